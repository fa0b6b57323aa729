//! The report on devices: their partitions, and the models on each.

use downbeat_engine::Executor;
use serde::{Deserialize, Serialize};

/// The answer of `GET /v2/devices`.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct DevicesReport {
    /// How partitions are chosen for models: fixed, or auto.
    pub shares: String,
    /// The partitions of each device; empty: devices are not divided.
    pub partitions: Vec<PartitionReport>,
    /// The devices, by their numbers.
    pub devices: Vec<DeviceReport>,
}

/// A partition, which all devices have alike.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct PartitionReport {
    /// The partition's number, from 0.
    pub partition: u32,
    /// The partition's size, in words.
    pub size: String,
    /// The partition's compute units: cores, or multiprocessors.
    pub units: u32,
}

/// A device.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct DeviceReport {
    /// The device's number, from 0.
    pub device: usize,
    /// The models on the device.
    pub models: Vec<PlacedModel>,
    /// The models whose operators run in groups (the policy overlap); `None`: the device has none.
    pub groups: Option<GroupsReport>,
}

/// Results of the operator groups of a device.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct GroupsReport {
    /// The predictor's mean absolute relative error when it was last tested or trained; `None`:
    /// there is no predictor, and requests run one at a time.
    pub mean_error: Option<f64>,
    /// The models, by when they came.
    pub models: Vec<GroupedModel>,
    /// Groups that have begun.
    pub groups: u64,
    /// Groups among them that had several requests.
    pub together: u64,
    /// Groups that were decided in time, but did not suit any more when the device was free.
    pub overtaken: u64,
    /// The median ratio of actual to predicted time of the last groups of several requests.
    pub expected: f64,
    /// The 95th percentile of that ratio: predictions are scaled by it.
    pub bound: f64,
    /// Results of training the predictor with served groups, on all devices; `None`: this server
    /// does not train it.
    pub retraining: Option<RetrainingReport>,
}

/// Results of training a predictor with served groups.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, Default)]
pub struct RetrainingReport {
    /// Trainings that were finished.
    pub trainings: u64,
    /// Trainings that changed the predictor.
    pub adopted: u64,
    /// Groups that the last training was judged by.
    pub held_out: u64,
    /// Mean absolute relative error on these groups of the predictor in use; `None`: there was no
    /// training yet.
    pub before: Option<f64>,
    /// The same error of the trained predictor.
    pub after: Option<f64>,
}

/// A model whose operators run in groups.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct GroupedModel {
    /// Model name.
    pub model: String,
    /// Model version.
    pub version: String,
    /// Why its requests run beside no other model's; `None`: they do.
    pub alone: Option<String>,
}

/// A model version on a device.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct PlacedModel {
    /// Model name.
    pub model: String,
    /// Model version.
    pub version: String,
    /// The device policy of the model.
    pub policy: String,
    /// The partition where its launches go; 0 where devices are not divided.
    pub partition: u32,
    /// All partitions that its launches go to.
    pub partitions: Vec<u32>,
    /// Whether the user has put it on its partition.
    pub by_hand: bool,
    /// Its share of the device, if shares are auto; `None`: it takes no part in sharing.
    pub share: Option<ShareReport>,
    /// The executor process that it runs in; `None`: the server's own.
    pub executor: Option<ExecutorReport>,
}

/// The process of its own that a model version runs in.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct ExecutorReport {
    /// The process's number; `None`: it has ended, and is being restarted.
    pub pid: Option<u32>,
    /// How often it was started again since the version was loaded.
    pub restarts: u64,
}

impl ExecutorReport {
    /// The report on a model's executor process.
    pub fn of(executor: &dyn Executor) -> Self {
        ExecutorReport { pid: executor.pid(), restarts: executor.restarts() }
    }
}

/// A model's share of a device, where shares follow the models' needs.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct ShareReport {
    /// Compute units that it runs on; 0: it has no share yet, and runs on all of the device.
    pub units: u32,
    /// Compute units of its next share.
    pub next_units: u32,
    /// The partition where lanes are made for it, or are ready until there is room.
    pub preparing: Option<u32>,
    /// Compute units beyond which it is hardly faster: it asked for as many. `None`: that is
    /// unknown, and it asked for 30% (GSLICE §3.2.3).
    pub knee: Option<u32>,
    /// The most items of its batches; `None`: its device policy decides.
    pub batch_limit: Option<u32>,
    /// Why it has this share, or gets the next one.
    pub reason: Option<String>,
}
