//! What a device offers to the launches and copies that share it.

use downbeat_core::Duration;
use serde::{Deserialize, Serialize};

/// How kernels share units that do not suffice for all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// All slow down in the same proportion.
    Proportional,
    /// Each takes what those before it leave over (E²bird §8.4: kernels wait until there are idle SMs).
    InOrder,
    /// One lane at a time has all units, for [`SLICE`] if another waits: processes without MPS (GSLICE §2.1.2).
    TimeSliced,
}

/// How long a lane has the device where lanes take turns. Assumed: the papers do not say; NVIDIA's default is of this order.
pub const SLICE: Duration = Duration::from_millis(2);

/// What a device offers to its launches and copies together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DeviceLimits {
    /// Compute units.
    pub units: u32,
    /// Who gets units when they do not suffice.
    pub sharing: Sharing,
    /// How many kernels of a launch the host issues before the device is done with those before them; 0: it waits for each.
    pub ahead: u32,
    /// What the device takes from one kernel of a launch to the next that is issued.
    pub gap: Duration,
    /// By how many thousandths each launch more that is under way lengthens the issue of a kernel: the cost of many streams.
    pub crowding_permille: u32,
    /// Whether each lane has a host of its own, such as a process under MPS: nobody's issuing waits for another's, or is lengthened by it.
    pub own_hosts: bool,
    /// By how many thousandths a kernel takes longer beside others that keep all units of its partition; in proportion beside fewer.
    pub interference_permille: u32,
    /// Bytes a second of a copy; one copy each way at a time.
    pub copy_bytes_per_second: f64,
    /// What each copy costs beside its bytes.
    pub copy_fixed: Duration,
}

impl DeviceLimits {
    /// So many units that are shared in proportion, and nothing else that launches disturb each other by.
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
