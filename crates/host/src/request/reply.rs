//! The way of an answer to the request that waits for it.

use std::cell::RefCell;
use std::sync::Arc;

use downbeat_core::Time;
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::statistics::Phases;
use downbeat_service::report::missed::Miss;
use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};
use tokio::sync::{mpsc, oneshot};

use crate::request::batch_codec::Outputs;

/// The outputs of a request, or the reason why it has none.
pub type Answer = Result<Outputs, ServiceError>;

/// The answer as the waiting request gets it.
pub struct Answered {
    /// The answer.
    pub answer: Answer,
    /// How the request missed; `None`: it is in time.
    pub miss: Option<Box<Miss>>,
}

thread_local! {
    /// The channel for answers to the requests of this thread, if its event loop takes them
    /// together.
    static WAY: RefCell<Option<Way>> = const { RefCell::new(None) };
    /// The answers of this thread that are not sent yet, while it sends answers together.
    static OUTBOX: RefCell<Option<Vec<(Way, Parcel)>>> = const { RefCell::new(None) };
}

/// Answers for one event loop.
pub type Parcel = SmallVec<[Delivery; 1]>;

type Way = mpsc::UnboundedSender<Parcel>;

/// The destination of a request's answer. An event loop is woken once for all answers of a batch,
/// not for each.
pub struct Reply {
    to: To,
    way: Option<Way>,
}

enum To {
    /// A request of this process waits for the answer.
    Client(oneshot::Sender<Answered>),
    /// The answer is kept, with the place of the request in its batch, until the batch is done.
    Batch(Arc<Gathered>, usize),
}

/// The answers to the requests of a batch, until the batch is done.
#[derive(Default)]
pub struct Gathered {
    answers: Mutex<BatchAnswers>,
    /// Takes the answers once no reply of the batch is left; `None`: the batch's owner takes them.
    done: Option<TakesAnswers>,
}

/// Takes the answers of a batch.
pub type TakesAnswers = Box<dyn Fn(BatchAnswers) + Send + Sync>;

impl Gathered {
    /// Gathers answers for `done`, which gets them once all replies are sent or dropped. The caller
    /// keeps no reference.
    pub fn until_done(done: TakesAnswers) -> Self {
        Gathered { answers: Mutex::default(), done: Some(done) }
    }

    /// Takes the answers that have come so far.
    pub fn take(&self) -> BatchAnswers {
        std::mem::take(&mut *self.answers.lock())
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(self.take());
        }
    }
}

/// The answers to the requests of a batch, and its run.
#[derive(Default)]
pub struct BatchAnswers {
    /// Each answer with the place of its request in the batch, in the order in which they came.
    pub answers: Vec<(usize, Answer)>,
    /// The launch of the batch. `None`: nothing ran, or the batch failed and each request ran alone.
    pub run: Option<BatchRun>,
}

/// The launch of a batch.
#[derive(Clone, Copy, Debug)]
pub struct BatchRun {
    /// Items of the launch, padding included.
    pub rows: u32,
    /// The phases of the launch.
    pub phases: Phases,
    /// When the launch ended.
    pub ended: Time,
}

/// An answer on the way to its client.
pub struct Delivery {
    to: To,
    answered: Answered,
}

impl Reply {
    /// Makes the reply for a request of the calling thread, which waits for its answer on that
    /// thread.
    pub fn channel() -> (Self, oneshot::Receiver<Answered>) {
        let (to, answer) = oneshot::channel();
        (Reply { to: To::Client(to), way: WAY.with_borrow(Clone::clone) }, answer)
    }

    /// Makes the reply for the request at this place of a batch.
    pub fn gathered(answers: Arc<Gathered>, place: usize) -> Self {
        Reply { to: To::Batch(answers, place), way: None }
    }

    /// Whether the client has gone.
    pub fn is_closed(&self) -> bool {
        match &self.to {
            To::Client(to) => to.is_closed(),
            To::Batch(..) => false,
        }
    }

    /// Notes the launch of the request's batch, if the batch gathers its answers.
    pub fn ran(&self, run: BatchRun) {
        if let To::Batch(gathered, _) = &self.to {
            gathered.answers.lock().run = Some(run);
        }
    }

    /// Answers a request that is in time. The answer is dropped if the client has gone.
    pub fn send(self, answer: Answer) {
        self.send_answered(Answered { answer, miss: None });
    }

    /// Answers a request that missed, if `miss` tells how.
    pub fn send_answered(self, answered: Answered) {
        let delivery = Delivery { to: self.to, answered };
        let elsewhere = |way: &Way| WAY.with_borrow(|mine| !mine.as_ref().is_some_and(|mine| mine.same_channel(way)));
        let Some(way) = self.way.filter(elsewhere) else { return delivery.deliver() };
        let sent = OUTBOX.with_borrow_mut(|outbox| {
            let Some(outbox) = outbox else { return Some((way, delivery)) };
            match outbox.iter_mut().find(|(other, _)| other.same_channel(&way)) {
                Some((_, parcel)) => parcel.push(delivery),
                None => outbox.push((way, smallvec![delivery])),
            }
            None
        });
        // If the event loop has ended, no request waits, and the answer is dropped.
        sent.into_iter().for_each(|(way, delivery)| drop(way.send(smallvec![delivery])));
    }
}

/// Sends the answers in the outbox, also if a panic ends the answering.
struct Outbox;

impl Drop for Outbox {
    fn drop(&mut self) {
        let parcels = OUTBOX.take().into_iter().flatten();
        parcels.for_each(|(way, parcel)| drop(way.send(parcel)));
    }
}

/// Answers requests by `answer`, and sends all answers at its end. Otherwise a sleeping event loop
/// would wake for the first answer, often in place of this thread, and again for each of the
/// others.
pub fn together<T>(answer: impl FnOnce() -> T) -> T {
    // Nested calls occur, as when the last request of a version drops the version. The outer call
    // sends the answers of both.
    let is_first = OUTBOX.with_borrow(Option::is_none);
    if is_first {
        OUTBOX.set(Some(Vec::new()));
    }
    let _sends = is_first.then(|| Outbox);
    answer()
}

impl Delivery {
    /// Hands the answer over.
    pub fn deliver(self) {
        match self.to {
            // The client may have gone.
            To::Client(to) => drop(to.send(self.answered)),
            To::Batch(gathered, place) => gathered.answers.lock().answers.push((place, self.answered.answer)),
        }
    }
}

/// From now on answers to requests of this thread come here, for the thread to deliver.
pub fn of_this_thread() -> mpsc::UnboundedReceiver<Parcel> {
    let (way, answers) = mpsc::unbounded_channel();
    WAY.set(Some(way));
    answers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(answer: Answer) -> Vec<u8> {
        answer.unwrap()[0].data.to_vec()
    }

    fn answer(byte: u8) -> Answer {
        Ok([crate::request::batch_codec::OutputPart { shape: vec![1], data: vec![byte].into() }].into_iter().collect())
    }

    #[test]
    fn answers_from_other_threads_come_together_and_own_ones_at_once() {
        let mut way = of_this_thread();
        let (replies, mut waiting): (Vec<_>, Vec<_>) = (0..3).map(|_| Reply::channel()).unzip();
        let (own, mut mine) = Reply::channel();
        let send = move || {
            let mut replies = (1..).zip(replies);
            together(|| replies.by_ref().take(2).for_each(|(byte, reply)| reply.send(answer(byte))));
            replies.for_each(|(byte, reply)| reply.send(answer(byte)));
        };
        std::thread::spawn(send).join().unwrap();
        own.send(answer(9));
        assert_eq!(bytes(mine.try_recv().unwrap().answer), [9]);
        assert!(waiting.iter_mut().all(|answer| answer.try_recv().is_err()), "they are not delivered yet");
        let mut come = Vec::new();
        assert_eq!(way.blocking_recv_many(&mut come, 10), 2);
        assert_eq!(come.iter().map(SmallVec::len).collect::<Vec<_>>(), [2, 1], "two were sent together");
        come.into_iter().flatten().for_each(Delivery::deliver);
        let got: Vec<Vec<u8>> = waiting.iter_mut().map(|answer| bytes(answer.try_recv().unwrap().answer)).collect();
        assert_eq!(got, [[1], [2], [3]]);
    }

    #[test]
    fn what_is_answered_in_the_middle_of_answering_comes_with_the_rest() {
        let mut way = of_this_thread();
        let (replies, mut waiting): (Vec<_>, Vec<_>) = (0..3).map(|_| Reply::channel()).unzip();
        let send = move || {
            let mut send = (1..).zip(replies).map(|(byte, reply)| reply.send(answer(byte)));
            together(|| {
                send.next();
                together(|| send.next());
                send.next();
            });
        };
        std::thread::spawn(send).join().unwrap();
        let come = way.try_recv().unwrap();
        assert!(way.try_recv().is_err(), "all were sent together");
        come.into_iter().for_each(Delivery::deliver);
        let got: Vec<Vec<u8>> = waiting.iter_mut().map(|answer| bytes(answer.try_recv().unwrap().answer)).collect();
        assert_eq!(got, [[1], [2], [3]]);
    }

    #[test]
    fn a_batch_gathers_its_answers_and_its_run() {
        let gathered = Arc::new(Gathered::default());
        let replies: Vec<_> = (0..2).map(|place| Reply::gathered(gathered.clone(), place)).collect();
        replies[0].ran(BatchRun { rows: 4, phases: Phases::default(), ended: Time::from_nanos(7) });
        replies.into_iter().rev().zip(1..).for_each(|(reply, byte)| reply.send(answer(byte)));
        let BatchAnswers { answers, run } = gathered.take();
        let run = run.unwrap();
        assert_eq!((run.rows, run.ended), (4, Time::from_nanos(7)));
        let answers: Vec<_> = answers.into_iter().map(|(place, answer)| (place, bytes(answer))).collect();
        assert_eq!(answers, [(1, vec![1]), (0, vec![2])]);
    }

    #[test]
    fn the_last_reply_hands_on_the_answers_of_its_batch() {
        let (sender, mut done) = mpsc::unbounded_channel();
        let gathered = Arc::new(Gathered::until_done(Box::new(move |answers| drop(sender.send(answers)))));
        let mut replies: Vec<_> = (0..2).map(|place| Reply::gathered(gathered.clone(), place)).collect();
        drop(gathered);
        replies.swap_remove(0).send(answer(1));
        assert!(done.try_recv().is_err(), "a reply is left");
        drop(replies);
        let BatchAnswers { answers, run } = done.try_recv().unwrap();
        let answers: Vec<_> = answers.into_iter().map(|(place, answer)| (place, bytes(answer))).collect();
        assert_eq!((answers, run.is_none()), (vec![(0, vec![1])], true), "the other reply had no answer");
    }

    #[test]
    fn a_thread_without_a_way_is_answered_at_once() {
        let (reply, mut mine) = std::thread::spawn(Reply::channel).join().unwrap();
        assert!(!reply.is_closed());
        reply.send(answer(1));
        assert_eq!(bytes(mine.try_recv().unwrap().answer), [1]);
    }
}
