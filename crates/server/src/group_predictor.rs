//! What says how long groups of operators take: the file that the server was given, and which of its models that is right about.

use std::path::Path;
use std::sync::Arc;

use downbeat_core::ModelId;
use downbeat_core::device::GroupSettings;
use downbeat_engine::EngineInfo;

use crate::profile_store::ProfileStore;
use crate::profiler::Threads;
use crate::stored_predictor::{PredictedModel, StoredPredictor};

/// What says how long groups of operators take on this server, or why nothing does.
#[derive(Debug)]
pub struct GroupPredictor(Result<StoredPredictor, String>);

impl GroupPredictor {
    /// The predictor in a file. What is wrong with it is said in the log, and for each model that would need it: the server goes on without.
    pub fn open(path: Option<&Path>) -> Self {
        let Some(path) = path else {
            return GroupPredictor(Err("no predictor was named ([device] predictor)".to_owned()));
        };
        let loaded = StoredPredictor::load(path).map_err(|error| error.to_string());
        match &loaded {
            Ok(stored) => {
                let models: Vec<&str> = stored.models.iter().map(|model| &*model.name).collect();
                let (path, error) = (path.display(), stored.error);
                tracing::info!(%path, ?models, at_once = stored.at_once(), error, "a predictor of groups of operators");
            }
            Err(reason) => {
                tracing::warn!(%reason, "no predictor of groups of operators: requests of the device policy overlap run one at a time")
            }
        }
        GroupPredictor(loaded)
    }

    /// What it was trained with of a model, by which that is best loaded.
    pub fn known(&self, model: &str) -> Option<&PredictedModel> {
        self.0.as_ref().ok()?.model(model)
    }

    /// On how many threads its models ran.
    pub fn threads(&self) -> Option<usize> {
        Some(self.0.as_ref().ok()?.threads)
    }

    /// Its mean absolute relative error, when it was tested.
    pub fn mean_error(&self) -> Option<f64> {
        Some(self.0.as_ref().ok()?.mean_error)
    }

    /// How groups of these models are made.
    pub fn settings(&self, models: &[(ModelId, &str)]) -> GroupSettings {
        let Ok(stored) = &self.0 else { return GroupSettings::default() };
        let number =
            |known: &PredictedModel| models.iter().find(|(_, name)| *name == known.name).map(|(number, _)| *number);
        let predictor = (!models.is_empty()).then(|| stored.predictor(number));
        GroupSettings { predictor, error: stored.error }
    }
}

/// A model whose operators run in groups with those of others.
#[derive(Clone, Debug)]
pub struct GroupMember {
    /// What says how long groups take.
    pub predictor: Arc<GroupPredictor>,
    /// Why that does not hold for the model, if so: it runs alone.
    pub misfit: Option<String>,
}

impl GroupMember {
    /// A model of this name and version that was loaded from `file`, by an engine on so many threads and on a part of the device if that is divided, cut into `segments`.
    pub fn new(
        predictor: Arc<GroupPredictor>,
        (name, version, file): (&str, u64, &Path),
        (engine, threads, part): (&EngineInfo, usize, Option<&str>),
        segments: usize,
    ) -> Self {
        let check = || {
            let stored = predictor.0.as_ref().map_err(Clone::clone)?;
            let file = ProfileStore::file_key(file).map_err(|error| format!("{}: {error}", file.display()))?;
            let place = ProfileStore::place_key(engine, Threads::Chosen(threads), part);
            stored.check(&place, [(name, version, &*file)]).map_err(|misfit| misfit.to_string())?;
            match stored.model(name).map(|known| usize::from(known.segments)) {
                Some(known) if known != segments => Err(format!(
                    "the model is cut into {segments} operators, and the predictor was trained with {known}: leave `stages` and `cut_at` out, or train it again with `downbeat profile --co-run`"
                )),
                _ => Ok(()),
            }
        };
        let misfit = check().err();
        if let Some(reason) = &misfit {
            tracing::warn!(model = %name, version, %reason, "its requests run one at a time, beside no other model's");
        }
        GroupMember { predictor, misfit }
    }
}
