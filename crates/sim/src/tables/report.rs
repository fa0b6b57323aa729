//! The outcome of a run.

use std::collections::BTreeMap;

use downbeat_core::cluster::DropReason;
use downbeat_core::{Duration, Time};

use crate::tables::recording::Recording;

/// The outcome of a run. It leaves out requests that arrived during the warm-up.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Report {
    /// The outcome of each model.
    pub models: Vec<ModelReport>,
    /// For each device: the share of the time in which it ran a batch, a preempted one included.
    pub busy: Vec<f64>,
    /// The time in which arrivals count.
    pub span: Duration,
    /// Whether the run ended early, once some model was certain to get worse than
    /// [`Simulation::give_up_above`](crate::Simulation::give_up_above). The counts then end at that
    /// time.
    pub gave_up: bool,
    /// The windows of time, if [`Simulation::window`](crate::Simulation::window) is set.
    pub windows: Vec<Window>,
    /// Every batch and request, if [`Simulation::record`](crate::Simulation::record) is set.
    pub recording: Recording,
}

/// The outcome of a model's requests.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ModelReport {
    /// Arrivals that count.
    pub offered: u64,
    /// Requests that finished by their deadline.
    pub good: u64,
    /// Requests that finished after their deadline.
    pub missed: u64,
    /// Requests that the scheduler did not accept.
    pub rejected: u64,
    /// Dropped requests, by reason.
    pub dropped: BTreeMap<DropReason, u64>,
    /// The number of finished batches of each size, from 0. Batches of the warm-up count too.
    pub batch_sizes: Vec<u64>,
    /// Batches that were stopped to make room for another; their work was lost.
    pub preempted: u64,
    /// Time to the deadline of a request that arrives.
    pub slo: Duration,
    /// Counts of the times from arrival to the start of the batch, for finished requests, in
    /// [`DELAY_BINS`] equal parts of the SLO. The last entry counts longer waits.
    pub delays: Vec<u64>,
    /// Each wait by itself, if the arrivals were [recorded](crate::Simulation::recorded).
    pub waits: Vec<Duration>,
    /// Each time from arrival to answer, beside [`ModelReport::waits`].
    pub answers: Vec<Duration>,
}

/// The number of equal parts of the SLO in [`ModelReport::delays`].
pub const DELAY_BINS: usize = 200;

/// The events of a window of time. Requests count in the window of their arrival.
#[derive(Clone, PartialEq, Debug)]
pub struct Window {
    /// The window's begin.
    pub start: Time,
    /// The arrivals of each model.
    pub offered: Vec<u32>,
    /// For each model: the requests that finished by their deadline.
    pub good: Vec<u32>,
    /// For each device: the share of the window in which it ran.
    pub busy: Vec<f32>,
}

impl ModelReport {
    /// The share of the arrivals that were not served in time.
    pub fn bad_share(&self) -> f64 {
        if self.offered == 0 { 0.0 } else { 1.0 - self.good as f64 / self.offered as f64 }
    }

    /// Mean size of a batch.
    pub fn mean_batch(&self) -> f64 {
        mean(&self.batch_sizes)
    }
}

impl Report {
    /// Requests finished by their deadline, of all models.
    pub fn good(&self) -> u64 {
        self.models.iter().map(|model| model.good).sum()
    }

    /// Arrivals that count, of all models.
    pub fn offered(&self) -> u64 {
        self.models.iter().map(|model| model.offered).sum()
    }

    /// Requests a second that finished by their deadline.
    pub fn goodput(&self) -> f64 {
        self.good() as f64 / self.span.as_secs_f64()
    }

    /// Share of all arrivals that were not served in time.
    pub fn bad_share(&self) -> f64 {
        let offered = self.offered();
        if offered == 0 { 0.0 } else { 1.0 - self.good() as f64 / offered as f64 }
    }

    /// Mean of the devices' busy shares.
    pub fn mean_busy(&self) -> f64 {
        if self.busy.is_empty() { 0.0 } else { self.busy.iter().sum::<f64>() / self.busy.len() as f64 }
    }

    /// The largest share of any model's requests that was not served in time.
    pub fn worst_bad_share(&self) -> f64 {
        self.models.iter().map(ModelReport::bad_share).fold(0.0, f64::max)
    }

    /// Whether at most this share of each model's requests was not served in time.
    pub fn holds(&self, tolerated: f64) -> bool {
        !self.gave_up && self.worst_bad_share() <= tolerated
    }

    /// Batches of all models by size, from 0.
    pub fn batch_sizes(&self) -> Vec<u64> {
        let mut sum = Vec::new();
        for model in &self.models {
            if sum.len() < model.batch_sizes.len() {
                sum.resize(model.batch_sizes.len(), 0);
            }
            sum.iter_mut().zip(&model.batch_sizes).for_each(|(sum, count)| *sum += count);
        }
        sum
    }

    /// Queueing delays of all models in parts of each model's SLO, as in [`ModelReport::delays`].
    pub fn delays(&self) -> Vec<u64> {
        let mut sum = vec![0; DELAY_BINS + 1];
        for model in &self.models {
            sum.iter_mut().zip(&model.delays).for_each(|(sum, count)| *sum += count);
        }
        sum
    }
}

/// The smallest index that at least the share `q` of the counts does not exceed; `None` if all
/// counts are 0.
pub fn quantile(counts: &[u64], q: f64) -> Option<usize> {
    let total: u64 = counts.iter().sum();
    let mut seen = 0;
    (total > 0).then(|| {
        counts.iter().position(|count| {
            seen += count;
            seen as f64 >= q * total as f64 && seen > 0
        })
    })?
}

/// The mean index, weighted by the counts; NaN if all counts are 0.
pub fn mean(counts: &[u64]) -> f64 {
    let total: u64 = counts.iter().sum();
    let sum: u64 = counts.iter().zip(0..).map(|(count, index)| count * index).sum();
    sum as f64 / total as f64
}
