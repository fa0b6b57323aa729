//! Tests of the simulator, and of the scheduler under random load, in one binary.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod table_2;
