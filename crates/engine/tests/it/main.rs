//! Tests of the engines through their trait.

mod answers;
mod model;
mod support;
