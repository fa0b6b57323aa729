//! How many batches of a model, or of several models together, run at once.

use crate::ids::ModelId;

/// The limits of batches in flight.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    models: Vec<ModelLimit>,
    /// By model.
    limits: Vec<Limit>,
}

#[derive(Clone, Copy, Debug)]
struct ModelLimit {
    /// The model whose limit applies, which is often the model itself.
    limit: ModelId,
    /// The model is parked with its limit.
    parked: bool,
}

/// A limit of the models that share it.
#[derive(Clone, Debug)]
struct Limit {
    in_flight: u32,
    most: u32,
    /// The models that wait only for this limit.
    parked: Vec<ModelId>,
}

impl InFlight {
    /// Adds the next model, with a limit of its own.
    pub fn add(&mut self, most: u32) {
        self.push(ModelId(self.models.len() as u32), most);
    }

    /// Adds the next model, with the limit of another model. If there is no such model, the limit
    /// is one batch.
    pub fn add_sharing(&mut self, other: ModelId) {
        let limit = self.models.get(other.0 as usize).map(|other| other.limit);
        self.push(limit.unwrap_or(ModelId(self.models.len() as u32)), 1);
    }

    fn push(&mut self, limit: ModelId, most: u32) {
        self.models.push(ModelLimit { limit, parked: false });
        self.limits.push(Limit { in_flight: 0, most, parked: Vec::new() });
    }

    fn limit(&mut self, model: ModelId) -> &mut Limit {
        &mut self.limits[self.models[model.0 as usize].limit.0 as usize]
    }

    /// A batch of the model is in flight.
    pub fn begin(&mut self, model: ModelId) {
        self.limit(model).in_flight += 1;
    }

    /// A batch of the model is no longer in flight. Returns the list of the models that waited for
    /// this limit, if there were any. The caller must return the list empty.
    pub fn end(&mut self, model: ModelId) -> Option<Vec<ModelId>> {
        let limit = self.limit(model);
        assert!(limit.in_flight > 0, "a batch that ends had begun");
        limit.in_flight -= 1;
        if limit.parked.is_empty() {
            return None;
        }
        let parked = std::mem::take(&mut limit.parked);
        for model in &parked {
            self.models[model.0 as usize].parked = false;
        }
        Some(parked)
    }

    /// Takes the list of [`InFlight::end`] back.
    pub fn give_back(&mut self, model: ModelId, list: Vec<ModelId>) {
        let limit = self.limit(model);
        // If one of the models was parked again, the limit already has a new list.
        if limit.parked.is_empty() {
            limit.parked = list;
        }
    }

    /// Whether the model's limit is reached. If so, the model is parked, and [`InFlight::end`] will
    /// name it.
    pub fn park(&mut self, model: ModelId) -> bool {
        let state = &mut self.models[model.0 as usize];
        let limit = &mut self.limits[state.limit.0 as usize];
        if limit.in_flight < limit.most {
            return false;
        }
        if !std::mem::replace(&mut state.parked, true) {
            limit.parked.push(model);
        }
        true
    }
}
