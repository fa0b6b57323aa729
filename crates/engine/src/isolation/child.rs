//! The executor process: it loads one model, runs its lanes, and ends with the process that started
//! it.

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use downbeat_core::tensor::TensorSpec;
use rustix::fd::OwnedFd;
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal, getpid, getrlimit};
use rustix::process::{kill_process, set_dumpable_behavior, setrlimit};

use super::message::{Answer, Batch, Call, LaneCall, LoadCall, Loaded, RunAnswer, RunCall, TrialLimits, WarmRun, Wire};
use super::message::{receive_with, send};
use crate::memory::region::Region;
use crate::stop::Stop;
use crate::tensor::fill::Fill;
use crate::tensor::state::State;
use crate::tensor::{Buffer, Tensor, elements};
use crate::traits::{Engine, Lane, LoadError, LoadOptions, Model, Place, Share};

/// The niceness of a load, as in the server.
const NICE_OF_LOADS: i32 = 10;

/// The engine that an executor process has to make.
pub struct Wanted {
    /// The name of the engine.
    pub engine: String,
    /// The engine's library, if it has one.
    pub library: Option<PathBuf>,
    /// Threads of the pool that runs share; 0: one a core.
    pub threads: usize,
}

/// Makes the engine of an executor process.
type MakeEngine<'a> = &'a dyn Fn(Wanted) -> Result<Arc<dyn Engine>, String>;

/// Runs an executor process, whose standard input is a socket of the server that started it.
/// `make` makes its engine. Returns once that server is gone.
///
/// # Errors
/// If standard input is no such socket.
pub fn serve(make: MakeEngine<'_>) -> io::Result<()> {
    // If the server was gone before this call, the socket tells.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut process = Process::default();
    let mut bytes = Vec::new();
    loop {
        let (call, files): (Call, _) = match receive_with(&control) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            received => received?,
        };
        let answer = match call {
            Call::Load(call) => process.load(&call, make),
            Call::Lane(call) => process.open(&call, files),
            Call::Stop { lane, run } => {
                process.stop(lane, run);
                continue;
            }
        };
        let answer = answer.unwrap_or_else(|Refused { of_file, reason }| Answer::Failed { of_file, reason });
        send(&control, &mut bytes, &answer, &[])?;
    }
}

/// The reason for a refusal.
struct Refused {
    of_file: bool,
    reason: String,
}

impl<E: ToString> From<E> for Refused {
    fn from(error: E) -> Self {
        Refused { of_file: false, reason: error.to_string() }
    }
}

/// Keeps this process to the limits of a trial. The process dumps no core and is as nice as a load.
/// If memory is short, the kernel ends this process first.
fn keep_to(limits: TrialLimits) -> io::Result<()> {
    let limit = |resource, most: u64| {
        let maximum = getrlimit(resource).maximum.map_or(most, |maximum| maximum.min(most));
        setrlimit(resource, Rlimit { current: Some(maximum), maximum: Some(maximum) })
    };
    limit(Resource::Core, 0)?;
    if let Some(bytes) = limits.memory {
        limit(Resource::Data, bytes)?;
    }
    // Either call may be refused. The trial then goes on without it.
    let _ = rustix::process::setpriority_process(None, NICE_OF_LOADS);
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    // The size limit does not hold for a core that goes to a program.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let watch = move || {
        let (_kept, never) = mpsc::channel::<()>();
        let _ = never.recv_timeout(limits.time);
        let _ = kill_process(getpid(), Signal::ALARM);
    };
    std::thread::Builder::new().name("trial-time".to_owned()).spawn(watch)?;
    Ok(())
}

fn refused(error: LoadError) -> Refused {
    Refused { of_file: matches!(error, LoadError::File { .. }), reason: error.into_reason() }
}

#[derive(Default)]
struct Process {
    /// Holds the state that the engine's models share, as long as the process has models.
    engine: Option<Arc<dyn Engine>>,
    model: Option<Arc<dyn Model>>,
    lanes: BTreeMap<u64, Arc<AtWork>>,
}

/// The present work of a lane's thread.
struct AtWork {
    stop: Stop,
    run: Mutex<Option<u64>>,
}

impl AtWork {
    fn run(&self) -> MutexGuard<'_, Option<u64>> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Process {
    fn load(&mut self, call: &LoadCall, make: MakeEngine<'_>) -> Result<Answer, Refused> {
        call.limits.map(keep_to).transpose()?;
        let wanted = Wanted { engine: call.engine.clone(), library: call.library.clone(), threads: call.pool };
        // Made with its threads, which must not be as nice as the load.
        let engine = make(wanted)?;
        let options = LoadOptions {
            share: share(call.cores.as_deref())?,
            cut: call.cut.clone(),
            cache: call.cache.clone(),
            operators: call.operators.clone().map(Arc::new),
            ..LoadOptions::new(&call.path, call.threads)
        };
        let nicely = || {
            let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE_OF_LOADS);
            engine.load(&options)
        };
        let loaded = std::thread::scope(|scope| scope.spawn(nicely).join());
        let model = loaded.map_err(|panic| panicked(&*panic))?.map_err(refused)?;
        let signature = model.signature().clone();
        let loaded = Loaded {
            inputs: signature.inputs,
            outputs: signature.outputs,
            segments: model.segment_info().to_vec(),
            activations: model.activations().cloned(),
            operators: model.operators().map(|operators| (**operators).clone()),
            profile: model.profile(options.share),
            rewritten: model.rewritten().map(str::to_owned),
            configuration: None,
            metering: Vec::new(),
            checks_ready: false,
        };
        (self.engine, self.model) = (Some(engine), Some(model));
        Ok(Answer::Loaded(Box::new(loaded)))
    }

    fn open(&mut self, call: &LaneCall, files: Vec<OwnedFd>) -> Result<Answer, Refused> {
        let model = self.model.clone().ok_or("no model is loaded")?;
        let place = Place { device: 0, share: share(call.cores.as_deref())? };
        let mut lane = model.lane_at(place).map_err(refused)?;
        let [socket, inputs, outputs] = <[OwnedFd; 3]>::try_from(files).map_err(|_| "a lane has three files")?;
        let (inputs, outputs) = (Region::open(inputs)?, Region::open(outputs)?);
        for run in &call.warm_up {
            warm_up(&*model, &mut *lane, run);
        }
        let mut served = ServedLane { wire: Wire::new(socket.into()), inputs, outputs, lane };
        let (sender, begun) = mpsc::channel();
        let work = move || {
            let at_work = Arc::new(AtWork { stop: Stop::of_this_thread(), run: Mutex::default() });
            // The receiver waits for this.
            let _ = sender.send(at_work.clone());
            // Ends once the lane's owner is gone.
            while served.run_next(&at_work).is_ok() {}
        };
        std::thread::Builder::new().name(format!("lane-{}", call.lane)).spawn(work)?;
        self.lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
        self.lanes.insert(call.lane, begun.recv()?);
        Ok(Answer::Lane)
    }

    fn stop(&self, lane: u64, run: u64) {
        if let Some(lane) = self.lanes.get(&lane) {
            // Under the lock, so that the run cannot end before the stop.
            let running = lane.run();
            if *running == Some(run) {
                lane.stop.stop();
            }
        }
    }
}

fn share(cores: Option<&str>) -> Result<Share, Refused> {
    Ok(match cores {
        Some(cores) => Share::Cores(cores.parse()?),
        None => Share::Whole,
    })
}

/// A lane, and the server's connection to it.
struct ServedLane {
    wire: Wire,
    inputs: Region,
    outputs: Region,
    lane: Box<dyn Lane>,
}

impl ServedLane {
    fn run_next(&mut self, at_work: &AtWork) -> io::Result<()> {
        let RunCall { run, first, end, batch, .. } = self.wire.receive()?;
        let mut state = State { tensors: batch.read(&mut self.inputs)? };
        *at_work.run() = Some(run);
        let ran = catch_unwind(AssertUnwindSafe(|| self.lane.run(first..end, &mut state)));
        *at_work.run() = None;
        at_work.stop.resume();
        let answer = match ran {
            Ok(Ok(())) => match Batch::write(&state.tensors, &mut self.outputs) {
                Ok(batch) => RunAnswer::Ran(batch),
                Err(error) => RunAnswer::Failed(format!("there is no memory for its outputs: {error}")),
            },
            Ok(Err(error)) => RunAnswer::Failed(error.reason),
            Err(panic) => RunAnswer::Failed(panicked(&*panic)),
        };
        self.wire.send(&answer)
    }
}

/// Runs a lane on a batch that this process makes, with shapes that the lane has run before. The
/// first fill that succeeds is enough. If none succeeds, the lane stays cold.
fn warm_up(model: &dyn Model, lane: &mut dyn Lane, run: &WarmRun) {
    let specs: &[TensorSpec] = match run.first.checked_sub(1) {
        None => &model.signature().inputs,
        Some(before) => model.segment_info().get(before).map_or(&[], |segment| &segment.live),
    };
    let tensor = |fill: Fill, spec: &TensorSpec, shape: &Vec<usize>| {
        let count = elements(shape)?;
        let mut data = Buffer::try_with_capacity(count.checked_mul(fill.size(spec.datatype))?).ok()?;
        fill.write(&spec.name, spec.datatype, count, &mut data);
        Some(Tensor { datatype: spec.datatype, shape: shape.clone(), data })
    };
    for fill in Fill::ALL {
        let tensors = specs.iter().zip(&run.shapes).map(|(spec, shape)| tensor(fill, spec, shape)).collect();
        let Some(tensors) = tensors else { return };
        let mut state = State { tensors };
        let ran = catch_unwind(AssertUnwindSafe(|| lane.run(run.first..run.end, &mut state)));
        if matches!(ran, Ok(Ok(()))) {
            return;
        }
    }
}

fn panicked(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    format!("the engine panicked: {text}")
}
