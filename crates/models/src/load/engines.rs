//! The engines of a server, and the devices that they run on.

use std::sync::Arc;

use anyhow::{anyhow, bail, ensure};
use downbeat_core::Duration;
use downbeat_engine::{Engine, TrialLimits};
use downbeat_engine_ort::{GpuInfo, Preference, Search};
use downbeat_python::OnMetering;
use downbeat_repository::ModelFormat;
use downbeat_service::memory;
use downbeat_service::options::{EngineChoice, Isolation, ServerOptions};

use crate::load::other_engines::{Made, OtherEngines, Processes, Python};
use crate::partitions::Partitions;

pub struct Engines {
    /// The engine of ONNX models whose options name none.
    onnx: Made,
    emulated: Made,
    others: OtherEngines,
    python: Python,
    /// The GPUs that ONNX models run on, one a device; none: they run on the CPU.
    pub gpus: Vec<GpuInfo>,
}

impl Engines {
    /// Finds the engines that the options ask for. Logs which one runs ONNX models, and how to get
    /// a faster one. `on_metering` hears of the metrics of Python models.
    ///
    /// # Errors
    /// If the engine asked for is missing.
    pub fn choose(options: &ServerOptions, on_metering: OnMetering) -> anyhow::Result<Self> {
        let preference: Preference = options.engine.name().parse().map_err(anyhow::Error::msg)?;
        let search = Search { threads: most_threads(options), ..Search::from_env() };
        let choice = downbeat_engine_ort::choose(preference, &search, &options.cuda)?;
        let info = choice.engine.info();
        let library = info.library.as_ref().map(|path| path.display().to_string());
        tracing::info!(engine = info.name, version = %info.version, device = %info.device, library, "engine");
        for gpu in &choice.gpus {
            tracing::info!("{gpu}");
        }
        if let Some(hint) = choice.hint {
            tracing::info!("{hint}");
        }
        if let Some(warning) = choice.warning {
            tracing::warn!("{warning}");
        }
        if choice.gpus.is_empty() && !options.cuda.devices.is_empty() {
            let engine = info.name;
            tracing::warn!(
                "--gpus has no effect: models run on the CPU, with the engine {engine}; with --engine cuda the server says why, and does not start"
            );
        }
        // All emulated models share the devices of a single emulated engine.
        let emulated: Arc<dyn Engine> = match options.engine {
            EngineChoice::Emulated => choice.engine.clone(),
            _ => Arc::new(downbeat_engine::Emulated::new()),
        };
        let processes = processes(options);
        Ok(Engines {
            onnx: Made::new(choice.engine, processes.clone()),
            emulated: Made::new(emulated, processes.clone()),
            others: OtherEngines::new(search, processes),
            python: Python::new(on_metering),
            gpus: choice.gpus,
        })
    }

    /// The engine of ONNX models whose options name none.
    pub fn of_most(&self) -> &Arc<dyn Engine> {
        &self.onnx.plain
    }

    /// The engine of a model: the one that its options name, or the one of all models.
    ///
    /// # Errors
    /// If that engine cannot be used here, or if its options ask for a process of its own and the
    /// model is on a GPU.
    pub fn of(
        &self,
        name: &str,
        format: ModelFormat,
        options: &ServerOptions,
        isolation: Isolation,
    ) -> anyhow::Result<&Arc<dyn Engine>> {
        if format == ModelFormat::Python {
            return self.python.get().map_err(anyhow::Error::msg);
        }
        let is_emulated = format == ModelFormat::Emulated;
        if isolation == Isolation::Process && !is_emulated && !self.gpus.is_empty() {
            bail!(
                "isolation is process, which is for models on the CPU, and this one is on a GPU; leave it out, or choose an engine on the \
                 CPU (--engine onnxruntime)"
            );
        }
        let made = match options.engine_of(name) {
            _ if is_emulated => &self.emulated,
            Some(own) if own.name() != self.onnx.plain.info().name => {
                ensure!(
                    self.gpus.is_empty(),
                    "[models.{name}] engine is {own}, which runs on the CPU, and this server's ONNX models are on GPUs; leave it out, or \
                     choose an engine on the CPU for all (--engine {own})"
                );
                let preference = own.name().parse().map_err(anyhow::Error::msg)?;
                self.others.get(preference).map_err(|reason| anyhow!("[models.{name}] engine is {own}: {reason}"))?
            }
            _ => &self.onnx,
        };
        Self::placed(made, isolation).map_err(anyhow::Error::msg)
    }

    /// The engine that may run a model which `engine` cannot run. `None` if the model's options
    /// name its engine, if models run on GPUs, or if no other engine is usable.
    pub fn instead(
        &self,
        name: &str,
        options: &ServerOptions,
        engine: &dyn Engine,
        isolation: Isolation,
    ) -> Option<&Arc<dyn Engine>> {
        if options.engine_of(name).is_some() || !self.gpus.is_empty() {
            return None;
        }
        let other = downbeat_engine_ort::other_than(engine.info().name)?;
        let made = self.others.get(other);
        let made = made.inspect_err(|reason| tracing::debug!(model = %name, %reason, "there is no other engine"));
        Self::placed(made.ok()?, isolation).ok()
    }

    fn placed(made: &Made, isolation: Isolation) -> Result<&Arc<dyn Engine>, String> {
        match isolation {
            Isolation::Process => made.isolated(),
            Isolation::None | Isolation::Auto => Ok(&made.plain),
        }
    }

    /// The engine that tries files in processes before `engine` loads them: the same, or on GPUs
    /// its library on the CPU. `None`: the options ask for no trials, or `engine` itself runs in
    /// processes.
    ///
    /// # Errors
    /// A text, if the operating system has no thread left.
    pub fn trial(&self, engine: &Arc<dyn Engine>) -> Result<Option<&Arc<dyn Engine>>, String> {
        let others = [Preference::Rten, Preference::Onnxruntime].map(|other| self.others.made(other));
        let mut own = std::iter::once(&self.onnx).chain(others.into_iter().flatten());
        let made = own.find(|made| Arc::ptr_eq(&made.plain, engine));
        made.map_or(Ok(None), Made::trial)
    }

    /// The limits of a file's trial.
    pub fn trial_limits(&self) -> Option<TrialLimits> {
        self.onnx.limits()
    }

    /// The number of devices of a server whose options ask for `asked`; 0: they do not say. A
    /// divided CPU is one device with any number of partitions.
    ///
    /// # Errors
    /// If there are GPUs, and fewer or more than asked for; if the CPU is divided, and more than
    /// one device was asked for.
    pub fn devices(&self, asked: usize, partitions: &Partitions) -> anyhow::Result<usize> {
        match self.gpus.len() {
            0 if partitions.are_there() && asked > 1 => bail!(
                "devices is {asked}, and [device] partitions divides the CPU, which is one device; leave devices out"
            ),
            0 => Ok(asked.max(1)),
            gpus if asked == 0 || asked == gpus => Ok(gpus),
            gpus => {
                let used = if gpus == 1 { "1 GPU is used".to_owned() } else { format!("{gpus} GPUs are used") };
                bail!(
                    "devices is {asked}, and {used}, each of them one device. Leave devices out, choose as many GPUs (--gpus), or choose an \
                     engine on the CPU (--engine onnxruntime)"
                )
            }
        }
    }
}

/// The most executors of a server whose options do not set the number.
pub const MOST_EXECUTORS: usize = 64;

/// The number of executors on a CPU of so many cores, unless the options set it. `at_once` has for
/// each model version how many of its batches may run at once. Versions that asked for executors
/// get them, so that none waits for another. The others get enough that a slow model leaves room
/// beside it. Executors share the cores: more of them make a batch slower, and a model that is
/// alone has the machine to itself.
pub fn executors(at_once: impl Iterator<Item = u32>, cores: usize) -> usize {
    let side_by_side = (cores / 4).clamp(2, 8);
    let (mut models, mut asked) = (0, 0);
    for at_once in at_once {
        models += 1;
        asked += at_once.saturating_sub(1) as usize;
    }
    (models.clamp(1, side_by_side) + asked).min(MOST_EXECUTORS)
}

/// The executor processes of models. Only the program itself enables them by `executor`, so that
/// another program with an embedded server does not start itself.
fn processes(options: &ServerOptions) -> Processes {
    let limits = TrialLimits { time: options.trial_timeout.into(), memory: memory::allowed() };
    let is_tried = options.trial_timeout > Duration::ZERO && options.executor.is_some();
    Processes {
        threads: most_threads(options),
        program: options.executor.clone().unwrap_or_default(),
        limits: is_tried.then_some(limits),
    }
}

/// The most threads of one run: the options' number, or this device's share of the cores.
pub fn most_threads(options: &ServerOptions) -> usize {
    match options.threads {
        0 => (std::thread::available_parallelism().map_or(1, usize::from) / options.devices.max(1)).max(1),
        threads => threads,
    }
}

#[cfg(test)]
mod tests {
    use downbeat_service::options::{ModelEngine, ModelOptions};

    use super::*;

    #[test]
    fn executors_are_as_many_as_the_models_ask_for_and_two_side_by_side() {
        let executors = |at_once: &[u32], cores| executors(at_once.iter().copied(), cores);
        assert_eq!((executors(&[], 2), executors(&[1], 64)), (1, 1));
        assert_eq!((executors(&[1, 1], 2), executors(&[1, 1, 1], 2), executors(&[1; 20], 16)), (2, 2, 4));
        assert_eq!((executors(&[4], 2), executors(&[4, 1], 2), executors(&[4, 1, 3], 2)), (4, 5, 7));
        assert_eq!(executors(&[u32::MAX, 100], 2), MOST_EXECUTORS);
    }

    /// Engines of a server whose options choose the engine of most models.
    fn engines(engine: EngineChoice) -> Engines {
        let options = ServerOptions { engine, ..ServerOptions::default() };
        Engines::choose(&options, Arc::new(|_, _| {})).unwrap()
    }

    fn gpus(count: u32) -> Vec<GpuInfo> {
        let gpu = |ordinal| GpuInfo {
            ordinal,
            name: "NVIDIA H200".into(),
            capability: (9, 0),
            memory: 141 << 30,
            multiprocessors: 132,
            uuid: String::new(),
        };
        (0..count).map(gpu).collect()
    }

    fn named(name: &str, engine: Option<ModelEngine>) -> ServerOptions {
        let model = ModelOptions { engine, ..ModelOptions::default() };
        ServerOptions { models: [(name.to_owned(), model)].into(), ..ServerOptions::default() }
    }

    #[test]
    fn a_model_runs_on_the_engine_that_it_names() {
        let engines = engines(EngineChoice::Emulated);
        let of = |options: &ServerOptions, is_emulated| {
            let format = if is_emulated { ModelFormat::Emulated } else { ModelFormat::Onnx };
            engines.of("m", format, options, Isolation::None).unwrap().info().name
        };
        assert_eq!(of(&named("m", None), false), "emulated");
        assert_eq!(of(&named("other", Some(ModelEngine::Rten)), false), "emulated");
        assert_eq!(of(&named("m", Some(ModelEngine::Rten)), false), "rten");
        assert_eq!(of(&named("m", Some(ModelEngine::Rten)), true), "emulated", "which no ONNX engine reads");
        let gpu = Engines { gpus: gpus(1), ..engines };
        let said = gpu
            .of("m", ModelFormat::Onnx, &named("m", Some(ModelEngine::Rten)), Isolation::None)
            .err()
            .unwrap()
            .to_string();
        assert!(said.starts_with("[models.m] engine is rten, which runs on the CPU"), "{said}");
    }

    #[test]
    fn another_engine_runs_what_one_cannot_unless_somebody_named_it() {
        let engines = engines(EngineChoice::Rten);
        let rten: Arc<dyn Engine> = engines.of_most().clone();
        let instead = |options: &ServerOptions| {
            engines.instead("m", options, &*rten, Isolation::None).map(|other| other.info().name)
        };
        let is_there =
            downbeat_engine_ort::available(&Search::from_env()).iter().any(|info| info.name == "onnxruntime");
        assert_eq!(instead(&named("m", None)), is_there.then_some("onnxruntime"));
        assert_eq!(instead(&named("m", Some(ModelEngine::Rten))), None, "it was said which");
        let emulated = downbeat_engine::Emulated::new();
        assert!(
            engines.instead("m", &named("m", None), &emulated, Isolation::None).is_none(),
            "it spends time, and runs nothing"
        );
    }

    #[test]
    fn each_gpu_is_a_device() {
        let engines = |count| Engines { gpus: gpus(count), ..engines(EngineChoice::Emulated) };
        let whole = Partitions::in_parts(0);
        let devices = |gpus, asked| engines(gpus).devices(asked, &whole).unwrap();
        assert_eq!((devices(0, 0), devices(0, 3)), (1, 3));
        assert_eq!((devices(2, 0), devices(2, 2)), (2, 2));
        let said = engines(2).devices(4, &whole).unwrap_err().to_string();
        assert!(
            said.starts_with("devices is 4, and 2 GPUs are used, each of them one device. Leave devices out"),
            "{said}"
        );
        let parts = Partitions::in_parts(3);
        assert_eq!(engines(0).devices(0, &parts).unwrap(), 1, "and so is a CPU that is divided");
        assert_eq!(engines(2).devices(0, &parts).unwrap(), 2);
        let said = engines(0).devices(2, &parts).unwrap_err().to_string();
        assert_eq!(
            said,
            "devices is 2, and [device] partitions divides the CPU, which is one device; leave devices out"
        );
    }
}
