//! What `GET /v2/scheduler` says.

use std::collections::BTreeMap;

use downbeat_core::cluster::{Behaviour, Ground, Order, RehearsalDecision};
use downbeat_core::device::Candidate;
use downbeat_core::{Duration, ModelId};
use serde::Serialize;

use crate::policy_report::DeviceTrialStatus;

/// What the scheduler's queues do, and why.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SchedulerStatus {
    /// Trials of the rehearsal that came to an end.
    pub trials: u64,
    /// Those after which queues did something else.
    pub changes: u64,
    /// What the rehearsal costs.
    pub cpu: CpuStatus,
    /// Requests that it did not see because more came than it takes: it leaves their time out.
    pub arrivals_lost: u64,
    /// Whose turn it is when batches of several queues wait for a device.
    pub order: OrderStatus,
    /// What each queue does.
    pub models: Vec<QueueStatus>,
    /// What came of the last trial.
    pub last_trial: Option<TrialStatus>,
    /// What models have that `auto` was asked for, on their devices.
    pub device_policies: DeviceRehearsalStatus,
}

/// What the rehearsal of device policies has come to, of the models in service that `auto` was asked for.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DeviceRehearsalStatus {
    /// Trials of a model's policies that came to an end.
    pub trials: u64,
    /// Those that found a better policy.
    pub changes: u64,
    /// Those whose replay of what there was did not come to what really became of the requests, and changed nothing.
    pub unfaithful: u64,
    /// Policies that lost against `exclusive` in service.
    pub losses: u64,
    /// Each of them.
    pub models: Vec<DevicePolicyStatus>,
}

/// The policy of a model that `auto` was asked for.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DevicePolicyStatus {
    /// The model.
    pub model: String,
    /// Its version.
    pub version: String,
    /// The policy with its settings, beside those that were written for the model.
    #[serde(flatten)]
    pub candidate: Candidate,
    /// Policies with settings that can be replayed, this one included; 0: it is not rehearsed.
    pub candidates: usize,
    /// As of all.
    pub trials: u64,
    /// As of all.
    pub changes: u64,
    /// As of all.
    pub unfaithful: u64,
    /// As of all.
    pub losses: u64,
    /// What came of the last trial of its policies.
    pub last_trial: Option<DeviceTrialStatus>,
}

/// What the rehearsal costs, as shares of a core's time.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct CpuStatus {
    /// What it may have; 0: nothing is rehearsed.
    pub budget: f64,
    /// What it had in the last seconds.
    pub used: f64,
}

/// In which order batches get devices, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct OrderStatus {
    /// Which it is.
    pub order: Order,
    /// Why it is that.
    pub by: Source,
}

/// Why a queue does what it does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Its policy says it.
    Policy,
    /// It is adaptive, and nothing has been found that is better than what follows from the load of the moment.
    StartRule,
    /// A trial has found it.
    Trial,
}

/// What a queue does: requests of a model that can share a batch.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct QueueStatus {
    /// The model.
    pub model: String,
    /// As decision logs call it.
    pub queue: String,
    /// Why it does it.
    pub by: Source,
    /// What it does, if it is adaptive.
    pub behaviour: Option<Behaviour>,
}

/// What came of a trial.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TrialStatus {
    /// For how long it has been over.
    pub seconds_ago: f64,
    /// What told what is done since from what was done before; nothing, if that went on.
    pub why: Option<Ground>,
    /// What was tried, what was done before first.
    pub candidates: Vec<CandidateStatus>,
}

/// What a candidate of a trial came to.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CandidateStatus {
    /// What the adaptive queues do in it: those that do the same together.
    pub behaviours: Vec<Group>,
    /// In which order batches get devices in it.
    pub order: Order,
    /// Whether it is what is done since.
    pub taken: bool,
    /// Parts of the past that it was tried on, of 4: the worse half of the candidates leaves after each.
    pub parts: u32,
    /// By rate (as it was, 1.1 and 1.25 times that): the share of requests that were dropped or late, of the model that fared worst and of all.
    pub bad: Vec<(f64, f64)>,
    /// Devices that were busy, in the mean.
    pub devices: f64,
    /// Mean time from arrival to answer, milliseconds.
    pub delay_ms: f64,
}

/// Queues that do the same.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Group {
    /// What they do; nothing: as follows from the load of the moment.
    pub behaviour: Option<Behaviour>,
    /// As decision logs call them.
    pub queues: Vec<String>,
}

impl TrialStatus {
    /// A decision that was made `ago`; of the queues that are adaptive.
    pub fn of(decision: &RehearsalDecision, ago: Duration, adaptive: impl Fn(ModelId) -> bool) -> Self {
        let taken = decision.tried.iter().position(|tried| decision.takes(tried));
        let candidates = decision.tried.iter().enumerate().map(|(index, tried)| {
            let mut groups: BTreeMap<Option<Behaviour>, Vec<String>> = BTreeMap::new();
            for (model, behaviour) in (0..).map(ModelId).zip(&tried.behaviours).filter(|(model, _)| adaptive(*model)) {
                groups.entry(*behaviour).or_default().push(model.to_string());
            }
            CandidateStatus {
                behaviours: groups.into_iter().map(|(behaviour, queues)| Group { behaviour, queues }).collect(),
                order: tried.order,
                taken: taken == Some(index),
                parts: tried.parts,
                bad: tried.bad.clone(),
                devices: tried.devices,
                delay_ms: tried.delay * 1e3,
            }
        });
        TrialStatus { seconds_ago: ago.as_secs_f64(), why: decision.why, candidates: candidates.collect() }
    }
}
