//! The trial of a model file in a process of its own, before this process lets an engine near the
//! file. A file may end the process that loads or runs it: a chain of operators overflows the
//! stack, a step of zero divides by zero.

use downbeat_engine::{Cut, LoadError, Model, RunError, Share, TrialLimits};
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_host::run::row_judgement::by_graph;
use downbeat_repository::{ModelDefinition, RowDependence, RowVerdict};
use downbeat_service::options::BatchingChoice;
use serde::{Deserialize, Serialize};

use super::Loading;
use crate::load::model_source::has_graph;
use crate::load::warm_up;

/// The news that a file can be run. The key is its content, the engine and the engine's version.
#[derive(Debug, Serialize, Deserialize)]
struct Survived {
    /// The model's file.
    model: std::path::PathBuf,
    /// The engine that ran the file.
    engine: String,
}

/// The process of a trial has ended.
#[derive(Debug, thiserror::Error)]
#[error("{engine} must not run this model in the server: {reason}{hint}")]
struct TrialDeath {
    engine: &'static str,
    reason: String,
    hint: String,
    /// The signal that ended it.
    signal: Option<i32>,
}

impl Loading<'_> {
    /// Has a process load the file and run what a load runs. A file that survived is not tried
    /// again. A file of a load request always is: its sender might have made it look like another.
    ///
    /// # Errors
    /// If the process has ended; on the CPU also if the engine refuses the file.
    pub(super) fn try_file(&mut self) -> anyhow::Result<()> {
        let own = self.source.engine;
        if !has_graph(&self.definition) {
            return Ok(());
        }
        let Some(trial) = self.context.engines.trial(own).map_err(anyhow::Error::msg)? else { return Ok(()) };
        let key = self.source.trial_key();
        let stored = key.as_ref().ok().filter(|_| self.may_come_again);
        if stored.is_some_and(|key| self.source.store.get::<Survived>(key).is_some()) {
            return Ok(());
        }
        self.progress.step("trying", 0.05);
        let (cut, share) = (self.source.options.cut.clone(), self.source.options.share);
        (self.source.engine, self.source.options.cut) = (trial, Cut::Whole);
        if self.on_gpus {
            self.source.options.share = Share::Whole;
        }
        let tried = self.run_in_process();
        (self.source.engine, self.source.options.cut, self.source.options.share) = (own, cut, share);
        let rows = match tried {
            Ok(rows) => rows,
            Err(error) if self.on_gpus && death(&error).is_none_or(|death| !death.is_crash()) => {
                tracing::info!(
                    model = %self.definition.name, version = %self.version, reason = %error,
                    "the model cannot be tried on the CPU before it runs on a GPU"
                );
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        tracing::debug!(
            model = %self.definition.name, version = %self.version,
            "the model's file was tried in a process"
        );
        // The engine in this process would come to the same verdict.
        if let Some(rows) = rows.filter(|_| !self.on_gpus) {
            self.context.keep_rows(self.source.rows_key().ok().as_deref(), &rows);
        }
        let (model, engine) = self.source.names();
        self.source.store.keep(key, "the result of the file's trial", &Survived { model, engine });
        Ok(())
    }

    /// Loads the file and runs it as a load does, in a process. Returns the verdict on its rows, if
    /// it was checked.
    fn run_in_process(&mut self) -> anyhow::Result<Option<RowVerdict>> {
        let limits = self.context.engines.trial_limits();
        let model = self.source.load(1).map_err(|error| died_loading(error, limits))?;
        let mut definition = self.definition.clone();
        definition.complete(model.signature())?;
        self.run_as_load(&*model, &definition).map_err(|error| match error.downcast::<RunError>() {
            Ok(error) if error.of_executor => {
                let signal = model.executor().and_then(|executor| executor.signal());
                TrialDeath::new(error.engine, error.reason, signal, limits).into()
            }
            Ok(error) => error.into(),
            Err(error) => error,
        })
    }

    fn run_as_load(&self, model: &dyn Model, definition: &ModelDefinition) -> anyhow::Result<Option<RowVerdict>> {
        let (inputs, outputs) = (definition.inputs.clone(), definition.outputs.clone());
        let codec = BatchCodec::new(inputs, outputs, definition.batching.max_batch_size).named(&definition.name);
        let codec = codec.with_defaults(&self.source.defaults).map_err(anyhow::Error::msg)?;
        let mut lane = model.lane()?;
        warm_up::find_answer(&codec, model, &mut *lane, self.context.clock)?;
        for sample in warm_up::samples(definition, &codec)?.iter() {
            let mut state = codec.assemble(std::iter::once(&sample.request)).map_err(anyhow::Error::msg)?;
            match lane.run(0..model.segments(), &mut state) {
                Err(error) if error.of_executor => return Err(error.into()),
                // The load reports a refused file.
                Ok(()) | Err(_) => {}
            }
        }
        let is_asked = self.context.options.batching(&definition.name) == BatchingChoice::Check;
        if !is_asked || definition.batching.max_batch_size < 2 {
            return Ok(None);
        }
        let (by_graph, random) = by_graph(&self.source.options.path);
        if by_graph.rows != RowDependence::Unknown || !random.is_empty() {
            return Ok(None);
        }
        self.check_rows(model, definition).map(Some)
    }
}

impl TrialDeath {
    fn new(engine: &'static str, reason: String, signal: Option<i32>, limits: Option<TrialLimits>) -> Self {
        const ABORT: i32 = 6;
        const KILL: i32 = 9;
        const ALARM: i32 = 14;
        let memory = limits.and_then(|limits| limits.memory);
        let hint = match (signal, limits, memory) {
            (Some(ALARM), Some(limits), _) => {
                format!("; the trial took more than {} s (trial_timeout_s)", limits.time.as_secs_f64())
            }
            (Some(ABORT | KILL), _, Some(bytes)) => {
                format!("; the stack or the memory of the trial ({bytes} bytes) may have been too small")
            }
            _ => "; with isolation = \"process\" the model runs in a process of its own, which may end".to_owned(),
        };
        TrialDeath { engine, reason, hint, signal }
    }

    /// Whether the file itself is to blame: neither time nor memory was short.
    fn is_crash(&self) -> bool {
        // SIGILL, SIGBUS, SIGFPE, SIGSEGV.
        matches!(self.signal, Some(4 | 7 | 8 | 11))
    }
}

fn death(error: &anyhow::Error) -> Option<&TrialDeath> {
    error.downcast_ref()
}

fn died_loading(error: LoadError, limits: Option<TrialLimits>) -> anyhow::Error {
    match error {
        LoadError::Died { engine, reason, signal, .. } => TrialDeath::new(engine, reason, signal, limits).into(),
        error => error.into(),
    }
}
