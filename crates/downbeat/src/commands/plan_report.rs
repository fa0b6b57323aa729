//! The output of `downbeat plan`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context, anyhow};
use downbeat_core::Duration;
use downbeat_plan::words::{bytes, number};
use downbeat_plan::workload::MAX_BYTES;
use downbeat_plan::{Plan, Problem, Workload};
use downbeat_report::Table;
use downbeat_service::options::PlacementPlan;
use serde::Serialize;

use crate::options::options_file::text;

/// A plan for people and, as JSON, for programs.
#[derive(Serialize, Debug)]
pub struct PlanReport {
    sub_clusters: Vec<SubCluster>,
    /// (max - min) / average of the sub-clusters' request rates.
    rate_imbalance: f64,
    /// (max - min) / average of the sub-clusters' static memory.
    memory_imbalance: f64,
    /// deltaR / Ravg + memory_weight * deltaS / Savg.
    objective: f64,
    /// No partition has an objective below this bound; null: no bound is known.
    bound: Option<f64>,
    /// Whether there is a proof that no partition is better.
    proved: bool,
    found_by: String,
    seconds: f64,
    /// Devices that all sub-clusters need at least, each rounded up.
    devices_needed: u64,
    /// The number of devices in the workload.
    devices: Option<u32>,
    device_memory_bytes: Option<u64>,
    max_rate: Option<f64>,
    /// Whether the workload says where some models run.
    running: bool,
    /// The cost of the moves, and the highest allowed cost.
    disruption: f64,
    max_disruption: Option<f64>,
    moves: Vec<Move>,
}

#[derive(Serialize, Debug)]
struct SubCluster {
    index: usize,
    models: Vec<String>,
    rate: f64,
    static_memory_bytes: u64,
    /// The largest dynamic memory among its models.
    dynamic_memory_bytes: u64,
    memory_bytes: u64,
    /// Fluid need: the sum of rate * l(b) / b over the models. b is the largest batch that the SLO
    /// allows at the rate.
    devices_needed: f64,
}

#[derive(Serialize, Debug)]
struct Move {
    model: String,
    /// null: the model runs nowhere yet.
    from: Option<usize>,
    to: usize,
    cost: f64,
}

/// Reads the placement of models from a plan that was printed as JSON.
///
/// # Errors
/// If the file cannot be read, or is no such plan.
pub fn read_plan(path: &Path) -> anyhow::Result<PlacementPlan> {
    let shown = path.display();
    serde_json::from_str(&text(path, MAX_BYTES)?)
        .with_context(|| format!("{shown} is not a plan that `downbeat plan --json` printed"))
}

/// Makes the plan the workload's running assignment. Models that only the plan has are gone; models
/// that only the workload has are new.
pub fn set_running(plan: &PlacementPlan, workload: &mut Workload) {
    let places: BTreeMap<&str, usize> =
        plan.sub_clusters.iter().flat_map(|s| s.models.iter().map(|m| (m.as_str(), s.index))).collect();
    for model in &mut workload.models {
        model.running_on = places.get(model.name.as_str()).copied();
    }
}

impl PlanReport {
    /// The report on a plan for a workload.
    ///
    /// # Errors
    /// If a model has no fluid need. [`Workload::parse`] refuses such models.
    pub fn new(workload: &Workload, problem: &Problem, plan: &Plan, took: Duration) -> anyhow::Result<Self> {
        let found = &plan.evaluation;
        let mut sub_clusters: Vec<SubCluster> = found
            .loads
            .iter()
            .enumerate()
            .map(|(index, load)| SubCluster {
                index,
                models: Vec::with_capacity(load.models),
                rate: load.rate,
                static_memory_bytes: load.static_memory,
                dynamic_memory_bytes: load.dynamic_memory,
                memory_bytes: load.memory(),
                devices_needed: 0.0,
            })
            .collect();
        let mut moves = Vec::new();
        for ((entry, model), to) in workload.models.iter().zip(&problem.models).zip(&found.assignment) {
            let sub_cluster = &mut sub_clusters[*to];
            sub_cluster.models.push(entry.name.clone());
            sub_cluster.devices_needed += entry.need().map_err(|e| anyhow!(e))?.devices;
            if model.running != Some(*to) {
                moves.push(Move {
                    model: entry.name.clone(),
                    from: model.running,
                    to: *to,
                    cost: model.move_cost(*to),
                });
            }
        }
        Ok(PlanReport {
            devices_needed: sub_clusters.iter().map(|s| s.devices_needed.ceil() as u64).sum(),
            sub_clusters,
            rate_imbalance: found.rate_imbalance(),
            memory_imbalance: found.memory_imbalance(),
            objective: found.objective,
            bound: plan.bound,
            proved: plan.proved,
            found_by: plan.found_by.to_string(),
            seconds: took.as_secs_f64(),
            devices: workload.devices,
            device_memory_bytes: workload.device_memory,
            max_rate: workload.max_rate,
            running: problem.has_running(),
            disruption: found.disruption,
            max_disruption: problem.max_disruption,
            moves,
        })
    }
}

impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Table::of(&self.sub_clusters)
            .number("sub-cluster", |s| s.index)
            .number("models", |s| s.models.len())
            .number("requests/s", |s| number(s.rate))
            .number("static", |s| bytes(s.static_memory_bytes))
            .number("dynamic", |s| bytes(s.dynamic_memory_bytes))
            .number("together", |s| bytes(s.memory_bytes))
            .number("devices", |s| format!("{:.2}", s.devices_needed))
            .fmt(f)?;
        writeln!(
            f,
            "\nimbalance, (max - min) / average: requests {:.4}, static memory {:.4}",
            self.rate_imbalance, self.memory_imbalance
        )?;
        let proof = match self.bound {
            _ if self.proved => "; proved to be the best".to_owned(),
            Some(bound) => format!("; no plan is below {}", number(bound)),
            None => String::new(),
        };
        writeln!(f, "objective {:.6}, by {} in {:.1} s{proof}", self.objective, self.found_by, self.seconds)?;
        write!(f, "the plan needs at least {} devices", self.devices_needed)?;
        match self.devices {
            Some(devices) if u64::from(devices) < self.devices_needed => write!(f, "; there are only {devices}")?,
            Some(devices) => write!(f, "; there are {devices}")?,
            None => {}
        }
        writeln!(
            f,
            " (fluid: rate * l(b) / b, with b the largest batch that the SLO allows at the rate; each sub-cluster rounded up)"
        )?;
        for s in &self.sub_clusters {
            writeln!(f, "\nsub-cluster {}: {}", s.index, s.models.join(", "))?;
        }
        if self.running {
            let may = self.max_disruption.map_or(String::new(), |most| format!(" of at most {}", number(most)));
            writeln!(f, "\n{} moves, cost {}{may}", self.moves.len(), number(self.disruption))?;
            for m in &self.moves {
                let from = m.from.map_or("new".to_owned(), |from| from.to_string());
                writeln!(f, "  {}: {from} -> {} (cost {})", m.model, m.to, number(m.cost))?;
            }
        }
        Ok(())
    }
}
