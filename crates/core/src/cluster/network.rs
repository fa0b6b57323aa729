//! How long messages between the scheduler, the frontends and the devices may take.

use serde::{Deserialize, Serialize};

use crate::time::Duration;

/// The network's part of a request's time, in high percentiles: the scheduler plans with the worst
/// expected delays (Symphony §4.3, §5.6, appendix D). Without a network all are zero, the default.
///
/// A batch of `b` items is sent [`NetworkBudget::delay`]`(b)` before it can start: the device gets
/// the metadata and then fetches the inputs from the frontends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NetworkBudget {
    /// `d_ctrl`: a message from the scheduler to a device.
    pub control: Duration,
    /// `d_data`: fetching one item's inputs.
    pub data: Duration,
    /// From the end of a batch to the client's answer. It is taken off every deadline at admission.
    pub reply: Duration,
}

impl NetworkBudget {
    /// `d_ctrl + d_data * items`: the time from the decision to the instant at which the batch can
    /// start.
    pub const fn delay(&self, items: u32) -> Duration {
        Duration::from_nanos(self.control.as_nanos().saturating_add(self.data.saturating_mul(items as u64).as_nanos()))
    }

    /// The worse of both budgets, for each part.
    #[must_use]
    pub fn worse(self, other: NetworkBudget) -> NetworkBudget {
        NetworkBudget {
            control: self.control.max(other.control),
            data: self.data.max(other.data),
            reply: self.reply.max(other.reply),
        }
    }

    /// Whether a batch takes time to get to its device.
    pub fn is_remote(&self) -> bool {
        self.delay(1) > Duration::ZERO
    }
}
