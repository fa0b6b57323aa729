//! Models in segments: the places where a model can be cut, and the measurements that choose among
//! them.

pub mod activations;
pub mod boundary;
pub mod operator_profile;
pub mod probe;
mod segment;

pub use segment::{Cut, SegmentInfo};
