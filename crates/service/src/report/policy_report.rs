//! Which policy a model version has, and why.

use downbeat_core::Duration;
use downbeat_core::device::{AutoChoice, GuardReport, OverlapPoint, Prediction};
use serde::{Deserialize, Serialize};

/// The answer of `GET /v2/models/M/policy`.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct PolicyReport {
    /// The policy that runs.
    pub policy: String,
    /// The policy that the user asked for; `auto`: the one that suits the model.
    pub asked: String,
    /// Where the policy was asked for.
    pub asked_for: AskedFor,
    /// Why it runs, in words.
    pub reason: String,
    /// The expected results of the policies, if `auto` was asked for.
    pub candidates: Vec<Prediction>,
    /// The measurements behind these expectations.
    pub measured: Option<AutoMeasured>,
    /// The guard's comparison since then.
    pub guard: Option<GuardReport>,
}

/// Where a policy was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum AskedFor {
    /// The model's own group or its configuration.
    Model,
    /// `[device] policy`, the group `"*"`, or the default.
    All,
}

/// Measurements that `auto` chooses by.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct AutoMeasured {
    /// The time to hand work over to another thread.
    #[serde(rename = "launch_ns")]
    pub launch: Duration,
    /// Measurements of two lanes together, by batch size; empty if no policy could have gained by
    /// overlap.
    pub overlap: Vec<OverlapMeasured>,
}

/// Two lanes together.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
pub struct OverlapMeasured {
    /// The time of a batch alone, and beside another.
    #[serde(flatten)]
    pub point: OverlapPoint,
    /// The work of both lanes together, as a multiple of the work of one alone.
    pub factor: f64,
}

impl From<&OverlapPoint> for OverlapMeasured {
    fn from(point: &OverlapPoint) -> Self {
        OverlapMeasured { point: *point, factor: point.factor() }
    }
}

impl PolicyReport {
    /// Takes the chosen policy, with its reason.
    pub fn take_choice(&mut self, choice: &AutoChoice) {
        self.policy = choice.policy.name().to_owned();
        self.reason.clone_from(&choice.reason);
        self.candidates.clone_from(&choice.candidates);
    }

    /// A policy that was asked for and runs.
    pub fn asked(policy: &str, asked_for: AskedFor) -> Self {
        let reason = match asked_for {
            AskedFor::Model => "it is named for the model",
            AskedFor::All => "it is that of all models that none is named for",
        };
        PolicyReport {
            policy: policy.to_owned(),
            asked: policy.to_owned(),
            asked_for,
            reason: reason.to_owned(),
            candidates: Vec::new(),
            measured: None,
            guard: None,
        }
    }
}
