//! In which order requests of models that share a device run, and whether by prediction.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Which request of a device that models share runs next. All but the first are what Abacus is compared with (§7.1): one request at a time, whole, and with `drop` what is late already is given up when its turn comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupOrder {
    /// The least headroom first, and operators of others beside it while it keeps its deadline by prediction (Abacus §6.2).
    #[default]
    Headroom,
    /// As they came.
    Fcfs,
    /// What takes the least alone, as predicted.
    Sjf,
    /// The earliest deadline.
    Edf,
}

impl GroupOrder {
    /// All there are.
    pub const ALL: [GroupOrder; 4] = [GroupOrder::Headroom, GroupOrder::Fcfs, GroupOrder::Sjf, GroupOrder::Edf];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            GroupOrder::Headroom => "headroom",
            GroupOrder::Fcfs => "fcfs",
            GroupOrder::Sjf => "sjf",
            GroupOrder::Edf => "edf",
        }
    }
}

/// As [`GroupOrder::name`].
impl fmt::Display for GroupOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that is no order of groups.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown order '{0}'; expected one of: {names}", names = GroupOrder::ALL.map(GroupOrder::name).join(", "))]
pub struct UnknownGroupOrder(String);

/// As [`GroupOrder::name`].
impl FromStr for GroupOrder {
    type Err = UnknownGroupOrder;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = GroupOrder::ALL.into_iter().find(|order| order.name() == text);
        known.ok_or_else(|| UnknownGroupOrder(text.to_owned()))
    }
}
