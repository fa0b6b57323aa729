//! A lane in an executor process, as the server sees it.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::executor::Process;
use super::message::{Answer, Batch, Call, LaneCall, RunAnswer, RunCall, WarmRun, Wire};
use super::model::Handle;
use super::side::AnswerTable;
use crate::memory::region::Region;
use crate::memory::run_memory::RunMemory;
use crate::stop::{self, Interrupt};
use crate::tensor::Tensor;
use crate::tensor::state::State;
use crate::traits::{Executor, Lane, RunError};

/// The most warm-up runs of a lane: the first run of each shape counts.
const WARM_RUNS: usize = 32;
/// Warm-up runs are taken from this many first runs.
const FIRST_RUNS: u64 = 256;

/// The server's side of a lane, independent of the present process.
pub(super) struct LaneLink {
    pub number: u64,
    /// The cores that the lane is bound to.
    cores: Option<String>,
    pub open: Mutex<Option<Open>>,
    /// The lane's first runs, which a new process repeats to warm it.
    first: Mutex<Vec<WarmRun>>,
}

/// A lane in a process.
pub(super) struct Open {
    pub process: Arc<Process>,
    pub wire: Wire,
    pub inputs: Region,
    pub outputs: Region,
}

impl LaneLink {
    pub fn new(number: u64, cores: Option<String>) -> Arc<Self> {
        Arc::new(LaneLink { number, cores, open: Mutex::default(), first: Mutex::default() })
    }

    /// Opens the lane in a process, and warms it.
    ///
    /// # Errors
    /// The process's error.
    pub fn open(&self, process: &Arc<Process>) -> Result<(), String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let warm_up = self.first.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let call = Call::Lane(LaneCall { lane: self.number, cores: self.cores.clone(), warm_up });
        let opened = || {
            let (ours, theirs) = UnixStream::pair()?;
            let (inputs, outputs) = (Region::create()?, Region::create()?);
            match process.call(&call, &[theirs.as_fd(), inputs.file(), outputs.file()])? {
                Answer::Lane => Ok(Ok(Open { process: process.clone(), wire: Wire::new(ours), inputs, outputs })),
                Answer::Failed { reason, .. } => Ok(Err(reason)),
                Answer::Loaded(_) => Err(io::ErrorKind::InvalidData.into()),
            }
        };
        let opened: io::Result<Result<Open, String>> = opened();
        *open = Some(opened.map_err(|error| format!("the model's executor process has no lane: {error}"))??);
        Ok(())
    }
}

impl Open {
    /// Runs segments on a batch. The inner result is the engine's.
    fn run(&mut self, run: u64, range: Range<usize>, tensors: &[Tensor]) -> io::Result<Result<Vec<Tensor>, String>> {
        let batch = Batch::write(tensors, &mut self.inputs)?;
        self.wire.send(&RunCall { run, first: range.start, end: range.end, batch, asked: Vec::new() })?;
        Ok(match self.wire.receive()? {
            RunAnswer::Ran(batch) => {
                let mut outputs = batch.read(&mut self.outputs)?;
                // Copied, as the next run overwrites the region.
                outputs.iter_mut().for_each(|tensor| tensor.data = tensor.data.as_slice().into());
                Ok(outputs)
            }
            RunAnswer::Failed(reason) => Err(reason),
            RunAnswer::Answered { .. } | RunAnswer::Raised { .. } => return Err(io::ErrorKind::InvalidData.into()),
        })
    }
}

/// Ends a run of a lane: asks the process first, and kills the process if that does not help.
pub(super) struct EndRun {
    pub lane: u64,
    /// The number of the run.
    pub run: AtomicU64,
    pub process: Mutex<Option<Arc<Process>>>,
    /// The answers that tell the run's progress.
    pub answers: Arc<AnswerTable>,
}

impl EndRun {
    fn process(&self) -> MutexGuard<'_, Option<Arc<Process>>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Interrupt for EndRun {
    fn interrupt(&self) {
        if let Some(process) = &*self.process() {
            process.stop(self.lane, self.run.load(Ordering::Relaxed));
        }
    }

    fn kill(&self) -> bool {
        self.process().as_ref().inspect(|process| process.kill()).is_some()
    }

    fn progress(&self) -> u64 {
        self.answers.progress()
    }
}

/// An engine's lane in an executor process.
pub(super) struct IsolatedLane {
    handle: Arc<Handle>,
    link: Arc<LaneLink>,
    memory: Option<Arc<RunMemory>>,
    end: Arc<EndRun>,
    runs: u64,
}

impl IsolatedLane {
    pub fn new(handle: Arc<Handle>, link: Arc<LaneLink>, memory: Option<Arc<RunMemory>>) -> Self {
        let end = Arc::new(EndRun {
            lane: link.number,
            run: AtomicU64::new(0),
            process: Mutex::default(),
            answers: Arc::default(),
        });
        IsolatedLane { handle, link, memory, end, runs: 0 }
    }

    /// Remembers a run if it is among the first.
    fn remember(&self, range: &Range<usize>, shapes: Vec<Vec<usize>>) {
        let ran = WarmRun { first: range.start, end: range.end, shapes };
        let mut first = self.link.first.lock().unwrap_or_else(PoisonError::into_inner);
        if first.len() < WARM_RUNS && !first.contains(&ran) {
            first.push(ran);
        }
    }
}

impl Lane for IsolatedLane {
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError> {
        if range.is_empty() {
            return Ok(());
        }
        let engine = self.handle.engine;
        let tensors = std::mem::take(&mut state.tensors);
        // The estimate starts from the model's inputs. A batch that has begun may go on.
        let memory = self.memory.as_ref().filter(|_| range.start == 0);
        let _reserved = memory
            .map(|memory| memory.reserve(&tensors))
            .transpose()
            .map_err(|error| RunError::new(engine, error.to_string()))?;
        let mut open = self.link.open.lock().unwrap_or_else(PoisonError::into_inner);
        let down = |reason| RunError { of_executor: true, ..RunError::new(engine, reason) };
        let Some(lane) = &mut *open else {
            return Err(down(self.handle.executor.down().unwrap_or_default()));
        };
        self.runs += 1;
        self.end.run.store(self.runs, Ordering::Relaxed);
        *self.end.process() = Some(lane.process.clone());
        let call = stop::run(Some(self.end.clone())).map_err(|reason| RunError::new(engine, reason))?;
        let ran = lane.run(self.runs, range.clone(), &tensors);
        drop(call);
        match ran {
            Ok(Ok(outputs)) => {
                drop(open);
                if self.runs <= FIRST_RUNS {
                    self.remember(&range, tensors.into_iter().map(|tensor| tensor.shape).collect());
                }
                state.tensors = outputs;
                Ok(())
            }
            Ok(Err(reason)) => Err(RunError::new(engine, reason)),
            Err(_) => {
                let process = lane.process.clone();
                *open = None;
                // The next process opens the lane.
                drop(open);
                Err(down(self.handle.executor.lost(&process)))
            }
        }
    }
}
