//! The policies a model can be batched by, by name. What they do is in `downbeat-core`, which has the table of device policies, too.

pub use downbeat_core::device::PolicyName;

use crate::named;

named! {
    /// When a batch leaves its queue for a device (Symphony §3).
    ///
    /// `Adaptive` is the default: on one local device it is `Eager`, with the lowest latency at low load, and under load the device
    /// is never idle, so batches grow while it works. On pools of devices, where deferral pays, it defers.
    DispatchPolicy as "dispatch policy" {
        /// When a device is free and as late as the deadlines allow, so that batches are large (Symphony §3.2).
        Deferred = "deferred",
        /// As soon as a device is free.
        Eager = "eager",
        /// When the batch is full or its first request has waited `max_queue_delay_microseconds`.
        Timeout = "timeout",
        /// When a device is free, but as late as `Deferred` where the larger batch is worth the wait: on pools of devices under load.
        Adaptive = "adaptive",
        /// As `Adaptive`, but also late where only device time is saved by it: the number of busy devices follows the load.
        Consolidating = "consolidating",
        /// At the latest moment that still makes the deadline.
        Latest = "latest",
        /// Not at all: a request goes to the device that will probably be done first with all that it has, of whatever models, and batches are made there, by a device policy ([`PolicyName`]).
        Route = "route",
    }
}

named! {
    /// Which requests of a queue are given up when not all can make their deadlines.
    DropPolicy as "drop policy" {
        /// Those before the window that gives the largest feasible batch (Symphony §3.3).
        Window = "window",
        /// As `Window`, but only for batches that would be too small to keep up with the arrivals.
        Adaptive = "adaptive",
        /// Those at the head that cannot make their deadline.
        Head = "head",
        /// None: late requests are answered late. Queue timeouts still apply.
        None = "none",
    }
}
