//! Identifiers of models, devices, requests and batches. An id is dense where it indexes a table,
//! and opaque elsewhere.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($repr:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $repr);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

id! {
    /// A model: dense, given out in order from zero, never reused. So a late message about a
    /// removed model cannot be taken for one about its successor.
    ModelId(u32), "m"
}
id! {
    /// A device: dense, given out in order from zero, never reused.
    DeviceId(u32), "d"
}
id! {
    /// A kind of device: devices of one kind run a model alike. Dense, chosen by the driver;
    /// `DeviceKind(0)` if all devices are alike.
    #[derive(Default)]
    DeviceKind(u32), "k"
}
id! {
    /// A request: chosen by the driver, unique among the requests that are not answered yet.
    RequestId(u64), "r"
}
id! {
    /// A batch: given out in order from zero by the scheduler, never reused.
    BatchId(u64), "b"
}
id! {
    /// A lane of a device: dense, from zero. A new lane takes over the id of a lane that has gone.
    LaneId(u32), "l"
}
id! {
    /// A launch on a lane: given out in order from zero by the device's scheduler, never reused.
    LaunchId(u64), "x"
}
id! {
    /// A partition of a device: dense, from zero; `PartitionId(0)` is the whole of a device that is
    /// not divided.
    #[derive(Default)]
    PartitionId(u32), "p"
}

impl DeviceKind {
    /// The largest number that a kind may have. Every event looks at each kind up to the largest in
    /// use.
    pub const LARGEST: DeviceKind = DeviceKind(63);
}
