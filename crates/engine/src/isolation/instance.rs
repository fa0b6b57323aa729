//! An instance of a model in the process of an interpreter. The instance answers the requests of a
//! batch one by one, so that their outputs may differ in shape.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::executor::{ExecutorProgram, Spawner, Supervisor};
use super::lane::{EndRun, LaneLink, Open};
use super::message::{Asked, Batch, LoadCall, Loaded, Metering, Reply, RunAnswer, RunCall};
use super::model::Handle;
use super::side::{AnswerTable, Side};
use crate::cut::Cut;
use crate::stop;
use crate::tensor::{ALIGNMENT, Tensor};
use crate::traits::{Answered, Answers, AskedRequest, ErrorCode, Executor, LoadError, LoadOptions, RunError};
use downbeat_core::tensor::Signature;

/// Starts instances. Keeps the priority of the thread that makes it.
pub struct InstanceStarter(Spawner);

/// Hears about changes of the metrics that a model's code keeps: one JSON value for each change.
pub type OnMetering = Arc<dyn Fn(Vec<serde_json::Value>) + Send + Sync>;

/// An instance of a model: a process that is started again when it ends.
pub struct Instance {
    handle: Arc<Handle>,
    link: Arc<LaneLink>,
    end: Arc<EndRun>,
    runs: u64,
    on_metering: OnMetering,
    answers: Arc<AnswerTable>,
}

/// A model as its first instance describes it.
pub struct LoadedInstance {
    /// The inputs and outputs.
    pub signature: Signature,
    /// The configuration as the model completes it, as JSON.
    pub configuration: Option<String>,
    /// Whether the code has a check of its own readiness.
    pub checks_ready: bool,
}

impl InstanceStarter {
    /// Makes a starter whose processes have the priority of this thread.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn new() -> io::Result<InstanceStarter> {
        Spawner::start().map(InstanceStarter)
    }

    /// Starts a process of `program`, which loads the model of `options` with its own `settings`.
    ///
    /// # Errors
    /// If the process does not start, or cannot load the model.
    pub fn start(
        &self,
        engine: &'static str,
        program: ExecutorProgram,
        options: &LoadOptions,
        settings: serde_json::Value,
        on_metering: OnMetering,
        side: Side,
    ) -> Result<(Instance, LoadedInstance), LoadError> {
        let call = LoadCall {
            engine: engine.to_owned(),
            library: None,
            pool: 1,
            path: options.path.clone(),
            threads: options.threads,
            cores: None,
            cut: Cut::Whole,
            cache: None,
            operators: None,
            limits: None,
            settings,
        };
        let answers = side.answers.clone();
        let executor = Supervisor::new(program, call, engine, Some(side));
        let handle = Arc::new(Handle { executor, engine });
        let Loaded { inputs, outputs, configuration, metering, checks_ready, .. } = handle.executor.start(&self.0)?;
        let link = LaneLink::new(0, None);
        handle.executor.add(&link)?;
        on_metering(metering);
        let end = Arc::new(EndRun {
            lane: link.number,
            run: AtomicU64::new(0),
            process: Mutex::default(),
            answers: answers.clone(),
        });
        let loaded = LoadedInstance { signature: Signature { inputs, outputs }, configuration, checks_ready };
        Ok((Instance { handle, link, end, runs: 0, on_metering, answers }, loaded))
    }
}

impl Instance {
    /// The process of the instance.
    pub fn executor(&self) -> Arc<dyn Executor> {
        self.handle.executor.clone()
    }

    /// Has the model's code answer the requests of a batch.
    ///
    /// # Errors
    /// If the process ends, the code fails for the whole batch, or the call is ended.
    pub fn answer(&mut self, requests: &[AskedRequest]) -> Result<Answers, RunError> {
        let engine = self.handle.engine;
        let down = |reason| RunError { of_executor: true, ..RunError::new(engine, reason) };
        let mut open = self.link.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(lane) = &mut *open else {
            return Err(down(self.handle.executor.down().unwrap_or_default()));
        };
        self.runs += 1;
        self.end.run.store(self.runs, Ordering::Relaxed);
        *self.end.process.lock().unwrap_or_else(PoisonError::into_inner) = Some(lane.process.clone());
        let call = stop::run(Some(self.end.clone())).map_err(|reason| RunError::new(engine, reason))?;
        self.answers.begin_run();
        let numbers = numbers(&self.answers, requests);
        let asked = lane.ask(engine, self.runs, requests, &numbers);
        requests.iter().filter_map(|request| request.about.as_ref()).for_each(|about| about.left.unwatch());
        // A run that fails has no more answers to its requests.
        if !matches!(&asked, Ok(BatchAnswer { answers: Ok(_), .. })) {
            numbers.iter().flatten().for_each(|number| drop(self.answers.remove(*number)));
        }
        let Ok(answer) = asked else {
            drop(call);
            let process = lane.process.clone();
            *open = None;
            // The next process opens the lane.
            drop(open);
            return Err(down(self.handle.executor.lost(&process)));
        };
        if answer.keeps_inputs {
            let process = lane.process.clone();
            // The process waits for the end of the lane's socket before it opens another.
            *open = None;
            drop(open);
            // The code goes on with its inputs, in memory that no run uses any more.
            if self.link.open(&process).is_err() {
                process.kill();
            }
        }
        drop(call);
        if !answer.metering.is_empty() {
            (self.on_metering)(answer.metering);
        }
        answer.answers.map_err(|reason| RunError::new(engine, reason))
    }
}

/// The numbers of the requests to which any number of answers may come.
fn numbers(table: &AnswerTable, requests: &[AskedRequest]) -> Vec<Option<u64>> {
    let taker = |request: &AskedRequest| request.about.as_ref()?.answers.0.get().cloned();
    requests.iter().map(|request| Some(table.add(taker(request)?))).collect()
}

/// The answer of a process to a batch.
struct BatchAnswer {
    /// The answers, or why the model's code failed for all requests.
    answers: Result<Answers, String>,
    keeps_inputs: bool,
    metering: Metering,
}

impl Open {
    /// Sends the requests of a batch to the process, and receives its answer.
    fn ask(
        &mut self,
        engine: &'static str,
        run: u64,
        requests: &[AskedRequest],
        numbers: &[Option<u64>],
    ) -> io::Result<BatchAnswer> {
        let head = requests.len().next_multiple_of(ALIGNMENT);
        let tensors: Vec<&Tensor> = requests.iter().flat_map(|request| request.tensors.iter().flatten()).collect();
        let batch = Batch::write_behind(head, tensors.iter().copied(), &mut self.inputs)?;
        self.inputs.write(0, &vec![0; head]);
        let mut places = 0..;
        let mut asked = Vec::with_capacity(requests.len());
        for (left, request) in requests.iter().enumerate() {
            let about = request.about.as_deref();
            if let (Some(about), Some(flag)) = (about, self.inputs.flag(left)) {
                about.left.watch(move || flag.set());
            }
            asked.push(Asked {
                rows: request.rows,
                inputs: request.tensors.iter().map(|tensor| tensor.as_ref().and_then(|_| places.next())).collect(),
                id: about.map(|about| about.id.clone()).unwrap_or_default(),
                parameters: about.map(|about| about.parameters.clone()).unwrap_or_default(),
                outputs: about.map(|about| about.outputs.clone()).unwrap_or_default(),
                budget_us: request.budget.map(|budget| budget.as_nanos() / 1_000),
                left,
                answers: numbers.get(left).copied().flatten(),
                is_made_up: about.is_none(),
            });
        }
        self.wire.send(&RunCall { run, first: 0, end: 1, batch, asked })?;
        match self.wire.receive()? {
            RunAnswer::Answered { batch, requests: replies, keeps_inputs, metering } => {
                let outputs = batch.read(&mut self.outputs)?;
                let answers = Ok(self::answers(engine, outputs, replies, requests)?);
                Ok(BatchAnswer { answers, keeps_inputs, metering })
            }
            RunAnswer::Raised { reason, keeps_inputs, metering } => {
                Ok(BatchAnswer { answers: Err(reason), keeps_inputs, metering })
            }
            RunAnswer::Failed(reason) => {
                Ok(BatchAnswer { answers: Err(reason), keeps_inputs: false, metering: Vec::new() })
            }
            RunAnswer::Ran(_) => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// The answers of requests. Their outputs are copied, as the next run overwrites the region.
fn answers(
    engine: &'static str,
    outputs: Vec<Tensor>,
    replies: Vec<Reply>,
    requests: &[AskedRequest],
) -> io::Result<Answers> {
    if replies.len() != requests.len() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut outputs: Vec<Option<Tensor>> = outputs.into_iter().map(Some).collect();
    let mut take = |place: Option<usize>| -> io::Result<Option<Tensor>> {
        let Some(place) = place else { return Ok(None) };
        let mut tensor = outputs.get_mut(place).and_then(Option::take).ok_or(io::ErrorKind::InvalidData)?;
        tensor.data = tensor.data.as_slice().into();
        Ok(Some(tensor))
    };
    let reply = |(reply, request): (Reply, &AskedRequest)| match reply {
        Reply::Outputs { places, parameters } => {
            if let (Some(about), Some(parameters)) = (&request.about, parameters) {
                let _ = about.answer_parameters.set(parameters);
            }
            Ok(Ok(places.into_iter().map(&mut take).collect::<io::Result<Answered>>()?))
        }
        Reply::Error { reason, code } => {
            let code = code.map_or(ErrorCode::Unknown, ErrorCode::of_number);
            Ok(Err(RunError { code: Some(code), ..RunError::new(engine, reason) }))
        }
    };
    replies.into_iter().zip(requests).map(reply).collect()
}
