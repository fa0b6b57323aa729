//! Tests of the driver from outside, in one binary.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod inside;
mod messages;
mod races;
