//! The order in which requests of models that share a device run.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The rule for the next request on a device that models share. All rules but the first are
/// baselines of Abacus (§7.1): requests run whole, one at a time. With `drop`, a request that is
/// late when its turn comes is given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupOrder {
    /// The request with the least headroom first. Operators of others run beside it as long as it
    /// keeps its deadline by prediction (Abacus §6.2).
    #[default]
    Headroom,
    /// First come, first served.
    Fcfs,
    /// The request with the shortest predicted latency alone.
    Sjf,
    /// The request with the earliest deadline.
    Edf,
}

impl GroupOrder {
    /// All orders.
    pub const ALL: [GroupOrder; 4] = [GroupOrder::Headroom, GroupOrder::Fcfs, GroupOrder::Sjf, GroupOrder::Edf];

    /// The order's name in settings.
    pub fn name(self) -> &'static str {
        match self {
            GroupOrder::Headroom => "headroom",
            GroupOrder::Fcfs => "fcfs",
            GroupOrder::Sjf => "sjf",
            GroupOrder::Edf => "edf",
        }
    }
}

/// Writes [`GroupOrder::name`].
impl fmt::Display for GroupOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that is no order of groups.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown order '{0}'; expected one of: {names}", names = GroupOrder::ALL.map(GroupOrder::name).join(", "))]
pub struct UnknownGroupOrder(String);

/// Reads [`GroupOrder::name`].
impl FromStr for GroupOrder {
    type Err = UnknownGroupOrder;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = GroupOrder::ALL.into_iter().find(|order| order.name() == text);
        known.ok_or_else(|| UnknownGroupOrder(text.to_owned()))
    }
}
