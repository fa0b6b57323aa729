//! The driver's shared state, built a second time on loom's primitives. The tests are in the
//! driver's own files.
#![cfg(test)]
// The tests call a part of each file only.
#![allow(dead_code, unused_imports)]

#[path = "../../../crates/driver/src/latest_candidates.rs"]
mod latest_candidates;
#[path = "../../../crates/driver/src/mailbox.rs"]
mod mailbox;
#[path = "../../../crates/driver/src/sync.rs"]
mod sync;
