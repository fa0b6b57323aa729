//! PARD's rule: a request is dropped once the expected rest of its way no longer fits.

use std::collections::VecDeque;

use downbeat_core::pipeline::{BatchDone, Division, Pipeline, Reached};
use downbeat_core::{Duration, Time};

/// The settings of [`Pard`]. The values that the tables use were the best of a grid on training seeds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PardOptions {
    /// How much of the measured waits counts. PARD adds the queueing, and a low quantile of the waits
    /// for batches.
    pub patience: f64,
    /// The weight of a batch in the moving means.
    pub newest: f64,
    /// The second order begins once the arrivals are this part above what a model can serve. The order
    /// ends once they are this part below. Infinity: the second order never begins.
    pub margin: f64,
}

/// PARD ("Proactive Request Dropping", 2026). A step knows the deadline of the whole. It also knows how
/// long the later steps will probably take, with a part of their queueing.
///
/// A step's local deadline is the deadline less the longest rest. The rest of a step is the mean
/// execution time of its last batches, and `patience` times the mean wait.
///
/// PARD has two orders. With *least budget first*, a model serves by deadline. With *highest budget
/// first*, which holds under overload, the requests with the least time left find no place and are
/// dropped. All queues here serve by deadline. The second order therefore chooses
/// before the queue. The model gives up as many requests as exceed its throughput, and begins with
/// those that have the least time left.
#[derive(Clone, Debug)]
pub struct Pard {
    pipelines: Vec<Pipeline>,
    models: Vec<Watched>,
    options: PardOptions,
}

/// What PARD knows of a model.
#[derive(Clone, Debug)]
struct Watched {
    /// Means in seconds.
    took: f64,
    waited: f64,
    /// Requests a second that the model's devices can serve.
    throughput: f64,
    /// The last requests: when they came, and the time that they had left beyond the expected rest.
    last: VecDeque<(Time, f64)>,
    is_overloaded: bool,
}

/// Requests by which the arrivals of a model are measured.
const WINDOW: usize = 64;

impl Pard {
    /// Begins with `l(1)` of each model and no wait. `models` has for each model `l(1)` and the requests
    /// a second that its devices can serve.
    pub fn new(pipelines: Vec<Pipeline>, models: impl Iterator<Item = (Duration, f64)>, options: PardOptions) -> Self {
        let watched = |(alone, throughput): (Duration, f64)| Watched {
            took: alone.as_secs_f64(),
            waited: 0.0,
            throughput,
            last: VecDeque::with_capacity(WINDOW),
            is_overloaded: false,
        };
        Pard { pipelines, models: models.map(watched).collect(), options }
    }
}

impl Watched {
    /// Notes a request with this much time left. Returns whether the second order gives it up.
    fn gives_up(&mut self, now: Time, left: f64, margin: f64) -> bool {
        if margin.is_infinite() {
            return false;
        }
        if self.last.len() >= WINDOW {
            self.last.pop_front();
        }
        self.last.push_back((now, left));
        let passed = now.since(self.last[0].0).as_secs_f64();
        if self.last.len() < WINDOW || passed <= 0.0 {
            return false;
        }
        let load = WINDOW as f64 / passed / self.throughput;
        self.is_overloaded = load > if self.is_overloaded { 1.0 - margin } else { 1.0 + margin };
        let too_many = (WINDOW as f64 * (1.0 - 1.0 / load)) as usize;
        self.is_overloaded && self.last.iter().filter(|(_, other)| *other < left).count() < too_many
    }
}

impl Division for Pard {
    fn local_deadline(&mut self, reached: &Reached<'_>) -> Option<Time> {
        let Pipeline { shape, models } = &self.pipelines[reached.pipeline];
        let expected = |model: &usize| self.models[*model].took + self.options.patience * self.models[*model].waited;
        let lengths: Vec<f64> = models.iter().map(expected).collect();
        let rest = Duration::from_secs_f64(shape.rest(&lengths)[reached.step]);
        let left = reached.deadline.since(reached.now).as_secs_f64() - rest.as_secs_f64();
        let gives_up = self.models[models[reached.step]].gives_up(reached.now, left, self.options.margin);
        (left >= 0.0 && !gives_up).then(|| reached.deadline - rest)
    }

    fn batch_done(&mut self, batch: BatchDone) {
        let Watched { took, waited, .. } = &mut self.models[batch.model];
        *took += self.options.newest * (batch.took.as_secs_f64() - *took);
        *waited += self.options.newest * (batch.waited.as_secs_f64() - *waited);
    }
}
