//! The names of the policies for a model's batches. The policies are in `downbeat-core`, and so is
//! the table of device policies.

pub use downbeat_core::device::PolicyName;

crate::named! {
    /// When a batch leaves its queue for a device (Symphony §3).
    ///
    /// `Adaptive` is the default. On one local device it is `Eager`, with the lowest latency at low
    /// load. Under load the device is never idle, so batches grow while it works. On pools of
    /// devices, where deferral pays, it defers.
    DispatchPolicy as "dispatch policy" {
        /// When a device is free and as late as the deadlines allow, so that batches are large
        /// (Symphony §3.2).
        Deferred = "deferred",
        /// As soon as a device is free.
        Eager = "eager",
        /// When the batch is full or its first request has waited `max_queue_delay_microseconds`.
        Timeout = "timeout",
        /// When a device is free, but as late as `Deferred` if the larger batch is worth the wait:
        /// on pools of devices under load.
        Adaptive = "adaptive",
        /// As `Adaptive`, but late also if that only saves device time: the number of busy devices
        /// follows the load.
        Consolidating = "consolidating",
        /// At the latest moment that still makes the deadline.
        Latest = "latest",
        /// The scheduler makes no batches. A request goes to the device that will probably finish
        /// all its work, for any model, first. A device policy makes the batches there
        /// ([`PolicyName`]).
        Route = "route",
    }
}

crate::named! {
    /// The requests to drop from a queue when not all can make their deadlines.
    DropPolicy as "drop policy" {
        /// Requests before the window that gives the largest feasible batch (Symphony §3.3).
        Window = "window",
        /// As `Window`, but only for batches that would be too small to keep up with the arrivals.
        Adaptive = "adaptive",
        /// Requests at the head that cannot make their deadline.
        Head = "head",
        /// None: late requests are answered late. Queue timeouts still apply.
        None = "none",
    }
}
