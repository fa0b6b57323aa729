//! Tests of the wire forms: what is written is read back, and nothing that is read brings the reader down.

#![allow(clippy::unwrap_used, reason = "a test fails where it unwraps")]

mod http;
mod tensors;
