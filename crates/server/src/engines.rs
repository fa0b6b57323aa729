//! The engines of a server, and the devices that they run on.

use std::sync::Arc;

use downbeat_engine::{Engine, ExecutorProgram, GpuInfo, Isolated};

use crate::options::{EngineChoice, Isolation, ServerOptions};
use crate::partitions::Partitions;

pub struct Engines {
    pub onnx: Arc<dyn Engine>,
    pub emulated: Arc<dyn Engine>,
    /// The same two in processes of their own, where models ask for that.
    isolated: Option<[Arc<dyn Engine>; 2]>,
    /// The GPUs that ONNX models run on, one a device; none: they run on the CPU.
    pub gpus: Vec<GpuInfo>,
}

impl Engines {
    /// The engines that the options ask for. Says which one runs ONNX models, and how to get a faster one.
    ///
    /// # Errors
    /// If the engine asked for is not there.
    pub fn choose(options: &ServerOptions) -> anyhow::Result<Self> {
        let preference: downbeat_engine::Preference = options.engine.name().parse().map_err(anyhow::Error::msg)?;
        let search = downbeat_engine::Search { threads: most_threads(options), ..downbeat_engine::Search::from_env() };
        let choice = downbeat_engine::choose(preference, &search, &options.cuda)?;
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
        // There is one of it, whose devices all its models share.
        let emulated: Arc<dyn Engine> = match options.engine {
            EngineChoice::Emulated => choice.engine.clone(),
            _ => Arc::new(downbeat_engine::Emulated::new()),
        };
        let (onnx, gpus) = (choice.engine, choice.gpus);
        let isolated = |engine: &Arc<dyn Engine>| -> anyhow::Result<Arc<dyn Engine>> {
            let program = ExecutorProgram::default();
            Ok(Arc::new(Isolated::new(engine.clone(), most_threads(options), program)?))
        };
        let isolated = options.isolates().then(|| Ok::<_, anyhow::Error>([isolated(&onnx)?, isolated(&emulated)?]));
        Ok(Engines { isolated: isolated.transpose()?, onnx, emulated, gpus })
    }

    /// What runs a model.
    ///
    /// # Errors
    /// If it cannot be in a process of its own and is to be.
    pub fn of(&self, is_emulated: bool, isolation: Isolation) -> anyhow::Result<&Arc<dyn Engine>> {
        match (isolation, &self.isolated) {
            (Isolation::Process, _) if !is_emulated && !self.gpus.is_empty() => anyhow::bail!(
                "isolation is process, which is for models on the CPU, and this one is on a GPU; leave it out, or choose an engine on the \
                 CPU (--engine onnxruntime)"
            ),
            (Isolation::Process, Some([onnx, emulated])) => Ok(if is_emulated { emulated } else { onnx }),
            _ => Ok(if is_emulated { &self.emulated } else { &self.onnx }),
        }
    }

    /// How many devices a server has that was asked for `asked` of them; 0: nobody said. A CPU that is divided is one, whatever its partitions.
    ///
    /// # Errors
    /// If there are GPUs, and not so many; if the CPU is divided, and more than one was asked for.
    pub fn devices(&self, asked: usize, partitions: &Partitions) -> anyhow::Result<usize> {
        match self.gpus.len() {
            0 if partitions.are_there() && asked > 1 => anyhow::bail!(
                "devices is {asked}, and [device] partitions divides the CPU, which is one device; leave devices out"
            ),
            0 => Ok(asked.max(1)),
            gpus if asked == 0 || asked == gpus => Ok(gpus),
            gpus => {
                let used = if gpus == 1 { "1 GPU is used".to_owned() } else { format!("{gpus} GPUs are used") };
                anyhow::bail!(
                    "devices is {asked}, and {used}, each of them one device. Leave devices out, choose as many GPUs (--gpus), or choose an \
                     engine on the CPU (--engine onnxruntime)"
                )
            }
        }
    }
}

/// The most executors of a server that nobody told how many to have.
pub const MOST_EXECUTORS: usize = 64;

/// How many executors a server has on a CPU of so many cores if nobody said, where of each model version so many batches may run at once:
/// those that were asked for, so that none waits for the others, and for the models that ask for none enough that a slow one leaves room beside it.
/// They share the cores, so that a batch takes the longer the more run; a model that is alone has the machine to itself.
pub fn executors(at_once: impl Iterator<Item = u32>, cores: usize) -> usize {
    let side_by_side = (cores / 4).clamp(2, 8);
    let (mut models, mut asked) = (0, 0);
    for at_once in at_once {
        models += 1;
        asked += at_once.saturating_sub(1) as usize;
    }
    (models.clamp(1, side_by_side) + asked).min(MOST_EXECUTORS)
}

/// Threads of one run, at most: what was asked for, or this device's share of the cores.
pub fn most_threads(options: &ServerOptions) -> usize {
    match options.threads {
        0 => (std::thread::available_parallelism().map_or(1, usize::from) / options.devices.max(1)).max(1),
        threads => threads,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executors_are_as_many_as_the_models_ask_for_and_two_side_by_side() {
        let executors = |at_once: &[u32], cores| executors(at_once.iter().copied(), cores);
        assert_eq!((executors(&[], 2), executors(&[1], 64)), (1, 1));
        assert_eq!((executors(&[1, 1], 2), executors(&[1, 1, 1], 2), executors(&[1; 20], 16)), (2, 2, 4));
        assert_eq!((executors(&[4], 2), executors(&[4, 1], 2), executors(&[4, 1, 3], 2)), (4, 5, 7));
        assert_eq!(executors(&[u32::MAX, 100], 2), MOST_EXECUTORS);
    }

    #[test]
    fn each_gpu_is_a_device() {
        let engines = |gpus| {
            let gpu = |ordinal| GpuInfo {
                ordinal,
                name: "NVIDIA H200".into(),
                capability: (9, 0),
                memory: 141 << 30,
                multiprocessors: 132,
                uuid: String::new(),
            };
            let engine = Arc::new(downbeat_engine::Emulated::new());
            Engines { onnx: engine.clone(), emulated: engine, isolated: None, gpus: (0..gpus).map(gpu).collect() }
        };
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
