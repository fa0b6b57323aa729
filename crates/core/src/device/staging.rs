//! The stages and buffer pairs of a model. DVABatch finds the number of stages, N_st, for each
//! model by trying eight numbers (§7.1). The search here tries pairs of buffers, too.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The pairs of buffers, unless a setting or a search says otherwise (DVABatch §8.6).
pub(super) const BUFFER_PAIRS: u16 = 2;
/// The number of stages, unless a setting or a search says otherwise.
pub(super) const STAGES: u16 = 4;
/// Numbers of stages that are tried (DVABatch §7.1: eight tries).
pub const TRIED_STAGES: [u16; 8] = [1, 2, 3, 4, 6, 8, 12, 20];
/// Pairs of buffers that are tried. More than two were never better (lab/docs/dvabatch.md).
pub const TRIED_PAIRS: [u16; 2] = [1, 2];

/// When requests join a running batch (policy III).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Joining {
    /// By the measured times the answers come sooner together than in two batches, one after the other.
    #[default]
    IfSooner,
    /// Whenever the batch is younger than `comp_wait` and has room (DVABatch §7.2).
    Always,
}

/// The settings of DVABatch that are tuned for each model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Staging {
    /// N_st, the number of stages.
    pub stages: u16,
    /// Pairs of buffers. With one pair, stages run in turn and no request joins.
    pub pairs: u16,
    /// The rule by which requests join.
    pub joining: Joining,
}

impl Staging {
    /// All combinations that are worth a trial. `joins`: whether requests may join running batches
    /// (policy III). Only then, and with two pairs and two stages, rules of joining differ.
    pub fn all(stages: &[u16], pairs: &[u16], rules: &[Joining], joins: bool) -> Vec<Staging> {
        let of = |(stages, pairs): (u16, u16)| {
            let differ = joins && pairs > 1 && stages > 1;
            let rules = rules.iter().take(if differ { rules.len() } else { 1 });
            rules.map(move |joining| Staging { stages, pairs, joining: *joining })
        };
        let each = stages.iter().flat_map(|stages| pairs.iter().map(|pairs| (*stages, *pairs)));
        each.flat_map(of).collect()
    }

    /// The one of `open` that serves without a search, for a model of so many segments. The default
    /// is four stages and two pairs, or the next smaller numbers, or the only ones.
    pub fn default_of(open: &[Staging], segments: u16) -> Option<Staging> {
        let fits = |staging: &&Staging| staging.stages <= segments;
        let usual = |staging: &&Staging| staging.stages <= STAGES && staging.pairs <= BUFFER_PAIRS;
        let size = |staging: &&Staging| (staging.stages, staging.pairs);
        let usual = open.iter().filter(fits).filter(usual).max_by_key(size);
        usual.or_else(|| open.iter().filter(fits).min_by_key(size)).copied()
    }

    /// The number of stages that run at once.
    pub fn at_once(self) -> u32 {
        u32::from(self.stages.min(self.pairs))
    }
}

impl fmt::Display for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joining = match self.joining {
            _ if self.at_once() < 2 => "",
            Joining::IfSooner => ", joins if sooner",
            Joining::Always => ", always joins",
        };
        write!(f, "{} stages, {} pairs{joining}", self.stages, self.pairs)
    }
}
