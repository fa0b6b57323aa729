//! The options and decisions of the division of a device.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::ModelId;
use crate::time::Duration;

/// The options of the division of a device.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct SpatialOptions {
    /// The compute units of the device.
    pub units: u32,
    /// The step of shares: 1% of a GPU under MPS, 8 SMs of a green context on Hopper, or a core.
    pub grain: u32,
    /// The time that a model's share stays after a change (GSLICE §3.2.1: 10 s).
    pub hold_down: Duration,
    /// The time between two tunings of shares (GSLICE figure 16: 2 s).
    pub period: Duration,
    /// Residuals and changes of a share up to this part count as none (GSLICE §3.2.2: 5%).
    pub threshold: f64,
    /// The throughput that a model needs beyond its arrivals, as a part of them. GSLICE has none,
    /// which suits evenly spaced requests. With uneven arrivals, a model that can answer just its
    /// arrivals has a queue that never ends.
    pub reserve: f64,
    /// The weight of a window in averages.
    pub weight: f64,
    /// Whether to give away units for which there is no demand (GSLICE figure 15; figure 16 leaves
    /// them idle).
    pub spread: bool,
    /// Whether shares follow measurements. `false`: they change only when models come and go, or by
    /// hand.
    pub tunes: bool,
}

impl SpatialOptions {
    /// GSLICE's options for a device of `units` units, except for a reserve of a quarter.
    pub fn new(units: u32, grain: u32) -> Self {
        SpatialOptions {
            units,
            grain: grain.max(1),
            hold_down: Duration::from_millis(10_000),
            period: Duration::from_millis(2_000),
            threshold: 0.05,
            reserve: 0.25,
            weight: 0.25,
            spread: true,
            tunes: true,
        }
    }
}

/// The reason for a model's new share.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShareReason {
    /// The model has come to the device.
    Came,
    /// Another model has come.
    OtherCame(ModelId),
    /// Another model has gone.
    OtherWent(ModelId),
    /// The model misses its SLO, or cannot answer its arrivals.
    TooSmall {
        /// The average latency in seconds.
        latency: f64,
        /// The average throughput in items per second.
        throughput: f64,
    },
    /// The model has latency and throughput to spare.
    TooLarge,
    /// Another model's share no longer suits it.
    OtherTuned(ModelId),
    /// The share was set by hand.
    ByHand,
    /// Another model's share was set by hand, or set free.
    OtherByHand(ModelId),
    /// Another model's lanes could not be made.
    OtherFailed(ModelId),
}

impl ShareReason {
    /// The reason as one word.
    pub const fn name(self) -> &'static str {
        match self {
            ShareReason::Came => "came",
            ShareReason::OtherCame(_) => "other_came",
            ShareReason::OtherWent(_) => "other_went",
            ShareReason::TooSmall { .. } => "too_small",
            ShareReason::TooLarge => "too_large",
            ShareReason::OtherTuned(_) => "other_tuned",
            ShareReason::ByHand => "by_hand",
            ShareReason::OtherByHand(_) => "other_by_hand",
            ShareReason::OtherFailed(_) => "other_failed",
        }
    }
}

impl fmt::Display for ShareReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShareReason::Came => f.write_str("it has come"),
            ShareReason::OtherCame(model) => write!(f, "{model} has come"),
            ShareReason::OtherWent(model) => write!(f, "{model} has gone"),
            ShareReason::TooSmall { latency, throughput } => {
                write!(f, "the model's share is too small: {:.1} ms, {throughput:.1} items/s", latency * 1e3)
            }
            ShareReason::TooLarge => f.write_str("the model has latency and throughput to spare"),
            ShareReason::OtherTuned(model) => write!(f, "the share of {model} did not suit"),
            ShareReason::ByHand => f.write_str("set by hand"),
            ShareReason::OtherByHand(model) => write!(f, "the share of {model} was set by hand"),
            ShareReason::OtherFailed(model) => write!(f, "no lanes could be made for {model}"),
        }
    }
}

/// A decision about the shares of a device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpatialOutput {
    /// Make lanes for the model on so many units, beside its own, and then call
    /// [`super::Spatial::handle_prepared`]. Earlier standby lanes of the model go.
    Prepare {
        /// The model.
        model: ModelId,
        /// The compute units.
        units: u32,
        /// The reason.
        reason: ShareReason,
    },
    /// From the next launch on the model runs on the prepared lanes. Its former lanes go once their
    /// launches are done.
    Switch {
        /// The model.
        model: ModelId,
        /// The compute units.
        units: u32,
    },
    /// The prepared lanes are no longer needed.
    Discard {
        /// The model.
        model: ModelId,
    },
    /// Limit the model's batches to this many items from now on.
    Limit {
        /// The model.
        model: ModelId,
        /// The items.
        rows: u32,
    },
    /// The device has no share for a model, which waits for one. There are more models than steps,
    /// or shares set by hand leave none.
    NoRoom {
        /// The model.
        model: ModelId,
    },
}

/// The reason of a device's timeout.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum SpatialTimeout {
    /// Shares are tuned at regular intervals.
    Period,
}

/// The reason why a share cannot be set.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadShare {
    /// There is no such model.
    #[error("the device does not have model {0}")]
    NoModel(ModelId),
    /// The device cannot be divided like this.
    #[error(
        "a share of {units} units: expected a multiple of {grain} from {grain} to {most}; other models need the rest"
    )]
    Units {
        /// The units that were asked for.
        units: u32,
        /// The step of shares.
        grain: u32,
        /// The most units that the model can have.
        most: u32,
    },
}
