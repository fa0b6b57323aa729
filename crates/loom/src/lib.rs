//! The driver's shared places, built a second time on loom's primitives. Their tests are in the driver's own files.
#![cfg(test)]
// The models use a part of what the driver does.
#![allow(dead_code, unused_imports)]

#[path = "../../driver/src/candidate_slot.rs"]
mod candidate_slot;
#[path = "../../driver/src/mailbox.rs"]
mod mailbox;
#[path = "../../driver/src/sync.rs"]
mod sync;
