//! Which policy a model version has, and why.

use downbeat_core::Duration;
use downbeat_core::device::{AutoChoice, GuardReport, OverlapPoint, Prediction};
use serde::{Deserialize, Serialize};

/// What `GET /v2/models/M/policy` answers.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct PolicyReport {
    /// The policy that runs.
    pub policy: String,
    /// The policy that was asked for; `auto`: whichever suits the model.
    pub asked: String,
    /// Who asked for it.
    pub asked_for: AskedFor,
    /// Why it runs, in words.
    pub reason: String,
    /// What was expected of policies, where `auto` was asked for.
    pub candidates: Vec<Prediction>,
    /// What that rests on.
    pub measured: Option<AutoMeasured>,
    /// What became of it since.
    pub guard: Option<GuardReport>,
}

/// Who asked for a policy.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum AskedFor {
    /// The model's own group or its configuration.
    Model,
    /// `[device] policy`, the group `"*"`, or nobody.
    All,
}

/// What `auto` goes by.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct AutoMeasured {
    /// What it takes to hand something over to another thread.
    #[serde(rename = "launch_ns")]
    pub launch: Duration,
    /// Two lanes together, by the size of their batches; empty where no policy could have gained by it.
    pub overlap: Vec<OverlapMeasured>,
}

/// Two lanes together.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
pub struct OverlapMeasured {
    /// What a batch takes alone and beside another.
    #[serde(flatten)]
    pub point: OverlapPoint,
    /// What both do of what one does alone.
    pub factor: f64,
}

impl From<&OverlapPoint> for OverlapMeasured {
    fn from(point: &OverlapPoint) -> Self {
        OverlapMeasured { point: *point, factor: point.factor() }
    }
}

impl PolicyReport {
    /// The policy is what was chosen, for its reason.
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
