//! Repaired files: they load, and answer as the file says.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod hostile;
mod repairs;
mod support;
