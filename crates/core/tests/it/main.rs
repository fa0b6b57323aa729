//! Tests of the core from outside, in one binary.
#![allow(missing_docs, reason = "tests")]

mod symphony_paper;
