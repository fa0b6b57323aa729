//! A predictor that was learned from samples.

use serde::{Deserialize, Serialize};

use super::features::FeatureLayout;
use super::group::GroupPart;
use super::mlp::{BadMlp, Mlp};
use super::predictor::Predictor;
use crate::ids::ModelId;
use crate::time::Duration;

/// A perceptron on the features of groups, whose outputs are milliseconds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct LearnedPredictor {
    layout: FeatureLayout,
    mlp: Mlp,
}

/// A predictor as it was read, before its numbers are checked.
#[derive(Deserialize)]
struct Unchecked {
    layout: FeatureLayout,
    mlp: Mlp,
}

impl TryFrom<Unchecked> for LearnedPredictor {
    type Error = BadMlp;

    fn try_from(Unchecked { layout, mlp }: Unchecked) -> Result<Self, BadMlp> {
        LearnedPredictor::new(layout, mlp)
    }
}

impl LearnedPredictor {
    /// The predictor for features of this layout.
    ///
    /// # Errors
    /// If the perceptron has another number of inputs than groups have features.
    pub fn new(layout: FeatureLayout, mlp: Mlp) -> Result<Self, BadMlp> {
        if mlp.inputs() != layout.len() {
            return Err(BadMlp::Shape { layer: 0, what: "features", found: mlp.inputs(), expected: layout.len() });
        }
        Ok(LearnedPredictor { layout, mlp })
    }

    /// The layout of a group's features.
    pub fn layout(&self) -> &FeatureLayout {
        &self.layout
    }

    /// The perceptron.
    pub fn mlp(&self) -> &Mlp {
        &self.mlp
    }

    /// The same predictor, with other ids for its models.
    #[must_use]
    pub fn renumbered(mut self, number: impl Fn(ModelId) -> ModelId) -> Self {
        self.layout.models.iter_mut().for_each(|known| known.model = number(known.model));
        self
    }
}

impl Predictor for LearnedPredictor {
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>> {
        let mut features = Vec::with_capacity(groups.len() * self.layout.len());
        let known: Vec<bool> = groups.iter().map(|group| self.layout.extend(&mut features, group)).collect();
        let mut outputs = self.mlp.infer(&features).into_iter();
        let mut milliseconds = |known: bool| known.then(|| outputs.next()).flatten().filter(|ms| ms.is_finite());
        known.into_iter().map(|known| milliseconds(known).map(|ms| Duration::from_millis_f64(f64::from(ms)))).collect()
    }
}
