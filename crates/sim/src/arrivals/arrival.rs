//! A request that arrives.

use downbeat_core::{ModelId, Time};

/// A request that comes in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// The time of the arrival.
    pub at: Time,
    /// The model's number in the simulation.
    pub model: ModelId,
    /// The deadline; `Time::MAX`: none.
    pub deadline: Time,
    /// The latest time to leave the queue; `Time::MAX`: none.
    pub queue_expiry: Time,
    /// The priority level, 0 the highest.
    pub level: u32,
    /// The number of items.
    pub size: u32,
}
