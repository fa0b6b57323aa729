//! Chooses the model of the next request, and one of its prepared requests.

use rand::RngExt;
use rand_pcg::Pcg64;

use crate::load::seed::Stream;

/// One of the prepared requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Index of the model.
    pub model: usize,
    /// Index among the prepared requests of the model.
    pub variant: usize,
}

/// Endless sequence of choices: models by their shares, variants equally likely.
pub struct Mix {
    /// `(upper end of the model's part of [0, 1), number of its variants)`.
    parts: Vec<(f64, usize)>,
    random: Pcg64,
}

impl Mix {
    /// Makes a mix of models. `models` has each model's share (positive; only ratios count) and its
    /// number of variants (at least one).
    pub fn new(models: &[(f64, usize)], seed: u64) -> Self {
        let total: f64 = models.iter().map(|(share, _)| share).sum();
        let mut end = 0.0;
        let parts = models
            .iter()
            .map(|&(share, variants)| {
                end += share / total;
                (end, variants)
            })
            .collect();
        Mix { parts, random: Stream::Mix.random(seed) }
    }

    /// The next choice.
    pub fn draw(&mut self) -> Choice {
        let at: f64 = self.random.random();
        // The last part's end may be rounded to just below 1.
        let model = self.parts.partition_point(|(end, _)| *end <= at).min(self.parts.len().saturating_sub(1));
        let variants = self.parts.get(model).map_or(1, |(_, variants)| *variants).max(1);
        Choice { model, variant: self.random.random_range(0..variants) }
    }
}
