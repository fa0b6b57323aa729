//! A predictor of operator groups in a file: its models, its device, and its tested error.

use std::io;
use std::path::{Path, PathBuf};

use downbeat_core::device::overlap::{FeatureLayout, FeatureModel, GroupPart, LearnedPredictor, Mlp};
use downbeat_core::{ModelId, file_content};
use downbeat_engine::Cut;
use serde::{Deserialize, Serialize};

/// The format's name in such a file.
const FORMAT: &str = "downbeat-overlap-predictor";
/// The version of the format that is written and read.
const FORMAT_VERSION: u32 = 1;

/// A model that a predictor was trained for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PredictedModel {
    /// The model's name in the repository.
    pub name: String,
    /// The model's version.
    pub version: u64,
    /// The key of its file's content: `ProfileStore::file_key`.
    pub file: String,
    /// The number of segments that it is cut into; they are the operators of a group.
    pub segments: u16,
    /// The last operator of each segment but the last, as the engine names it. Empty if the model
    /// is one segment, or the engine has no operators (`emulated`).
    pub cuts: Vec<String>,
    /// The most items of a request that it was trained with.
    pub most_rows: u32,
    /// The greatest size of its varying dimension in the training; 0: no dimension varies.
    pub longest: u32,
}

impl PredictedModel {
    /// The cut that makes the same segments.
    pub fn cut(&self) -> Cut {
        match self.segments {
            0 | 1 => Cut::Whole,
            _ if self.cuts.is_empty() => Cut::Stages(self.segments.into()),
            _ => Cut::At(self.cuts.clone()),
        }
    }
}

/// A trained predictor of the time of operator groups (Abacus §5), with its models and device.
/// `downbeat profile --co-run` writes it, a server reads it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StoredPredictor {
    format: String,
    format_version: u32,
    /// The place of the measurements, as profiles name it:
    /// `ProfileStore::place_key`.
    pub device: String,
    /// Threads of a run of each model.
    pub threads: usize,
    /// The models, in the order of the predictor's features, from number 0.
    pub models: Vec<PredictedModel>,
    /// An upper bound of the relative error of 95% of the tested groups, which the training did not
    /// see: [`downbeat_core::device::overlap::OverlapOptions::error`].
    pub error: f64,
    /// Mean absolute relative error of the same groups (Abacus equation 1).
    pub mean_error: f64,
    /// Groups that it was trained with.
    pub samples: usize,
    /// Groups that it was tested with.
    pub tested: usize,
    /// The predictor itself; models have the numbers of their places in `models`.
    predictor: LearnedPredictor,
}

/// Why a file is no predictor.
#[derive(Debug, thiserror::Error)]
pub enum PredictorFileError {
    /// The file cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file has another format.
    #[error("{path} is not a predictor of operator groups ({reason}); `downbeat profile MODEL --co-run MODELS --predictor FILE` writes one", path = path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The missing part.
        reason: String,
    },
    /// The file is of another version of Downbeat.
    #[error("{path} has version {found} of the predictor's format, and this Downbeat reads version {known}; train the predictor again with `downbeat profile --co-run`", path = path.display(), known = FORMAT_VERSION)]
    Version {
        /// The file.
        path: PathBuf,
        /// The version that it has.
        found: u32,
    },
    /// The content makes no predictor: a weight is NaN, or parts do not fit each other.
    #[error("{path}: {reason}; train it again with `downbeat profile --co-run`", path = path.display())]
    Bad {
        /// The file.
        path: PathBuf,
        /// The defect.
        reason: String,
    },
}

/// Why a predictor does not fit the models or the device of this server.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PredictorMisfit {
    /// The predictor was measured on another device.
    #[error(
        "the predictor was trained on {trained}, and this is {here}: train it here with `downbeat profile --co-run`"
    )]
    Device {
        /// The device of its measurements.
        trained: String,
        /// The device of this server.
        here: String,
    },
    /// The predictor does not know a model.
    #[error(
        "the predictor does not know the model '{model}', only {known}: train it with all of them, `downbeat profile --co-run`"
    )]
    Unknown {
        /// The model.
        model: String,
        /// The models that it knows.
        known: String,
    },
    /// A model's file has changed since the training.
    #[error(
        "the file of model '{model}' (version {version}) is not the one that the predictor was trained with (version {trained}): train it again with `downbeat profile --co-run`"
    )]
    Changed {
        /// The model.
        model: String,
        /// The version that is served.
        version: u64,
        /// The version that it was trained with.
        trained: u64,
    },
}

/// The fields that every version of the format has.
#[derive(Deserialize)]
struct Head {
    format: String,
    format_version: u32,
}

/// The facts of a training that are stored: see [`StoredPredictor`].
#[derive(Clone, Debug)]
pub struct Training {
    /// The place of the measurements.
    pub device: String,
    /// Threads of a run.
    pub threads: usize,
    /// The models, as in the layout of the predictor.
    pub models: Vec<PredictedModel>,
    /// An upper bound of the relative error of 95% of the tested groups.
    pub error: f64,
    /// Mean absolute relative error of the test.
    pub mean_error: f64,
    /// Groups of the training.
    pub samples: usize,
    /// Groups of the test.
    pub tested: usize,
}

impl StoredPredictor {
    /// How groups of up to `at_once` of these models are seen.
    pub fn layout(models: &[PredictedModel], at_once: usize) -> FeatureLayout {
        let known = |(number, model): (u32, &PredictedModel)| FeatureModel {
            model: ModelId(number),
            operators: model.segments,
        };
        FeatureLayout { models: (0..).zip(models).map(known).collect(), at_once }
    }

    /// The result of a training.
    ///
    /// # Errors
    /// A text, if its parts do not fit each other, or an error is no number.
    pub fn new(training: Training, predictor: LearnedPredictor) -> Result<Self, String> {
        let Training { device, threads, models, error, mean_error, samples, tested } = training;
        let (format, format_version) = (FORMAT.to_owned(), FORMAT_VERSION);
        let stored = StoredPredictor {
            format,
            format_version,
            device,
            threads,
            models,
            error,
            mean_error,
            samples,
            tested,
            predictor,
        };
        stored.checked()
    }

    fn checked(self) -> Result<Self, String> {
        for (what, error) in [("error", self.error), ("mean_error", self.mean_error)] {
            if !error.is_finite() || error < 0.0 {
                return Err(format!(
                    "the predictor's {what} is {error}, which is not an error rate: its training failed"
                ));
            }
        }
        let layout = self.predictor.layout();
        if *layout != StoredPredictor::layout(&self.models, layout.at_once) {
            return Err("the predictor is of other models, or of other segments, than its file says".to_owned());
        }
        Ok(self)
    }

    /// Reads one.
    ///
    /// # Errors
    /// If the file cannot be read, has another format or version, or its content makes no
    /// predictor.
    pub fn load(path: &Path) -> Result<Self, PredictorFileError> {
        let file = || path.to_owned();
        let bytes = std::fs::read(path).map_err(|source| PredictorFileError::File { path: file(), source })?;
        let foreign = |reason: String| PredictorFileError::Foreign { path: file(), reason };
        let text = file_content::text(&bytes).map_err(|error| foreign(format!("it {error}")))?;
        let head: Head = serde_json::from_str(text).map_err(|error| foreign(error.to_string()))?;
        if head.format != FORMAT {
            return Err(foreign(format!("the file says that it is '{}'", head.format.escape_debug())));
        }
        if head.format_version != FORMAT_VERSION {
            return Err(PredictorFileError::Version { path: file(), found: head.format_version });
        }
        let bad = |reason: String| PredictorFileError::Bad { path: file(), reason };
        let read = |error: serde_json::Error| {
            let reason = error.to_string();
            // How JSON writes NaN.
            let hint = if reason.contains("null") { " (a number that is NaN or infinite)" } else { "" };
            bad(format!("{reason}{hint}"))
        };
        let stored: StoredPredictor = serde_json::from_str(text).map_err(read)?;
        stored.checked().map_err(bad)
    }

    /// Writes the file aside and moves it, so that no reader sees half of the content.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), PredictorFileError> {
        let write = || -> io::Result<()> {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let mut aside = tempfile::NamedTempFile::new_in(folder)?;
            serde_json::to_writer(&mut aside, self)?;
            aside.persist(path)?;
            Ok(())
        };
        write().map_err(|source| PredictorFileError::File { path: path.to_owned(), source })
    }

    /// Checks that the predictor fits this server: its place (`device`, see
    /// `ProfileStore::place_key`), and its models by name, version and
    /// `ProfileStore::file_key`. The predictor may know more models than
    /// the server has.
    ///
    /// # Errors
    /// Why it does not fit. The server then goes on without it: one model at a time.
    pub fn check<'a>(
        &self,
        device: &str,
        models: impl IntoIterator<Item = (&'a str, u64, &'a str)>,
    ) -> Result<(), PredictorMisfit> {
        if self.device != device {
            return Err(PredictorMisfit::Device { trained: self.device.clone(), here: device.to_owned() });
        }
        for (name, version, file) in models {
            let Some(known) = self.model(name) else {
                let known: Vec<&str> = self.models.iter().map(|model| &*model.name).collect();
                return Err(PredictorMisfit::Unknown { model: name.to_owned(), known: known.join(", ") });
            };
            if known.version != version || known.file != file {
                return Err(PredictorMisfit::Changed { model: name.to_owned(), version, trained: known.version });
            }
        }
        Ok(())
    }

    /// The predictor's record of a model.
    pub fn model(&self, name: &str) -> Option<&PredictedModel> {
        self.models.iter().find(|model| model.name == name)
    }

    /// How many requests of different models it has seen in a group at most.
    pub fn at_once(&self) -> usize {
        self.predictor.layout().at_once
    }

    /// The features of a group whose models are numbered as in [`Self::models`]; `None`: a part of
    /// the group is unknown.
    pub fn features(&self, group: &[GroupPart]) -> Option<Vec<f32>> {
        let mut features = Vec::new();
        self.predictor.layout().extend(&mut features, group).then_some(features)
    }

    /// The perceptron.
    pub fn mlp(&self) -> &Mlp {
        self.predictor.mlp()
    }

    /// The same predictor with other weights and their errors: an upper bound for 95% of the
    /// groups, and the mean.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn retrained(&self, mlp: Mlp, (error, mean_error): (f64, f64)) -> Result<Self, String> {
        let layout = self.predictor.layout().clone();
        let predictor = LearnedPredictor::new(layout, mlp).map_err(|bad| bad.to_string())?;
        StoredPredictor { predictor, error, mean_error, ..self.clone() }.checked()
    }

    /// The predictor with these numbers for models. It predicts nothing of a model without a
    /// number.
    pub fn predictor(&self, number: impl Fn(&PredictedModel) -> Option<ModelId>) -> LearnedPredictor {
        let numbers: Vec<Option<ModelId>> = self.models.iter().map(number).collect();
        let of = |model: ModelId| numbers.get(model.0 as usize).copied().flatten();
        // A model that is not served is in no group.
        self.predictor.clone().renumbered(|model| of(model).unwrap_or(ModelId(u32::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::RequestId;
    use downbeat_core::device::SegmentRange;
    use downbeat_core::device::overlap::{Layer, Predictor};

    use super::*;

    fn model(name: &str, cuts: &[&str]) -> PredictedModel {
        let cuts: Vec<String> = cuts.iter().map(|cut| (*cut).to_owned()).collect();
        PredictedModel {
            name: name.to_owned(),
            version: 1,
            file: format!("{name}-file"),
            segments: cuts.len() as u16 + 1,
            cuts,
            most_rows: 32,
            longest: 0,
        }
    }

    fn stored() -> StoredPredictor {
        let models = vec![model("a", &["x", "y"]), model("b", &[])];
        let layout = StoredPredictor::layout(&models, 2);
        let inputs = layout.len();
        let layer = Layer { weights: vec![0.01; inputs], biases: vec![1.0] };
        let mlp = Mlp::new(vec![0.0; inputs], vec![1.0; inputs], vec![layer]).unwrap();
        let predictor = LearnedPredictor::new(layout, mlp).unwrap();
        let training = Training {
            device: "here".to_owned(),
            threads: 1,
            models,
            error: 0.1,
            mean_error: 0.05,
            samples: 80,
            tested: 20,
        };
        StoredPredictor::new(training, predictor).unwrap()
    }

    fn part(model: u32, operators: SegmentRange) -> GroupPart {
        GroupPart { request: RequestId(0), model: ModelId(model), operators, rows: 4, length: 0 }
    }

    #[test]
    fn what_is_saved_is_loaded_and_says_the_same_of_models_of_other_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("predictor.json");
        let saved = stored();
        saved.save(&path).unwrap();
        let loaded = StoredPredictor::load(&path).unwrap();
        assert_eq!(loaded, saved);
        assert_eq!(
            (loaded.models[0].cut(), loaded.models[1].cut()),
            (Cut::At(vec!["x".into(), "y".into()]), Cut::Whole)
        );
        let own = loaded.predictor(|model| Some(ModelId(u32::from(model.name == "b"))));
        let other = loaded.predictor(|model| (model.name == "a").then_some(ModelId(7)));
        let said = |predictor: &LearnedPredictor, model| predictor.predict(&[&[part(model, SegmentRange::new(0, 3))]]);
        assert!(said(&own, 0)[0].is_some());
        assert_eq!((said(&own, 0), vec![None]), (said(&other, 7), said(&other, 0)));
    }

    #[test]
    fn files_that_are_no_predictor_say_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("predictor.json");
        let mut good = Vec::new();
        serde_json::to_writer(&mut good, &stored()).unwrap();
        let good = String::from_utf8(good).unwrap();
        let said = |text: &str| {
            std::fs::write(&path, text).unwrap();
            StoredPredictor::load(&path).unwrap_err().to_string()
        };
        assert!(said("{\"models\":[]}").contains("is not a predictor of operator groups (missing field `format`"));
        assert!(said("hello").contains("is not a predictor"));
        let pointer = "version https://git-lfs.github.com/spec/v1\nsize 9\n";
        assert!(said(pointer).contains("(it is a git-lfs pointer to 9 bytes"));
        assert!(said(&good.replace("\"format_version\":1", "\"format_version\":9")).contains("has version 9"));
        let nan = said(&good.replacen("0.01", "null", 1));
        assert!(nan.contains("a number that is NaN or infinite"), "{nan}");
        assert!(said(&good.replacen("0.01", "1e39", 1)).contains("number out of range"));
        let scales = said(&good.replacen("\"scales\":[1.0", "\"scales\":[0.0", 1));
        assert!(scales.contains("an unusable number among its scales (0)"), "{scales}");
        assert!(said(&good.replace("\"error\":0.1", "\"error\":-1")).contains("its training failed"));
        assert!(said(&good.replace("\"segments\":3", "\"segments\":2")).contains("of other segments"));
        assert!(said(&good[..good.len() / 2]).contains("EOF"));
        assert!(StoredPredictor::load(&folder.path().join("none")).unwrap_err().to_string().contains("No such file"));
    }

    #[test]
    fn a_new_device_a_changed_file_and_an_unknown_model_are_noticed() {
        let stored = stored();
        assert_eq!(stored.check("here", [("b", 1, "b-file")]), Ok(()));
        let misfit = |device, model| stored.check(device, [model]).unwrap_err().to_string();
        assert!(misfit("there", ("a", 1, "a-file")).contains("was trained on here, and this is there"));
        assert!(misfit("here", ("a", 1, "other")).contains("the file of model 'a' (version 1) is not the one"));
        assert!(
            misfit("here", ("a", 2, "a-file"))
                .contains("(version 2) is not the one that the predictor was trained with (version 1)")
        );
        assert!(misfit("here", ("c", 1, "c")).contains("does not know the model 'c', only a, b"));
    }
}
