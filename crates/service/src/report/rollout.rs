//! The answer to `GET /v2/models/MODEL/rollout`: both versions of a rollout, side by side.

use downbeat_core::Time;
use downbeat_core::rollout::{OutcomeCounts, RollBackRule, Rollout, RolloutState, Side};
use serde::Serialize;

/// The parameter of a request that asks for the new version. A frontend writes it for a request with the
/// header of the rollout.
pub const ASKS_FOR_NEW: &str = "downbeat_rollout";

/// The answer of `GET /v2/models/MODEL/rollout`.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct RolloutReport {
    /// The model's name.
    pub model: String,
    /// Which versions take requests.
    pub state: RolloutState,
    /// Why the rollout has ended, in a sentence; empty while it goes on.
    pub reason: String,
    /// The share of the requests that the new version takes.
    pub share: f64,
    /// A request with this header goes to the new version, too.
    pub header: Option<String>,
    /// Whether the new version only gets copies.
    pub shadow: bool,
    /// How far numbers of answers to copies may lie apart.
    pub tolerance: f64,
    /// When the server takes the new version back; `None`: never.
    pub roll_back: Option<RollBackRule>,
    /// The version that served before.
    pub old: VersionReport,
    /// The version that is rolled out.
    pub new: VersionReport,
}

/// A version in a rollout, with its requests.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct VersionReport {
    /// The version's number.
    pub version: String,
    /// The share of its latest requests that were good; `None`: there was none.
    pub attainment: Option<f64>,
    /// The number of these requests.
    pub latest_requests: u64,
    /// All requests since the rollout began, by outcome.
    pub requests: OutcomeCounts,
}

impl RolloutReport {
    /// The report at `now` on a rollout from one version to another.
    pub fn of(model: &str, [old, new]: [u64; 2], rollout: &mut Rollout, now: Time) -> Self {
        let mut version = |version: u64, side: Side| {
            let (attainment, latest_requests) = rollout.attainment(now, side);
            VersionReport { version: version.to_string(), attainment, latest_requests, requests: rollout.counts(side) }
        };
        let (old, new) = (version(old, Side::Old), version(new, Side::New));
        let terms = rollout.terms();
        RolloutReport {
            model: model.to_owned(),
            state: rollout.state(),
            reason: rollout.reason().to_owned(),
            share: terms.share,
            header: terms.header.clone(),
            shadow: terms.shadow,
            tolerance: terms.tolerance,
            roll_back: terms.roll_back,
            old,
            new,
        }
    }
}
