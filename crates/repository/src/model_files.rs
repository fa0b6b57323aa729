//! The files of a model's folder that lie beside its configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use downbeat_core::file_content;
use downbeat_protocol::inference::model_version_policy::PolicyChoice;
use downbeat_protocol::inference::{ModelConfig, model_warmup};

use crate::boundary::{Boundary, is_there, reason};
use crate::config::check::Report;
use crate::config::parameters::newest_versions;
use crate::config::warmup::{Warmup, WarmupData, WarmupInput};
use crate::definition::{ModelFormat, datatype};
use crate::other_model::OtherModel;
use crate::version_folder::{CONFIG_FILE, VersionFolders, contents, few, is_onnx_name, onnx_files};

/// Largest file of class names, bytes.
const MAX_LABEL_BYTES: u64 = 16 << 20;

/// The files beside a configuration.
pub(crate) struct ModelFiles<'a> {
    pub(crate) boundary: &'a Boundary,
    pub(crate) dir: &'a Path,
    /// The folder as messages name it.
    pub(crate) shown: PathBuf,
    /// The only file of a model whose folder may have files of other models.
    pub(crate) file: Option<&'a Path>,
    /// Whether the user gave the path of `file`, which may then be a link to anywhere.
    pub(crate) is_given: bool,
}

impl ModelFiles<'_> {
    /// The path of a file that the configuration names. The file must be inside the model's folder.
    fn named(&self, name: &str) -> Result<PathBuf, String> {
        let path = Path::new(name);
        if name.is_empty() || !path.components().all(|c| matches!(c, Component::Normal(_))) {
            return Err(format!("'{name}' does not name a file inside the model's folder"));
        }
        let (path, shown) = (self.dir.join(path), self.shown.join(name));
        let shown = shown.display();
        self.boundary.check(&path).map_err(|reason| format!("{shown}: {reason}"))?;
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() => Ok(path),
            Ok(_) => Err(format!("{shown} is not a file")),
            Err(e) => Err(format!("{shown}: {}", reason(&path, &e))),
        }
    }

    /// The names of classes, by output.
    pub(crate) fn labels(&self, config: &ModelConfig, report: &mut Report<'_>) -> BTreeMap<String, Arc<[String]>> {
        let mut labels = BTreeMap::new();
        for (i, output) in config.output.iter().enumerate().filter(|(_, o)| !o.label_filename.is_empty()) {
            let shown = self.shown.join(&output.label_filename);
            let read = |path: PathBuf| read_labels(&path).map_err(|reason| format!("{} {reason}", shown.display()));
            match self.named(&output.label_filename).and_then(read) {
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
                    // As in Triton, only the field's name counts.
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
            if warmup.count > Warmup::MOST_RUNS {
                let (count, most) = (warmup.count, Warmup::MOST_RUNS);
                report.warn(
                    &format!("{path}.count"),
                    format!("is {count}; the server sends the request {most} times, the most allowed"),
                );
            }
            warmups.push(Warmup {
                name: if warmup.name.is_empty() { format!("{}", i + 1) } else { warmup.name.clone() },
                batch_size: warmup.batch_size.max(1),
                count: warmup.count.clamp(1, Warmup::MOST_RUNS),
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
        if format == Some(ModelFormat::Ensemble) {
            return (ModelFormat::Ensemble, self.ensemble_versions(config, report));
        }
        if let Some(file) = self.file {
            return (ModelFormat::Onnx, self.only_version(file, self.is_given, config, report));
        }
        let folders = VersionFolders::read(self.dir);
        let unknown = format.unwrap_or(ModelFormat::Onnx);
        if folders.present.is_empty() {
            match self.plain_file(&config.default_model_filename, format, report) {
                Some((format, file)) => {
                    for near in folders.near_by_name {
                        report.warn("", near);
                    }
                    return (format, self.only_version(&file, false, config, report));
                }
                None if !report.errors.is_empty() => return (unknown, Vec::new()),
                None => {}
            }
            let named = Some(config.default_model_filename.as_str()).filter(|name| !name.is_empty());
            let file = named.or(unknown.file_names().first().copied()).unwrap_or_default();
            let expected = || format!("expected {}", self.shown.join("1").join(file).display());
            let remedy = folders.remedy(self.dir, &self.shown.display().to_string(), &config.default_model_filename);
            report.error("", format!("no version folder; {}", remedy.unwrap_or_else(expected)));
            return (unknown, Vec::new());
        }
        for near in folders.near_by_name {
            report.warn("", near);
        }
        let mut versions = Vec::new();
        let mut formats = BTreeSet::new();
        for version in select_versions(folders.present, config, report) {
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
            report.error("backend", "the versions have different kinds of model files; name one kind in this field");
        }
        let format = versions.first().map_or(unknown, |(_, format, _)| *format);
        (format, versions.into_iter().map(|(version, _, path)| (version, path)).collect())
    }

    /// The versions of an ensemble: folders, which may be empty. Version control keeps no empty
    /// folder, so an ensemble without any is version 1.
    fn ensemble_versions(&self, config: &ModelConfig, report: &mut Report<'_>) -> Vec<(u64, PathBuf)> {
        let mut present = VersionFolders::read(self.dir).present;
        if present.is_empty() {
            present.insert(1);
        }
        let selected = select_versions(present, config, report).into_iter();
        selected.map(|version| (version, self.dir.join(version.to_string()))).collect()
    }

    /// A model file without a version folder is version 1.
    fn only_version(
        &self,
        file: &Path,
        is_given: bool,
        config: &ModelConfig,
        report: &mut Report<'_>,
    ) -> Vec<(u64, PathBuf)> {
        if !is_given && let Err(reason) = self.boundary.check(file) {
            report.error("", format!("{}: {reason}", file.display()));
            return Vec::new();
        }
        select_versions(BTreeSet::from([1]), config, report).into_iter().map(|one| (one, file.to_owned())).collect()
    }

    /// The model file in a model's folder without versions: the one that the configuration names,
    /// one of a standard name, or the only ONNX file. Warns about ONNX files that are left out.
    fn plain_file(
        &self,
        name: &str,
        format: Option<ModelFormat>,
        report: &mut Report<'_>,
    ) -> Option<(ModelFormat, PathBuf)> {
        let others = onnx_files(self.dir);
        let standard = || {
            let wanted = wanted_formats(format, true);
            let mut names = wanted.flat_map(|of| of.file_names().iter().map(move |name| (of, (*name).to_owned())));
            names.find(|(_, name)| is_there(&self.dir.join(name)))
        };
        let found = match (name, &others[..]) {
            ("", _) if let Some(found) = standard() => found,
            ("", [only]) => (ModelFormat::Onnx, only.clone()),
            ("", []) => return None,
            ("", several) => {
                let folder = self.shown.display();
                report.error(
                    "",
                    format!(
                        "has {} ONNX files and none is model.onnx: {}; rename one to model.onnx, write \
                         default_model_filename in {CONFIG_FILE}, or serve each as a model: downbeat serve {folder}",
                        several.len(),
                        few(several)
                    ),
                );
                return None;
            }
            (name, _) => {
                let is_file = !name.contains('/') && self.dir.join(name).is_file();
                return is_file.then(|| (format_of_name(name), self.dir.join(name)));
            }
        };
        let left_out: Vec<String> = others.into_iter().filter(|other| *other != found.1).collect();
        if !left_out.is_empty() {
            report.warn("", format!("{} is served; other ONNX files there are not: {}", found.1, few(&left_out)));
        }
        Some((found.0, self.dir.join(found.1)))
    }

    /// The model file of a version. `name` is from the configuration, or empty.
    fn model_file(
        &self,
        version: u64,
        name: &str,
        format: Option<ModelFormat>,
    ) -> Result<(ModelFormat, PathBuf), String> {
        let folder = self.dir.join(version.to_string());
        let shown = self.shown.join(version.to_string());
        let has_onnx = !onnx_files(&folder).is_empty();
        let candidates: Vec<(ModelFormat, &str)> = if name.is_empty() {
            wanted_formats(format, has_onnx).flat_map(|f| f.file_names().iter().map(move |n| (f, *n))).collect()
        } else {
            if Path::new(name).components().count() != 1
                || !Path::new(name).components().all(|c| matches!(c, Component::Normal(_)))
            {
                return Err(format!("'{name}' must be the name of a file in the version's folder"));
            }
            vec![(format.unwrap_or(format_of_name(name)), name)]
        };
        for (format, name) in &candidates {
            let shown = shown.join(name);
            let refused = |reason: String| format!("{}: {reason}", shown.display());
            // A folder of this name holds the graph beside its external weights.
            for path in [folder.join(name), folder.join(name).join(name)] {
                match fs::metadata(&path) {
                    Ok(metadata) if metadata.is_file() => {
                        self.boundary.check(&path).map_err(refused)?;
                        return Ok((*format, path));
                    }
                    // A symbolic link that leads nowhere.
                    Err(e) if is_there(&path) => return Err(refused(reason(&path, &e))),
                    _ => {}
                }
            }
        }
        if let ([only], "") = (&onnx_files(&folder)[..], name)
            && format.is_none_or(|format| format == ModelFormat::Onnx)
        {
            let path = folder.join(only);
            self.boundary.check(&path).map_err(|reason| format!("{}: {reason}", shown.join(only).display()))?;
            return Ok((ModelFormat::Onnx, path));
        }
        let wanted = candidates.first().map_or("model.onnx", |(_, name)| *name);
        Err(missing_model(&folder, &shown, wanted, name.is_empty()))
    }
}

/// The formats that a model's file may have. Code is a model beside ONNX files only if the
/// configuration says so.
fn wanted_formats(format: Option<ModelFormat>, has_onnx: bool) -> impl Iterator<Item = ModelFormat> {
    let may_be = move |of: &ModelFormat| match format {
        Some(format) => format == *of,
        None => !has_onnx || *of != ModelFormat::Python,
    };
    ModelFormat::WITH_FILES.into_iter().filter(may_be)
}

/// The format of a file that a configuration names.
fn format_of_name(name: &str) -> ModelFormat {
    match name {
        name if name.contains(".emulated.") => ModelFormat::Emulated,
        name if Path::new(name).extension().is_some_and(|extension| extension == "py") => ModelFormat::Python,
        _ => ModelFormat::Onnx,
    }
}

/// The versions that the configuration's policy selects.
fn select_versions(present: BTreeSet<u64>, config: &ModelConfig, report: &mut Report<'_>) -> BTreeSet<u64> {
    match config.version_policy.as_ref().and_then(|p| p.policy_choice.as_ref()) {
        Some(PolicyChoice::All(_)) => present,
        Some(PolicyChoice::Specific(specific)) => {
            let wanted: BTreeSet<u64> = specific.versions.iter().filter_map(|v| u64::try_from(*v).ok()).collect();
            let all: Vec<String> = present.iter().map(u64::to_string).collect();
            for version in wanted.difference(&present) {
                let message = format!("the model has no version {version}; its versions are: {}", all.join(", "));
                report.warn("version_policy.specific.versions", message);
            }
            let selected: BTreeSet<u64> = wanted.intersection(&present).copied().collect();
            if selected.is_empty() {
                let message = format!("selects none of the versions {}", all.join(", "));
                report.error("version_policy.specific.versions", message);
            }
            selected
        }
        Some(PolicyChoice::Latest(latest)) => present.into_iter().rev().take(latest.num_versions as usize).collect(),
        None => present.into_iter().rev().take(newest_versions(config) as usize).collect(),
    }
}

/// The error of a version's folder without the model file `wanted`, with the remedy. With
/// `is_default`, no configuration gives that name.
fn missing_model(folder: &Path, shown: &Path, wanted: &str, is_default: bool) -> String {
    let is_folder = folder.join(wanted).is_dir();
    let looked_into = if is_folder { folder.join(wanted) } else { folder.to_owned() };
    let (files, found) = match contents(&looked_into) {
        Ok(contents) => contents,
        Err(e) => return format!("{} cannot be read: {}", shown.display(), reason(&looked_into, &e)),
    };
    let shown = shown.join(wanted);
    let what = if is_folder {
        format!("is a folder without a file {wanted} in it ({found})")
    } else {
        format!("does not exist ({found})")
    };
    let models: Vec<&String> = files.iter().filter(|name| is_onnx_name(name) && is_onnx_name(wanted)).collect();
    let remedy = match models[..] {
        [only] if is_default && !is_folder => {
            format!("; rename {only} to {wanted}, or write default_model_filename: \"{only}\" in {CONFIG_FILE}")
        }
        [only] => format!("; rename {only} to {wanted}"),
        [] if is_onnx_name(wanted) => {
            let other = files.iter().find_map(|name| Some((name, OtherModel::of(name)?)));
            other.map(|(name, other)| format!("; {name} {other}")).unwrap_or_default()
        }
        _ => String::new(),
    };
    format!("{} {what}{remedy}", shown.display())
}

fn read_labels(path: &Path) -> Result<Arc<[String]>, String> {
    let cannot = |e: std::io::Error| format!("cannot be read: {}", reason(path, &e));
    let size = fs::metadata(path).map_err(cannot)?.len();
    if size > MAX_LABEL_BYTES {
        return Err(format!("has {size} bytes; at most {MAX_LABEL_BYTES} are read"));
    }
    let bytes = fs::read(path).map_err(cannot)?;
    let text = file_content::text(&bytes).map_err(|e| e.to_string())?;
    Ok(text.lines().map(str::to_owned).collect())
}
