//! Tests of the pipeline lab, in one binary.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod rules;
