//! Which policy a model version has, and why.

use downbeat_core::Duration;
use downbeat_core::device::{
    AutoChoice, Candidate, DeviceDecision, GuardReport, OverlapPoint, Prediction, TriedPolicy,
};
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
    /// The result of the rehearsal's last trial, if `auto` was asked for.
    #[serde(default)]
    pub rehearsal: Option<DeviceTrialStatus>,
}

/// The result of a trial of a model's policies.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct DeviceTrialStatus {
    /// The time since the trial ended.
    pub seconds_ago: f64,
    /// Whether the trial found a better policy, to which the model goes.
    pub changed: bool,
    /// Whether the replay of the present policy matched the real outcome. If not, nothing is
    /// changed.
    pub faithful: bool,
    /// The real outcome: the share of requests that were refused, dropped or late.
    pub real_bad: f64,
    /// The real mean time to the answer, milliseconds.
    pub real_delay_ms: f64,
    /// The tried candidates: the model's own policy first, then the last candidates.
    pub candidates: Vec<TriedPolicyStatus>,
}

/// The result of a candidate.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct TriedPolicyStatus {
    /// The policy with its settings, beside the settings that were written for the model.
    #[serde(flatten)]
    pub candidate: Candidate,
    /// Whether it is the best.
    pub taken: bool,
    /// By rate (the real one, 1.1 and 1.25 times as high): the share of requests that were refused,
    /// dropped or late, of the model that fared worst and of all.
    pub bad: Vec<(f64, f64)>,
    /// Mean time from arrival to answer at the real rate, milliseconds.
    pub delay_ms: f64,
}

impl DeviceTrialStatus {
    /// A decision that was made `ago`.
    pub fn of(decision: &DeviceDecision, ago: Duration) -> Self {
        let candidates = decision.tried.iter().map(|tried| TriedPolicyStatus {
            candidate: tried.candidate.clone(),
            taken: tried.candidate == decision.best,
            bad: tried.bad.clone(),
            delay_ms: tried.delay * 1e3,
        });
        let (real_bad, real_delay) = decision.real;
        DeviceTrialStatus {
            seconds_ago: ago.as_secs_f64(),
            changed: decision.changed,
            faithful: decision.faithful,
            real_bad,
            real_delay_ms: real_delay * 1e3,
            candidates: candidates.collect(),
        }
    }
}

/// Why a model goes to another policy.
pub fn reason(decision: &DeviceDecision) -> String {
    let said = |tried: &TriedPolicy| {
        let bad: Vec<_> = tried.bad.iter().map(|(_, all)| format!("{:.2}%", all * 100.0)).collect();
        format!("{} loses {} of the requests and takes {:.3} ms", tried.candidate, bad.join(", "), tried.delay * 1e3)
    };
    let best = decision.tried.iter().find(|tried| tried.candidate == decision.best);
    let all: Vec<_> = best.into_iter().chain(decision.tried.first()).map(said).collect();
    let (bad, delay) = decision.real;
    format!(
        "replays of the last seconds, as they were and at 1.1 and 1.25 times the rate: {}; really {:.2}%, {:.3} ms",
        all.join("; "),
        bad * 100.0,
        delay * 1e3
    )
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
            rehearsal: None,
        }
    }
}
