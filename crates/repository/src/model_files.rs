//! The files of a model's folder that lie beside its configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use downbeat_protocol::inference::model_version_policy::PolicyChoice;
use downbeat_protocol::inference::{ModelConfig, model_warmup};

use crate::check::Report;
use crate::definition::{ModelFormat, datatype};
use crate::repository::{ModelRepository, io_reason, version_number};
use crate::warmup::{Warmup, WarmupData, WarmupInput};

/// Largest file of class names that is read, bytes.
const MAX_LABEL_BYTES: u64 = 16 << 20;

/// The files beside a configuration.
pub(crate) struct ModelFiles<'a> {
    pub(crate) repository: &'a ModelRepository,
    pub(crate) dir: &'a Path,
    /// The folder as messages name it.
    pub(crate) shown: PathBuf,
}

impl ModelFiles<'_> {
    /// A file that the configuration names, which has to be inside the model's folder.
    fn named(&self, name: &str) -> Result<PathBuf, String> {
        let path = Path::new(name);
        if name.is_empty() || !path.components().all(|c| matches!(c, Component::Normal(_))) {
            return Err(format!("'{name}' does not name a file inside the model's folder"));
        }
        let path = self.dir.join(path);
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => return Err(format!("{} is not a file", self.shown.join(name).display())),
            Err(e) => return Err(format!("{}: {}", self.shown.join(name).display(), io_reason(&e))),
        }
        self.repository.stays_inside(&path)?;
        Ok(path)
    }

    /// The names of classes, by output.
    pub(crate) fn labels(&self, config: &ModelConfig, report: &mut Report<'_>) -> BTreeMap<String, Arc<[String]>> {
        let mut labels = BTreeMap::new();
        for (i, output) in config.output.iter().enumerate().filter(|(_, o)| !o.label_filename.is_empty()) {
            match self.named(&output.label_filename).and_then(|path| read_labels(&path)) {
                Ok(names) => {
                    labels.insert(output.name.clone(), names);
                }
                Err(e) => report.error(&format!("output[{i}].label_filename"), e),
            }
        }
        labels
    }

    /// The warm-up requests.
    pub(crate) fn warmups(&self, config: &ModelConfig, report: &mut Report<'_>) -> Vec<Warmup> {
        let mut warmups = Vec::new();
        for (i, warmup) in config.model_warmup.iter().enumerate() {
            let path = format!("model_warmup[{i}]");
            if warmup.inputs.is_empty() {
                report.error(&path, "has no inputs");
            }
            let mut inputs = BTreeMap::new();
            for (name, input) in &warmup.inputs {
                let path = format!("{path}.inputs[\"{name}\"]");
                let Some(datatype) = datatype(input.data_type) else {
                    report.error(&path, "has no data_type");
                    continue;
                };
                let dims: Option<Vec<usize>> =
                    input.dims.iter().map(|d| usize::try_from(*d).ok().filter(|d| *d > 0)).collect();
                let Some(dims) = dims else {
                    report.error(&path, "dims must be 1 or larger; a warm-up has no sizes that vary");
                    continue;
                };
                let data = match &input.input_data_type {
                    // As in Triton, naming the field is what counts.
                    Some(model_warmup::input::InputDataType::ZeroData(_)) => WarmupData::Zero,
                    Some(model_warmup::input::InputDataType::RandomData(_)) => WarmupData::Random,
                    Some(model_warmup::input::InputDataType::InputDataFile(name)) => {
                        match self.named(&format!("warmup/{name}")) {
                            Ok(path) => WarmupData::File(path),
                            Err(e) => {
                                report.error(&path, e);
                                continue;
                            }
                        }
                    }
                    None => {
                        report.error(&path, "needs one of zero_data: true, random_data: true, input_data_file");
                        continue;
                    }
                };
                inputs.insert(name.clone(), WarmupInput { datatype, dims, data });
            }
            warmups.push(Warmup {
                name: if warmup.name.is_empty() { format!("{}", i + 1) } else { warmup.name.clone() },
                batch_size: warmup.batch_size.max(1),
                count: warmup.count.max(1),
                inputs,
                batched: config.max_batch_size > 0,
            });
        }
        warmups
    }

    /// The versions that the policy selects, each with its model file.
    pub(crate) fn versions(
        &self,
        config: &ModelConfig,
        format: Option<ModelFormat>,
        report: &mut Report<'_>,
    ) -> (ModelFormat, Vec<(u64, PathBuf)>) {
        let mut present = BTreeSet::new();
        for entry in fs::read_dir(self.dir).into_iter().flatten().flatten() {
            if let Some(version) = entry.file_name().to_str().and_then(version_number)
                && entry.path().is_dir()
            {
                present.insert(version);
            }
        }
        let unknown = format.unwrap_or(ModelFormat::Onnx);
        if present.is_empty() {
            let file = self.shown.join("1").join(unknown.file_names().first().copied().unwrap_or_default());
            report.error("", format!("no version folder; expected {}", file.display()));
            return (unknown, Vec::new());
        }
        let selected = match config.version_policy.as_ref().and_then(|p| p.policy_choice.as_ref()) {
            Some(PolicyChoice::All(_)) => present,
            Some(PolicyChoice::Specific(specific)) => {
                let wanted: BTreeSet<u64> = specific.versions.iter().filter_map(|v| u64::try_from(*v).ok()).collect();
                let all: Vec<String> = present.iter().map(u64::to_string).collect();
                for version in wanted.difference(&present) {
                    let message = format!("there is no version {version} (there is: {})", all.join(", "));
                    report.warn("version_policy.specific.versions", message);
                }
                let selected: BTreeSet<u64> = wanted.intersection(&present).copied().collect();
                if selected.is_empty() {
                    let message = format!("selects none of the versions {}", all.join(", "));
                    report.error("version_policy.specific.versions", message);
                }
                selected
            }
            choice => {
                let count = match choice {
                    Some(PolicyChoice::Latest(latest)) => latest.num_versions as usize,
                    _ => 1,
                };
                present.into_iter().rev().take(count).collect()
            }
        };
        let mut versions = Vec::new();
        let mut formats = BTreeSet::new();
        for version in selected {
            match self.model_file(version, &config.default_model_filename, format) {
                Ok((found, path)) => {
                    formats.insert(found.backend());
                    versions.push((version, found, path));
                }
                Err(message) => report.error(
                    if config.default_model_filename.is_empty() { "" } else { "default_model_filename" },
                    message,
                ),
            }
        }
        if formats.len() > 1 {
            report.error("backend", "the versions have different kinds of model files; say which one is meant");
        }
        let format = versions.first().map_or(unknown, |(_, format, _)| *format);
        (format, versions.into_iter().map(|(version, _, path)| (version, path)).collect())
    }

    /// The model file of a version. `name` is the configuration's, or empty.
    fn model_file(
        &self,
        version: u64,
        name: &str,
        format: Option<ModelFormat>,
    ) -> Result<(ModelFormat, PathBuf), String> {
        let folder = self.dir.join(version.to_string());
        let shown = self.shown.join(version.to_string());
        const FORMATS: [ModelFormat; 2] = [ModelFormat::Onnx, ModelFormat::Emulated];
        let candidates: Vec<(ModelFormat, &str)> = if name.is_empty() {
            FORMATS
                .into_iter()
                .filter(|f| format.is_none_or(|format| format == *f))
                .flat_map(|f| f.file_names().iter().map(move |n| (f, *n)))
                .collect()
        } else {
            if Path::new(name).components().count() != 1
                || !Path::new(name).components().all(|c| matches!(c, Component::Normal(_)))
            {
                return Err(format!("'{name}' must be the name of a file in the version's folder"));
            }
            let emulated = name.contains(".emulated.");
            vec![(format.unwrap_or(if emulated { ModelFormat::Emulated } else { ModelFormat::Onnx }), name)]
        };
        for (format, name) in &candidates {
            // A folder of that name holds the graph beside its external weights.
            for path in [folder.join(name), folder.join(name).join(name)] {
                if path.is_file() {
                    self.repository
                        .stays_inside(&path)
                        .map_err(|reason| format!("{}: {reason}", shown.join(name).display()))?;
                    return Ok((*format, path));
                }
            }
        }
        let wanted = candidates.first().map_or("model.onnx", |(_, name)| *name);
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let mut files: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        files.sort_unstable();
        files.truncate(8);
        let found =
            if files.is_empty() { "the folder is empty".to_owned() } else { format!("found: {}", files.join(", ")) };
        Err(format!("{} does not exist ({found})", shown.join(wanted).display()))
    }
}

fn read_labels(path: &Path) -> Result<Arc<[String]>, String> {
    let size = fs::metadata(path).map_err(|e| io_reason(&e))?.len();
    if size > MAX_LABEL_BYTES {
        return Err(format!("has {size} bytes; at most {MAX_LABEL_BYTES} are read"));
    }
    let bytes = fs::read(path).map_err(|e| io_reason(&e))?;
    let text = String::from_utf8(bytes).map_err(|_| "is not UTF-8 text".to_owned())?;
    Ok(text.lines().map(str::to_owned).collect())
}
