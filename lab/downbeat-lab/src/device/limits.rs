//! The limits of a device for the launches and copies that share it.

use downbeat_core::Duration;
use serde::{Deserialize, Serialize};

/// The way that kernels share units that do not suffice for all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// All kernels slow down in the same proportion.
    Proportional,
    /// Each kernel takes the units that earlier kernels leave over (E²bird §8.4: kernels wait until
    /// there are idle SMs).
    InOrder,
    /// Lanes take turns on all units, for [`SLICE`] if another lane waits: processes without MPS
    /// (GSLICE §2.1.2).
    TimeSliced,
}

/// The time that a lane has the device where lanes take turns. Assumed: the papers do not say;
/// NVIDIA's default is of this order.
pub const SLICE: Duration = Duration::from_millis(2);

/// The limits of a device for all its launches and copies together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DeviceLimits {
    /// Compute units.
    pub units: u32,
    /// How kernels share units that do not suffice.
    pub sharing: Sharing,
    /// The kernels of a launch that the host issues before the device has finished the previous
    /// ones. With 0 the host waits for each kernel.
    pub ahead: u32,
    /// The device's time from the end of a kernel to the start of the next one of the launch, if
    /// that is issued.
    pub gap: Duration,
    /// The thousandths by which each other launch under way lengthens the issue of a kernel: the
    /// cost of many streams.
    pub crowding_permille: u32,
    /// Whether each lane has a host of its own, such as a process under MPS. Then no lane's issuing
    /// waits for another's, or is lengthened by another lane.
    pub own_hosts: bool,
    /// The thousandths by which a kernel slows down beside others that keep all units of its
    /// partition busy; in proportion beside fewer.
    pub interference_permille: u32,
    /// Bytes a second of a copy; one copy each way at a time.
    pub copy_bytes_per_second: f64,
    /// The cost of each copy apart from its bytes.
    pub copy_fixed: Duration,
}

impl DeviceLimits {
    /// Makes the limits of a device whose units are shared in proportion. Launches do not disturb
    /// each other in any other way.
    pub fn plain(units: u32) -> Self {
        DeviceLimits {
            units,
            sharing: Sharing::Proportional,
            ahead: 0,
            gap: Duration::ZERO,
            crowding_permille: 0,
            own_hosts: false,
            interference_permille: 0,
            copy_bytes_per_second: 1e12,
            copy_fixed: Duration::ZERO,
        }
    }
}
