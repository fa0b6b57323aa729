//! Which models a backend is to have, and the plan that this follows from (Symphony §4.4).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::epoch::Epoch;

/// When a leading scheduler said something: the greater one is newer, whoever led.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Stamp {
    /// Under whose lead.
    pub epoch: Epoch,
    /// From 1, in the order in which it was said.
    pub number: u64,
}

/// Which models a backend is to have, of those in its repository.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// When it was said.
    pub stamp: Stamp,
    /// The plan that it follows.
    pub plan: Stamp,
    /// The sub-cluster that the backend is in, from 0.
    pub sub_cluster: u32,
    /// The models of its sub-cluster.
    pub planned: Vec<String>,
    /// Models that it is to have until others have loaded them.
    pub kept: Vec<String>,
}

impl Assignment {
    /// Whether the backend is to have this model.
    pub fn has(&self, model: &str) -> bool {
        self.planned.iter().chain(&self.kept).any(|known| known == model)
    }
}

/// Which models share a sub-cluster: what outlives whoever leads, where there is a store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SubClusterPlan {
    /// When it was made.
    pub stamp: Stamp,
    /// How many sub-clusters there are.
    pub sub_clusters: u32,
    /// By name: the sub-cluster of each model, from 0.
    pub models: BTreeMap<String, u32>,
}

/// A model that is to be planned.
#[derive(Clone, PartialEq, Debug)]
pub struct PlannedModel {
    /// Its name.
    pub name: String,
    /// Devices that its requests keep busy, as far as is known: requests a second by the seconds that one takes in a full batch.
    pub load: f64,
    /// Bytes that it takes on each device of its sub-cluster.
    pub memory: u64,
    /// The sub-cluster where it is now.
    pub running: Option<u32>,
}

/// The question which models are to share a sub-cluster; to be answered with [`super::SchedulerNode::handle_planned`].
#[derive(Clone, PartialEq, Debug)]
pub struct PlanWanted {
    /// Of this question.
    pub number: u64,
    /// How many sub-clusters there are.
    pub sub_clusters: u32,
    /// At least one, by name.
    pub models: Vec<PlannedModel>,
    /// Bytes for models that each device has; `None`: not known.
    pub memory: Option<u64>,
    /// Models that may change their sub-cluster; `None`: any number.
    pub most_moves: Option<u32>,
}
