//! The driver's shared places, built a second time on loom's primitives. The driver's own files have the tests.
#![cfg(test)]
// The tests call a part of each file only.
#![allow(dead_code, unused_imports)]

#[path = "../../driver/src/latest_candidates.rs"]
mod latest_candidates;
#[path = "../../driver/src/mailbox.rs"]
mod mailbox;
#[path = "../../driver/src/sync.rs"]
mod sync;
