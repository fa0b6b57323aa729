//! Checks of a model's readiness by its own code (`is_ready`).

use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};

use downbeat_engine::OnReady;

use super::Frame;
use super::frame::Reply;

/// Most callers that wait for one check. A check that does not end keeps them.
const MOST_WAITING: usize = 256;

/// The checks of one instance. All who ask during a check hear its answer.
#[derive(Default)]
pub struct ReadyChecks(Mutex<State>);

#[derive(Default)]
struct State {
    /// The number of the process that answers, and the channel of its messages.
    process: Option<(u64, mpsc::Sender<Frame>)>,
    /// The number of the last check.
    number: u64,
    waiting: Vec<OnReady>,
}

impl ReadyChecks {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process takes the checks from now on.
    pub(super) fn open(&self, process: u64, replies: mpsc::Sender<Frame>) {
        self.lock().process = Some((process, replies));
    }

    /// A process has ended: its check has no answer.
    pub(super) fn close(&self, process: u64) {
        let mut state = self.lock();
        if state.process.as_ref().is_some_and(|(open, _)| *open == process) {
            state.process = None;
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            tell(waiting, &Err("the process of the model has ended".to_owned()));
        }
    }

    /// Asks the code, unless a check runs already.
    pub fn ask(&self, on_ready: OnReady) {
        let mut state = self.lock();
        if state.waiting.len() >= MOST_WAITING {
            drop(state);
            return on_ready(Err("is_ready has not returned yet".to_owned()));
        }
        state.waiting.push(on_ready);
        if state.waiting.len() > 1 {
            return;
        }
        state.number += 1;
        let question = Reply { asks_ready: true, ..Reply::of(state.number) };
        let is_sent = state.process.as_ref().is_some_and(|(_, replies)| replies.send((question, Vec::new())).is_ok());
        if !is_sent {
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            tell(waiting, &Err("the process of the model does not run".to_owned()));
        }
    }

    /// The code has answered a check. `reason`: why it is not ready.
    pub(super) fn hear(&self, number: u64, reason: Option<String>) {
        let mut state = self.lock();
        // An ended process cannot answer for its successor.
        if state.number == number {
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            tell(waiting, &reason.map_or(Ok(()), Err));
        }
    }
}

fn tell(waiting: Vec<OnReady>, answer: &Result<(), String>) {
    for on_ready in waiting {
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
    fn all_who_ask_during_a_check_hear_its_answer() {
        let (checks, heard, (replies, frames)) = (ReadyChecks::default(), Heard::default(), mpsc::channel());
        checks.open(1, replies);
        ask(&checks, &heard);
        ask(&checks, &heard);
        assert_eq!(asked(&frames), [1]);
        checks.hear(1, Some("no".to_owned()));
        assert_eq!(*heard.lock().unwrap(), [Err("no".to_owned()), Err("no".to_owned())]);
        ask(&checks, &heard);
        assert_eq!(asked(&frames), [2]);
        checks.hear(1, Some("late".to_owned()));
        assert_eq!(heard.lock().unwrap().len(), 2, "the answer to another check");
        checks.hear(2, None);
        assert_eq!(heard.lock().unwrap()[2], Ok(()));
    }

    #[test]
    fn the_end_of_the_process_answers() {
        let (checks, heard, (replies, _frames)) = (ReadyChecks::default(), Heard::default(), mpsc::channel());
        ask(&checks, &heard);
        assert!(heard.lock().unwrap()[0].as_ref().is_err_and(|reason| reason.contains("does not run")));
        checks.open(1, replies.clone());
        ask(&checks, &heard);
        checks.open(2, replies);
        checks.close(1);
        assert_eq!(heard.lock().unwrap().len(), 1, "another process has taken over");
        checks.close(2);
        assert!(heard.lock().unwrap()[1].as_ref().is_err_and(|reason| reason.contains("has ended")));
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
