//! The answer to `GET /v2/scheduler`.

use std::collections::BTreeMap;

use downbeat_core::cluster::{Behaviour, Ground, Order, RehearsalDecision};
use downbeat_core::{Duration, ModelId};
use serde::Serialize;

/// The behaviours of the scheduler's queues, and their reasons.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SchedulerStatus {
    /// Completed trials of the rehearsal.
    pub trials: u64,
    /// Trials that changed the behaviour of queues.
    pub changes: u64,
    /// The cost of the rehearsal.
    pub cpu: CpuStatus,
    /// Requests that the rehearsal did not see, because too many came at once. It leaves their time
    /// out.
    pub arrivals_lost: u64,
    /// The order in which batches of several queues get devices.
    pub order: OrderStatus,
    /// The behaviour of each queue.
    pub models: Vec<QueueStatus>,
    /// The result of the last trial.
    pub last_trial: Option<TrialStatus>,
}

/// The cost of the rehearsal, as shares of a core's time.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct CpuStatus {
    /// The allowed share; 0: no rehearsal.
    pub budget: f64,
    /// The share used in the last seconds.
    pub used: f64,
}

/// The order in which batches get devices, and its reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct OrderStatus {
    /// The order.
    pub order: Order,
    /// The source of the order.
    pub by: Source,
}

/// The source of a queue's behaviour.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The queue's policy sets it.
    Policy,
    /// The queue is adaptive, and no trial has found a better behaviour than the one that follows
    /// from the present load.
    StartRule,
    /// A trial has found the behaviour.
    Trial,
}

/// The behaviour of a queue: requests of a model that can share a batch.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct QueueStatus {
    /// The model's name.
    pub model: String,
    /// The queue's name in decision logs.
    pub queue: String,
    /// The source of the behaviour.
    pub by: Source,
    /// The behaviour, if the queue is adaptive.
    pub behaviour: Option<Behaviour>,
}

/// The result of a trial.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TrialStatus {
    /// Seconds since the trial ended.
    pub seconds_ago: f64,
    /// The reason for the new behaviour; none if the trial changed nothing.
    pub why: Option<Ground>,
    /// The candidates of the trial, the present behaviour first.
    pub candidates: Vec<CandidateStatus>,
}

/// The result of a candidate in a trial.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CandidateStatus {
    /// The behaviours of the adaptive queues in this candidate. Queues with the same behaviour are
    /// one group.
    pub behaviours: Vec<Group>,
    /// The order in which batches get devices in this candidate.
    pub order: Order,
    /// Whether the scheduler took this candidate.
    pub taken: bool,
    /// Parts of the past, of 4, that the candidate was tried on. The worse half of the candidates
    /// leaves after each part.
    pub parts: u32,
    /// By rate (as it was, 1.1 and 1.25 times that): the shares of requests that were dropped or
    /// late. First the share of the model that fared worst, then the share of all.
    pub bad: Vec<(f64, f64)>,
    /// The mean number of busy devices.
    pub devices: f64,
    /// Mean time from arrival to answer, milliseconds.
    pub delay_ms: f64,
}

/// Queues with the same behaviour.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Group {
    /// The behaviour; none: it follows from the present load.
    pub behaviour: Option<Behaviour>,
    /// The queues' names in decision logs.
    pub queues: Vec<String>,
}

impl TrialStatus {
    /// The status of a decision made `ago` ago. `adaptive`: whether a queue is adaptive.
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
