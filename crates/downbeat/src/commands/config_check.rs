//! `downbeat config check`: reports errors and ignored settings in a model repository.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use clap::{Args, Subcommand};
use downbeat_core::Duration;
use downbeat_engine::{Declared, Emulated, Engine, LoadOptions};
use downbeat_host::run::row_judgement::RowJudgement;
use downbeat_models::registry::Registry;
use downbeat_repair::RepairedFile;
use downbeat_report::say;
use downbeat_repository::{EnsembleStep, ModelDefinition, ModelFormat, ModelRepositories, StepModel};
use downbeat_server::escaped;
use downbeat_service::options::{ModelControl, ServerOptions};
use downbeat_service::service::LoadOverrides;

use crate::options::resolve::{Process, resolve};
use crate::options::serve_flags::ServeFlags;
use crate::run_output::waiting;

/// Check configurations without serving them.
#[derive(Subcommand, Debug)]
pub enum ConfigCommand {
    /// Check every model of a repository, and load it as `downbeat serve` with the same flags
    /// would; fails if a model could not be served
    Check(Box<CheckArgs>),
}

/// Arguments of `downbeat config check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Fail on warnings, too
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    flags: ServeFlags,
}

/// The time for the check of a model's rows.
const CHECK_BUDGET: Duration = Duration::from_millis(3_600_000);

/// Runs the command. Returns `false` if it found an error, or with `--strict` a warning.
///
/// # Errors
/// If the repository or the options cannot be read or are wrong, or the engine does not exist.
pub fn run(command: &ConfigCommand) -> anyhow::Result<bool> {
    let ConfigCommand::Check(args) = command;
    let options = resolve(&args.flags, Process::Server, Path::new(""))?.options;
    let repositories = ModelRepositories::open(&options.repositories)?;
    let scan = repositories.map(|repository| repository.with_follow_symlinks(options.follow_symlinks)).scan()?;
    let notices = options.notices.clone();
    let unknown = options.unknown_models(&scan.names);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let registry = Registry::open(Arc::new(without_service(options)))?;
    let (mut errors, mut warnings) = (0, 0);
    let mut warn = |warning: &dyn std::fmt::Display| {
        warnings += 1;
        tell(format_args!("warning: {warning}"))
    };
    notices.iter().try_for_each(|notice| warn(notice))?;
    scan.warnings.iter().try_for_each(|w| warn(w))?;
    for unknown in &unknown {
        errors += 1;
        tell(format_args!("error: {}", unknown.message))?;
    }
    let mut known = BTreeMap::new();
    // The models of an ensemble's steps come before the ensemble.
    for name in &registry.in_load_order(scan.names.clone()).concat() {
        let mut definition = match registry.definition(name) {
            Ok(definition) => definition,
            Err(error) => {
                errors += 1;
                tell(format_args!("error: {error}"))?;
                continue;
            }
        };
        let is_ensemble = definition.ensemble.is_some();
        let checked = against_others(&registry, &mut definition, &known, &scan.names);
        definition.warnings.iter().try_for_each(|w| warn(w))?;
        tell_devices(name, &registry)?;
        // An ensemble has nothing to load but the models of its steps, which were loaded before.
        let load = || if is_ensemble { Ok(Vec::new()) } else { runtime.block_on(load(&registry, name)) };
        match checked.and_then(|()| waiting(false, &format!("loading {}", name.escape_debug()), load)) {
            Ok(judgements) => {
                known.insert(name.clone(), definition);
                for (version, RowJudgement { verdict, .. }) in &judgements {
                    tell(format_args!("{name} {version}: rows of a batch: {verdict}"))?;
                }
                let complaints = judgements.iter().filter_map(|(_, judgement)| judgement.complaint());
                complaints.into_iter().try_for_each(|complaint| warn(&format_args!("{name}: {complaint}")))?;
            }
            Err(error) => {
                errors += 1;
                tell(format_args!("error: {error}"))?;
            }
        }
    }
    let models = scan.names.len();
    tell(format_args!(
        "{models} {}, {errors} in error, {warnings} {}",
        plural(models, "model"),
        plural(warnings, "warning")
    ))?;
    Ok(errors == 0 && (warnings == 0 || !args.strict))
}

/// Prints the devices that the options keep a model to.
fn tell_devices(name: &str, registry: &Registry) -> std::io::Result<()> {
    let Some(devices) = registry.chosen_devices(name) else { return Ok(()) };
    let devices: Vec<String> = devices.iter().map(usize::to_string).collect();
    tell(format_args!("{name}: on device {}", devices.join(", ")))
}

/// Checks a definition against its model files, or an ensemble against the models of its steps.
fn against_others(
    registry: &Registry,
    definition: &mut ModelDefinition,
    known: &BTreeMap<String, ModelDefinition>,
    names: &[String],
) -> anyhow::Result<()> {
    if definition.ensemble.is_none() {
        return against_files(definition);
    }
    if let Some(circle) = registry.circle_of_steps(&definition.name) {
        anyhow::bail!("{}: the ensemble is a step of itself: {circle}", definition.name);
    }
    against_models(definition, known, names)
}

/// Prints a line, escaped: the names of models come from folders, and errors from files.
fn tell(line: std::fmt::Arguments<'_>) -> std::io::Result<()> {
    say(escaped(line))
}

/// The options of a server that loads models on request and measures none. It writes nothing but
/// verdicts on rows.
fn without_service(mut options: ServerOptions) -> ServerOptions {
    options.model_control = ModelControl::Explicit { load: Vec::new() };
    options.profiling.enabled = false;
    // No request waits for the check of rows.
    options.profiling.budget = CHECK_BUDGET;
    options.autoscale = None;
    options.decision_log = None;
    options
}

/// Checks a definition against the signature of each of its model files.
fn against_files(definition: &mut ModelDefinition) -> anyhow::Result<()> {
    for (_, file) in definition.versions.clone() {
        let signature = match definition.format {
            ModelFormat::Onnx => {
                let repaired = RepairedFile::of(&file)?;
                for (output, labels) in repaired.iter().flat_map(|repaired| &repaired.labels) {
                    definition.add_labels(output, labels);
                }
                let file = repaired.as_ref().map_or(file, RepairedFile::path);
                let mut declared = Declared::default();
                for (name, shape, is_optional) in definition.declared_inputs() {
                    declared.shapes.extend(shape.map(|shape| (name.to_owned(), shape)));
                    declared.optional.extend(is_optional.then(|| name.to_owned()));
                }
                declared.shapes.extend(definition.declared_outputs().map(|(name, shape)| (name.to_owned(), shape)));
                declared.inspect(&file)?
            }
            ModelFormat::Ensemble => continue,
            // The load tells.
            ModelFormat::Python if completes_itself(&file) => continue,
            ModelFormat::Python => definition.declared_signature()?,
            ModelFormat::Emulated => Emulated::new().load(&LoadOptions::new(file, 1))?.signature().clone(),
        };
        definition.complete(&signature)?;
    }
    Ok(())
}

/// Checks an ensemble against the models of its steps. `known` has the models without errors, and
/// `names` all models.
fn against_models(
    definition: &ModelDefinition,
    known: &BTreeMap<String, ModelDefinition>,
    names: &[String],
) -> anyhow::Result<()> {
    let find = |step: &EnsembleStep| {
        let model = known.get(&step.model).ok_or_else(|| match names.contains(&step.model) {
            true => "this model has errors of its own".to_owned(),
            false => {
                let hint = downbeat_repository::did_you_mean(&step.model, names.iter().map(String::as_str));
                format!("the repository has no model of this name{hint}")
            }
        })?;
        model.check_runs_as_step()?;
        if let Some(version) = step.version.filter(|version| model.version_file(*version).is_none()) {
            let served: Vec<String> = model.versions.iter().map(|(version, _)| version.to_string()).collect();
            return Err(format!("version {version} of the model is not served; served: {}", served.join(", ")));
        }
        let max_batch_size = model.batching.max_batch_size;
        Ok(StepModel { inputs: &model.inputs, outputs: &model.outputs, max_batch_size })
    };
    let steps = definition.ensemble.iter().flat_map(|ensemble| &ensemble.steps);
    Ok(definition.check_steps(&steps.map(find).collect::<Vec<_>>())?)
}

/// Whether the code of a Python model adds to its configuration.
fn completes_itself(file: &std::path::Path) -> bool {
    std::fs::read_to_string(file).is_ok_and(|code| code.contains("auto_complete_config"))
}

/// Loads a model, and unloads it again: not all models may fit at once. Returns the verdict on each
/// version's rows.
async fn load(registry: &Registry, name: &str) -> anyhow::Result<Vec<(u64, RowJudgement)>> {
    registry.load_model(name, LoadOverrides::default(), Arc::new(())).await?;
    let judgements = registry.row_judgements(name);
    registry.unload_model(name).await?;
    Ok(judgements)
}

fn plural(count: usize, word: &str) -> String {
    if count == 1 { word.to_owned() } else { format!("{word}s") }
}
