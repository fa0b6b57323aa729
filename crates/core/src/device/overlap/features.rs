//! What a predictor sees of a group: a bit for each model that it knows, and four numbers for each that is in the group.

use serde::{Deserialize, Serialize};

use super::group::GroupPart;
use crate::ids::ModelId;

/// A model that a predictor knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FeatureModel {
    /// Which.
    pub model: ModelId,
    /// How many operators it has.
    pub operators: u16,
}

/// The features of a group (Abacus §5.3, figure 8): 7 models of which N run at once are `7 + 4 * N` numbers. First a bit for each model, in the order of
/// [`Self::models`]; then in that order, for each that is in the group, its first operator, one past its last, its items, and its length. Zeros where fewer run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FeatureLayout {
    /// The models that it knows, each once.
    pub models: Vec<FeatureModel>,
    /// How many of them are in a group at most.
    pub at_once: usize,
}

impl FeatureLayout {
    /// How many numbers a group is.
    pub fn len(&self) -> usize {
        self.models.len() + 4 * self.at_once
    }

    /// Whether it knows no model.
    pub fn is_empty(&self) -> bool {
        self.models.is_empty()
    }

    /// Adds the features of a group to `features`. Adds nothing and says `false` where there are none: a model that is not known or is there twice, operators that it has not, too
    /// many at once.
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
