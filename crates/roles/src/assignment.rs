//! The models that a backend must have, and the plan behind them (Symphony §4.4).

use std::collections::BTreeMap;

use downbeat_core::time::Duration;
use serde::{Deserialize, Serialize};

use crate::epoch::Epoch;

/// The order of a leading scheduler's decisions. The greater stamp is newer, whichever scheduler
/// led.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Stamp {
    /// The epoch of the decision.
    pub epoch: Epoch,
    /// From 1, in the order of the decisions.
    pub number: u64,
}

/// The models of its repository that a backend must have.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// When the scheduler decided this.
    pub stamp: Stamp,
    /// The plan that this follows.
    pub plan: Stamp,
    /// The sub-cluster that the backend is in, from 0.
    pub sub_cluster: u32,
    /// The models of its sub-cluster.
    pub planned: Vec<String>,
    /// Models that the backend must keep until other backends have loaded them.
    pub kept: Vec<String>,
}

impl Assignment {
    /// Whether the backend must have this model.
    pub fn has(&self, model: &str) -> bool {
        self.planned.iter().chain(&self.kept).any(|known| known == model)
    }
}

/// Which models share a sub-cluster. The plan outlives its leader where there is a store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SubClusterPlan {
    /// When the plan was made.
    pub stamp: Stamp,
    /// How many sub-clusters there are.
    pub sub_clusters: u32,
    /// By name: the sub-cluster of each model, from 0.
    pub models: BTreeMap<String, u32>,
}

/// A model that needs a sub-cluster.
#[derive(Clone, PartialEq, Debug)]
pub struct PlannedModel {
    /// The model's name.
    pub name: String,
    /// Devices that the model's requests keep busy, as far as is known: requests per second times
    /// the seconds that each takes in a full batch.
    pub load: f64,
    /// Requests per second.
    pub requests: f64,
    /// Bytes that the model takes on each device of its sub-cluster.
    pub memory: u64,
    /// Bytes that a run of the model takes beside these.
    pub run_memory: u64,
    /// How long a backend takes to load the model.
    pub load_time: Duration,
    /// Sub-clusters whose backends all have loaded the model.
    pub loaded_in: Vec<u32>,
    /// The model's present sub-cluster.
    pub running: Option<u32>,
}

/// How much one plan may change (`Cmax` of Symphony appendix A). Models that run nowhere yet do not
/// count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveLimit {
    /// Any number of models may move.
    Any,
    /// This number of models may move.
    Models(u32),
    /// Each backend may load the moved models for this time, all together.
    LoadTime(Duration),
}

/// Asks which models should share a sub-cluster. [`crate::SchedulerNode::handle_planned`] takes the
/// answer.
#[derive(Clone, PartialEq, Debug)]
pub struct PlanWanted {
    /// The number of this question.
    pub number: u64,
    /// The least number of sub-clusters, at least 1.
    pub least: u32,
    /// The largest number of sub-clusters: no more than backends.
    pub most: u32,
    /// The present number of sub-clusters; 0: none.
    pub present: u32,
    /// The models, at least one, in the order of their names.
    pub models: Vec<PlannedModel>,
    /// Bytes for models on each device; `None`: not known.
    pub memory: Option<u64>,
    /// The most bytes that runs beside each other take on a device; `None`: one batch runs at a time.
    pub runs: Option<u64>,
    /// The most requests per second of a sub-cluster; `None`: any number.
    pub most_requests: Option<u32>,
    /// How much the plan may change.
    pub moves: MoveLimit,
}

/// The answer to [`PlanWanted`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Divided {
    /// The number of sub-clusters.
    pub sub_clusters: u32,
    /// The sub-cluster of each model of the question, from 0.
    pub models: Vec<u32>,
    /// Why the plan breaks the limit of requests, if it does. Models are divided all the same, since
    /// without a plan none of them would be served.
    pub too_many_requests: Option<String>,
}
