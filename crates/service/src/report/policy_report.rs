//! Which policy a model version has, and why.

use downbeat_core::Duration;
use downbeat_core::device::{AutoChoice, GuardReport, OverlapPoint, Prediction, Staging, Tried};
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
    /// The stages of the policy `staged`; `None`: another policy, or the user set all numbers.
    #[serde(default)]
    pub staging: Option<StagingReport>,
    /// The reports of all backends, if a frontend was asked and their policies differ. The rest is
    /// then that of the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backends: Vec<BackendPolicy>,
}

/// The policy of a model on one of several backends.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct BackendPolicy {
    /// The backend's name.
    pub backend: String,
    /// Its report.
    #[serde(flatten)]
    pub report: PolicyReport,
}

/// The number of stages and of buffer pairs that a search found, or their defaults.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct StagingReport {
    /// The number of stages into which the model is cut.
    pub stages: u16,
    /// The pairs of buffers.
    pub buffer_pairs: u16,
    /// Why these, in words.
    pub reason: String,
    /// The results of the search; empty if there was none.
    pub tried: Vec<StagingTrial>,
}

/// A trial of the search, in a replay of random requests by the model's measured latencies.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
pub struct StagingTrial {
    /// The number of stages.
    pub stages: u16,
    /// The pairs of buffers.
    pub buffer_pairs: u16,
    /// The highest load with at most 1% late requests; `None`: less than that of an earlier trial.
    pub requests_per_second: Option<f64>,
    /// The mean latency at 9/10 of the highest load of all trials; `None`: this trial's own highest
    /// load is too low.
    pub mean_ms: Option<f64>,
}

impl From<&Tried<Staging>> for StagingTrial {
    fn from(tried: &Tried<Staging>) -> Self {
        let Staging { stages, pairs, .. } = tried.choice;
        let (requests_per_second, mean_ms) = (Some(tried.peak).filter(|peak| *peak > 0.0), tried.mean_ms);
        StagingTrial { stages, buffer_pairs: pairs, requests_per_second, mean_ms }
    }
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
            staging: None,
            backends: Vec::new(),
        }
    }
}
