//! What devices are divided into, and which model is where.

use downbeat_engine::Executor;
use serde::{Deserialize, Serialize};

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
