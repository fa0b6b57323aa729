//! The server's predictor of operator groups: its file, and the models for which the file is right.

use std::sync::Arc;

use downbeat_core::device::overlap::{GroupOrder, GroupPart};
use downbeat_core::device::{GroupSettings, GroupStats};
use downbeat_core::{Duration, ModelId};
use downbeat_service::options::DeviceOptions;
use downbeat_service::report::device_report::GroupsReport;

use crate::groups::retraining::Learning;
use crate::groups::stored_predictor::{PredictedModel, StoredPredictor};

/// The server's predictor of operator groups, or why there is none.
#[derive(Debug)]
pub struct GroupPredictor {
    /// The predictor as its file has it.
    stored: Result<Arc<StoredPredictor>, String>,
    order: GroupOrder,
    /// Trains the predictor with served groups; `None`: the predictor stays as its file has it.
    learning: Option<Learning>,
}

impl GroupPredictor {
    /// The predictor in a file. A wrong file is an error in the log, and the reason why models run
    /// alone: the server goes on. The predictor is trained with served groups if there is time
    /// (`may_learn`) and the build has the feature `retraining`. The file stays as it is.
    pub fn open(DeviceOptions { predictor, order, .. }: &DeviceOptions, may_learn: bool) -> Self {
        let loaded = match predictor {
            Some(path) => StoredPredictor::load(path).map(|stored| (path, stored)).map_err(|error| error.to_string()),
            None => Err("no predictor was named ([device] predictor)".to_owned()),
        };
        match &loaded {
            Ok((path, stored)) => {
                let models: Vec<&str> = stored.models.iter().map(|model| &*model.name).collect();
                let (path, error) = (path.display(), stored.error);
                tracing::info!(%path, ?models, at_once = stored.at_once(), error, "a predictor of groups of operators");
            }
            Err(reason) if predictor.is_some() => {
                tracing::warn!(%reason, "no predictor of groups of operators: requests of the device policy overlap run one at a time")
            }
            Err(_) => {}
        }
        let may_learn = may_learn && loaded.is_ok() && *order == GroupOrder::Headroom;
        GroupPredictor {
            stored: loaded.map(|(_, stored)| Arc::new(stored)),
            order: *order,
            learning: may_learn.then(Learning::start).flatten(),
        }
    }

    /// Trains the predictor with served groups; `None`: the predictor stays as its file has it.
    pub fn learning(&self) -> Option<&Learning> {
        self.learning.as_ref()
    }

    /// The predictor in use: of its file, or of a later training; `None`: there is none.
    pub fn in_use(&self) -> Option<Arc<StoredPredictor>> {
        let adopted = self.learning.as_ref().and_then(Learning::adopted);
        adopted.or_else(|| self.stored.as_ref().ok().cloned())
    }

    /// Hears the time that a served group took. `name` translates a model's number; groups with an
    /// unknown model are left out.
    pub fn serves<'a>(&self, parts: &[GroupPart], took: Duration, name: impl Fn(ModelId) -> Option<&'a str>) {
        let (Some(learning), Ok(stored)) = (&self.learning, &self.stored) else { return };
        let renumbered = |part: &GroupPart| {
            let name = name(part.model)?;
            let number = stored.models.iter().position(|known| known.name == name)?;
            Some(GroupPart { model: ModelId(number as u32), ..*part })
        };
        if let Some(parts) = parts.iter().map(renumbered).collect() {
            learning.hear(parts, took);
        }
    }

    /// The report on the groups of a device. The caller adds the names of the models.
    pub fn report(&self, stats: GroupStats) -> GroupsReport {
        let GroupStats { groups, together, overtaken, expected, bound } = stats;
        let (mean_error, retraining) = (self.mean_error(), self.learning.as_ref().map(Learning::report));
        GroupsReport { mean_error, models: Vec::new(), groups, together, overtaken, expected, bound, retraining }
    }

    /// The predictor's record of a model, which tells how to load the model.
    pub fn known(&self, model: &str) -> Option<&PredictedModel> {
        self.stored.as_ref().ok()?.model(model)
    }

    /// The number of threads of its models' runs.
    pub fn threads(&self) -> Option<usize> {
        Some(self.stored.as_ref().ok()?.threads)
    }

    /// The mean absolute relative error of its test.
    pub fn mean_error(&self) -> Option<f64> {
        Some(self.in_use()?.mean_error)
    }

    /// How groups of these models are made.
    pub fn settings(&self, models: &[(ModelId, &str)]) -> GroupSettings {
        let order = self.order;
        let Some(stored) = self.in_use() else { return GroupSettings { order, ..GroupSettings::default() } };
        let number =
            |known: &PredictedModel| models.iter().find(|(_, name)| *name == known.name).map(|(number, _)| *number);
        let predictor = (!models.is_empty()).then(|| stored.predictor(number));
        GroupSettings { predictor, error: stored.error, order }
    }
}

/// A model whose operators run in groups with other models.
#[derive(Clone, Debug)]
pub struct GroupMember {
    /// The predictor of the groups' times.
    pub predictor: Arc<GroupPredictor>,
    /// Why the predictor does not fit the model, if so: the model runs alone.
    pub misfit: Option<String>,
}

impl GroupMember {
    /// A model of this name and version, loaded from the file of this key and cut into `segments`.
    /// `place`: the key of its engine, threads and part of the device.
    pub fn new(
        predictor: Arc<GroupPredictor>,
        (name, version): (&str, u64),
        file: impl FnOnce() -> Result<String, String>,
        place: &str,
        segments: usize,
    ) -> Self {
        let check = || {
            let stored = predictor.stored.as_ref().map_err(Clone::clone)?;
            stored.check(place, [(name, version, &*file()?)]).map_err(|misfit| misfit.to_string())?;
            match stored.model(name).map(|known| usize::from(known.segments)) {
                Some(known) if known != segments => Err(format!(
                    "the model is cut into {segments} operators, and the predictor was trained with {known}: leave `stages` and `cut_at` out, or train it again with `downbeat profile --co-run`"
                )),
                _ => Ok(()),
            }
        };
        let misfit = check().err();
        if let Some(reason) = &misfit {
            tracing::warn!(model = %name, version, %reason, "the model's requests run one at a time, beside no other model's");
        }
        GroupMember { predictor, misfit }
    }
}
