//! Threads for work that would hold up connections: reading and writing large bodies, decoding
//! pictures and texts, listing and rendering what the server has.
//!
//! **Turns.** Only `turns` threads work at the same time: each has a turn. Work that calls
//! [`step`](downbeat_protocol::pace::step) gives its turn up after each slice, if the line has work
//! that was served less (`work_line.rs`). Its thread waits until it has a turn again.
//!
//! **Work that cannot stop.** A tokenizer knows no steps. A turn that takes long is overdue: the
//! pool grants another turn until it ends, so that one text does not hold up others. Few turns in
//! all may be overdue, and still fewer of one model or one client address.
//!
//! **End.** Work ends at its next step once its future is dropped, or after 30 s in turns.
//!
//! **Bound.** The bytes of waiting work count in the budget of all requests. A thread is started
//! when work needs one. As many threads as there are turns stay, and sleep while there is no work.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Weak};

use downbeat_core::{Duration, Time};
use downbeat_engine::at_normal_priority;
use downbeat_protocol::pace;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use crate::error::ServiceError;
use crate::work::work_line::{Path, Waiting, WorkLine};

/// Bytes of a slice: about a millisecond of reading JSON.
const SLICE: u64 = 128 << 10;
/// A turn is overdue after this long.
const OVERDUE_AFTER: std::time::Duration = std::time::Duration::from_millis(50);
/// Most turns of a pool that are overdue at the same time.
const MOST_OVERDUE: u32 = 8;
/// Most time that one piece of work may use, all its turns together.
const MOST_TIME: std::time::Duration = std::time::Duration::from_secs(30);

/// Work that ended at a step because its client had left, in all pools.
static ABANDONED: AtomicU64 = AtomicU64::new(0);

/// How often work ended, or did not begin, because its client had left.
pub fn abandoned() -> u64 {
    ABANDONED.load(Relaxed)
}

/// The place of a piece of work in the line.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Whose it is.
    pub path: Path,
    /// When it should be done.
    pub deadline: Time,
    /// How long it probably takes.
    pub takes: Duration,
}

/// Threads that take turns.
#[derive(Debug)]
pub struct WorkPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    name: &'static str,
    turns: u32,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug)]
struct State {
    line: WorkLine<Work>,
    /// The work that has a turn, by its number.
    held: BTreeMap<u64, Held>,
    overdue: u32,
    /// Work that has a turn, and no thread yet.
    ready: VecDeque<Waiting<Work>>,
    threads: u32,
    idle: u32,
    next: u64,
    stopped: bool,
}

#[derive(Debug)]
struct Held {
    path: Path,
    since: Instant,
    takes: Duration,
    is_overdue: bool,
}

#[derive(Debug)]
enum Work {
    Begin(Job),
    /// The thread that waits for its next turn.
    GoOn(SyncSender<()>, Duration),
}

impl Work {
    fn takes(&self) -> Duration {
        match self {
            Work::Begin(Job { takes, .. }) | Work::GoOn(_, takes) => *takes,
        }
    }
}

struct Job {
    takes: Duration,
    asker: Weak<Asker>,
    run: Box<dyn FnOnce() + Send>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "work of about {}", self.takes)
    }
}

/// Lives as long as the future that waits for a piece of work.
#[derive(Default)]
struct Asker {
    /// The work has used all the time that it may.
    took_too_long: AtomicBool,
}

/// The payload of the panic that ends work at a step.
struct Ended;

impl WorkPool {
    /// Makes a pool with `turns` turns, at least one. `name` names its threads.
    pub fn new(name: &'static str, turns: usize) -> Self {
        let turns = u32::try_from(turns).unwrap_or(u32::MAX).max(1);
        let state = State {
            // A connection leaves others a quarter of the turns.
            line: WorkLine::new((turns - turns / 4).max(2)),
            held: BTreeMap::new(),
            overdue: 0,
            ready: VecDeque::new(),
            threads: 0,
            idle: 0,
            next: 0,
            stopped: false,
        };
        WorkPool { shared: Arc::new(Shared { name, turns, state: Mutex::new(state), wake: Condvar::new() }) }
    }

    /// Has `work` done. Dropping the future ends the work at its next step.
    ///
    /// # Errors
    /// `TooLarge` if it used more time than work may; `Internal` if it panicked, or the system has
    /// no thread left.
    pub async fn run<T: Send + 'static>(
        &self,
        place: Place,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ServiceError> {
        let asker = Arc::new(Asker::default());
        let (sender, mut done) = oneshot::channel();
        let run = move || {
            // An error: the future was dropped.
            let _ = sender.send(work());
        };
        self.submit(place, Job { takes: place.takes, asker: Arc::downgrade(&asker), run: Box::new(run) });
        loop {
            match timeout(OVERDUE_AFTER, &mut done).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(_)) if asker.took_too_long.load(Relaxed) => {
                    return Err(ServiceError::TooLarge(format!(
                        "the request takes more than {} s of a core to read or to answer: send less in one request",
                        MOST_TIME.as_secs()
                    )));
                }
                Ok(Err(_)) => return Err(ServiceError::Internal("a worker stopped: this is a defect".to_owned())),
                Err(_) => self.shared.lend_turns(),
            }
        }
    }

    /// Has `work` done. No future waits for the end.
    pub fn spawn(&self, place: Place, work: impl FnOnce() + Send + 'static) {
        let asker = Arc::new(Asker::default());
        let weak = Arc::downgrade(&asker);
        let run = move || {
            work();
            drop(asker);
        };
        self.submit(place, Job { takes: place.takes, asker: weak, run: Box::new(run) });
    }

    fn submit(&self, Place { path, deadline, .. }: Place, job: Job) {
        let mut state = self.shared.state.lock();
        let number = state.next;
        state.next += 1;
        state.line.push(Waiting { path, has_begun: false, deadline, number, work: Work::Begin(job) });
        self.shared.grant(&mut state);
    }

    /// How long work with this deadline would wait if it came now: zero if a turn is free.
    pub fn wait(&self, deadline: Time) -> Duration {
        let state = self.shared.state.lock();
        if state.has_turn(self.shared.turns) {
            return Duration::ZERO;
        }
        let waiting = state.line.iter().filter(|waiting| waiting.deadline <= deadline);
        let held = state.held.values().map(|held| held.takes);
        let all =
            waiting.map(|waiting| waiting.work.takes()).chain(held).fold(Duration::ZERO, |sum, takes| sum + takes);
        Duration::from_nanos(all.as_nanos() / u64::from(self.shared.turns))
    }
}

impl Drop for WorkPool {
    fn drop(&mut self) {
        self.shared.state.lock().stopped = true;
        self.shared.wake.notify_all();
    }
}

impl State {
    /// Whether a turn is free.
    fn has_turn(&self, turns: u32) -> bool {
        (self.held.len() as u64) < u64::from(turns + self.overdue)
    }
}

impl Shared {
    /// Grants the free turns.
    fn grant(self: &Arc<Self>, state: &mut State) {
        while state.has_turn(self.turns)
            && let Some(next) = state.line.pop()
        {
            let takes = next.work.takes();
            let held = Held { path: next.path, since: Instant::now(), takes, is_overdue: false };
            state.held.insert(next.number, held);
            match next.work {
                // The work's thread waits for the turn.
                Work::GoOn(turn, _) => drop(turn.send(())),
                Work::Begin(_) => {
                    state.ready.push_back(next);
                    self.wake_thread(state);
                }
            }
        }
    }

    /// Wakes or starts a thread for the work that is ready.
    fn wake_thread(self: &Arc<Self>, state: &mut State) {
        if state.idle as usize >= state.ready.len() {
            self.wake.notify_one();
            return;
        }
        let (its, thread) = (self.clone(), std::thread::Builder::new().name(self.name.to_owned()));
        match at_normal_priority(move || thread.spawn(move || its.work())) {
            Ok(_) => state.threads += 1,
            Err(error) => {
                tracing::error!(%error, "no thread for the work of a request");
                // Another thread takes it. Without one, the work is dropped, and its request is
                // answered with an error.
                if state.threads == 0
                    && let Some(lost) = state.ready.pop_back()
                {
                    self.give_up(state, lost.number);
                    state.line.end(&lost.path);
                }
            }
        }
    }

    /// The life of a thread.
    fn work(self: Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            if let Some(Waiting { path, deadline, number, work: Work::Begin(job), .. }) = state.ready.pop_front() {
                MutexGuard::unlocked(&mut state, || self.run(job, path, deadline, number));
                self.give_up(&mut state, number);
                state.line.end(&path);
                self.grant(&mut state);
            } else if state.stopped || state.idle >= self.turns {
                state.threads -= 1;
                return;
            } else {
                state.idle += 1;
                self.wake.wait(&mut state);
                state.idle -= 1;
            }
        }
    }

    fn run(self: &Arc<Self>, job: Job, path: Path, deadline: Time, number: u64) {
        if job.asker.strong_count() == 0 {
            ABANDONED.fetch_add(1, Relaxed);
            return;
        }
        let (shared, takes) = (self.clone(), job.takes);
        let mut pace = Pace {
            shared,
            path,
            deadline,
            number,
            takes,
            asker: job.asker,
            bytes: 0,
            since: Instant::now(),
            used: Default::default(),
        };
        let ended = catch_unwind(AssertUnwindSafe(|| pace::with(move |bytes| pace.step(bytes), job.run)));
        // Work that panics fails its request, whose sender is dropped with it, and no other.
        if ended.is_err_and(|payload| !payload.is::<Ended>()) {
            tracing::error!("the work of a request panicked: this is a defect");
        }
    }

    /// Takes the turn of work back, and counts its time.
    fn give_up(&self, state: &mut State, number: u64) {
        let Some(held) = state.held.remove(&number) else { return };
        state.line.serve(&held.path, held.since.elapsed());
        if held.is_overdue {
            state.overdue -= 1;
            state.line.set_overdue(&held.path, false);
        }
    }

    /// Grants a further turn for each overdue one.
    fn lend_turns(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let now = Instant::now();
        for held in state.held.values_mut() {
            let is_late = now.duration_since(held.since) >= OVERDUE_AFTER;
            if is_late && !held.is_overdue && state.overdue < MOST_OVERDUE {
                held.is_overdue = true;
                state.overdue += 1;
                state.line.set_overdue(&held.path, true);
            }
        }
        self.grant(state);
    }
}

/// The state of a piece of work between its steps.
struct Pace {
    shared: Arc<Shared>,
    path: Path,
    deadline: Time,
    number: u64,
    takes: Duration,
    asker: Weak<Asker>,
    /// Since the last slice.
    bytes: u64,
    /// The beginning of the turn.
    since: Instant,
    /// Time of the turns before.
    used: std::time::Duration,
}

impl Pace {
    fn step(&mut self, bytes: u64) {
        self.bytes += bytes;
        if self.bytes < SLICE {
            return;
        }
        let now = Instant::now();
        match self.asker.upgrade() {
            None => {
                ABANDONED.fetch_add(1, Relaxed);
                resume_unwind(Box::new(Ended));
            }
            Some(asker) if self.used + (now - self.since) > MOST_TIME => {
                asker.took_too_long.store(true, Relaxed);
                resume_unwind(Box::new(Ended));
            }
            Some(_) => self.pass(now),
        }
    }

    /// Lets others go first that were served less.
    fn pass(&mut self, now: Instant) {
        let mut state = self.shared.state.lock();
        self.bytes = 0;
        self.shared.give_up(&mut state, self.number);
        let (turn, next_turn) = sync_channel(1);
        let (path, deadline, number) = (self.path, self.deadline, self.number);
        state.line.push(Waiting { path, has_begun: true, deadline, number, work: Work::GoOn(turn, self.takes) });
        self.shared.grant(&mut state);
        drop(state);
        self.used += now - self.since;
        // An error cannot be: the line keeps the other end until it has sent.
        let _ = next_turn.recv();
        self.since = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use futures_util::FutureExt;

    use super::*;
    use crate::client::Client;
    use crate::work::work_line::{path_by_model, path_by_size};

    const MS: Duration = Duration::from_millis(1);

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    fn place(deadline: Time, takes: Duration) -> Place {
        Place { path: path_by_model(Client::HERE, 1), deadline, takes }
    }

    fn of_size(connection: Client, bytes: u64) -> Place {
        Place { path: path_by_size(connection, bytes), deadline: Time::MAX, takes: Duration::ZERO }
    }

    fn connection() -> Client {
        Client::at("10.0.0.1".parse().unwrap())
    }

    /// Has the only turn of a pool taken until the sender is dropped. The caller keeps the future.
    fn hold(pool: &WorkPool, place: Place) -> (impl Future<Output = Result<(), ServiceError>>, mpsc::Sender<()>) {
        let (release, released) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        let mut held = Box::pin(pool.run(place, move || {
            begun.send(()).unwrap();
            let _ = released.recv();
        }));
        assert!(held.as_mut().now_or_never().is_none());
        begins.recv().unwrap();
        (held, release)
    }

    #[tokio::test]
    async fn the_earliest_deadline_of_a_client_is_first_and_equal_ones_in_order() {
        let pool = WorkPool::new("test", 1);
        let (held, release) = hold(&pool, place(at(0), MS));
        let (done, order) = mpsc::channel();
        let all = [("c", at(30)), ("a", at(10)), ("b", at(20)), ("b2", at(20)), ("never", Time::MAX)];
        let mut runs: Vec<_> = all
            .into_iter()
            .map(|(name, deadline)| {
                let done = done.clone();
                Box::pin(pool.run(place(deadline, MS), move || done.send(name).unwrap()))
            })
            .collect();
        assert!(runs.iter_mut().all(|run| run.as_mut().now_or_never().is_none()));
        drop((release, done));
        assert_eq!(order.iter().collect::<Vec<_>>(), ["a", "b", "b2", "c", "never"]);
        held.await.unwrap();
    }

    #[tokio::test]
    async fn what_comes_waits_for_the_more_urgent_and_not_where_a_turn_is_free() {
        let pool = WorkPool::new("test", 1);
        assert_eq!(pool.wait(at(10)), Duration::ZERO);
        let (_held, release) = hold(&pool, place(at(0), MS));
        assert_eq!(pool.wait(at(10)), MS, "what is at work");
        let mut later = Box::pin(pool.run(place(at(20), Duration::from_millis(5)), || ()));
        assert!(later.as_mut().now_or_never().is_none());
        assert_eq!((pool.wait(at(10)), pool.wait(at(20))), (MS, Duration::from_millis(6)));
        drop(release);
        later.await.unwrap();
    }

    #[tokio::test]
    async fn a_panic_ends_its_work_alone() {
        let pool = WorkPool::new("test", 1);
        let failed = pool.run(place(at(1), MS), || panic!("on purpose")).await;
        assert!(matches!(failed, Err(ServiceError::Internal(_))), "{failed:?}");
        assert_eq!(pool.run(place(at(2), MS), || 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn work_ends_at_its_next_step_once_nobody_waits() {
        let pool = WorkPool::new("test", 1);
        let (release, released) = mpsc::channel::<()>();
        let (said, steps) = mpsc::channel();
        let mut long = Box::pin(pool.run(of_size(connection(), 1 << 30), move || {
            for step in 0..1000 {
                said.send(step).unwrap();
                if step == 3 {
                    let _ = released.recv();
                }
                pace::step(SLICE);
            }
        }));
        assert!(long.as_mut().now_or_never().is_none());
        assert_eq!(steps.iter().take(4).last(), Some(3));
        drop(long);
        drop(release);
        // The channel ends with the work.
        assert_eq!(steps.iter().count(), 0);
    }

    #[tokio::test]
    async fn work_that_waits_for_its_turn_does_not_begin_once_nobody_waits_for_it() {
        let pool = WorkPool::new("test", 1);
        let (held, release) = hold(&pool, of_size(connection(), 1));
        let (said, begun) = mpsc::channel::<()>();
        let mut left = Box::pin(pool.run(of_size(connection(), 1), move || said.send(()).unwrap()));
        assert!(left.as_mut().now_or_never().is_none());
        drop(left);
        drop(release);
        assert_eq!(begun.iter().count(), 0);
        held.await.unwrap();
    }

    #[tokio::test]
    async fn small_work_has_its_turn_after_a_slice_of_large_work() {
        let pool = WorkPool::new("test", 1);
        let (release, released) = mpsc::channel::<()>();
        let (said, order) = mpsc::channel();
        let (begun, of_small) = (said.clone(), said);
        let mut large = Box::pin(pool.run(of_size(connection(), 48 << 20), move || {
            for slice in 0..4 {
                begun.send(("large", slice)).unwrap();
                let _ = released.recv();
                pace::step(SLICE);
            }
        }));
        assert!(large.as_mut().now_or_never().is_none());
        assert_eq!(order.recv().unwrap(), ("large", 0));
        let mut small =
            Box::pin(pool.run(of_size(connection(), 300 << 10), move || of_small.send(("small", 0)).unwrap()));
        assert!(small.as_mut().now_or_never().is_none());
        drop(release);
        assert_eq!(order.recv().unwrap(), ("small", 0));
        assert_eq!(order.iter().collect::<Vec<_>>(), [("large", 1), ("large", 2), ("large", 3)]);
        large.await.unwrap();
        small.await.unwrap();
    }

    #[tokio::test]
    async fn work_that_cannot_stop_does_not_hold_up_that_of_another_model() {
        let pool = WorkPool::new("test", 1);
        let (_held, _release) = hold(&pool, place(Time::MAX, MS));
        let other = Place { path: path_by_model(connection(), 2), deadline: Time::MAX, takes: MS };
        assert_eq!(pool.run(other, || 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn threads_beyond_the_turns_end_and_the_others_sleep() {
        let pool = WorkPool::new("test", 1);
        let (held, release) = hold(&pool, place(Time::MAX, MS));
        let other = Place { path: path_by_model(connection(), 2), deadline: Time::MAX, takes: MS };
        pool.run(other, || ()).await.unwrap();
        drop(release);
        held.await.unwrap();
        let counts = || {
            let state = pool.shared.state.lock();
            (state.threads, state.idle, state.held.len(), state.overdue)
        };
        while counts() != (1, 1, 0, 0) {
            tokio::task::yield_now().await;
        }
    }
}
