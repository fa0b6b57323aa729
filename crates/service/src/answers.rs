//! The queue of the answers to one request. The thread that runs the model fills the queue, and
//! the connection of the client empties it.
//!
//! A client that reads slowly holds up its own request only. The queue takes [`MOST_ANSWERS`]
//! answers and [`MOST_BYTES`] bytes; then the sender waits. If the client takes no answer for the
//! sender's patience, the request ends with an error. If the client leaves, [`AnswerSender::is_closed`]
//! tells the model.

use std::any::Any;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use downbeat_protocol::InferResponse;
use futures_util::Stream;
use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use crate::error::ServiceError;

/// Most answers that wait for their client.
pub const MOST_ANSWERS: usize = 64;
/// Most bytes of answers that wait for their client, if there is more than one answer.
pub const MOST_BYTES: usize = 16 << 20;
/// How long a client may take no answer while its queue is full.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// One step of a request's answers.
#[derive(Debug)]
pub struct StreamAnswer {
    /// A response or an error; `None` if only the end is told.
    pub answer: Option<Result<InferResponse, ServiceError>>,
    /// Whether no step follows.
    pub is_final: bool,
}

/// The reader has gone, or the request has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no client waits for more answers of this request")]
pub struct NoReader;

/// The sender's end of a request's answers. Dropping it without a final step ends the request with
/// an error.
pub struct AnswerSender(Arc<Shared>);

/// The reader's end of a request's answers: a stream that ends after the final step. Dropping the
/// stream tells the sender that the client has left.
pub struct Answers {
    shared: Arc<Shared>,
    /// Kept until the answers end: what the request holds meanwhile.
    _held: Option<Box<dyn Any + Send>>,
}

struct Shared {
    state: Mutex<State>,
    patience: Duration,
    /// Tells a sender on a thread that there is room, or no reader.
    thread_room: Condvar,
    /// Tells a sender in a task the same.
    task_room: Notify,
    /// Tells that no reader is left.
    left: Notify,
}

#[derive(Default)]
struct State {
    steps: VecDeque<StreamAnswer>,
    bytes: usize,
    reader: Option<Waker>,
    /// A step was sent.
    is_used: bool,
    /// The final step was sent.
    is_ended: bool,
    /// The reader has gone.
    is_closed: bool,
}

/// A queue for the answers to one request. A sender waits at most `patience` for a reader that
/// takes nothing.
pub fn channel(patience: Duration) -> (AnswerSender, Answers) {
    let shared = Arc::new(Shared {
        state: Mutex::default(),
        patience,
        thread_room: Condvar::new(),
        task_room: Notify::new(),
        left: Notify::new(),
    });
    (AnswerSender(Arc::clone(&shared)), Answers { shared, _held: None })
}

impl StreamAnswer {
    /// A response or an error that others follow.
    pub fn more(answer: Result<InferResponse, ServiceError>) -> Self {
        StreamAnswer { answer: Some(answer), is_final: false }
    }

    /// The last response or error.
    pub fn last(answer: Result<InferResponse, ServiceError>) -> Self {
        StreamAnswer { answer: Some(answer), is_final: true }
    }

    /// The end after the last response.
    pub fn end() -> Self {
        StreamAnswer { answer: None, is_final: true }
    }

    fn bytes(&self) -> usize {
        match &self.answer {
            Some(Ok(response)) => response.outputs.iter().map(|output| output.data.len()).sum(),
            _ => 0,
        }
    }
}

impl State {
    /// Puts a step into the queue, and returns it if there is no room.
    fn offer(&mut self, step: StreamAnswer) -> Result<Result<(), StreamAnswer>, NoReader> {
        if self.is_closed || self.is_ended {
            return Err(NoReader);
        }
        let bytes = step.bytes();
        // The mark of the end always has room: it is the last.
        let has_room = self.steps.len() < MOST_ANSWERS && (self.bytes == 0 || self.bytes + bytes <= MOST_BYTES);
        if !has_room && step.answer.is_some() {
            return Ok(Err(step));
        }
        self.push(step, bytes);
        Ok(Ok(()))
    }

    fn push(&mut self, step: StreamAnswer, bytes: usize) {
        self.is_used = true;
        self.is_ended = step.is_final;
        self.bytes += bytes;
        self.steps.push_back(step);
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    /// Ends a request whose client reads too slowly. The answers that wait are thrown away.
    fn give_up(&mut self, patience: Duration) -> NoReader {
        if !self.is_closed && !self.is_ended {
            self.steps.clear();
            self.bytes = 0;
            let error = ServiceError::DeadlineExceeded(format!(
                "the client took no answer for {patience:?} while {MOST_ANSWERS} answers or {MOST_BYTES} bytes waited \
                 for it; read the answers as they come"
            ));
            self.push(StreamAnswer::last(Err(error)), 0);
        }
        NoReader
    }
}

impl AnswerSender {
    /// Sends a step. A full queue holds up the calling thread.
    ///
    /// # Errors
    /// [`NoReader`] if the client has left, does not read, or has had the final step.
    pub fn send_blocking(&self, step: StreamAnswer) -> Result<(), NoReader> {
        let mut state = self.0.state.lock();
        let mut step = step;
        loop {
            let is_final = step.is_final;
            match state.offer(step)? {
                Ok(()) => {
                    if is_final {
                        self.0.left.notify_waiters();
                    }
                    return Ok(());
                }
                Err(back) => step = back,
            }
            if self.0.thread_room.wait_for(&mut state, self.0.patience).timed_out() {
                self.0.left.notify_waiters();
                return Err(state.give_up(self.0.patience));
            }
        }
    }

    /// As [`AnswerSender::send_blocking`], for a task.
    ///
    /// # Errors
    /// The same.
    pub async fn send(&self, step: StreamAnswer) -> Result<(), NoReader> {
        let mut step = step;
        loop {
            let room = self.0.task_room.notified();
            let is_final = step.is_final;
            match self.0.state.lock().offer(step)? {
                Ok(()) => {
                    if is_final {
                        self.0.left.notify_waiters();
                    }
                    return Ok(());
                }
                Err(back) => step = back,
            }
            if tokio::time::timeout(self.0.patience, room).await.is_err() {
                let gone = self.0.state.lock().give_up(self.0.patience);
                self.0.left.notify_waiters();
                return Err(gone);
            }
        }
    }

    /// Whether nothing was sent.
    pub fn is_unused(&self) -> bool {
        !self.0.state.lock().is_used
    }

    /// Whether no client waits for more answers.
    pub fn is_closed(&self) -> bool {
        let state = self.0.state.lock();
        state.is_closed || state.is_ended
    }

    /// Completes once the client has left, or the final step was sent.
    pub async fn closed(&self) {
        loop {
            let left = self.0.left.notified();
            if self.is_closed() {
                return;
            }
            left.await;
        }
    }
}

impl Drop for AnswerSender {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        if !state.is_ended && !state.is_closed {
            let error = ServiceError::Internal("the model stopped before the last answer of this request".to_owned());
            state.push(StreamAnswer::last(Err(error)), 0);
        }
    }
}

impl Answers {
    /// The answers of a request that has exactly one.
    pub fn one(response: InferResponse) -> Self {
        let (sender, answers) = channel(PATIENCE);
        let step = StreamAnswer::last(Ok(response));
        let bytes = step.bytes();
        sender.0.state.lock().push(step, bytes);
        answers
    }

    /// Completes once a step can be read, or none will come.
    pub async fn begun(&mut self) {
        std::future::poll_fn(|context| {
            let mut state = self.shared.state.lock();
            if !state.steps.is_empty() || state.is_ended {
                return Poll::Ready(());
            }
            state.reader = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Keeps `held` until the answers end or are dropped.
    pub fn holding(mut self, held: impl Any + Send) -> Self {
        let before = self._held.take();
        self._held = Some(Box::new((held, before)));
        self
    }
}

impl Stream for Answers {
    type Item = StreamAnswer;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<StreamAnswer>> {
        let this = self.get_mut();
        let mut state = this.shared.state.lock();
        let Some(step) = state.steps.pop_front() else {
            if state.is_ended {
                drop(state);
                this._held = None;
                return Poll::Ready(None);
            }
            if state.reader.as_ref().is_none_or(|reader| !reader.will_wake(context.waker())) {
                state.reader = Some(context.waker().clone());
            }
            return Poll::Pending;
        };
        state.bytes -= step.bytes();
        drop(state);
        this.shared.thread_room.notify_all();
        this.shared.task_room.notify_waiters();
        Poll::Ready(Some(step))
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        let unread = std::mem::take(&mut state.steps);
        state.bytes = 0;
        drop(state);
        drop(unread);
        self.shared.thread_room.notify_all();
        self.shared.task_room.notify_waiters();
        self.shared.left.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use downbeat_core::tensor::DataType;
    use downbeat_protocol::InferTensor;
    use futures_util::StreamExt;

    use super::*;

    fn response(id: usize, bytes: usize) -> Result<InferResponse, ServiceError> {
        let output = InferTensor {
            name: "y".to_owned(),
            datatype: DataType::Uint8,
            shape: vec![bytes as i64],
            parameters: Default::default(),
            data: Bytes::from(vec![0; bytes]),
        };
        Ok(InferResponse { id: id.to_string(), outputs: vec![output], ..Default::default() })
    }

    fn id(step: &StreamAnswer) -> &str {
        &step.answer.as_ref().unwrap().as_ref().unwrap().id
    }

    fn error(step: StreamAnswer) -> String {
        step.answer.unwrap().unwrap_err().to_string()
    }

    #[tokio::test]
    async fn answers_come_in_order_until_the_final_step() {
        let (sender, mut answers) = channel(PATIENCE);
        let work = tokio::spawn(async move {
            for i in 0..1000 {
                sender.send(StreamAnswer::more(response(i, 1))).await.unwrap();
            }
            sender.send(StreamAnswer::end()).await.unwrap();
            assert_eq!(sender.send(StreamAnswer::end()).await, Err(NoReader));
        });
        for i in 0..1000 {
            let step = answers.next().await.unwrap();
            assert_eq!((id(&step), step.is_final), (i.to_string().as_str(), false));
        }
        let last = answers.next().await.unwrap();
        assert!(last.answer.is_none() && last.is_final);
        assert!(answers.next().await.is_none());
        work.await.unwrap();
    }

    #[test]
    fn a_thread_waits_for_room() {
        let (sender, mut answers) = channel(PATIENCE);
        let thread = std::thread::spawn(move || {
            for i in 0..5 {
                sender.send_blocking(StreamAnswer::more(response(i, MOST_BYTES / 2))).unwrap();
            }
            sender.send_blocking(StreamAnswer::last(response(5, MOST_BYTES * 2))).unwrap();
        });
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            for i in 0..6 {
                assert_eq!(id(&answers.next().await.unwrap()), i.to_string());
                assert!(answers.shared.state.lock().bytes <= MOST_BYTES * 2);
            }
            assert!(answers.next().await.is_none());
        });
        thread.join().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_ends_its_request() {
        let (sender, mut answers) = channel(PATIENCE);
        for i in 0..MOST_ANSWERS {
            sender.send(StreamAnswer::more(response(i, 1))).await.unwrap();
        }
        assert_eq!(sender.send(StreamAnswer::more(response(0, 1))).await, Err(NoReader));
        assert!(sender.is_closed());
        let only = error(answers.next().await.unwrap());
        assert!(only.starts_with("the client took no answer for 30s"), "{only}");
        assert!(answers.next().await.is_none());
    }

    #[test]
    fn a_thread_does_not_wait_longer_than_its_patience() {
        let (sender, answers) = channel(Duration::from_millis(1));
        let sent = (0..=MOST_ANSWERS).find(|i| sender.send_blocking(StreamAnswer::more(response(*i, 1))).is_err());
        assert_eq!(sent, Some(MOST_ANSWERS));
        drop(answers);
    }

    #[tokio::test]
    async fn a_reader_that_leaves_is_noticed() {
        let (sender, answers) = channel(PATIENCE);
        for i in 0..MOST_ANSWERS {
            sender.send(StreamAnswer::more(response(i, 1))).await.unwrap();
        }
        let waits = tokio::spawn(async move {
            let sent = sender.send(StreamAnswer::more(response(0, 1))).await;
            sender.closed().await;
            sent
        });
        tokio::task::yield_now().await;
        drop(answers);
        assert_eq!(waits.await.unwrap(), Err(NoReader));
    }

    #[tokio::test]
    async fn a_sender_that_stops_early_is_an_error() {
        let (sender, mut answers) = channel(PATIENCE);
        sender.send(StreamAnswer::more(response(0, 1))).await.unwrap();
        drop(sender);
        assert_eq!(id(&answers.next().await.unwrap()), "0");
        assert_eq!(error(answers.next().await.unwrap()), "the model stopped before the last answer of this request");
        assert!(answers.next().await.is_none());
    }

    #[tokio::test]
    async fn a_request_holds_its_things_until_its_answers_end() {
        let held = Arc::new(());
        let mut answers = Answers::one(response(0, 1).unwrap()).holding(Arc::clone(&held)).holding(Arc::clone(&held));
        assert!(answers.next().await.unwrap().is_final);
        assert_eq!(Arc::strong_count(&held), 3);
        assert!(answers.next().await.is_none());
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
