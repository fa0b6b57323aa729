//! Checks of a model's readiness by its own code (`is_ready`).

use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};

use downbeat_engine::OnReady;

use super::Frame;
use super::frame::Reply;

/// Most callers that wait. A check that does not end keeps them.
const MOST_WAITING: usize = 256;

/// The checks of one instance. Each caller hears a check that began after its question, since an
/// older check may have looked at what the caller has changed since.
#[derive(Default)]
pub struct ReadyChecks(Mutex<State>);

#[derive(Default)]
struct State {
    /// The number of the process that answers, and the channel of its messages.
    process: Option<(u64, mpsc::Sender<Frame>)>,
    /// The number of the last check.
    number: u64,
    /// The callers that the running check answers. Empty: no check runs.
    waiting: Vec<OnReady>,
    /// The callers that came during the running check. The next check answers all of them.
    next: Vec<OnReady>,
}

impl State {
    /// Begins a check if there are callers. Returns the callers if no process hears the question.
    fn begin(&mut self, callers: Vec<OnReady>) -> Vec<OnReady> {
        if callers.is_empty() {
            return callers;
        }
        self.number += 1;
        let question = Reply { asks_ready: true, ..Reply::of(self.number) };
        let is_sent = self.process.as_ref().is_some_and(|(_, replies)| replies.send((question, Vec::new())).is_ok());
        if !is_sent {
            return callers;
        }
        self.waiting = callers;
        Vec::new()
    }

    /// Takes all callers.
    fn take_all(&mut self) -> Vec<OnReady> {
        let mut callers = std::mem::take(&mut self.waiting);
        callers.append(&mut self.next);
        callers
    }
}

impl ReadyChecks {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process takes the checks from now on, and the callers of its predecessor.
    pub(super) fn open(&self, process: u64, replies: mpsc::Sender<Frame>) {
        let mut state = self.lock();
        state.process = Some((process, replies));
        let callers = state.take_all();
        let unheard = state.begin(callers);
        drop(state);
        tell_of_no_process(unheard);
    }

    /// A process has ended: its check has no answer.
    pub(super) fn close(&self, process: u64) {
        let mut state = self.lock();
        if state.process.as_ref().is_some_and(|(open, _)| *open == process) {
            state.process = None;
            let callers = state.take_all();
            drop(state);
            tell(callers, &Err("the process of the model has ended".to_owned()));
        }
    }

    /// Asks the code, at once or after the check that runs.
    pub fn ask(&self, on_ready: OnReady) {
        let mut state = self.lock();
        if state.waiting.len() + state.next.len() >= MOST_WAITING {
            drop(state);
            return on_ready(Err("is_ready has not returned yet".to_owned()));
        }
        if !state.waiting.is_empty() {
            return state.next.push(on_ready);
        }
        let unheard = state.begin(vec![on_ready]);
        drop(state);
        tell_of_no_process(unheard);
    }

    /// The code has answered a check. `reason`: why it is not ready.
    pub(super) fn hear(&self, number: u64, reason: Option<String>) {
        let mut state = self.lock();
        // An ended process cannot answer for its successor.
        if state.number != number {
            return;
        }
        let answered = std::mem::take(&mut state.waiting);
        let next = std::mem::take(&mut state.next);
        let unheard = state.begin(next);
        drop(state);
        tell(answered, &reason.map_or(Ok(()), Err));
        tell_of_no_process(unheard);
    }
}

fn tell_of_no_process(callers: Vec<OnReady>) {
    tell(callers, &Err("the process of the model does not run".to_owned()));
}

fn tell(callers: Vec<OnReady>, answer: &Result<(), String>) {
    for on_ready in callers {
        on_ready(answer.clone());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    type Heard = Arc<Mutex<Vec<Result<(), String>>>>;

    fn ask(checks: &ReadyChecks, heard: &Heard) {
        let heard = heard.clone();
        checks.ask(Box::new(move |answer| heard.lock().unwrap().push(answer)));
    }

    fn asked(frames: &mpsc::Receiver<Frame>) -> Vec<u64> {
        frames.try_iter().map(|(reply, _)| reply).filter(|reply| reply.asks_ready).map(|reply| reply.id).collect()
    }

    #[test]
    fn a_check_answers_only_who_asked_before_it() {
        let (checks, heard, (replies, frames)) = (ReadyChecks::default(), Heard::default(), mpsc::channel());
        checks.open(1, replies);
        ask(&checks, &heard);
        ask(&checks, &heard);
        ask(&checks, &heard);
        assert_eq!(asked(&frames), [1]);
        checks.hear(1, Some("no".to_owned()));
        assert_eq!(*heard.lock().unwrap(), [Err("no".to_owned())]);
        assert_eq!(asked(&frames), [2], "one check for all that came meanwhile");
        checks.hear(1, Some("late".to_owned()));
        assert_eq!(heard.lock().unwrap().len(), 1, "the answer to another check");
        checks.hear(2, None);
        assert_eq!(heard.lock().unwrap()[1..], [Ok(()), Ok(())]);
        assert!(asked(&frames).is_empty(), "all callers have their answers");
        ask(&checks, &heard);
        assert_eq!(asked(&frames), [3]);
    }

    #[test]
    fn the_end_of_the_process_answers() {
        let (checks, heard, (replies, _frames)) = (ReadyChecks::default(), Heard::default(), mpsc::channel());
        ask(&checks, &heard);
        assert!(heard.lock().unwrap()[0].as_ref().is_err_and(|reason| reason.contains("does not run")));
        checks.open(1, replies);
        ask(&checks, &heard);
        ask(&checks, &heard);
        checks.close(1);
        let heard = heard.lock().unwrap();
        assert_eq!(heard.len(), 3);
        assert!(heard[1..].iter().all(|heard| heard.as_ref().is_err_and(|reason| reason.contains("has ended"))));
    }

    #[test]
    fn the_next_process_takes_over_the_callers() {
        let (checks, heard, (replies, first)) = (ReadyChecks::default(), Heard::default(), mpsc::channel());
        checks.open(1, replies);
        ask(&checks, &heard);
        ask(&checks, &heard);
        let (replies, second) = mpsc::channel();
        checks.open(2, replies);
        checks.close(1);
        assert_eq!((asked(&first), asked(&second)), (vec![1], vec![2]));
        checks.hear(1, Some("late".to_owned()));
        assert!(heard.lock().unwrap().is_empty());
        checks.hear(2, None);
        assert_eq!(*heard.lock().unwrap(), [Ok(()), Ok(())]);
    }

    #[test]
    fn a_check_that_does_not_end_keeps_few_callers() {
        let (checks, heard, (replies, _frames)) = (ReadyChecks::default(), Heard::default(), mpsc::channel());
        checks.open(1, replies);
        for _ in 0..MOST_WAITING + 3 {
            ask(&checks, &heard);
        }
        assert_eq!(heard.lock().unwrap().len(), 3);
    }
}
