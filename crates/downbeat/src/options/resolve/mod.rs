//! Turns flags and files into the server's options.

use std::path::{Path, PathBuf};

use anyhow::bail;
use downbeat_core::cluster::Autoscale;
use downbeat_repository::{ModelRepository, ModelSource, Origin, nearest};
use downbeat_service::options::cluster_options::{HAS_UCX, NO_UCX, UcxUse};
use downbeat_service::options::{
    DeviceOptions, DispatchPolicy, EngineChoice, ExecutorProgram, ModelControl, PolicyName, ServerOptions, SharesBy,
};

use crate::commands::plan_report;
use crate::options::draft::Draft;
use crate::options::keys::KEYS;
use crate::options::options_file;
use crate::options::remote_models;
use crate::options::serve_flags::ServeFlags;

/// Name of the options file.
const FILE_NAME: &str = "downbeat.toml";
/// The default repository of commands that serve nothing.
const EXAMPLES: &str = "examples/models";

/// Options, and the file that some of them come from.
#[derive(Debug)]
pub struct Resolved {
    /// The server's options.
    pub options: ServerOptions,
    /// The options file, if there is one.
    pub file: Option<PathBuf>,
}

/// The kind of process that the options are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Process {
    /// All roles in one process.
    Server,
    /// Serves the clients of a cluster.
    Frontend,
    /// Decides for a cluster.
    Scheduler,
    /// Runs the models of a cluster on its devices.
    Backend,
}

/// Resolves the options of a process, started in `folder`.
///
/// # Errors
/// If a file cannot be read or is wrong, or options contradict each other.
pub fn resolve(flags: &ServeFlags, process: Process, folder: &Path) -> anyhow::Result<Resolved> {
    let mut given = Draft::default();
    flags.keys.apply(&mut given)?;
    let given = given.options.repositories;
    let file = match &flags.config {
        Some(file) => Some(folder.join(file)),
        None => std::iter::once(folder.to_owned())
            .chain(given.iter().filter_map(ModelSource::path).map(|path| folder.join(path)))
            .map(|folder| folder.join(FILE_NAME))
            .find(|file| file.is_file()),
    };
    let mut draft = Draft::default();
    if let Some(file) = &file {
        options_file::apply(file, &mut draft)?;
        let repositories = if given.is_empty() { &draft.options.repositories } else { &given };
        let paths = repositories.iter().filter_map(ModelSource::path);
        let lies_there = paths.map(|path| folder.join(path)).any(|path| lies_in(file, &path));
        if flags.config.is_none() && lies_there {
            options_file::check_of_models(file)?;
        }
    }
    flags.keys.apply(&mut draft)?;
    let mut options = finish(draft, process)?;
    options.executor = Some(ExecutorProgram::default());
    with_supplies(&mut options)?;
    options.plan = flags.plan.as_ref().map(|file| plan_report::read_plan(&folder.join(file))).transpose()?;
    options.notices.extend(flags.others.notice(flags.keys.values("backend-config"), flags.strict_flags)?);
    if process == Process::Server && !flags.keys.values("schedulers").is_empty() {
        options.notices.push("--schedulers has no effect: downbeat serve has all roles in one process; use downbeat frontend and downbeat backend".to_owned());
    }
    options.notices.extend(without_effect(&options));
    let variables = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    options.notices.extend(variables.filter_map(|name| misspelled(&name)));
    let is_polled = matches!(options.model_control, ModelControl::Poll { .. });
    if !is_polled && !flags.keys.values("repository-poll-secs").is_empty() {
        options.notices.push("--repository-poll-secs has no effect without --model-control-mode poll".to_owned());
    }
    Ok(Resolved { options, file })
}

fn lies_in(file: &Path, folder: &Path) -> bool {
    matches!((file.canonicalize(), folder.canonicalize()), (Ok(file), Ok(folder)) if file.starts_with(&folder))
}

/// The repository of `model` for a command that serves nothing, started in `folder`. It is the
/// given one, or the first with the model among the repositories of the options file in `folder`.
///
/// # Errors
/// If the file or the repository cannot be read, or the file is wrong.
pub fn open_repository(model: &str, given: Option<&Path>, folder: &Path) -> anyhow::Result<ModelRepository> {
    let (file, mut draft) = (folder.join(FILE_NAME), Draft::default());
    if file.is_file() {
        options_file::apply(&file, &mut draft)?;
    }
    let paths: Vec<PathBuf> =
        draft.options.repositories.iter().filter_map(ModelSource::path).map(Path::to_owned).collect();
    let path = repository_of(model, given, &paths);
    Ok(ModelRepository::open(path)?.with_follow_symlinks(draft.options.follow_symlinks))
}

fn repository_of(model: &str, given: Option<&Path>, repositories: &[PathBuf]) -> PathBuf {
    let having = || repositories.iter().find(|repository| repository.join(model).is_dir());
    let listed = || having().or(repositories.first()).cloned();
    given.map(Path::to_owned).or_else(listed).unwrap_or_else(|| EXAMPLES.into())
}

/// The options of a server with this text as its `downbeat.toml`, and nothing else; paths stay as
/// they are written.
///
/// # Errors
/// If the text is wrong, names no repository or contradicts itself.
pub fn options_of_text(text: &str) -> anyhow::Result<ServerOptions> {
    let mut draft = Draft::default();
    options_file::apply_text(text, Path::new(""), &mut draft).map_err(anyhow::Error::msg)?;
    finish(draft, Process::Server)
}

/// Gives each address of models its supply.
///
/// # Errors
/// If an address is wrong, or this build lacks the feature.
fn with_supplies(options: &mut ServerOptions) -> anyhow::Result<()> {
    let remote = options.remote.clone();
    for source in &mut options.repositories {
        if let Origin::Address(address) = &source.origin {
            source.origin = Origin::Supply(remote_models::supply(address, &remote)?);
        }
    }
    Ok(())
}

fn finish(draft: Draft, process: Process) -> anyhow::Result<ServerOptions> {
    let options = draft.finish()?;
    check(&options, process)?;
    Ok(options)
}

/// A notice for an environment variable that looks like an option but sets none. Kubernetes sets
/// variables `DOWNBEAT_SERVICE_*` and `DOWNBEAT_PORT*` for a service called downbeat.
fn misspelled(variable: &str) -> Option<String> {
    let name = variable.strip_prefix("DOWNBEAT_")?;
    if name.starts_with("SERVICE_") || name.starts_with("PORT") {
        return None;
    }
    let flag = name.to_lowercase().replace('_', "-");
    let flags = || KEYS.iter().filter(|key| !key.flag.is_empty());
    if flags().any(|key| key.flag == flag && key.variable().is_empty() && !key.is_hidden) {
        return Some(format!("{variable} in the environment has no effect: use the flag --{flag}"));
    }
    let known = || flags().map(|key| key.flag).chain(["config", "plan"]);
    if known().any(|known| known == flag) {
        return None;
    }
    let meant = nearest(&flag, known().filter(|known| known.len() > 2))?;
    let meant = meant.to_uppercase().replace('-', "_");
    Some(format!("{variable} in the environment sets no option; did you mean 'DOWNBEAT_{meant}'?"))
}

/// A notice for each option that has no effect without another option.
fn without_effect(options: &ServerOptions) -> Vec<String> {
    let (device, defaults) = (&options.device, DeviceOptions::default());
    let are_shared = device.shares == SharesBy::Auto;
    let mut notices = Vec::new();
    let is_alone = |key: &str, is_given: bool| {
        (is_given && !are_shared).then(|| format!("[device] {key} has no effect without shares = \"auto\""))
    };
    notices.extend(is_alone("share_batches", device.share_batches != defaults.share_batches));
    notices.extend(is_alone("share_period_s", device.share_period != defaults.share_period));
    notices.extend(is_alone("share_hold_down_s", device.share_hold_down != defaults.share_hold_down));
    let policies = device.groups.iter().filter_map(|group| group.policy).chain([device.policy]);
    if are_shared && policies.into_iter().all(|policy| policy == PolicyName::EXCLUSIVE) {
        notices.push(
            "[device] shares = \"auto\" has no effect on models with the policy exclusive, and no option sets another \
             policy; set [device] policy, such as \"windowed\", or the policy of a group. A model's config.pbtxt may \
             also name a policy"
                .to_owned(),
        );
    }
    notices
}

fn check(options: &ServerOptions, process: Process) -> anyhow::Result<()> {
    let has_schedulers = !(options.cluster.schedulers.is_empty() && options.cluster.etcd.is_empty());
    if !has_schedulers && matches!(process, Process::Frontend | Process::Backend) {
        bail!(
            "no scheduler is named: give --schedulers HOST:PORT,... or --etcd URL, or `schedulers` or `etcd` in [cluster] of {FILE_NAME}"
        );
    }
    if options.repositories.is_empty() && matches!(process, Process::Server | Process::Backend) {
        bail!(
            "no models are given: downbeat serve SOURCE (such as model.onnx, examples/models or hf://ORGANISATION/NAME), \
             or `repository` in {FILE_NAME}"
        );
    }
    if !HAS_UCX && options.cluster.ucx != UcxUse::Off && process != Process::Scheduler {
        bail!("{NO_UCX}");
    }
    let ports = [
        ("HTTP", options.http_port),
        ("gRPC", options.grpc_port),
        ("metrics", options.metrics_port),
        ("probes", options.health_port),
    ];
    for (i, (name, port)) in ports.iter().enumerate() {
        if let Some((other, _)) = ports.iter().take(i).find(|(_, p)| p == port && p.is_some_and(|p| p != 0)) {
            bail!("{other} and {name} both have port {}; give one of them another", port.unwrap_or_default());
        }
    }
    if options.http_port.is_none() && options.grpc_port.is_none() && process != Process::Scheduler {
        bail!("the HTTP port and the gRPC port are both off, so no client could reach the server; turn one of them on");
    }
    let on_gpus = matches!(options.engine, EngineChoice::Auto | EngineChoice::Cuda | EngineChoice::Tensorrt);
    if !options.cuda.devices.is_empty() && !on_gpus {
        bail!(
            "--gpus names GPUs, but the engine '{}' runs on none; choose --engine cuda, or leave --gpus out",
            options.engine
        );
    }
    options.check_partitions()?;
    let routes = options.device.policy.makes_batches() || !options.device.groups.is_empty();
    if options.dispatch == DispatchPolicy::Route && !routes {
        bail!(
            "no part of the server would make batches: the scheduler 'route' leaves them to the device policy, and \
             the device policy '{}' leaves them to the scheduler; choose another device policy (--device-policy) or \
             another scheduler (--scheduler)",
            options.device.policy
        );
    }
    for name in options.device.named() {
        let dispatch = options.models.get(name).and_then(|model| model.dispatch.clone());
        let policy = options.device_policy(name, None);
        options.check_dispatch(name, policy, dispatch).map_err(|error| anyhow::anyhow!("model '{name}': {error}"))?;
    }
    if let Some(Err(error)) = options.autoscale.clone().map(Autoscale::new) {
        bail!("[autoscale]: {error}");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
