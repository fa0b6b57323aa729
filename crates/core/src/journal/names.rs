//! The names of the models of a log.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::ModelId;

/// The name of a model's queue.
///
/// A model whose requests differ in shape has a queue for each shape: `encoder [1,128]` and
/// `encoder [1,256]`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct QueueName {
    /// The model, as its owner calls it.
    pub model: String,
    /// The version.
    pub version: String,
    /// The shape of the requests in the queue, such as `[1,128]`; empty: all requests of the model.
    pub shape: String,
    /// Whether the queue has the requests beyond their tenants' shares.
    pub is_lent: bool,
}

impl QueueName {
    /// Whether a word names the queue: the owner's name, which all queues of a model share, or the
    /// queue's own.
    pub fn is_called(&self, word: &str) -> bool {
        self.model == word || self.to_string() == word
    }
}

impl fmt::Display for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.model)?;
        if !self.shape.is_empty() {
            write!(f, " {}", self.shape)?;
        }
        if self.is_lent { f.write_str(" (lent)") } else { Ok(()) }
    }
}

/// The names of a log's models, as far as the log was read.
///
/// **Bound.** A name for each model that the log adds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Names(BTreeMap<ModelId, QueueName>);

impl Names {
    /// Learns the name of a model.
    pub fn add(&mut self, model: ModelId, name: QueueName) {
        self.0.insert(model, name);
    }

    /// The name of a model; `None`: the log has not named it.
    pub fn get(&self, model: ModelId) -> Option<&QueueName> {
        self.0.get(&model)
    }

    /// The name of a model, or its number where the log has no name.
    pub fn of(&self, model: ModelId) -> impl fmt::Display {
        fmt::from_fn(move |f| match self.0.get(&model) {
            Some(name) => fmt::Display::fmt(name, f),
            None => fmt::Display::fmt(&model, f),
        })
    }
}
