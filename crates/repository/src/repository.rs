//! The models at one path: `NAME/VERSION/model.onnx`, with an optional `NAME/config.pbtxt` (Triton's
//! layout), or one of the plainer [layouts](crate::layout).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;
use std::{fs, io};

use downbeat_protocol::inference::model_config::SchedulingChoice;
use downbeat_protocol::pace;

use crate::boundary::{Boundary, is_there, reason};
use crate::config::check::Report;
use crate::config::config_source::ConfigSource;
use crate::config::finding::{ConfigError, Finding, did_you_mean, sorted};
use crate::definition::{CompletionOptions, ModelDefinition, ModelFormat};
use crate::layout::{Layout, derived_name, looks_like_model, name_of_path, stem};
use crate::model_files::ModelFiles;
use crate::other_model::OtherModel;
use crate::source::SupplyError;
use crate::version_folder::{CONFIG_FILE, VersionFolders, few, has_misplaced_model, is_onnx_name, onnx_files};

/// The folder of a model's other configurations. A server may choose one of them by name.
const CONFIGS_FOLDER: &str = "configs";

/// A model repository on a local disk. It holds no state of the models: each call looks at the
/// disk.
#[derive(Clone, Debug)]
pub struct ModelRepository {
    /// The folder as it was given, for messages.
    path: PathBuf,
    /// The folder with symbolic links resolved, and whether links may lead to files outside that
    /// folder. For a file, it is the file's folder.
    boundary: Boundary,
    /// The layout, if the disk does not decide it.
    layout: Option<Layout>,
    /// The name that the user gave to the only model.
    name: Option<String>,
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
    /// One name was given to a place with several models. The fields are the name, the place, and
    /// the models.
    #[error(
        "{name}={path}: one name was given, but {path} has {many} models: {models}; leave '{name}=' out, or give the \
         path of one model", name = .0, path = .1.display(), many = .2.len(), models = few(.2)
    )]
    Several(String, PathBuf, Vec<String>),
    /// The models of a source could not be brought to this machine.
    #[error("{0}: {1}")]
    NotBrought(String, SupplyError),
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
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Fingerprint(BTreeMap<PathBuf, (u64, Option<SystemTime>)>);

impl Fingerprint {
    /// The same files, as those of the folder `folder`.
    pub(crate) fn below(self, folder: &str) -> Self {
        Fingerprint(self.0.into_iter().map(|(path, file)| (Path::new(folder).join(path), file)).collect())
    }

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

/// The files of one model.
struct Place {
    /// The folder with the configuration.
    dir: PathBuf,
    /// The folder as messages name it.
    shown: PathBuf,
    /// The model's only file, if the folder may have files of other models.
    file: Option<PathBuf>,
    /// Whether the configuration's `name` may differ from the model's.
    is_named_freely: bool,
}

/// An entry of a repository's folder.
enum Entry {
    /// The folder of the model of this name.
    Model(String),
    /// The file of a model.
    PlainFile(String),
    /// An entry that is no model, with the reason for the user.
    Ignored(String),
    /// A file of this name in another format.
    Other(String, &'static OtherModel),
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
        let completion =
            CompletionOptions { enabled: true, default_max_batch_size: 32, ..CompletionOptions::default() };
        let (boundary, layout) = boundary_of(&path)?;
        Ok(ModelRepository { path, boundary, layout, name: None, completion, config_name: None })
    }

    /// Sets the name of the only model (default: the name follows from the path).
    #[must_use]
    pub fn with_name(mut self, name: Option<String>) -> Self {
        self.name = name;
        self
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
        let layout = Some(Layout::Several);
        Ok(ModelRepository { layout, name: None, ..self.moved_to(path.into())? })
    }

    /// The same models at another path.
    ///
    /// # Errors
    /// As [`ModelRepository::open`].
    pub(crate) fn moved_to(&self, path: PathBuf) -> Result<Self, RepositoryError> {
        let (boundary, layout) = boundary_of(&path)?;
        let boundary = boundary.with_follow_symlinks(self.boundary.follows_symlinks());
        let (completion, config_name, name) = (self.completion.clone(), self.config_name.clone(), self.name.clone());
        Ok(ModelRepository { path, boundary, layout, name, completion, config_name })
    }

    /// The folder or file, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder with symbolic links resolved.
    pub(crate) fn root(&self) -> &Path {
        self.boundary.root()
    }

    /// Whether both have the same models.
    pub(crate) fn is_same(&self, other: &ModelRepository) -> bool {
        (self.root(), &self.layout, &self.name) == (other.root(), &other.layout, &other.name)
    }

    /// Whether the repository has an entry of this name: a model, or anything else.
    pub(crate) fn has_entry(&self, name: &str) -> bool {
        Self::check_name(name).is_ok() && is_there(&self.root().join(name))
    }

    /// Whether the repository has a model of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.place(name)
            .is_ok_and(|place| place.file.is_some() || looks_like_model(&place.dir) || has_misplaced_model(&place.dir))
    }

    fn layout(&self) -> Layout {
        self.layout.clone().unwrap_or_else(|| Layout::of_folder(self.root()))
    }

    /// The name of the model, if the path is that of one model. The user's name comes first, then the
    /// name in the configuration, then that of the folder or file.
    fn only_name(&self, layout: &Layout) -> Option<String> {
        let written = match layout {
            Layout::File(_) => None,
            Layout::One(dir) => {
                let file = Some(dir.join(self.config_file(dir))).filter(|file| self.boundary.check(file).is_ok());
                let source = file.and_then(|file| ConfigSource::read(&file, String::new()).ok().flatten());
                source.map(|source| source.config.name).filter(|name| Self::check_name(name).is_ok())
            }
            Layout::Several => return None,
        };
        self.name.clone().or(written).or_else(|| Some(name_of_path(&self.path)))
    }

    /// The models, and warnings about other entries.
    ///
    /// # Errors
    /// If the folder cannot be read any more.
    pub fn scan(&self) -> Result<Scan, RepositoryError> {
        let layout = self.layout();
        if let Some(name) = self.only_name(&layout) {
            fs::metadata(&self.path).map_err(|e| self.unreadable(&e))?;
            let shown = self.path.file_name().map(|file| file.to_string_lossy().into_owned());
            let is_derived = self.name.is_none() && name == name_of_path(&self.path);
            let other = shown.filter(|shown| is_derived && stem(shown) != name);
            let warnings = other.iter().map(|_| renamed(&self.path.display().to_string(), &name)).collect();
            return Ok(Scan { names: vec![name], warnings });
        }
        let mut scan = self.scan_folder()?;
        if let Some(name) = &self.name {
            match scan.names.len() {
                0 => {}
                1 => scan.names = vec![name.clone()],
                _ => return Err(RepositoryError::Several(name.clone(), self.path.clone(), scan.names)),
            }
        }
        Ok(scan)
    }

    fn unreadable(&self, error: &io::Error) -> RepositoryError {
        RepositoryError::Unreadable(self.path.clone(), reason(&self.path, error))
    }

    /// The models in a folder of models. A model of the folder's own layout wins over a plain file.
    fn scan_folder(&self) -> Result<Scan, RepositoryError> {
        let (mut scan, mut plain, mut others) = (Scan::default(), Vec::new(), Vec::new());
        let shown = |file: &str| self.path.join(file).display().to_string();
        for entry in fs::read_dir(self.root()).map_err(|e| self.unreadable(&e))? {
            let entry = entry.map_err(|e| self.unreadable(&e))?;
            pace::step(pace::ENTRY);
            match self.classify(&entry) {
                Entry::Model(name) => scan.names.push(name),
                Entry::PlainFile(file) => plain.push(file),
                Entry::Other(file, other) => others.push((file, other)),
                Entry::Ignored(reason) => {
                    scan.warnings.push(Finding::of(shown(&entry.file_name().to_string_lossy()), reason));
                }
                Entry::Unrelated => {}
            }
        }
        plain.sort_unstable();
        for file in plain {
            let name = derived_name(stem(&file));
            if scan.names.contains(&name) {
                let reason = format!("another model has the name '{name}'; ignored. Rename one of them");
                scan.warnings.push(Finding::of(shown(&file), reason));
                continue;
            }
            if name != stem(&file) {
                scan.warnings.push(renamed(&shown(&file), &name));
            }
            scan.names.push(name);
        }
        // Beside models, code and archives are the owner's own affair.
        let is_alone = scan.names.is_empty();
        let others = others.into_iter().filter(|(_, other)| is_alone || other.is_model());
        scan.warnings.extend(others.map(|(file, other)| Finding::of(shown(&file), format!("{other}; ignored"))));
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
            // As in Triton, a model without a configuration is none if configurations are not
            // completed.
            Ok(_) if is_onnx_name(&shown) && !self.completion.enabled => {
                Entry::Ignored(format!("has no {CONFIG_FILE}, and configurations are not completed; ignored"))
            }
            Ok(metadata) if is_onnx_name(&shown) && metadata.is_file() => match file_name.to_str() {
                None => Entry::Ignored("the name is not UTF-8; ignored".to_owned()),
                Some(name) => Entry::PlainFile(name.to_owned()),
            },
            Ok(_) => OtherModel::of(&shown).map_or(Entry::Unrelated, |other| Entry::Other(shown.into_owned(), other)),
        }
    }

    /// Finds out whether the folder of this name is a model.
    fn classify_folder(&self, name: &str) -> Entry {
        let dir = match self.model_dir(name) {
            Ok(dir) => dir,
            Err(e) => return Entry::Ignored(format!("{e}; ignored")),
        };
        // A folder that nobody may read would seem to have no version.
        if let Err(error) = fs::read_dir(&dir) {
            return Entry::Ignored(format!("cannot be read: {}; ignored", reason(&dir, &error)));
        }
        if looks_like_model(&dir) {
            // As in Triton, a folder without a configuration is no model if configurations are not
            // completed.
            if !self.completion.enabled && !is_there(&dir.join(self.config_file(&dir))) {
                return Entry::Ignored(format!("has no {CONFIG_FILE}, and configurations are not completed; ignored"));
            }
            return Entry::Model(name.to_owned());
        }
        // The load of a model whose version has a wrong name reports that, and the server is not
        // ready without the model.
        if has_misplaced_model(&dir) {
            return Entry::Model(name.to_owned());
        }
        Entry::Ignored(match VersionFolders::read(&dir).remedy(&dir, name, "") {
            Some(remedy) => format!("has no version folder; {remedy}"),
            None => format!("has neither a version folder such as {name}/1 nor {CONFIG_FILE}; ignored"),
        })
    }

    /// Reads the definition of a model. `config` (JSON or the text format) replaces its
    /// `config.pbtxt`.
    ///
    /// # Errors
    /// If there is no such model, or its folder or configuration is wrong.
    pub fn definition(&self, name: &str, config: Option<&str>) -> Result<ModelDefinition, RepositoryError> {
        let Place { dir, shown, file, is_named_freely } = self.place(name)?;
        let mut source = match config {
            Some(text) => ConfigSource::from_request(text)?,
            None => self.config_source(&dir, &shown, file.as_deref())?,
        };
        if is_named_freely {
            source.config.name.clear();
        }
        let mut report = Report::new(&source);
        let checked = report.check(name);
        let is_given = matches!(self.layout, Some(Layout::File(_)));
        let files = ModelFiles { boundary: &self.boundary, dir: &dir, shown, file: file.as_deref(), is_given };
        let warmups = files.warmups(&source.config, &mut report);
        let labels = files.labels(&source.config, &mut report);
        let (format, versions) = files.versions(&source.config, checked.format, &mut report);
        let gpus = match self.completion.places.get(name).filter(|_| format != ModelFormat::Ensemble) {
            Some(gpus) => Some(gpus.clone()).filter(|gpus| !gpus.is_empty()),
            None if format == ModelFormat::Ensemble => None,
            None => report.places(format, &self.completion),
        };
        if !report.errors.is_empty() {
            return Err(ConfigError { findings: sorted(report.errors) }.into());
        }
        let warnings = sorted(report.warnings);
        let config = source.config.clone();
        let batching = ModelDefinition::batching(&config, u32::try_from(config.max_batch_size).unwrap_or(0));
        let mut definition = ModelDefinition {
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
            rollout: checked.rollout,
            tensorrt: checked.tensorrt,
            ensemble: checked.ensemble.map(Arc::new),
            warmups,
            rows: None,
            warnings,
            inputs: Vec::new(),
            outputs: Vec::new(),
            source,
            labels,
            completion: self.completion.clone(),
        };
        if definition.format == ModelFormat::Ensemble {
            definition.complete_ensemble();
        }
        Ok(definition)
    }

    /// The models that the steps of an ensemble run. The list is empty if the model is no ensemble, or
    /// its configuration cannot be read. `config` is as for
    /// [`ModelRepository::definition`].
    pub fn models_of_steps(&self, name: &str, config: Option<&str>) -> BTreeSet<String> {
        let source = match config {
            Some(text) => ConfigSource::from_request(text).ok(),
            None => self
                .place(name)
                .ok()
                .and_then(|place| self.config_source(&place.dir, &place.shown, place.file.as_deref()).ok()),
        };
        let steps = source.and_then(|source| match source.config.scheduling_choice {
            Some(SchedulingChoice::EnsembleScheduling(scheduling)) => Some(scheduling.step),
            _ => None,
        });
        steps.into_iter().flatten().map(|step| step.model_name).collect()
    }

    /// Reads the configuration in a model's folder. That of a plain file is the folder's, if the
    /// folder has no other model.
    fn config_source(&self, dir: &Path, shown: &Path, file: Option<&Path>) -> Result<ConfigSource, RepositoryError> {
        let absent = || ConfigSource::absent(shown.display().to_string());
        if file.is_some_and(|file| !owns_folder(dir, file)) {
            return Ok(absent());
        }
        let config_file = self.config_file(dir);
        let (folder, label) =
            (if file.is_some() { shown.parent().unwrap_or(shown) } else { shown }, dir.join(&config_file));
        let shown_config = folder.join(&config_file).display().to_string();
        if is_there(&label) {
            self.boundary.check(&label).map_err(|reason| ConfigError::from(Finding::of(&shown_config, reason)))?;
        }
        Ok(ConfigSource::read(&label, shown_config)?.unwrap_or_else(absent))
    }

    /// Sizes and times of the model's files, to detect changes. Empty if there is no such model.
    /// Paths are relative to the model's folder: the same files elsewhere are no change.
    pub fn fingerprint(&self, name: &str) -> Fingerprint {
        let mut files = BTreeMap::new();
        let place = self.place(name);
        if let Ok(Place { dir, file: Some(file), .. }) = &place {
            // The weights beside `a.onnx` are `a.onnx.data`, `a.onnx_data` or `a.data`.
            let beginning = file.file_stem().unwrap_or_default().to_string_lossy();
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                let name = entry.file_name();
                if let Ok(metadata) = fs::metadata(entry.path())
                    && name.to_string_lossy().starts_with(&*beginning)
                    && metadata.is_file()
                {
                    files.insert(name.into(), (metadata.len(), metadata.modified().ok()));
                }
            }
        } else if let Ok(Place { dir, .. }) = place {
            let mut pending = vec![(dir.clone(), 0)];
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
                    let inside = path.strip_prefix(&dir).unwrap_or(&path).to_owned();
                    files.insert(inside, (size, metadata.modified().ok()));
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

    /// The files of a model.
    fn place(&self, name: &str) -> Result<Place, RepositoryError> {
        Self::check_name(name)?;
        let layout = self.layout();
        let only = self.only_name(&layout);
        let not_found =
            |near: &str| RepositoryError::NotFound(name.to_owned(), self.path.clone(), did_you_mean(name, [near]));
        match (layout, only) {
            (Layout::File(file), Some(only)) if only == name => {
                let (dir, shown) = (self.root().to_owned(), self.path.clone());
                Ok(Place { file: Some(dir.join(file)), dir, shown, is_named_freely: true })
            }
            (Layout::One(dir), Some(only)) if only == name => {
                let shown =
                    dir.strip_prefix(self.root()).map_or_else(|_| self.path.clone(), |below| self.path.join(below));
                let shown = if dir == self.root() { self.path.clone() } else { shown };
                Ok(Place { dir, shown, file: None, is_named_freely: true })
            }
            (_, Some(only)) => Err(not_found(&only)),
            (_, None) => match &self.name {
                Some(given) if given == name => match &self.scan_folder()?.names[..] {
                    [inner] => self.place_in_folder(inner).map(|place| Place { is_named_freely: true, ..place }),
                    _ => Err(not_found(given)),
                },
                Some(given) => Err(not_found(given)),
                None => self.place_in_folder(name),
            },
        }
    }

    /// The files of a model in a folder of models.
    fn place_in_folder(&self, name: &str) -> Result<Place, RepositoryError> {
        let missing = match self.model_dir(name) {
            Ok(dir) if looks_like_model(&dir) || has_misplaced_model(&dir) => {
                return Ok(Place { dir, shown: self.path.join(name), file: None, is_named_freely: false });
            }
            found => found,
        };
        if let Some(file) = onnx_files(self.root()).into_iter().find(|file| derived_name(stem(file)) == name) {
            let dir = self.root().to_owned();
            return Ok(Place { file: Some(dir.join(&file)), dir, shown: self.path.join(file), is_named_freely: false });
        }
        Ok(Place { dir: missing?, shown: self.path.join(name), file: None, is_named_freely: false })
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

/// The boundary around a path, and the layout of a path that is a file. The user gave the path, so
/// a file may be a link to anywhere.
fn boundary_of(path: &Path) -> Result<(Boundary, Option<Layout>), RepositoryError> {
    let unreadable = |e: io::Error| RepositoryError::Unreadable(path.to_owned(), reason(path, &e));
    let metadata = fs::metadata(path).map_err(unreadable)?;
    let name = path.file_name().filter(|name| is_onnx_name(&name.to_string_lossy()) && metadata.is_file());
    let Some(name) = name else {
        if metadata.is_file() {
            let unknown = "is a file that does not end in .onnx; give a model file or a folder of models";
            let other = OtherModel::of(&path.to_string_lossy());
            let reason = other.map_or_else(|| unknown.to_owned(), OtherModel::to_string);
            return Err(RepositoryError::Unreadable(path.to_owned(), reason));
        }
        let boundary = Boundary::of(path).map_err(unreadable)?;
        fs::read_dir(boundary.root()).map_err(unreadable)?;
        return Ok((boundary, None));
    };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((Boundary::of(parent).map_err(unreadable)?, Some(Layout::File(name.to_owned()))))
}

/// The warning about a name that clients could not write.
fn renamed(path: &str, name: &str) -> Finding {
    let reason = format!(
        "is served as '{name}', because clients write the name into addresses; 'NAME={path}' gives another name"
    );
    Finding::of(path.to_owned(), reason)
}

/// Whether the configuration and labels in a folder belong to a plain model file there.
fn owns_folder(dir: &Path, file: &Path) -> bool {
    file.file_name().is_some_and(|name| name == "model.onnx") || onnx_files(dir).len() <= 1
}
