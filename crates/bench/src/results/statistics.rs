//! A server's counters of a model during a run.

use std::collections::BTreeMap;

use downbeat_protocol::inference::StatisticDuration;
use serde::Serialize;

/// A phase of requests, from the protocol's statistics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Phase {
    /// Requests or executions that went through the phase.
    pub count: u64,
    /// The total time in the phase, nanoseconds.
    pub ns: u64,
}

impl std::ops::AddAssign for Phase {
    fn add_assign(&mut self, other: Phase) {
        self.count += other.count;
        self.ns += other.ns;
    }
}

impl From<Option<StatisticDuration>> for Phase {
    fn from(duration: Option<StatisticDuration>) -> Phase {
        duration.map_or(Phase::default(), |StatisticDuration { count, ns }| Phase { count, ns })
    }
}

impl Phase {
    fn since(self, before: Phase) -> Phase {
        Phase { count: self.count.saturating_sub(before.count), ns: self.ns.saturating_sub(before.ns) }
    }

    /// Mean time in the phase, in milliseconds; zero if no request went through.
    pub fn mean_ms(self) -> f64 {
        if self.count == 0 { 0.0 } else { self.ns as f64 / self.count as f64 / 1e6 }
    }
}

/// Executions of one batch size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct BatchStatistics {
    /// The number of executions.
    pub executions: u64,
    /// The total inference time, nanoseconds.
    pub compute_infer_ns: u64,
}

/// Counters of a model. [`ModelStatistics::since`] returns the difference of two readings.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ModelStatistics {
    /// Inferences (items), the protocol's `inference_count`.
    pub requests_executed: u64,
    /// Batches.
    pub executions: u64,
    /// Time in the queue.
    pub queue: Phase,
    /// Time of putting inputs together.
    pub compute_input: Phase,
    /// Time in the engine.
    pub compute_infer: Phase,
    /// Time of taking outputs apart.
    pub compute_output: Phase,
    /// The executions of each batch size.
    pub batches: BTreeMap<u64, BatchStatistics>,
}

impl ModelStatistics {
    /// The counts after `before`.
    pub fn since(&self, before: &ModelStatistics) -> ModelStatistics {
        ModelStatistics {
            requests_executed: self.requests_executed.saturating_sub(before.requests_executed),
            executions: self.executions.saturating_sub(before.executions),
            queue: self.queue.since(before.queue),
            compute_input: self.compute_input.since(before.compute_input),
            compute_infer: self.compute_infer.since(before.compute_infer),
            compute_output: self.compute_output.since(before.compute_output),
            batches: self
                .batches
                .iter()
                .map(|(size, now)| {
                    let then = before.batches.get(size).copied().unwrap_or_default();
                    let batch = BatchStatistics {
                        executions: now.executions.saturating_sub(then.executions),
                        compute_infer_ns: now.compute_infer_ns.saturating_sub(then.compute_infer_ns),
                    };
                    (*size, batch)
                })
                .filter(|(_, batch)| batch.executions > 0)
                .collect(),
        }
    }

    /// Mean items per execution; `None` if nothing was executed.
    pub fn mean_batch(&self) -> Option<f64> {
        (self.executions > 0).then(|| self.requests_executed as f64 / self.executions as f64)
    }
}
