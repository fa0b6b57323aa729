//! What the division of a device is decided by, and what is decided.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::ModelId;
use crate::time::Duration;

/// How a device is divided.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct SpatialOptions {
    /// Compute units of the device.
    pub units: u32,
    /// Shares are multiples of it: 1% of a GPU under MPS, 8 SMs of a green context on Hopper, a core.
    pub grain: u32,
    /// How long the share of a model stays as it is after it was changed (GSLICE §3.2.1: 10 s).
    pub hold_down: Duration,
    /// How often shares are looked at (GSLICE figure 16: 2 s).
    pub period: Duration,
    /// Residuals, and changes of a share, up to this part are none (GSLICE §3.2.2: 5%).
    pub threshold: f64,
    /// How much more than what comes a model is to be able to answer. GSLICE: nothing, which suits requests that come evenly; where they do not, a model that can answer
    /// just what comes has a queue that never ends.
    pub reserve: f64,
    /// How much a window counts in averages.
    pub weight: f64,
    /// Whether units that nobody asks for are given away, too (GSLICE figure 15; figure 16 leaves them idle).
    pub spread: bool,
    /// Whether shares follow what is measured. `false`: they change only as models come and go, or by hand.
    pub tunes: bool,
}

impl SpatialOptions {
    /// GSLICE's, for a device of so many units, but with a quarter in reserve.
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

/// Why a model gets another share.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShareReason {
    /// It has come to the device.
    Came,
    /// Another has come.
    OtherCame(ModelId),
    /// Another has gone.
    OtherWent(ModelId),
    /// It misses its SLO, or cannot answer what comes: average seconds and items a second.
    TooSmall {
        /// Average latency, seconds.
        latency: f64,
        /// Average items a second.
        throughput: f64,
    },
    /// It has latency and throughput to spare.
    TooLarge,
    /// Another's share suits it no more.
    OtherTuned(ModelId),
    /// Somebody says so.
    ByHand,
    /// Another's share was set, or set free.
    OtherByHand(ModelId),
    /// Another's lanes could not be made.
    OtherFailed(ModelId),
}

impl ShareReason {
    /// A word for it.
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
                write!(f, "its share is too small: {:.1} ms, {throughput:.1} items/s", latency * 1e3)
            }
            ShareReason::TooLarge => f.write_str("it has latency and throughput to spare"),
            ShareReason::OtherTuned(model) => write!(f, "the share of {model} did not suit"),
            ShareReason::ByHand => f.write_str("set by hand"),
            ShareReason::OtherByHand(model) => write!(f, "the share of {model} was set by hand"),
            ShareReason::OtherFailed(model) => write!(f, "no lanes could be made for {model}"),
        }
    }
}

/// What is decided about the shares of a device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpatialOutput {
    /// Make lanes for the model on so many units, beside those it has, and then call [`super::Spatial::handle_prepared`]. What was made for it before and not changed
    /// over to goes.
    Prepare {
        /// The model.
        model: ModelId,
        /// Compute units.
        units: u32,
        /// Why.
        reason: ShareReason,
    },
    /// From the next launch on the model runs on the lanes that were prepared; those before go when what runs there is done.
    Switch {
        /// The model.
        model: ModelId,
        /// Compute units.
        units: u32,
    },
    /// Lanes that were prepared are not needed any more.
    Discard {
        /// The model.
        model: ModelId,
    },
    /// Batches of the model have at most so many items from now on.
    Limit {
        /// The model.
        model: ModelId,
        /// Items.
        rows: u32,
    },
    /// The device has no share for a model: there are more models than steps, or what was set by hand leaves none. It waits until there is one.
    NoRoom {
        /// The model.
        model: ModelId,
    },
}

/// Why a device wants to be called at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum SpatialTimeout {
    /// Shares are looked at every so often.
    Period,
}

/// Why a share cannot be set.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadShare {
    /// There is no such model.
    #[error("the device does not have model {0}")]
    NoModel(ModelId),
    /// The device cannot be divided so.
    #[error(
        "a share of {units} units: expected a multiple of {grain} from {grain} to {most}, as other models need the rest"
    )]
    Units {
        /// What was asked for.
        units: u32,
        /// Shares are multiples of it.
        grain: u32,
        /// The most there may be.
        most: u32,
    },
}
