//! Requests that a lane takes one by one, instead of as rows of a joined batch.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use downbeat_core::{Duration, Time};

use super::error::RunError;
use crate::tensor::Tensor;

/// A request for [`super::Lane::answer`].
#[derive(Debug)]
pub struct AskedRequest {
    /// The request's rows: the size of its batch dimension, or 1.
    pub rows: u32,
    /// The inputs in signature order, each with its own shape. `None`: the client left out an
    /// optional input.
    pub tensors: Vec<Option<Tensor>>,
    /// The rest of the time until the request's deadline; `None`: it may take any time.
    pub budget: Option<Duration>,
    /// The other parts of the request; `None`: the server made up the request.
    pub about: Option<Arc<RequestAbout>>,
}

/// The outputs of a request in signature order. `None`: the model gave no such output.
pub type Answered = Vec<Option<Tensor>>;

/// An answer for each request of a batch. A request may fail alone.
pub type Answers = Vec<Result<Answered, RunError>>;

/// The parts of a request beside its tensors, for models that ask for them.
#[derive(Debug, Default)]
pub struct RequestAbout {
    /// The client's id of the request.
    pub id: String,
    /// The client's parameters, as a JSON object.
    pub parameters: String,
    /// The names of the outputs that the client wants; empty: all.
    pub outputs: Vec<String>,
    /// The positions of the inputs that the client left out.
    pub left_out: Vec<usize>,
    /// The request's deadline, once it is known.
    pub deadline: OnceLock<Time>,
    /// Whether the client has left.
    pub left: ClientLeft,
    /// Takes the answers, if the model may give any number of them.
    pub answers: AnswersTo,
    /// The parameters of the answer, as a JSON object, if the model gives one answer with some.
    pub answer_parameters: OnceLock<String>,
}

/// Takes the answers of a model that may give any number of answers to a request.
pub trait TakesAnswers: Send + Sync {
    /// Takes an answer with its `parameters` (a JSON object), and calls `done` with whether the client
    /// waits for more. `None`: the answers end without another. A client that reads slowly delays the
    /// call of `done`, and nothing else.
    fn take(
        &self,
        answer: Option<Result<Answered, RunError>>,
        parameters: Option<String>,
        is_final: bool,
        done: Box<dyn FnOnce(bool) + Send>,
    );

    /// Whether the client waits for more answers.
    fn is_open(&self) -> bool;
}

/// The place for the taker of a request's answers; empty for models with one answer.
#[derive(Default)]
pub struct AnswersTo(pub OnceLock<Arc<dyn TakesAnswers>>);

impl fmt::Debug for AnswersTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnswersTo({})", if self.0.get().is_some() { "a taker" } else { "nobody" })
    }
}

/// Tells whether the client of a request has left. A lane may watch for it.
#[derive(Default)]
pub struct ClientLeft {
    has_left: AtomicBool,
    watcher: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl ClientLeft {
    /// Whether the client has left.
    pub fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }

    /// The client has left: calls the watcher, once.
    pub fn leave(&self) {
        let mut watcher = self.watcher.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_left.store(true, Ordering::Release);
        if let Some(watcher) = watcher.take() {
            watcher();
        }
    }

    /// Calls `watcher` when the client leaves, or at once if it has left. Replaces any watcher.
    pub fn watch(&self, watcher: impl FnOnce() + Send + 'static) {
        let mut place = self.watcher.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_left() {
            watcher();
        } else {
            *place = Some(Box::new(watcher));
        }
    }

    /// Forgets the watcher.
    pub fn unwatch(&self) {
        *self.watcher.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl fmt::Debug for ClientLeft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientLeft({})", self.has_left())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn a_watcher_hears_once_that_the_client_has_left() {
        let (left, heard) = (ClientLeft::default(), Arc::new(AtomicU32::new(0)));
        let watcher = || {
            let heard = heard.clone();
            move || {
                heard.fetch_add(1, Ordering::Relaxed);
            }
        };
        left.watch(watcher());
        left.unwatch();
        left.watch(watcher());
        assert!(!left.has_left());
        left.leave();
        left.leave();
        assert_eq!((left.has_left(), heard.load(Ordering::Relaxed)), (true, 1));
        left.watch(watcher());
        assert_eq!(heard.load(Ordering::Relaxed), 2, "at once, as it has left");
    }
}
