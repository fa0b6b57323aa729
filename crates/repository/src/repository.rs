//! The folder of models: `NAME/VERSION/model.onnx`, with an optional `NAME/config.pbtxt` (Triton's
//! layout).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{fs, io};

use downbeat_protocol::pace;

use crate::boundary::{Boundary, is_there, reason};
use crate::config::check::Report;
use crate::config::config_source::ConfigSource;
use crate::config::finding::{ConfigError, Finding, did_you_mean, sorted};
use crate::definition::{CompletionOptions, ModelDefinition};
use crate::model_files::ModelFiles;
use crate::version_folder::{VersionFolders, has_misplaced_model, has_model_file, is_onnx_name, version_number};

/// Name of a model's configuration file.
pub const CONFIG_FILE: &str = "config.pbtxt";

/// The folder of a model's other configurations. A server may choose one of them by name.
const CONFIGS_FOLDER: &str = "configs";

/// A model repository on a local disk. It holds no state of the models: each call looks at the
/// disk.
#[derive(Clone, Debug)]
pub struct ModelRepository {
    /// The folder as it was given, for messages.
    path: PathBuf,
    /// The folder with symbolic links resolved, and whether links may lead to files outside that
    /// folder.
    boundary: Boundary,
    completion: CompletionOptions,
    /// The name of the configuration that replaces [`CONFIG_FILE`] in models that have it.
    config_name: Option<String>,
}

/// The reason why the repository has no definition of a model.
#[derive(Debug, thiserror::Error)]
pub enum RepositoryError {
    /// The repository's folder cannot be read, with the reason.
    #[error("model repository {path}: {1}", path = .0.display())]
    Unreadable(PathBuf, String),
    /// No folder can have this name, or its folder lies outside the repository. The fields are the
    /// shortened name and the error.
    #[error("'{0}' is not the name of a model: {1}")]
    Name(String, String),
    /// This repository has no folder of this name. The last field is a hint if another name is
    /// near.
    #[error("no model '{0}' in {path}{2}", path = .1.display())]
    NotFound(String, PathBuf, String),
    /// Two repositories have a folder of this name.
    #[error(
        "model appears in two or more repositories: '{0}' is in {one} and in {other}; remove or rename one of them",
        one = .1.display(), other = .2.display()
    )]
    Ambiguous(String, PathBuf, PathBuf),
    /// The model's folder or its configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// The result of a look at the repository.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Scan {
    /// Names of the models, sorted.
    pub names: Vec<String>,
    /// Warnings about entries that look like models and are not.
    pub warnings: Vec<Finding>,
}

/// Sizes and times of a model's files. It stays equal as long as no file changes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Fingerprint(BTreeMap<PathBuf, (u64, Option<SystemTime>)>);

impl Fingerprint {
    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.0.values().fold(0, |sum, (bytes, _)| sum.saturating_add(*bytes))
    }
}

impl FromIterator<Fingerprint> for Fingerprint {
    fn from_iter<I: IntoIterator<Item = Fingerprint>>(all: I) -> Self {
        Fingerprint(all.into_iter().flat_map(|one| one.0).collect())
    }
}

/// An entry of a repository's folder.
enum Entry {
    /// The folder of the model of this name.
    Model(String),
    /// The folder of a model whose file is at a wrong place. Loading the model reports the error,
    /// and the server is not ready without the model.
    MisplacedModel(String),
    /// An entry that is no model, with the reason for the user.
    Ignored(String),
    /// A file or hidden folder that a user does not mean as a model.
    Unrelated,
}

impl ModelRepository {
    /// The repository at `path`.
    ///
    /// # Errors
    /// If the path is not a readable folder.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, RepositoryError> {
        let path = path.into();
        let unreadable = |e: io::Error| RepositoryError::Unreadable(path.clone(), reason(&path, &e));
        let boundary = Boundary::of(&path).map_err(unreadable)?;
        fs::read_dir(boundary.root()).map_err(unreadable)?;
        let completion =
            CompletionOptions { enabled: true, default_max_batch_size: 32, ..CompletionOptions::default() };
        Ok(ModelRepository { path, boundary, completion, config_name: None })
    }

    /// Sets whether the model file completes configurations (default), or they must be complete.
    #[must_use]
    pub fn with_auto_complete(mut self, enabled: bool) -> Self {
        self.completion.enabled = enabled;
        self
    }

    /// Sets whether to follow symbolic links that lead out of the repository (default: they are
    /// errors).
    #[must_use]
    pub fn with_follow_symlinks(mut self, enabled: bool) -> Self {
        self.boundary = self.boundary.with_follow_symlinks(enabled);
        self
    }

    /// Sets the largest batch of models that could be batched and name no limit (default 32). 0:
    /// such models are not batched.
    #[must_use]
    pub fn with_default_max_batch_size(mut self, size: u32) -> Self {
        self.completion.default_max_batch_size = size.min(i32::MAX as u32);
        self
    }

    /// Sets the name of configurations: `configs/NAME.pbtxt` in a model's folder, if it exists,
    /// replaces `config.pbtxt` (default: never).
    #[must_use]
    pub fn with_config_name(mut self, name: Option<String>) -> Self {
        self.config_name = name;
        self
    }

    /// Sets whether a model with `KIND_GPU` runs on the CPU of a server without GPUs, with a
    /// warning (default: it is an error).
    #[must_use]
    pub fn with_cpu_for_gpus(mut self, allowed: bool) -> Self {
        self.completion.cpu_for_gpus = allowed;
        self
    }

    /// Sets the GPUs that models run on, by their ordinals (default: none, models run on the CPU).
    /// The places of instances in configurations are checked against these GPUs.
    #[must_use]
    pub fn with_gpus(mut self, gpus: Vec<u32>) -> Self {
        self.completion.gpus = gpus;
        self
    }

    /// Sets the GPUs of models whose places the server's options choose. An empty list means that
    /// the server has no GPUs, or that the model is on all of them. The places in these models'
    /// configurations are then ignored.
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
        let ModelRepository { path, boundary, .. } = ModelRepository::open(path)?;
        let boundary = boundary.with_follow_symlinks(self.boundary.follows_symlinks());
        let (completion, config_name) = (self.completion.clone(), self.config_name.clone());
        Ok(ModelRepository { path, boundary, completion, config_name })
    }

    /// The folder, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder with symbolic links resolved.
    pub(crate) fn root(&self) -> &Path {
        self.boundary.root()
    }

    /// Whether the repository has an entry of this name: a model, or anything else.
    pub(crate) fn has_entry(&self, name: &str) -> bool {
        Self::check_name(name).is_ok() && is_there(&self.root().join(name))
    }

    /// Whether the repository has a model of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.model_dir(name).is_ok_and(|dir| looks_like_model(&dir) || has_misplaced_model(&dir))
    }

    /// The models, and warnings about other entries.
    ///
    /// # Errors
    /// If the folder cannot be read any more.
    pub fn scan(&self) -> Result<Scan, RepositoryError> {
        let unreadable = |e: io::Error| RepositoryError::Unreadable(self.path.clone(), reason(&self.path, &e));
        let (mut scan, mut misplaced) = (Scan::default(), Vec::new());
        for entry in fs::read_dir(self.root()).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            pace::step(pace::ENTRY);
            match self.classify(&entry) {
                Entry::Model(name) => scan.names.push(name),
                Entry::MisplacedModel(name) => misplaced.push(name),
                Entry::Ignored(reason) => {
                    let file = self.path.join(entry.file_name()).display().to_string();
                    scan.warnings.push(Finding::of(file, reason));
                }
                Entry::Unrelated => {}
            }
        }
        if scan.names.is_empty()
            && let Some(message) = self.is_misplaced()
        {
            scan.warnings = vec![Finding::of(self.path.display().to_string(), message)];
        } else {
            scan.names.extend(misplaced);
        }
        scan.names.sort_unstable();
        scan.warnings.sort_by(|a, b| a.file.cmp(&b.file));
        Ok(scan)
    }

    /// Finds out whether an entry of the folder is a model.
    fn classify(&self, entry: &fs::DirEntry) -> Entry {
        let file_name = entry.file_name();
        let shown = file_name.to_string_lossy();
        // `.git`, and the `..data` of a Kubernetes volume.
        if shown.starts_with('.') {
            return Entry::Unrelated;
        }
        match fs::metadata(entry.path()) {
            Err(error) => Entry::Ignored(format!("cannot be read: {}; ignored", reason(&entry.path(), &error))),
            Ok(metadata) if metadata.is_dir() => match file_name.to_str() {
                None => Entry::Ignored("the name is not UTF-8; ignored".to_owned()),
                Some(name) => self.classify_folder(name),
            },
            Ok(_) if is_onnx_name(&shown) => {
                let stem = Path::new(&*shown).file_stem().unwrap_or_default().to_string_lossy();
                Entry::Ignored(format!("is a file; a model is a folder: {stem}/1/model.onnx"))
            }
            Ok(_) => Entry::Unrelated,
        }
    }

    /// Finds out whether the folder of this name is a model.
    fn classify_folder(&self, name: &str) -> Entry {
        let dir = match self.model_dir(name) {
            Ok(dir) => dir,
            Err(e) => return Entry::Ignored(format!("{e}; ignored")),
        };
        if looks_like_model(&dir) {
            // As in Triton, a folder without a configuration is no model if configurations are not
            // completed.
            if !self.completion.enabled && !is_there(&dir.join(self.config_file(&dir))) {
                return Entry::Ignored(format!("has no {CONFIG_FILE}, and configurations are not completed; ignored"));
            }
            return Entry::Model(name.to_owned());
        }
        if has_misplaced_model(&dir) {
            return Entry::MisplacedModel(name.to_owned());
        }
        Entry::Ignored(match VersionFolders::read(&dir).remedy(&dir, name, "") {
            Some(remedy) => format!("has no version folder; {remedy}"),
            None => format!("has neither a version folder such as {name}/1 nor {CONFIG_FILE}; ignored"),
        })
    }

    /// A message if the folder is only a part of a repository, with the folder that the user
    /// probably wants.
    fn is_misplaced(&self) -> Option<String> {
        let entries = || fs::read_dir(self.root()).into_iter().flatten().flatten();
        let is_version = |path: &Path| path.file_name().and_then(|n| n.to_str()).and_then(version_number).is_some();
        let above = |levels: usize| self.root().ancestors().nth(levels).unwrap_or(self.root()).display().to_string();
        if self.root().join(CONFIG_FILE).is_file()
            || entries().any(|e| is_version(&e.path()) && has_model_file(&e.path()))
        {
            return Some(format!(
                "is the folder of one model, not a model repository; give the folder above it: {}",
                above(1)
            ));
        }
        if is_version(self.root()) && has_model_file(self.root()) {
            return Some(format!(
                "is the folder of one version of a model, not a model repository; give the folder two above it: {}",
                above(2)
            ));
        }
        None
    }

    /// Reads the definition of a model. `config` (JSON or the text format) replaces its
    /// `config.pbtxt`.
    ///
    /// # Errors
    /// If there is no such model, or its folder or configuration is wrong.
    pub fn definition(&self, name: &str, config: Option<&str>) -> Result<ModelDefinition, RepositoryError> {
        let dir = self.model_dir(name)?;
        let shown = |file: &str| self.path.join(name).join(file).display().to_string();
        let config_file = self.config_file(&dir);
        let label = shown(&config_file);
        let source = match config {
            Some(text) => ConfigSource::from_request(text)?,
            None => {
                let file = dir.join(&config_file);
                if is_there(&file) {
                    self.boundary.check(&file).map_err(|reason| ConfigError::from(Finding::of(&label, reason)))?;
                }
                ConfigSource::read(&file, label)?
                    .unwrap_or_else(|| ConfigSource::absent(self.path.join(name).display().to_string()))
            }
        };
        let mut report = Report::new(&source);
        let checked = report.check(name);
        let files = ModelFiles { boundary: &self.boundary, dir: &dir, shown: self.path.join(name) };
        let warmups = files.warmups(&source.config, &mut report);
        let labels = files.labels(&source.config, &mut report);
        let (format, versions) = files.versions(&source.config, checked.format, &mut report);
        let gpus = match self.completion.places.get(name) {
            Some(gpus) => Some(gpus.clone()).filter(|gpus| !gpus.is_empty()),
            None => report.places(format, &self.completion),
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
            boundary: self.boundary.clone(),
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
            rows: None,
            warnings,
            inputs: Vec::new(),
            outputs: Vec::new(),
            source,
            labels,
            completion: self.completion.clone(),
        })
    }

    /// Sizes and times of the model's files, to detect changes. Empty if there is no such model.
    pub fn fingerprint(&self, name: &str) -> Fingerprint {
        let mut files = BTreeMap::new();
        if let Ok(dir) = self.model_dir(name) {
            let mut pending = vec![(dir, 0)];
            while let Some((folder, depth)) = pending.pop() {
                let Ok(entries) = fs::read_dir(&folder) else { continue };
                for path in entries.flatten().map(|e| e.path()) {
                    let Ok(metadata) = fs::metadata(&path) else { continue };
                    // NAME/VERSION/model.onnx/data is the deepest file that counts. Symbolic links
                    // may form a circle.
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

    /// Checks whether a model can have this name at all.
    ///
    /// # Errors
    /// The error of the name.
    pub fn check_name(name: &str) -> Result<(), RepositoryError> {
        let strange = name.chars().find(|c| matches!(c, '/' | '\\') || c.is_control());
        let reason = match strange {
            _ if name.is_empty() => "the name is empty".to_owned(),
            _ if name.len() > 255 => "the name is longer than 255 bytes".to_owned(),
            Some(c) => format!("the name contains '{}'", c.escape_default()),
            None if name.starts_with('.') => "the name starts with a dot".to_owned(),
            None => return Ok(()),
        };
        Err(RepositoryError::Name(name.chars().take(64).collect(), reason))
    }

    /// The folder of a model, which is inside the repository.
    fn model_dir(&self, name: &str) -> Result<PathBuf, RepositoryError> {
        Self::check_name(name)?;
        let dir = self.root().join(name);
        let named = |reason: String| RepositoryError::Name(name.chars().take(64).collect(), reason);
        match fs::metadata(&dir) {
            Ok(metadata) if metadata.is_dir() => {}
            Err(error) if is_there(&dir) => return Err(named(reason(&dir, &error))),
            found => {
                let hint = if found.is_ok() { String::new() } else { self.near(name) };
                return Err(RepositoryError::NotFound(name.to_owned(), self.path.clone(), hint));
            }
        }
        self.boundary.check(&dir).map_err(named)?;
        Ok(dir)
    }

    /// A suggestion of a folder with a similar name.
    fn near(&self, name: &str) -> String {
        let entries = fs::read_dir(self.root()).into_iter().flatten().flatten().filter(|e| e.path().is_dir());
        let folders: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        did_you_mean(name, folders.iter().map(String::as_str).filter(|n| !n.starts_with('.')))
    }

    /// The configuration file of the model in a folder, relative to the folder.
    fn config_file(&self, dir: &Path) -> String {
        let named = self.config_name.as_ref().map(|name| format!("{CONFIGS_FOLDER}/{name}.pbtxt"));
        named.filter(|file| is_there(&dir.join(file))).unwrap_or_else(|| CONFIG_FILE.to_owned())
    }
}

fn looks_like_model(dir: &Path) -> bool {
    is_there(&dir.join(CONFIG_FILE))
        || fs::read_dir(dir).is_ok_and(|entries| {
            entries.flatten().any(|e| e.file_name().to_str().and_then(version_number).is_some() && e.path().is_dir())
        })
}
