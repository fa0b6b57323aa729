//! The trace of the operations that have run.

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Host to device.
    Upload = 1,
    /// Device to host.
    Download = 2,
    /// Device to device.
    Copy = 3,
    /// A fill.
    Set = 4,
    /// A function that plays a kernel.
    Kernel = 5,
    /// Memory freed in the order of a stream.
    Free = 6,
}

/// One operation that has run.
///
/// Times are virtual. An operation begins after three events. The host has enqueued it, its
/// predecessor in the stream has ended, and everything that it waits for has ended. The host's time
/// advances only where the host waits. So two operations overlap in these times exactly if they are
/// unordered. A copy takes 1 us and 1 us for each 25 kB, and a fill 1 us and 1 us for each MB. A
/// kernel takes 10 us or the time set by [`StandIn::spend`](crate::StandIn::spend).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Work {
    /// The stream's handle.
    pub stream: u64,
    /// The handle of the stream's context.
    pub context: u64,
    /// The destination, a device or host address; for a kernel, its argument.
    pub to: u64,
    /// The source.
    pub from: u64,
    /// Bytes written.
    pub len: u64,
    /// The begin, in nanoseconds of virtual time.
    pub start: u64,
    /// The end, in nanoseconds of virtual time.
    pub end: u64,
    /// The kind of the operation.
    pub kind: Kind,
    /// The priority of the stream: a lower number is a higher priority.
    pub priority: i32,
}

impl Work {
    /// Returns true if the two operations are unordered.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}
