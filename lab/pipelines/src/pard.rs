//! PARD's rule: a request is dropped once the expected rest of its way no longer fits.

use downbeat_core::Duration;
use downbeat_core::Time;
use downbeat_core::pipeline::{BatchDone, Division, Pipeline, Reached};

/// The weight of a batch in the moving means.
const NEWEST: f64 = 0.1;

/// PARD ("Proactive Request Dropping", ASPLOS '26). A step knows the deadline of the whole. It also
/// knows how long the later steps will probably take, with a part of their queueing.
///
/// A step's local deadline is the deadline less the longest rest. The rest of a step is the mean
/// execution time of its last batches, and `patience` times the mean wait. Left out: the order by
/// the largest budget first, which PARD takes under overload. All rules here queue by deadline.
#[derive(Clone, Debug)]
pub struct Pard {
    pipelines: Vec<Pipeline>,
    /// By model: means of `(execution, wait)` in seconds.
    means: Vec<(f64, f64)>,
    patience: f64,
}

impl Pard {
    /// Begins with `l(1)` of each model and no wait.
    pub fn new(pipelines: Vec<Pipeline>, alone: impl Iterator<Item = Duration>, patience: f64) -> Self {
        Pard { pipelines, means: alone.map(|alone| (alone.as_secs_f64(), 0.0)).collect(), patience }
    }
}

impl Division for Pard {
    fn local_deadline(&mut self, reached: &Reached<'_>) -> Option<Time> {
        let Pipeline { shape, models } = &self.pipelines[reached.pipeline];
        let expected = |model: &usize| self.means[*model].0 + self.patience * self.means[*model].1;
        let lengths: Vec<f64> = models.iter().map(expected).collect();
        let rest = Duration::from_secs_f64(shape.rest(&lengths)[reached.step]);
        (reached.now + rest <= reached.deadline).then(|| reached.deadline - rest)
    }

    fn batch_done(&mut self, batch: BatchDone) {
        let (took, waited) = &mut self.means[batch.model];
        *took += NEWEST * (batch.took.as_secs_f64() - *took);
        *waited += NEWEST * (batch.waited.as_secs_f64() - *waited);
    }
}
