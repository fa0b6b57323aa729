//! The folder of models: `NAME/VERSION/model.onnx`, beside it an optional `NAME/config.pbtxt` (Triton's layout).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use downbeat_protocol::inference::model_version_policy::PolicyChoice;
use downbeat_protocol::inference::{ModelConfig, model_warmup};

use crate::check::Report;
use crate::config_source::ConfigSource;
use crate::definition::{CompletionOptions, ModelDefinition, ModelFormat, datatype};
use crate::finding::{ConfigError, Finding, nearest, sorted};
use crate::warmup::{Warmup, WarmupData, WarmupInput};

/// Name of a model's configuration file.
pub const CONFIG_FILE: &str = "config.pbtxt";

/// Largest file of class names that is read, bytes.
const MAX_LABEL_BYTES: u64 = 16 << 20;

/// A model repository on a local disk. Holds no state of the models: each call looks at the disk.
#[derive(Clone, Debug)]
pub struct ModelRepository {
    /// The folder as it was given, for messages.
    path: PathBuf,
    /// The folder with symbolic links resolved: nothing outside it is read.
    root: PathBuf,
    completion: CompletionOptions,
}

/// Why the repository has no definition of a model.
#[derive(Debug, thiserror::Error)]
pub enum RepositoryError {
    /// The repository itself cannot be read.
    #[error("model repository {path}: {reason}", path = path.display())]
    Unreadable {
        /// Its folder.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// No folder can have this name, or its folder lies outside the repository.
    #[error("'{name}' is not the name of a model: {reason}")]
    Name {
        /// The name, shortened.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no such folder.
    #[error("no model '{name}' in {path}{hint}", path = path.display())]
    NotFound {
        /// The name.
        name: String,
        /// The repository's folder.
        path: PathBuf,
        /// A name that is there and near, or nothing.
        hint: String,
    },
    /// Two repositories have a folder of this name.
    #[error(
        "model appears in two or more repositories: '{name}' is in {one} and in {other}; remove or rename one of them",
        one = one.display(), other = other.display()
    )]
    Ambiguous {
        /// The name.
        name: String,
        /// One of the repositories.
        one: PathBuf,
        /// Another.
        other: PathBuf,
    },
    /// The model's folder or its configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// What a look at the repository found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Scan {
    /// Names of the models, sorted.
    pub names: Vec<String>,
    /// Entries that look like models but are none.
    pub warnings: Vec<Finding>,
}

/// What the files of a model were when it was looked at: equal as long as nothing has changed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Fingerprint(BTreeMap<PathBuf, (u64, Option<SystemTime>)>);

impl FromIterator<Fingerprint> for Fingerprint {
    fn from_iter<I: IntoIterator<Item = Fingerprint>>(all: I) -> Self {
        Fingerprint(all.into_iter().flat_map(|one| one.0).collect())
    }
}

impl ModelRepository {
    /// The repository at `path`.
    ///
    /// # Errors
    /// If it is not a readable folder.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, RepositoryError> {
        let path = path.into();
        let unreadable = |e: io::Error| RepositoryError::Unreadable { path: path.clone(), reason: io_reason(&e) };
        let root = path.canonicalize().map_err(unreadable)?;
        fs::read_dir(&root).map_err(unreadable)?;
        let completion =
            CompletionOptions { enabled: true, default_max_batch_size: 32, ..CompletionOptions::default() };
        Ok(ModelRepository { path, root, completion })
    }

    /// Whether configurations are completed from the model file (default), or have to be whole.
    #[must_use]
    pub fn with_auto_complete(mut self, enabled: bool) -> Self {
        self.completion.enabled = enabled;
        self
    }

    /// Largest batch of models that could be batched and do not say how far (default 32). 0: they are not batched.
    #[must_use]
    pub fn with_default_max_batch_size(mut self, size: u32) -> Self {
        self.completion.default_max_batch_size = size.min(i32::MAX as u32);
        self
    }

    /// The GPUs that models run on, by their ordinals (default: none, they run on the CPU). What a configuration says of the places of
    /// its instances is judged by it.
    #[must_use]
    pub fn with_gpus(mut self, gpus: Vec<u32>) -> Self {
        self.completion.gpus = gpus;
        self
    }

    /// The same repository of a server that was told which of its GPUs these models are on (none: it has no GPUs, or the models are all over them): what their configurations say of
    /// places does not count.
    #[must_use]
    pub fn with_places(mut self, places: BTreeMap<String, Vec<u32>>) -> Self {
        self.completion.places = places;
        self
    }

    /// Another folder, read by the same rules: the files of a load request.
    ///
    /// # Errors
    /// As [`ModelRepository::open`].
    pub fn at(&self, path: impl Into<PathBuf>) -> Result<Self, RepositoryError> {
        Ok(ModelRepository { completion: self.completion.clone(), ..ModelRepository::open(path)? })
    }

    /// The folder, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder with symbolic links resolved.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Whether there is a model of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.model_dir(name).is_ok_and(|dir| looks_like_model(&dir))
    }

    /// The models and what else is strange.
    ///
    /// # Errors
    /// If the folder cannot be read any more.
    pub fn scan(&self) -> Result<Scan, RepositoryError> {
        let unreadable = |e: io::Error| RepositoryError::Unreadable { path: self.path.clone(), reason: io_reason(&e) };
        let mut scan = Scan::default();
        for entry in fs::read_dir(&self.root).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let file_name = entry.file_name();
            let shown = file_name.to_string_lossy().into_owned();
            // `.git`, and the `..data` of a Kubernetes volume.
            if shown.starts_with('.') {
                continue;
            }
            let mut warn = |message: String| {
                scan.warnings.push(Finding {
                    file: self.path.join(&file_name).display().to_string(),
                    position: None,
                    field: String::new(),
                    message,
                });
            };
            let Ok(metadata) = fs::metadata(entry.path()) else {
                warn("cannot be read (a broken symbolic link?); ignored".to_owned());
                continue;
            };
            if !metadata.is_dir() {
                if let Some(stem) = shown.strip_suffix(".onnx") {
                    warn(format!("is a file; a model is a folder: {stem}/1/model.onnx"));
                }
                continue;
            }
            match file_name.to_str() {
                None => warn("the name is not UTF-8; ignored".to_owned()),
                Some(name) => match self.model_dir(name) {
                    Err(e) => warn(format!("{e}; ignored")),
                    // As in Triton: without a configuration, and none to be made up, it is no model.
                    Ok(dir)
                        if looks_like_model(&dir) && !self.completion.enabled && !dir.join(CONFIG_FILE).exists() =>
                    {
                        warn(format!("has no {CONFIG_FILE}, and configurations are not completed; ignored"));
                    }
                    Ok(dir) if looks_like_model(&dir) => scan.names.push(name.to_owned()),
                    Ok(dir) if dir.join("model.onnx").exists() => {
                        warn(format!("has no version folder; move the file to {name}/1/model.onnx"));
                    }
                    Ok(_) => warn(format!("has neither a version folder such as {name}/1 nor {CONFIG_FILE}; ignored")),
                },
            }
        }
        if scan.names.is_empty()
            && let Some(message) = self.is_misplaced()
        {
            let file = self.path.display().to_string();
            scan.warnings = vec![Finding { file, position: None, field: String::new(), message }];
        }
        scan.names.sort_unstable();
        scan.warnings.sort_by(|a, b| a.file.cmp(&b.file));
        Ok(scan)
    }

    /// What the folder is if it is not a repository but a part of one, and which folder was probably meant.
    fn is_misplaced(&self) -> Option<String> {
        let entries = || fs::read_dir(&self.root).into_iter().flatten().flatten();
        let is_version = |path: &Path| path.file_name().and_then(|n| n.to_str()).and_then(version_number).is_some();
        let above = |levels: usize| self.root.ancestors().nth(levels).unwrap_or(&self.root).display().to_string();
        if self.root.join(CONFIG_FILE).is_file()
            || entries().any(|e| is_version(&e.path()) && has_model_file(&e.path()))
        {
            return Some(format!(
                "is the folder of one model, not a model repository; give the folder above it: {}",
                above(1)
            ));
        }
        if is_version(&self.root) && has_model_file(&self.root) {
            return Some(format!(
                "is the folder of one version of a model, not a model repository; give the folder two above it: {}",
                above(2)
            ));
        }
        None
    }

    /// Names of the models, sorted.
    ///
    /// # Errors
    /// If the folder cannot be read any more.
    pub fn names(&self) -> Result<Vec<String>, RepositoryError> {
        self.scan().map(|scan| scan.names)
    }

    /// What the folder says about a model. `config` (JSON or the text format) stands in for its `config.pbtxt`.
    ///
    /// # Errors
    /// If there is no such model, or its folder or configuration is wrong.
    pub fn definition(&self, name: &str, config: Option<&str>) -> Result<ModelDefinition, RepositoryError> {
        let dir = self.model_dir(name)?;
        let shown = |file: &str| self.path.join(name).join(file).display().to_string();
        let label = shown(CONFIG_FILE);
        let source = match config {
            Some(text) => ConfigSource::from_request(text)?,
            None => {
                let file = dir.join(CONFIG_FILE);
                if file.exists() {
                    self.stays_inside(&file).map_err(|reason| plain(&label, reason))?;
                }
                ConfigSource::read(&file, label)?
                    .unwrap_or_else(|| ConfigSource::absent(self.path.join(name).display().to_string()))
            }
        };
        let mut report = Report::new(&source);
        let checked = report.check(name);
        let mut files = Files { repository: self, dir: &dir, shown: self.path.join(name) };
        let warmups = files.warmups(&source.config, &mut report);
        let labels = files.labels(&source.config, &mut report);
        let (format, versions) = files.versions(&source.config, checked.format, &mut report);
        let gpus = match self.completion.places.get(name) {
            Some(gpus) => Some(gpus.clone()).filter(|gpus| !gpus.is_empty()),
            None => report.places(format, &self.completion.gpus),
        };
        if !report.errors.is_empty() {
            return Err(ConfigError { findings: sorted(report.errors) }.into());
        }
        let warnings = sorted(report.warnings);
        let config = source.config.clone();
        let batching = ModelDefinition::batching(&config, u32::try_from(config.max_batch_size).unwrap_or(0));
        Ok(ModelDefinition {
            name: name.to_owned(),
            dir,
            config,
            versions,
            format,
            batching,
            instances: checked.instances,
            gpus,
            slo: checked.slo,
            dispatch: checked.dispatch,
            device: checked.device,
            drop: checked.drop,
            tensorrt: checked.tensorrt,
            warmups,
            warnings,
            inputs: Vec::new(),
            outputs: Vec::new(),
            source,
            labels,
            completion: self.completion.clone(),
        })
    }

    /// Sizes and times of the model's files, to see whether it changed. Empty if there is no such model.
    pub fn fingerprint(&self, name: &str) -> Fingerprint {
        let mut files = BTreeMap::new();
        if let Ok(dir) = self.model_dir(name) {
            let mut pending = vec![(dir, 0)];
            while let Some((folder, depth)) = pending.pop() {
                let Ok(entries) = fs::read_dir(&folder) else { continue };
                for path in entries.flatten().map(|e| e.path()) {
                    let Ok(metadata) = fs::metadata(&path) else { continue };
                    // NAME/VERSION/model.onnx/data is the deepest that counts; symbolic links may form a circle.
                    if metadata.is_dir() && depth < 3 {
                        pending.push((path.clone(), depth + 1));
                    }
                    let size = if metadata.is_dir() { 0 } else { metadata.len() };
                    files.insert(path, (size, metadata.modified().ok()));
                }
            }
        }
        Fingerprint(files)
    }

    /// Whether a model can have this name at all.
    ///
    /// # Errors
    /// What is wrong with the name.
    pub fn check_name(name: &str) -> Result<(), RepositoryError> {
        let refuse = |reason: String| RepositoryError::Name { name: name.chars().take(64).collect(), reason };
        if name.is_empty() {
            return Err(refuse("it is empty".to_owned()));
        }
        if name.len() > 255 {
            return Err(refuse("it is longer than 255 bytes".to_owned()));
        }
        if let Some(c) = name.chars().find(|c| matches!(c, '/' | '\\') || c.is_control()) {
            return Err(refuse(format!("it contains '{}'", c.escape_default())));
        }
        if name.starts_with('.') {
            return Err(refuse("it starts with a dot".to_owned()));
        }
        Ok(())
    }

    /// The folder of a model, which is inside the repository.
    fn model_dir(&self, name: &str) -> Result<PathBuf, RepositoryError> {
        let refuse = |reason: String| RepositoryError::Name { name: name.chars().take(64).collect(), reason };
        Self::check_name(name)?;
        let dir = self.root.join(name);
        if !dir.is_dir() {
            let names = if dir.exists() { Vec::new() } else { self.near(name) };
            let hint = names.first().map_or_else(String::new, |n| format!("; did you mean '{n}'?"));
            return Err(RepositoryError::NotFound { name: name.to_owned(), path: self.path.clone(), hint });
        }
        self.stays_inside(&dir).map_err(refuse)?;
        Ok(dir)
    }

    /// A folder with a name near `name`.
    fn near(&self, name: &str) -> Vec<String> {
        let folders: Vec<String> = fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|e| e.path().is_dir())
            .filter_map(|e| e.file_name().into_string().ok())
            .filter(|n| !n.starts_with('.'))
            .collect();
        nearest(name, folders.iter().map(String::as_str)).map(str::to_owned).into_iter().collect()
    }

    fn stays_inside(&self, path: &Path) -> Result<(), String> {
        match path.canonicalize() {
            Ok(real) if real.starts_with(&self.root) => Ok(()),
            Ok(real) => Err(format!("it is a symbolic link to {}, outside the repository", real.display())),
            Err(e) => Err(io_reason(&e)),
        }
    }
}

fn io_reason(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::NotFound => "no such file or folder".to_owned(),
        io::ErrorKind::NotADirectory => "is not a folder".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => e.to_string(),
    }
}

fn plain(file: &str, message: String) -> ConfigError {
    Finding { file: file.to_owned(), position: None, field: String::new(), message }.into()
}

/// The version that a folder is named after. As in Triton, names with a leading zero are none.
fn version_number(name: &str) -> Option<u64> {
    let digits = name.bytes().all(|b| b.is_ascii_digit()) && !name.starts_with('0');
    digits.then(|| name.parse().ok()).flatten()
}

fn has_model_file(dir: &Path) -> bool {
    [ModelFormat::Onnx, ModelFormat::Emulated].iter().flat_map(|f| f.file_names()).any(|name| dir.join(name).exists())
}

fn looks_like_model(dir: &Path) -> bool {
    dir.join(CONFIG_FILE).exists()
        || fs::read_dir(dir).is_ok_and(|entries| {
            entries.flatten().any(|e| e.file_name().to_str().and_then(version_number).is_some() && e.path().is_dir())
        })
}

/// The files beside a configuration.
struct Files<'a> {
    repository: &'a ModelRepository,
    dir: &'a Path,
    /// The folder as messages name it.
    shown: PathBuf,
}

impl Files<'_> {
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

    fn labels(&mut self, config: &ModelConfig, report: &mut Report<'_>) -> BTreeMap<String, Arc<[String]>> {
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

    fn warmups(&mut self, config: &ModelConfig, report: &mut Report<'_>) -> Vec<Warmup> {
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
    fn versions(
        &mut self,
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
        let mut files: Vec<String> = fs::read_dir(&folder)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
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
