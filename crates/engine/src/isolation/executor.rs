//! An executor process as the server sees it: started, watched, and started again.

use std::ffi::OsString;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::Duration;

use downbeat_core::tensor::TensorSpec;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open, pidfd_send_signal};

use super::lane::LaneLink;
use super::message::{Answer, Call, LoadCall, Loaded, Wire, send};
use super::output::{LastLine, Output, now};
use super::side::Side;
use crate::stop::Interrupt;
use crate::traits::{Executor, LoadError};

/// The pause before an ended process is started again. It doubles each time that a process ends
/// soon.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A process that lives this long has not ended soon.
const LIVED: Duration = Duration::from_secs(60);
/// The longest wait of a lane for the reason why its process has ended: a process with much memory
/// takes time to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// The program of an executor process: it calls [`super::serve`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExecutorProgram {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The worker that the program runs, if the program is an interpreter.
    pub worker: Option<Worker>,
}

/// The worker of an interpreter: code that the process gets over its socket before the first call.
/// The process leads a group of processes, which ends with it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Worker {
    /// The source text.
    pub source: Arc<str>,
    /// Variables of the environment that differ from those of this process.
    pub environment: Vec<(OsString, OsString)>,
    /// The name of the model, for the log. Standard output goes to the log, too.
    pub model: String,
}

impl Default for ExecutorProgram {
    /// This program itself as `downbeat executor`, even if its file has been replaced since.
    fn default() -> Self {
        ExecutorProgram { program: "/proc/self/exe".into(), arguments: vec!["executor".into()], worker: None }
    }
}

/// Starts and watches a model's executor process. When the process ends, its successor takes its
/// place here.
pub(super) struct Supervisor {
    program: ExecutorProgram,
    call: LoadCall,
    engine: &'static str,
    /// Whether the process serves; each request checks this.
    is_up: AtomicBool,
    restarts: AtomicU64,
    life: Mutex<Life>,
    changed: Condvar,
    /// The open lanes.
    lanes: Mutex<Vec<Weak<LaneLink>>>,
    /// The messages beside the runs; `None`: there are none.
    side: Option<Side>,
}

#[derive(Default)]
struct Life {
    /// The process that serves, or loads the model.
    process: Option<Arc<Process>>,
    why_down: String,
    /// The signal that ended the last process.
    signal: Option<i32>,
    /// The model is not needed any more.
    closed: bool,
}

/// An executor process.
pub(super) struct Process {
    pid: u32,
    /// A handle of the process. None where the kernel has no such handles (Linux before 5.3), or
    /// valgrind does not know them.
    handle: Option<OwnedFd>,
    /// One call and its answer at a time.
    control: Mutex<Wire>,
    /// The same socket, for messages without an answer.
    stops: Mutex<UnixStream>,
    last_line: LastLine,
    /// Whether the process leads a group.
    leads: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The command of an executor process, without its socket.
fn command(program: &ExecutorProgram, call: &LoadCall) -> Command {
    let mut command = Command::new(&program.program);
    command.args(&program.arguments);
    if call.limits.is_some() {
        let (variable, value) = crate::process::stack_of_trials();
        command.env(variable, value);
    }
    let worker = program.worker.as_ref();
    if let Some(worker) = worker {
        command.envs(worker.environment.iter().cloned()).process_group(0);
    } else {
        // An interpreter finds its packages by its own name.
        command.arg0("downbeat");
    }
    // With a log, the process must not wait for the log's reader. Without a log, lines that
    // name no model would mix with the output of a command. The error of the load or the run
    // says why a process ended.
    let has_log = tracing::dispatcher::has_been_set();
    let piped = |is_wanted| if is_wanted { Stdio::piped() } else { Stdio::null() };
    command.stdout(piped(has_log && worker.is_some())).stderr(piped(has_log || worker.is_some()));
    command
}

impl Process {
    fn spawn(program: &ExecutorProgram, call: &LoadCall) -> io::Result<(Child, Process)> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = command(program, call);
        let mut child = command.stdin(OwnedFd::from(theirs)).spawn()?;
        // The command keeps the process's end of the socket.
        drop(command);
        let (pid, worker) = (child.id(), program.worker.as_ref());
        let made = || {
            let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
            let handle = match pidfd_open(number, PidfdFlags::empty()) {
                Err(Errno::NOSYS) => None,
                handle => Some(handle?),
            };
            let last_line = LastLine::default();
            let model = worker.map_or_else(|| call.path.display().to_string(), |worker| worker.model.clone());
            let prefix = if worker.is_some() { "" } else { "an executor process says: " };
            let output = |is_error| Output { model: model.clone(), pid, is_error, prefix, last: last_line.clone() };
            let start = |copy: Box<dyn FnOnce() + Send>| {
                std::thread::Builder::new().name("executor-log".to_owned()).spawn(copy).map(drop)
            };
            if let (Some(stderr), output) = (child.stderr.take(), output(true)) {
                start(Box::new(move || output.copy(stderr)))?;
            }
            if let (Some(stdout), output) = (child.stdout.take(), output(false)) {
                start(Box::new(move || output.copy(stdout)))?;
            }
            let mut stops = ours.try_clone()?;
            if let Some(worker) = worker {
                let source = worker.source.as_bytes();
                let len = u32::try_from(source.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
                // A process that ends at once is reported by its end.
                let _ = stops.write_all(&len.to_le_bytes()).and_then(|()| stops.write_all(source));
            }
            let (control, stops) = (Mutex::new(Wire::new(ours)), Mutex::new(stops));
            Ok(Process { pid, handle, control, stops, last_line, leads: worker.is_some() })
        };
        match made() {
            Ok(process) => Ok((child, process)),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Sends a call to the process, and waits for the answer.
    pub fn call(&self, call: &Call, files: &[BorrowedFd<'_>]) -> io::Result<Answer> {
        let mut control = lock(&self.control);
        let sending = lock(&self.stops);
        control.send_with(call, files)?;
        drop(sending);
        control.receive()
    }

    /// Asks the process to end a run.
    pub fn stop(&self, lane: u64, run: u64) {
        // A process that is gone has no runs.
        let _ = send(&lock(&self.stops), &mut Vec::new(), &Call::Stop { lane, run }, &[]);
    }

    pub fn kill(&self) {
        // An error means that the process is gone already.
        let _ = match (&self.handle, i32::try_from(self.pid).ok().and_then(Pid::from_raw)) {
            (Some(handle), _) => pidfd_send_signal(handle, Signal::KILL),
            (None, Some(pid)) => kill_process(pid, Signal::KILL),
            (None, None) => Ok(()),
        };
    }

    /// Tells a worker that the server needs it no more, and gives it [`PATIENCE`] for its last work.
    /// Kills any other process at once.
    fn end(self: &Arc<Self>) {
        if !self.leads || lock(&self.stops).shutdown(Shutdown::Write).is_err() {
            return self.kill();
        }
        let process = self.clone();
        let kill = move || {
            let (_kept, never) = mpsc::channel::<()>();
            let _ = never.recv_timeout(PATIENCE);
            process.kill();
        };
        if std::thread::Builder::new().name("executor-end".to_owned()).spawn(kill).is_err() {
            self.kill();
        }
    }

    /// Ends the processes that an ended process has started, and that hold its sockets open.
    fn end_group(&self) {
        if let Some(group) = i32::try_from(self.pid).ok().and_then(Pid::from_raw).filter(|_| self.leads) {
            // An error means that the group is empty.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// The parts of a model that may not change while it serves: inputs, outputs, the number of
/// segments.
type Likeness = (Vec<TensorSpec>, Vec<TensorSpec>, usize);

/// Ends the load of a model by ending its process.
struct EndLoad(Weak<Supervisor>);

impl Interrupt for EndLoad {
    fn interrupt(&self) {
        if let Some(executor) = self.0.upgrade() {
            executor.close();
        }
    }
}

impl Supervisor {
    pub(super) fn new(program: ExecutorProgram, call: LoadCall, engine: &'static str, side: Option<Side>) -> Arc<Self> {
        Arc::new(Supervisor {
            program,
            call,
            engine,
            is_up: AtomicBool::new(false),
            restarts: AtomicU64::new(0),
            life: Mutex::default(),
            changed: Condvar::new(),
            lanes: Mutex::default(),
            side,
        })
    }

    /// Starts the process, and supervises it until it is closed, on a thread that `spawner` starts.
    /// Returns the loaded model.
    pub(super) fn start(self: &Arc<Self>, spawner: &Spawner) -> Result<Loaded, LoadError> {
        let _call =
            crate::stop::run(Some(Arc::new(EndLoad(Arc::downgrade(self))))).map_err(|r| self.error(false, r))?;
        let (done, loaded) = mpsc::channel();
        let executor = self.clone();
        spawner.spawn(Box::new(move || executor.supervise(&done)));
        loaded.recv().unwrap_or_else(|_| Err(self.error(false, "there is no thread to watch its process".to_owned())))
    }

    /// Runs the thread that watches the process. A process ends with the thread that has started
    /// it, so that one thread lives as long as the executor.
    fn supervise(&self, done: &mpsc::Sender<Result<Loaded, LoadError>>) {
        let (mut child, loaded) = match self.begin() {
            Ok(begun) => begun,
            Err(error) => return drop(done.send(Err(error))),
        };
        self.set_up();
        let like = (loaded.inputs.clone(), loaded.outputs.clone(), loaded.segments.len());
        // If the caller no longer waits, it has closed the executor.
        let _ = done.send(Ok(loaded));
        let mut pause = FIRST_PAUSE;
        loop {
            let begin = now();
            let status = child.wait();
            if now().duration_since(begin) >= LIVED {
                pause = FIRST_PAUSE;
            }
            lock(&self.life).signal = status.as_ref().ok().and_then(ExitStatusExt::signal);
            let process = lock(&self.life).process.clone();
            process.iter().for_each(|process| process.end_group());
            let last = process.map(|process| process.last_line.words()).unwrap_or_default();
            let ended = format!("{}{last}", status.map_or_else(|error| error.to_string(), how_it_ended));
            if self.call.limits.is_some() {
                self.set_down(&format!("the model's trial process has ended ({ended})"));
                return;
            }
            if self.set_down(&format!("the model's executor process has ended ({ended}), and is started again")) {
                return;
            }
            tracing::error!(model = %self.call.path.display(), %ended, pause_ms = pause.as_millis(), "an executor process has ended, and is started again");
            child = loop {
                if self.pause(pause) {
                    return;
                }
                pause = LONGEST_PAUSE.min(pause * 2);
                match self.begin_again(&like) {
                    Ok(child) => break child,
                    Err(error) => {
                        let reason = error.to_string();
                        tracing::error!(%reason, pause_ms = pause.as_millis(), "an executor process does not come back");
                        if self.set_down(&format!("the model's executor process does not come back: {reason}")) {
                            return;
                        }
                    }
                }
            };
            self.restarts.fetch_add(1, Ordering::Relaxed);
            self.set_up();
            tracing::info!(model = %self.call.path.display(), pid = child.id(), "an executor process has come back");
        }
    }

    /// Starts a process and makes it load the model; after an error no process is left.
    fn begin(&self) -> Result<(Child, Loaded), LoadError> {
        let failed = |error: io::Error| {
            self.error(
                false,
                format!("the model's executor process {} does not start: {error}", self.program.program.display()),
            )
        };
        let (mut child, process) = Process::spawn(&self.program, &self.call).map_err(failed)?;
        let process = Arc::new(process);
        if self.set_process(&process) {
            process.kill();
        }
        let theirs = match self.side.as_ref().map(Side::open).transpose() {
            Ok(theirs) => theirs,
            Err(error) => {
                process.kill();
                let _ = child.wait();
                return Err(failed(error));
            }
        };
        let files: Vec<_> = theirs.iter().map(UnixStream::as_fd).collect();
        let answer = process.call(&Call::Load(Box::new(self.call.clone())), &files);
        // Only the process keeps its end: the server then hears when the process ends.
        drop(theirs);
        if let Ok(Answer::Loaded(loaded)) = answer {
            return Ok((child, *loaded));
        }
        process.kill();
        let status = child.wait();
        process.end_group();
        if let Ok(Answer::Failed { of_file, reason }) = answer {
            return Err(self.error(of_file, reason));
        }
        let signal = status.as_ref().ok().and_then(ExitStatusExt::signal);
        let last = process.last_line.words();
        let ended = format!("{}{last}", status.map_or_else(|error| error.to_string(), how_it_ended));
        let kind = if self.call.limits.is_some() { "trial" } else { "executor" };
        let reason = format!("the model's {kind} process has ended during the load ({ended})");
        Err(LoadError::Died { path: self.call.path.clone(), engine: self.engine, reason, signal })
    }

    /// Starts the process again, with the present lanes.
    fn begin_again(&self, like: &Likeness) -> Result<Child, LoadError> {
        let (mut child, loaded) = self.begin()?;
        let process = lock(&self.life).process.clone();
        let restored = match process {
            _ if (&loaded.inputs, &loaded.outputs, loaded.segments.len()) != (&like.0, &like.1, like.2) => {
                Err("the model's file has other inputs, outputs or segments than before; load the model again"
                    .to_owned())
            }
            Some(process) => self.lanes().iter().try_for_each(|lane| lane.open(&process)),
            None => Err("it was closed".to_owned()),
        };
        restored.map_err(|reason| {
            let _ = child.kill();
            let _ = child.wait();
            self.error(false, reason)
        })?;
        Ok(child)
    }

    /// Adds a lane, which is opened again whenever the process is started again.
    pub(super) fn add(&self, lane: &Arc<LaneLink>) -> Result<(), LoadError> {
        let mut lanes = lock(&self.lanes);
        lanes.retain(|lane| lane.strong_count() > 0);
        lanes.push(Arc::downgrade(lane));
        drop(lanes);
        let process = lock(&self.life).process.clone().filter(|_| self.is_up.load(Ordering::Acquire));
        let opened = process.map_or_else(|| Err(self.down().unwrap_or_default()), |process| lane.open(&process));
        opened.map_err(|reason| self.error(false, reason))
    }

    fn lanes(&self) -> Vec<Arc<LaneLink>> {
        lock(&self.lanes).iter().filter_map(Weak::upgrade).collect()
    }

    /// Handles a lane that has lost its process: kills the process, and returns the reason for its
    /// end once it is known.
    pub(super) fn lost(&self, process: &Arc<Process>) -> String {
        process.kill();
        let serves = |life: &mut Life| life.process.as_ref().is_some_and(|serving| Arc::ptr_eq(serving, process));
        let waited = self.changed.wait_timeout_while(lock(&self.life), PATIENCE, serves);
        let life = waited.map_or_else(|poisoned| poisoned.into_inner().0, |(life, _)| life);
        match life.why_down.is_empty() {
            true => "the model's executor process has ended, and is started again".to_owned(),
            false => life.why_down.clone(),
        }
    }

    /// Ends the process, for good.
    pub(super) fn close(&self) {
        let mut life = lock(&self.life);
        life.closed = true;
        life.process.iter().for_each(Process::end);
        self.changed.notify_all();
    }

    /// Records a new process before it loads. Returns true if the executor is closed.
    fn set_process(&self, process: &Arc<Process>) -> bool {
        let mut life = lock(&self.life);
        life.process = Some(process.clone());
        life.closed
    }

    fn set_up(&self) {
        let _life = lock(&self.life);
        self.is_up.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Records that there is no process, for `reason`. Returns true if the executor is closed.
    fn set_down(&self, reason: &str) -> bool {
        let mut life = lock(&self.life);
        reason.clone_into(&mut life.why_down);
        life.process = None;
        self.is_up.store(false, Ordering::Release);
        self.changed.notify_all();
        life.closed
    }

    /// Waits for this time, or until the executor is closed. Returns true if it is closed.
    fn pause(&self, time: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(lock(&self.life), time, |life| !life.closed);
        waited.map_or_else(|poisoned| poisoned.into_inner().0, |(life, _)| life).closed
    }

    pub(super) fn error(&self, of_file: bool, reason: String) -> LoadError {
        let path = self.call.path.clone();
        match of_file {
            true => LoadError::File { path, reason },
            false => LoadError::Model { path, engine: self.engine, reason },
        }
    }
}

impl Executor for Supervisor {
    fn pid(&self) -> Option<u32> {
        lock(&self.life).process.as_ref().filter(|_| self.is_up.load(Ordering::Acquire)).map(|process| process.pid)
    }

    fn signal(&self) -> Option<i32> {
        lock(&self.life).signal
    }

    fn comes_back(&self) -> bool {
        let is_down = |life: &mut Life| !life.closed && !self.is_up.load(Ordering::Acquire);
        if self.call.limits.is_none() {
            // The flag below decides, however the wait ended.
            drop(self.changed.wait_timeout_while(lock(&self.life), PATIENCE, is_down));
        }
        self.is_up.load(Ordering::Acquire)
    }

    fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    fn down(&self) -> Option<String> {
        if self.is_up.load(Ordering::Acquire) {
            return None;
        }
        Some(lock(&self.life).why_down.clone())
    }
}

fn how_it_ended(status: ExitStatus) -> String {
    let Some(signal) = status.signal() else { return status.to_string() };
    let name = match signal {
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        14 => " (SIGALRM)",
        15 => " (SIGTERM)",
        _ => "",
    };
    format!("signal {signal}{name}")
}

/// Starts threads with the niceness of the spawner's own thread, not of the caller. Processes that
/// they start inherit it.
pub(super) struct Spawner(Mutex<mpsc::Sender<Work>>);

type Work = Box<dyn FnOnce() + Send>;

impl Spawner {
    /// Starts the spawner's thread, with the niceness of this thread.
    pub fn start() -> io::Result<Spawner> {
        let (sender, works) = mpsc::channel::<Work>();
        let start = move || {
            for work in works {
                // If no thread starts, the work is dropped, and with it the channel that its caller
                // waits on.
                let _ = std::thread::Builder::new().name("executor".to_owned()).spawn(work);
            }
        };
        std::thread::Builder::new().name("executors".to_owned()).spawn(start)?;
        Ok(Spawner(Mutex::new(sender)))
    }

    fn spawn(&self, work: Work) {
        // The same holds here.
        let _ = lock(&self.0).send(work);
    }
}
