//! Tests of the wire forms: a reader gets the written value back, and no input brings the reader
//! down.

#![allow(clippy::unwrap_used, reason = "a test fails where it unwraps")]

mod http;
mod tensors;
