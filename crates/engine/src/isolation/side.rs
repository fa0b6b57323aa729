//! A second socket between the server and the process of an interpreter. It carries
//! messages beside the runs: early and late answers, and calls of other models.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::traits::{RunError, TakesAnswers};

/// The server's part in the messages of a process.
#[derive(Clone)]
pub struct Side {
    /// The requests whose answers come as messages.
    pub answers: Arc<AnswerTable>,
    /// Reads a process's messages, from the start of the process to its end.
    pub serve: Arc<dyn Fn(UnixStream) + Send + Sync>,
}

impl Side {
    /// Begins to serve a process, and returns the end of the socket for it.
    pub(super) fn open(&self) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        (self.serve)(ours);
        Ok(theirs)
    }
}

/// The requests of an instance to which any number of answers may come, by their numbers.
#[derive(Default)]
pub struct AnswerTable {
    /// Counts requests. The numbers of a later process are above those of an earlier one.
    next: AtomicU64,
    /// The number of the first request of the present run.
    run: AtomicU64,
    /// Counts the answers to the requests of the present run and of earlier ones.
    progress: AtomicU64,
    takers: Mutex<BTreeMap<u64, Arc<dyn TakesAnswers>>>,
}

impl AnswerTable {
    fn takers(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<dyn TakesAnswers>>> {
        self.takers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a request a number.
    pub fn add(&self, taker: Arc<dyn TakesAnswers>) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.takers().insert(number, taker);
        number
    }

    /// The taker of a request's answers; `None` after its last.
    pub fn get(&self, number: u64) -> Option<Arc<dyn TakesAnswers>> {
        self.takers().get(&number).cloned()
    }

    /// Forgets a request, and returns the taker of its answers.
    pub fn remove(&self, number: u64) -> Option<Arc<dyn TakesAnswers>> {
        self.takers().remove(&number)
    }

    /// A run begins with the next request.
    pub(super) fn begin_run(&self) {
        self.run.store(self.next(), Ordering::Relaxed);
    }

    /// Notes that the model has answered a request.
    pub fn answered(&self, number: u64) {
        if number >= self.run.load(Ordering::Relaxed) {
            self.progress.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A number that rises whenever the present run answers a request.
    pub(super) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// The number that the next request will have.
    pub fn next(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Ends the requests with numbers below `end`: their process has ended.
    pub fn end_below(&self, end: u64, error: &RunError) {
        let ended = {
            let mut takers = self.takers();
            let later = takers.split_off(&end);
            std::mem::replace(&mut *takers, later)
        };
        ended.into_values().for_each(|taker| taker.take(Some(Err(error.clone())), None, true, Box::new(drop)));
    }
}
