//! The scheduler as a server runs it: the thread that posts a request works it off, and a completed batch makes place for the next.

use anyhow::Result;
use downbeat_bench::scheduler::{CountedCluster, Workload};
use downbeat_core::cluster::{DispatchPolicy, DropPolicy};

use crate::gate::part::Plan;

const DEVICES: u32 = 64;
const MAX_BATCH: u32 = 32;
/// The rate of the requests, as a share of the capacity of the devices.
const LOAD: f64 = 0.7;
const SEED: u64 = 1;

/// Counts requests of so many models.
pub fn run(plan: &Plan, models: u32) -> Result<()> {
    let (dispatch, drop) = (DispatchPolicy::Adaptive { consolidate: false }, DropPolicy::Adaptive);
    let mut workload = Workload::new(models, DEVICES, MAX_BATCH, dispatch, drop, SEED);
    workload.rate = LOAD * workload.capacity();
    let mut cluster = CountedCluster::new(&workload, 1)?;
    plan.run(|count| cluster.serve(count))
}
