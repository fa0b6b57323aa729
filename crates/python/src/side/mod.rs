//! The server's end of a process's second socket: answers to clients, and calls of other models.

mod frame;
mod ready;

use std::collections::BTreeMap;
use std::io::{BufReader, BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use bytes::Bytes;
use downbeat_engine::{AnswerTable, Answered, ErrorCode, RunError, Side, Tensor};
pub use frame::Fault;
use frame::{Called, Placed, Reply, Told};
pub use ready::ReadyChecks;

use crate::worker::NAME;

/// A tensor with its name.
pub type Named = (String, Tensor);

/// A request of a model's code to another model.
#[derive(Debug)]
pub struct ModelCall {
    /// The model whose code calls.
    pub caller: String,
    /// The number of the process that calls, unique in this server.
    pub instance: u64,
    /// The model that is called.
    pub model: String,
    /// Its version; empty: the server's choice.
    pub version: String,
    /// The id of the request.
    pub id: String,
    /// The parameters, as a JSON object.
    pub parameters: String,
    /// The wanted outputs; empty: all.
    pub outputs: Vec<String>,
    /// The inputs.
    pub inputs: Vec<Named>,
    /// The most time until the answer: the rest of the caller's, or less.
    pub budget_us: Option<u64>,
    /// Whether any number of answers may come.
    pub decoupled: bool,
    /// Whether the instance does nothing else before the answer.
    pub blocks: bool,
}

/// An answer of a called model.
#[derive(Debug, Default)]
pub struct CallAnswer {
    /// The outputs.
    pub outputs: Vec<Named>,
    /// The parameters, as a JSON object; `None`: there are none.
    pub parameters: Option<String>,
}

/// Hears the answers to a call: an answer or an error, or `None`, and whether it is the last.
pub type OnAnswer = Box<dyn FnMut(Option<Result<CallAnswer, Fault>>, bool) + Send>;

/// A call that is under way. Dropping it ends the call.
pub trait OpenCall: Send {
    /// The code wants the next answer.
    fn pull(&self);
}

/// Begins a call.
pub type OnCall = Arc<dyn Fn(ModelCall, OnAnswer) -> Box<dyn OpenCall> + Send + Sync>;

/// Counts processes.
static PROCESSES: AtomicU64 = AtomicU64::new(0);

/// The messages of the processes of one instance of `model`.
pub fn side(model: &str, on_call: &OnCall, checks: &Arc<ReadyChecks>) -> Side {
    let answers = Arc::new(AnswerTable::default());
    let (model, on_call, table, checks) = (model.to_owned(), on_call.clone(), answers.clone(), checks.clone());
    let serve = move |stream: UnixStream| {
        let (replies, to_write) = mpsc::channel();
        let instance = PROCESSES.fetch_add(1, Ordering::Relaxed);
        checks.open(instance, replies.clone());
        let process = Process {
            model: model.clone(),
            instance,
            on_call: on_call.clone(),
            answers: table.clone(),
            calls: Calls::default(),
            checks: checks.clone(),
            replies,
        };
        let Ok(reader) = stream.try_clone() else { return };
        let write = move || write(stream, &to_write);
        let read = move || process.read(reader);
        for (name, work) in
            [("python-write", Box::new(write) as Box<dyn FnOnce() + Send>), ("python-read", Box::new(read))]
        {
            // Without a thread the process hears no reply: its answers and calls wait for their
            // deadlines.
            if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(work) {
                tracing::error!(%error, "there is no thread for the messages of a Python model");
            }
        }
    };
    Side { answers, serve: Arc::new(serve) }
}

type Frame = (Reply, Vec<Bytes>);

fn write(stream: UnixStream, frames: &mpsc::Receiver<Frame>) {
    let mut stream = BufWriter::new(stream);
    while let Ok((reply, data)) = frames.recv() {
        let written = frame::write(&mut stream, &reply, &data).and_then(|()| stream.flush());
        // The process has ended, which the reader hears.
        if written.is_err() {
            return;
        }
    }
}

#[derive(Default, Clone)]
struct Calls(Arc<Mutex<BTreeMap<u64, Box<dyn OpenCall>>>>);

impl Calls {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Box<dyn OpenCall>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process that is served.
struct Process {
    model: String,
    instance: u64,
    on_call: OnCall,
    answers: Arc<AnswerTable>,
    calls: Calls,
    checks: Arc<ReadyChecks>,
    replies: mpsc::Sender<Frame>,
}

impl Process {
    /// Serves the process until its end.
    fn read(self, stream: UnixStream) {
        let mut stream = BufReader::new(stream);
        loop {
            match frame::read(&mut stream) {
                Ok(Some((told, data))) => self.hear(told, &data),
                Ok(None) => break,
                Err(error) => {
                    tracing::error!(model = %self.model, %error, "a message of a Python model cannot be read");
                    break;
                }
            }
        }
        self.checks.close(self.instance);
        let calls = std::mem::take(&mut *self.calls.lock());
        drop(calls);
        let reason = "the process of the model has ended before its last answer".to_owned();
        self.answers.end_below(self.answers.next(), &RunError { of_executor: true, ..RunError::new(NAME, reason) });
    }

    fn hear(&self, told: Told, data: &Bytes) {
        match told {
            Told::Answer { id, request, is_final, error, outputs, parameters } => {
                self.answer(id, request, is_final, answer_of(error, outputs, data), parameters);
            }
            Told::Look { id, request } => {
                let ok = self.answers.get(request).is_some_and(|taker| taker.is_open());
                let _ = self.replies.send((done(id, ok), Vec::new()));
            }
            Told::Call(call) => self.call(*call, data),
            Told::Pull { id } => {
                if let Some(call) = self.calls.lock().get(&id) {
                    call.pull();
                }
            }
            Told::Drop { id } => drop(self.calls.lock().remove(&id)),
            Told::Ready { id, reason } => self.checks.hear(id, reason),
        }
    }

    fn answer(
        &self,
        id: u64,
        request: u64,
        is_final: bool,
        answer: Option<Result<Answered, RunError>>,
        parameters: Option<String>,
    ) {
        self.answers.answered(request);
        let taker = if is_final { self.answers.remove(request) } else { self.answers.get(request) };
        let replies = self.replies.clone();
        let reply = move |ok| drop(replies.send((done(id, ok), Vec::new())));
        match taker {
            Some(taker) => taker.take(answer, parameters, is_final, Box::new(reply)),
            None => reply(false),
        }
    }

    fn call(&self, call: Called, data: &Bytes) {
        let (id, replies, calls) = (call.id, self.replies.clone(), self.calls.clone());
        let reply: OnAnswer = Box::new(move |answer, is_final| {
            let _ = replies.send(reply_of(id, answer, is_final));
            if is_final {
                let ended = calls.lock().remove(&id);
                drop(ended);
            }
        });
        let inputs = frame::tensors(&call.inputs, data);
        let inputs = match inputs {
            Ok(tensors) => call.inputs.into_iter().map(|placed| placed.name.unwrap_or_default()).zip(tensors).collect(),
            Err(reason) => {
                let mut reply = reply;
                return reply(Some(Err(Fault { reason, code: ErrorCode::InvalidArgument as u32 })), true);
            }
        };
        let call = ModelCall {
            caller: self.model.clone(),
            instance: self.instance,
            model: call.model,
            version: call.version,
            id: call.request_id,
            parameters: call.parameters,
            outputs: call.outputs,
            inputs,
            budget_us: call.budget_us,
            decoupled: call.decoupled,
            blocks: call.blocks,
        };
        // The lock is held meanwhile: an answer removes the call only after it is noted.
        let mut calls = self.calls.lock();
        let open = (self.on_call)(call, reply);
        calls.insert(id, open);
    }
}

/// Reads arbitrary bytes as the messages of a process, with their tensors. Returns the number of
/// messages that could be read. For fuzz tests.
pub fn read_as_process(mut bytes: &[u8]) -> usize {
    let mut messages = 0;
    while let Ok(Some((told, data))) = frame::read(&mut bytes) {
        match told {
            Told::Answer { error, outputs, .. } => drop(answer_of(error, outputs, &data)),
            Told::Call(call) => drop(frame::tensors(&call.inputs, &data)),
            Told::Look { .. } | Told::Pull { .. } | Told::Drop { .. } | Told::Ready { .. } => {}
        }
        messages += 1;
    }
    messages
}

fn done(id: u64, ok: bool) -> Reply {
    Reply { ok, ..Reply::of(id) }
}

/// An answer of the code, with its outputs at their places.
fn answer_of(error: Option<Fault>, outputs: Option<Vec<Placed>>, data: &Bytes) -> Option<Result<Answered, RunError>> {
    if let Some(Fault { reason, code }) = error {
        let code = ErrorCode::of_number(code);
        return Some(Err(RunError { code: Some(code), ..RunError::new(NAME, reason) }));
    }
    let placed = outputs?;
    let tensors = match frame::tensors(&placed, data) {
        Ok(tensors) => tensors,
        Err(reason) => return Some(Err(RunError::new(NAME, reason))),
    };
    let mut at = BTreeMap::new();
    at.extend(placed.iter().map(|placed| placed.place).zip(tensors));
    // A place is below the number of outputs: the worker looks it up. Others are left out.
    let count = at.keys().next_back().map_or(0, |last| (*last).min(MOST_OUTPUTS) + 1);
    Some(Ok((0..count).map(|place| at.remove(&place)).collect()))
}

/// Most outputs of a model's answer.
const MOST_OUTPUTS: usize = 4096;

fn reply_of(id: u64, answer: Option<Result<CallAnswer, Fault>>, is_final: bool) -> Frame {
    let mut reply = Reply { is_final, ..Reply::of(id) };
    let mut data = Vec::new();
    match answer {
        None => {}
        Some(Err(fault)) => reply.error = Some(fault),
        Some(Ok(CallAnswer { outputs, parameters })) => {
            reply.parameters = parameters;
            let place = |(place, (name, tensor)): (usize, Named)| {
                let bytes = tensor.data.into_bytes();
                let placed = Placed {
                    name: Some(name),
                    place,
                    datatype: tensor.datatype.name().to_owned(),
                    shape: tensor.shape.iter().map(|size| *size as i64).collect(),
                    len: bytes.len(),
                };
                data.push(bytes);
                placed
            };
            reply.outputs = Some(outputs.into_iter().enumerate().map(place).collect());
        }
    }
    (reply, data)
}
