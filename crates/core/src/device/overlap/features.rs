//! The features of a group for a predictor: a bit for each known model, and four numbers for each
//! model in the group.

use serde::{Deserialize, Serialize};

use super::group::GroupPart;
use crate::ids::ModelId;

/// A model that a predictor knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FeatureModel {
    /// The model.
    pub model: ModelId,
    /// The number of the model's operators.
    pub operators: u16,
}

/// The layout of a group's features (Abacus §5.3, figure 8). For 7 models of which N run at once,
/// the features are `7 + 4 * N` numbers. First comes a bit for each model, in the order of
/// [`Self::models`]. Then, in that order, each model in the group has four numbers: its first
/// operator, one past its last, its items, and its length. Unused places hold zeros.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FeatureLayout {
    /// The models that the predictor knows, each once.
    pub models: Vec<FeatureModel>,
    /// The most models in a group.
    pub at_once: usize,
}

impl FeatureLayout {
    /// The number of features of a group.
    pub fn len(&self) -> usize {
        self.models.len() + 4 * self.at_once
    }

    /// Whether the layout knows no model.
    pub fn is_empty(&self) -> bool {
        self.models.is_empty()
    }

    /// Appends the features of a group to `features`. Appends nothing and returns `false` if the
    /// layout cannot describe the group. Reasons are an unknown model, two parts of one model, an
    /// operator out of range, or too many models.
    pub fn extend(&self, features: &mut Vec<f32>, group: &[GroupPart]) -> bool {
        let begin = features.len();
        if group.len() > self.at_once {
            return false;
        }
        features.resize(begin + self.models.len(), 0.0);
        let mut found = 0;
        for (index, known) in self.models.iter().enumerate() {
            let mut of_it = group.iter().filter(|part| part.model == known.model);
            let Some(part) = of_it.next() else { continue };
            if part.operators.end > known.operators || of_it.next().is_some() {
                break;
            }
            features[begin + index] = 1.0;
            let ends = [part.operators.first, part.operators.end].map(f32::from);
            features.extend(ends.into_iter().chain([part.rows as f32, part.length as f32]));
            found += 1;
        }
        let is_known = found == group.len() && found > 0;
        features.resize(if is_known { begin + self.len() } else { begin }, 0.0);
        is_known
    }
}
