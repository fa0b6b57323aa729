//! The requests on a backend whose model takes requests instead of rows, such as a Python model. The
//! model's code can see that a client has left. A decoupled model streams its answers to the frontend.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use downbeat_core::BatchId;
use downbeat_engine::{Answered, RequestAbout, RunError, TakesAnswers};
use downbeat_host::request::reply::Answer;
use downbeat_models::loaded_version::LoadedVersion;
use downbeat_models::serving::{FirstAnswer, InFlight};
use downbeat_roles::{BatchKey, Epoch, MOST_STREAMED, NodeId, Outcome, RequestKey};
use downbeat_service::answers::MOST_BYTES;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::backend_role::BackendEvent;
use crate::wire::about::sent_parameters;
use crate::wire::arena::Arena;
use crate::wire::tensors::Tensors;

/// A run of a request: the batch's name tells it from another run of the same request.
pub type RequestRun = (RequestKey, BatchKey);

/// A request whose model takes requests.
pub struct AskedRequest {
    about: Arc<RequestAbout>,
    /// `None`: the model gives one answer.
    stream: Option<Stream>,
}

/// A request's stream of answers.
struct Stream {
    window: Arc<Window>,
    has_run: bool,
    has_last: bool,
    /// Keeps the model from being unloaded until the last answer.
    _model: InFlight,
}

/// An answer as its frontend hears it. `parameters`: those of the answer, as a JSON object.
pub fn outcome(answer: Answer, parameters: Option<String>, arena: Option<&Arc<Arena>>) -> Outcome<Tensors> {
    match answer {
        Ok(outputs) => {
            let parts = outputs.into_iter().chain(parameters.map(sent_parameters));
            Outcome::Outputs(Tensors::kept(parts, arena))
        }
        Err(error) => Outcome::Failed { code: error.code(), message: error.to_string() },
    }
}

/// The result of a request's run.
pub enum Ran {
    /// The model gave one answer, with these parameters (a JSON object).
    One(Option<String>),
    /// The model streams its answers.
    Streamed,
}

impl AskedRequest {
    /// A request of a model with one answer.
    pub fn with_one_answer(about: Arc<RequestAbout>) -> Self {
        AskedRequest { about, stream: None }
    }

    /// A request of a decoupled model, whose answers go to the backend's node.
    pub fn decoupled(
        about: Arc<RequestAbout>,
        run: RequestRun,
        (loaded, model): (Arc<LoadedVersion>, InFlight),
        (events, arena): (mpsc::UnboundedSender<BackendEvent>, Option<Arc<Arena>>),
        first: FirstAnswer,
    ) -> Self {
        let window = Arc::new(Window::default());
        let taker = StreamTaker { run, loaded, first, window: window.clone(), events, arena };
        // Nothing else has set the taker of a request that has just come.
        let _ = about.answers.0.set(Arc::new(taker));
        let stream = Stream { window, has_run: false, has_last: false, _model: model };
        AskedRequest { about, stream: Some(stream) }
    }

    /// The client has left.
    fn leave(&self) {
        self.about.left.leave();
        if let Some(stream) = &self.stream {
            stream.window.close();
        }
    }
}

/// The requests whose model takes requests, until their last answer.
#[derive(Default)]
pub struct AskedRequests(BTreeMap<RequestRun, AskedRequest>);

impl AskedRequests {
    /// Adds requests whose batch begins.
    pub fn add(&mut self, asked: Vec<(RequestRun, AskedRequest)>) {
        self.0.extend(asked);
    }

    /// The run of a request is over. A request that has failed has no more answers.
    pub fn ran(&mut self, run: RequestRun, has_succeeded: bool) -> Ran {
        if !has_succeeded {
            if let Some(asked) = self.0.remove(&run) {
                asked.leave();
            }
            return Ran::One(None);
        }
        let Some(asked) = self.0.get_mut(&run) else { return Ran::One(None) };
        let Some(stream) = &mut asked.stream else {
            let parameters = asked.about.answer_parameters.get().cloned();
            self.0.remove(&run);
            return Ran::One(parameters);
        };
        stream.has_run = true;
        if stream.has_last {
            self.0.remove(&run);
        }
        Ran::Streamed
    }

    /// A request has given one of its answers. Returns whether its frontend must hear of the answer.
    pub fn streamed(&mut self, run: RequestRun, is_last: bool) -> bool {
        let Some(stream) = self.0.get_mut(&run).and_then(|asked| asked.stream.as_mut()) else { return false };
        stream.has_last |= is_last;
        if stream.has_last && stream.has_run {
            self.0.remove(&run);
        }
        true
    }

    fn runs_of(&self, request: RequestKey) -> impl Iterator<Item = &AskedRequest> {
        let first = BatchKey { epoch: Epoch::NONE, batch: BatchId(0) };
        self.0.range((request, first)..).take_while(move |((of, _), _)| *of == request).map(|(_, asked)| asked)
    }

    /// The client of a request has taken so many answers.
    pub fn has_room(&self, request: RequestKey, answers: u32) {
        let streams = self.runs_of(request).filter_map(|asked| asked.stream.as_ref());
        streams.for_each(|stream| stream.window.taken(answers));
    }

    /// The clients of these requests have left.
    pub fn left(&self, requests: &[RequestKey]) {
        requests.iter().flat_map(|request| self.runs_of(*request)).for_each(AskedRequest::leave);
    }

    /// A frontend is lost, and with it the clients of its requests.
    pub fn handle_lost(&mut self, frontend: NodeId) {
        let lost = self.0.extract_if(.., |(request, _), _| request.frontend == frontend);
        lost.for_each(|(_, asked)| asked.leave());
    }
}

/// Tells the model's code whether the client waits for more answers.
type Done = Box<dyn FnOnce(bool) + Send>;

/// Bounds the answers that are on their way to a client, in number ([`MOST_STREAMED`]) and in bytes
/// ([`MOST_BYTES`]). A single answer may have more bytes.
#[derive(Default)]
struct Window(Mutex<WindowState>);

#[derive(Default)]
struct WindowState {
    /// The bytes of each answer on its way.
    on_way: VecDeque<usize>,
    bytes: usize,
    /// Calls of the model's code that wait for room.
    waiting: Vec<Done>,
    is_closed: bool,
}

impl WindowState {
    fn has_room(&self) -> bool {
        self.on_way.len() < MOST_STREAMED && self.bytes < MOST_BYTES
    }
}

impl Window {
    /// An answer goes to the client. `done` is called once another one may follow.
    fn sent(&self, bytes: usize, done: Done) {
        let mut state = self.0.lock();
        state.on_way.push_back(bytes);
        state.bytes += bytes;
        match (state.is_closed, state.has_room()) {
            (false, false) => state.waiting.push(done),
            (is_closed, _) => {
                drop(state);
                done(!is_closed);
            }
        }
    }

    /// The client has taken so many answers.
    fn taken(&self, answers: u32) {
        let mut state = self.0.lock();
        for _ in 0..answers {
            let Some(bytes) = state.on_way.pop_front() else { break };
            state.bytes -= bytes;
        }
        let free = if state.has_room() { std::mem::take(&mut state.waiting) } else { Vec::new() };
        let goes_on = !state.is_closed;
        drop(state);
        free.into_iter().for_each(|done| done(goes_on));
    }

    /// The client has left.
    fn close(&self) {
        let mut state = self.0.lock();
        state.is_closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(|done| done(false));
    }

    fn is_open(&self) -> bool {
        !self.0.lock().is_closed
    }
}

/// Takes the answers to a request of a decoupled model.
struct StreamTaker {
    run: RequestRun,
    loaded: Arc<LoadedVersion>,
    first: FirstAnswer,
    window: Arc<Window>,
    events: mpsc::UnboundedSender<BackendEvent>,
    arena: Option<Arc<Arena>>,
}

impl TakesAnswers for StreamTaker {
    fn take(
        &self,
        answer: Option<Result<Answered, RunError>>,
        parameters: Option<String>,
        is_final: bool,
        done: Box<dyn FnOnce(bool) + Send>,
    ) {
        let outputs = self.first.outputs(&self.loaded, answer);
        let answer = outputs.map(|outputs| outcome(outputs, parameters, self.arena.as_ref()));
        let bytes = match &answer {
            Some(Outcome::Outputs(outputs)) => usize::try_from(outputs.bytes()).unwrap_or(usize::MAX),
            _ => 0,
        };
        // A node that has ended has no clients.
        let goes_on = self.events.send(BackendEvent::Streamed(self.run, answer, is_final)).is_ok();
        if goes_on && !is_final {
            self.window.sent(bytes, done);
        } else {
            done(false);
        }
    }

    fn is_open(&self) -> bool {
        self.window.is_open()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window, and a way to send an answer of so many bytes. The answers of the window come back in
    /// order: whether more may follow.
    fn window() -> (Window, impl Fn(&Window, usize), std::sync::mpsc::Receiver<bool>) {
        let (sender, heard) = std::sync::mpsc::channel();
        let send = move |window: &Window, bytes| {
            let sender = sender.clone();
            window.sent(bytes, Box::new(move |more| assert!(sender.send(more).is_ok())));
        };
        (Window::default(), send, heard)
    }

    #[test]
    fn a_model_waits_for_a_client_that_does_not_read() {
        let (window, send, heard) = window();
        (0..MOST_STREAMED).for_each(|_| send(&window, 1));
        assert_eq!(heard.try_iter().filter(|more| *more).count(), MOST_STREAMED - 1, "the last one waits");
        window.taken(1);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [true]);
        window.taken(u32::MAX);
        send(&window, MOST_BYTES);
        assert_eq!(heard.try_iter().count(), 0, "large answers wait one by one");
        window.taken(1);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [true]);
    }

    #[test]
    fn a_model_hears_that_its_client_has_left() {
        let (window, send, heard) = window();
        (0..MOST_STREAMED).for_each(|_| send(&window, 1));
        window.close();
        assert_eq!(heard.try_iter().last(), Some(false));
        send(&window, 1);
        assert_eq!((heard.try_iter().collect::<Vec<_>>(), window.is_open()), (vec![false], false));
    }
}
