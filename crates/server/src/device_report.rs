//! What devices are divided into, and which model is where.

use downbeat_core::device::GroupStats;
use downbeat_engine::Executor;
use serde::{Deserialize, Serialize};

use crate::group_predictor::GroupPredictor;

/// What `GET /v2/devices` answers.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct DevicesReport {
    /// Who says on which partition a model runs: fixed, or auto.
    pub shares: String,
    /// What each device is divided into; empty: they are not divided.
    pub partitions: Vec<PartitionReport>,
    /// The devices, by their numbers.
    pub devices: Vec<DeviceReport>,
}

/// A partition, which all devices have alike.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct PartitionReport {
    /// Its number, from 0.
    pub partition: u32,
    /// What it has, in words.
    pub size: String,
    /// Its compute units: cores, or multiprocessors.
    pub units: u32,
}

/// A device.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct DeviceReport {
    /// Its number, from 0.
    pub device: usize,
    /// What is on it.
    pub models: Vec<PlacedModel>,
    /// Its models whose operators run in groups (the policy overlap); `None`: there are none.
    pub groups: Option<GroupsReport>,
}

/// What the groups of operators of a device came to.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct GroupsReport {
    /// The mean absolute relative error of what predicts them, when it was tested or trained again; `None`: nothing does, and requests run one at a time.
    pub mean_error: Option<f64>,
    /// The models, by when they came.
    pub models: Vec<GroupedModel>,
    /// Groups that have begun.
    pub groups: u64,
    /// Of these, of several requests.
    pub together: u64,
    /// Groups that were decided in time, and did not suit any more when the device was free.
    pub overtaken: u64,
    /// What half of the last groups of several took, or less, of what was predicted.
    pub expected: f64,
    /// What 95% of them did: what a group is taken to need.
    pub bound: f64,
    /// What has come of training what predicts them with what was served, on all devices; `None`: it is not trained here.
    pub retraining: Option<RetrainingReport>,
}

/// What has come of training a predictor with what was served.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, Default)]
pub struct RetrainingReport {
    /// Trainings that came to an end.
    pub trainings: u64,
    /// Those after which the predictor was another.
    pub adopted: u64,
    /// Of the last, groups that it was judged by.
    pub held_out: u64,
    /// Mean absolute relative error on these of the predictor that was in use; `None`: there was no training yet.
    pub before: Option<f64>,
    /// And of what came of the training.
    pub after: Option<f64>,
}

/// A model whose operators run in groups.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct GroupedModel {
    /// Model name.
    pub model: String,
    /// Its version.
    pub version: String,
    /// Why its requests run beside no other model's; `None`: they do.
    pub alone: Option<String>,
}

impl GroupsReport {
    /// Of models that are still to be named.
    pub fn new(stats: GroupStats, predictor: &GroupPredictor) -> Self {
        let GroupStats { groups, together, overtaken, expected, bound } = stats;
        let (mean_error, retraining) = (predictor.mean_error(), predictor.retraining());
        GroupsReport { mean_error, models: Vec::new(), groups, together, overtaken, expected, bound, retraining }
    }
}

/// A model version on a device.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct PlacedModel {
    /// Model name.
    pub model: String,
    /// Its version.
    pub version: String,
    /// Its device policy.
    pub policy: String,
    /// The partition where its launches go; 0 where devices are not divided.
    pub partition: u32,
    /// All partitions that its launches go to.
    pub partitions: Vec<u32>,
    /// Whether somebody has put it there.
    pub by_hand: bool,
    /// What it has of the device, where shares are auto; `None`: it has no part in that.
    pub share: Option<ShareReport>,
    /// The process of its own that it runs in; `None`: it has none.
    pub executor: Option<ExecutorReport>,
}

/// The process of its own that a model version runs in.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct ExecutorReport {
    /// Its number; `None`: it has ended, and is started again.
    pub pid: Option<u32>,
    /// How often it was started again since the version was loaded.
    pub restarts: u64,
}

impl ExecutorReport {
    /// That of the process of a model.
    pub fn of(executor: &Executor) -> Self {
        ExecutorReport { pid: executor.pid(), restarts: executor.restarts() }
    }
}

/// What a model has of a device whose shares follow what models do.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct ShareReport {
    /// Compute units that it runs on; 0: it has no share yet, and runs on all of the device.
    pub units: u32,
    /// Compute units that it is to have.
    pub next_units: u32,
    /// The partition where lanes are made for it, or are ready until there is room.
    pub preparing: Option<u32>,
    /// Compute units beyond which it is hardly faster, which it asked for when it came; `None`: nobody knows, and it asked for 30% (GSLICE §3.2.3).
    pub knee: Option<u32>,
    /// The most items of its batches; `None`: that is left to its device policy.
    pub batch_limit: Option<u32>,
    /// Why it has, or is to have, this share.
    pub reason: Option<String>,
}
