//! Requests of several models on one device under virtual time, served by Abacus or a baseline.

use downbeat_core::{Duration, Time};
use rand::RngExt;
use rand_pcg::Pcg64;

use super::architecture::Architecture;
use super::failure::DeviceFailure;
use super::model::EmulatedModel;
use super::overlap_devices::{OverlapDevices, OverlapQueries, SpreadBy};
use super::overlap_play::{Query, whole};
use super::overlap_predictor::PredictedBy;
use super::overlap_report::OverlapReport;
use super::platform::Platform;
use downbeat_sim::Arrivals;

/// Items of a query, and tokens of a query for BERT (Abacus table 1).
const ROWS: [u32; 4] = [4, 8, 16, 32];
const LENGTHS: [u32; 4] = [8, 16, 32, 64];

/// The rule that chooses the next work of the device.
#[derive(Clone, PartialEq, Debug)]
pub enum OverlapServing {
    /// Groups by prediction, of up to `at_once` models. With one model it runs one query at a time,
    /// the most urgent first, without queries that cannot meet their deadline.
    Abacus {
        /// The most models in a group.
        at_once: usize,
        /// The share that running side by side has to save (`OverlapOptions::worth`).
        worth: f64,
        /// The predictor of group times.
        by: PredictedBy,
    },
    /// One query at a time, in the order of arrival. This rule and the rules below drop queries
    /// that are already late (§7.1).
    Fcfs,
    /// One query at a time, the shortest first. The device waits for each decision, since this rule
    /// predicts queries and cannot hide that (§7.2).
    Sjf {
        /// The time of a decision.
        decision: Duration,
    },
    /// One query at a time, the most urgent first.
    Edf,
    /// One query of each model at once, in the order of arrival: MPS as it is.
    Free,
}

/// The sizes of queries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OverlapInputs {
    /// Any of table 1's sizes and lengths.
    Any,
    /// The smallest size and length (§7.2, figure 16).
    Smallest,
}

/// A run: queries come at random, each for one of some models, all equally often.
#[derive(Clone, PartialEq, Debug)]
pub struct OverlapRun {
    /// The device.
    pub platform: Platform,
    /// The models, each at most once.
    pub models: Vec<Architecture>,
    /// The rule that serves the queries.
    pub serving: OverlapServing,
    /// Queries a second, of all models.
    pub rate: f64,
    /// The number of queries.
    pub queries: u32,
    /// The sizes of queries.
    pub inputs: OverlapInputs,
    /// The device for the QoS targets: the run's device, or the larger one that it is a part of. A
    /// model's target is twice the time of its largest query alone on that device (§7.1).
    pub target_on: Platform,
    /// Chooses all random numbers.
    pub seed: u64,
}

impl OverlapServing {
    /// One query at a time, the shortest first, with one pass of the predictor for a decision
    /// (§7.7).
    pub const SJF: OverlapServing = OverlapServing::Sjf { decision: Duration::from_micros(66) };
}

impl OverlapInputs {
    fn largest(self) -> (u32, u32) {
        if self == OverlapInputs::Any { (ROWS[3], LENGTHS[3]) } else { (ROWS[0], LENGTHS[0]) }
    }

    /// Draws the items and the length of a query.
    pub(super) fn draw(self, rng: &mut Pcg64) -> (u32, u32) {
        match self {
            OverlapInputs::Any => (ROWS[rng.random_range(0..4)], LENGTHS[rng.random_range(0..4)]),
            OverlapInputs::Smallest => self.largest(),
        }
    }
}

impl OverlapRun {
    /// Returns the models, cut into Abacus' operators.
    ///
    /// # Errors
    /// If one is none of Abacus' models.
    pub fn models(&self) -> Result<Vec<EmulatedModel>, DeviceFailure> {
        self.models.iter().map(|model| EmulatedModel::abacus(*model, self.platform)).collect()
    }

    /// Returns the QoS target of each model.
    ///
    /// # Errors
    /// As [`Self::models`].
    pub fn targets(&self) -> Result<Vec<Duration>, DeviceFailure> {
        let (rows, length) = self.inputs.largest();
        let target = |model: &Architecture| {
            let model = EmulatedModel::abacus(*model, self.target_on)?;
            Ok(whole(&model, rows, length, self.target_on.units).saturating_mul(2))
        };
        self.models.iter().map(target).collect()
    }

    /// Plays the run until all queries are answered or dropped.
    ///
    /// # Errors
    /// If there is no model, one is none of Abacus', or the rate is not positive and finite.
    pub fn play(&self) -> Result<OverlapReport, DeviceFailure> {
        if self.models.is_empty() {
            return Err(DeviceFailure("queries of no model".to_owned()));
        }
        let streams = vec![Arrivals::Poisson.stream(self.rate, self.seed, 0)?];
        let queries = OverlapQueries::new(self, streams, self.targets()?, true);
        Ok(OverlapDevices::new(queries, 1, SpreadBy::Turn)?.play())
    }

    /// Draws a query that comes now for a model with this number and target.
    pub(super) fn query(
        &self,
        emulated: &EmulatedModel,
        (model, target): (usize, Duration),
        now: Time,
        draws: &mut Pcg64,
    ) -> Query {
        let (rows, length) = self.inputs.draw(draws);
        let length = if emulated.has_length() { length } else { 0 };
        let alone = whole(emulated, rows, length, self.platform.units);
        Query { model, arrived: now, deadline: now + target, rows, length, alone }
    }
}
