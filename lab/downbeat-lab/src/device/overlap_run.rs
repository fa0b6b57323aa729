//! Queries of several models on one device under virtual time: Abacus, and what it is compared with.

use downbeat_core::{Duration, Time};
use rand::RngExt;
use rand_pcg::Pcg64;

use super::architecture::Architecture;
use super::failure::DeviceFailure;
use super::model::EmulatedModel;
use super::overlap_play::{Play, Query, whole};
use super::overlap_predictor::PredictedBy;
use super::overlap_report::OverlapReport;
use super::platform::Platform;
use downbeat_sim::{Arrivals, random};

/// Items of a query, and tokens of one of BERT (Abacus table 1).
const ROWS: [u32; 4] = [4, 8, 16, 32];
const LENGTHS: [u32; 4] = [8, 16, 32, 64];

/// Who says what runs next.
#[derive(Clone, PartialEq, Debug)]
pub enum OverlapServing {
    /// Groups by prediction, of so many models at once: of one it is one query at a time, the most urgent first, without those that cannot make it.
    Abacus {
        /// Models at once.
        at_once: usize,
        /// What running side by side has to save (`OverlapOptions::worth`).
        worth: f64,
        /// What says how long groups take.
        by: PredictedBy,
    },
    /// One query at a time, as they came; the queries that are late already are dropped (§7.1), as below.
    Fcfs,
    /// One at a time, the shortest first.
    Sjf,
    /// One at a time, the most urgent first.
    Edf,
    /// One of each model, as they came, all at once: MPS as it is.
    Free,
}

/// How large queries are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OverlapInputs {
    /// Any of table 1's sizes and lengths.
    Any,
    /// The smallest of each (§7.2, figure 16).
    Smallest,
}

/// A run: queries come at random, each for one of some models, all as often.
#[derive(Clone, PartialEq, Debug)]
pub struct OverlapRun {
    /// The device.
    pub platform: Platform,
    /// The models, each at most once.
    pub models: Vec<Architecture>,
    /// Who says what runs.
    pub serving: OverlapServing,
    /// Queries a second, of all models.
    pub rate: f64,
    /// How many come.
    pub queries: u32,
    /// How large they are.
    pub inputs: OverlapInputs,
    /// The QoS target of a model is twice what the largest queries take alone on this device (§7.1): it, or what it is a part of.
    pub target_on: Platform,
    /// Chooses all random numbers.
    pub seed: u64,
}

impl OverlapInputs {
    fn largest(self) -> (u32, u32) {
        if self == OverlapInputs::Any { (ROWS[3], LENGTHS[3]) } else { (ROWS[0], LENGTHS[0]) }
    }

    /// Items and length of a query.
    pub(super) fn draw(self, rng: &mut Pcg64) -> (u32, u32) {
        match self {
            OverlapInputs::Any => (ROWS[rng.random_range(0..4)], LENGTHS[rng.random_range(0..4)]),
            OverlapInputs::Smallest => self.largest(),
        }
    }
}

impl OverlapRun {
    /// The models, cut into Abacus' operators.
    ///
    /// # Errors
    /// If one is none of theirs.
    pub fn models(&self) -> Result<Vec<EmulatedModel>, DeviceFailure> {
        self.models.iter().map(|model| EmulatedModel::abacus(*model, self.platform)).collect()
    }

    /// The QoS target of each model.
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

    /// Plays it until all queries are answered or dropped.
    ///
    /// # Errors
    /// If there is no model, one is none of Abacus', or the rate is none.
    pub fn play(&self) -> Result<OverlapReport, DeviceFailure> {
        if self.models.is_empty() {
            return Err(DeviceFailure("queries of no model".to_owned()));
        }
        let (targets, mut play) = (self.targets()?, Play::new(self, self.models()?, 0)?);
        let mut arrivals = Arrivals::Poisson.stream(self.rate, self.seed, 0)?;
        let mut draws = random(self.seed, 1);
        let (mut sent, mut next) = (0, arrivals.next_arrival());
        loop {
            let arrives = if sent < self.queries { next } else { Time::MAX };
            let now = play.next_event().map_or(arrives, |event| event.min(arrives));
            if now == Time::MAX {
                return Ok(play.report);
            }
            play.advance(now);
            if now == arrives {
                let model = draws.random_range(0..self.models.len());
                let query = self.query(&play.models[model], (model, targets[model]), now, &mut draws);
                play.arrive(now, u64::from(sent), query);
                (sent, next) = (sent + 1, arrivals.next_arrival());
                if sent == self.queries {
                    play.end_of_arrivals(now);
                }
            }
            play.carry_out(now);
        }
    }

    /// A query of a model, by its number and target, that comes now.
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
