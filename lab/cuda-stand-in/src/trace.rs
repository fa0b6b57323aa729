//! What has run, in the order in which it ran.

/// What kind of work an operation is.
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
/// Times are virtual: an operation begins when the host has enqueued it, the one before it in its stream has ended, and so has
/// everything it was told to wait for. The host's time goes on only where it waits. So two operations overlap in these times exactly
/// where nothing orders them. A copy takes 1 us and 1 us for each 25 kB, a fill 1 us and 1 us a MB, a kernel 10 us or what
/// [`StandIn::spend`](crate::StandIn::spend) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Work {
    /// The stream's handle.
    pub stream: u64,
    /// The context's handle that the stream belongs to.
    pub context: u64,
    /// Where it writes, a device or host address; of a kernel, its argument.
    pub to: u64,
    /// Where it reads.
    pub from: u64,
    /// Bytes written.
    pub len: u64,
    /// Nanoseconds of virtual time.
    pub start: u64,
    /// Nanoseconds of virtual time.
    pub end: u64,
    /// What it was.
    pub kind: Kind,
    /// Of the stream: the lower, the higher.
    pub priority: i32,
}

impl Work {
    /// Whether nothing orders the two.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}
