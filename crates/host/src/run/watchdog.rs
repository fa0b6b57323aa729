//! Watches the threads that run engines. A run that takes far longer than expected is ended. If it
//! cannot be ended its thread is left behind, and another thread takes its work.
//!
//! A model may loop for ever, and only some engines can end a run when told (`onnxruntime` can
//! between operators, `rten` cannot). So there are three steps:
//!
//! 1. The watchdog tells the engine.
//! 2. If the run goes on after a while, the model's executor process is ended, if it has one.
//!    Otherwise the thread's owner answers its requests and starts another thread.
//! 3. Only a new process helps if as many threads are left behind as the machine has cores, or no
//!    thread can be started. The server is then not live any more; the same holds once the engine
//!    has no device left.

use std::sync::{Arc, Weak};

use downbeat_core::{Duration, Time};
use downbeat_engine::{Engine, Stop};
use downbeat_service::clock::Clock;
use downbeat_service::options::RunLimits;
use parking_lot::Mutex;

use crate::run::activity::Activity;
use crate::run::model_health::ModelHealth;

/// How often it looks, while there is something to watch.
const TICK: std::time::Duration = std::time::Duration::from_millis(200);
/// Most time for a run to end once it was told to, unless its limit is less.
const GRACE: Duration = Duration::from_millis(5_000);

/// How long a run may go on without a waiting client: a shorter run is over soon.
const USELESS_AFTER: Duration = Duration::from_millis(1_000);
/// The error of such a run, which no client reads.
const USELESS: &str = "no client waits for the run any more";

/// Watches the threads that have a [`Post`].
pub struct Watchdog {
    limits: RunLimits,
    clock: Clock,
    engine: Arc<dyn Engine>,
    activity: Arc<Activity>,
    posts: Mutex<Vec<Weak<Post>>>,
    state: Mutex<State>,
    /// Most threads that may be left behind: each has a core for itself.
    most_left_behind: u32,
}

#[derive(Default)]
struct State {
    left_behind: u32,
    hopeless: Option<String>,
}

/// The watchdog's record of a thread that runs models.
pub struct Post {
    watchdog: Arc<Watchdog>,
    stop: Stop,
    doing: Mutex<Doing>,
    owner: Weak<dyn Owner>,
}

/// The owner of a thread's work.
pub trait Owner: Send + Sync {
    /// Whether a client waits for the thread's present work.
    fn is_awaited(&self) -> bool {
        true
    }

    /// Hears that the thread's work cannot be ended, for `reason`. The calling thread answers its
    /// clients from now on.
    fn leave_behind(&self, reason: &str);
}

enum Doing {
    Nothing,
    Run(Run),
    Load(Load),
    /// Work that goes on though it was told to end, with the reason; of a model version in service,
    /// or of a load.
    LeftBehind(String, Option<Arc<ModelHealth>>),
}

struct Run {
    health: Arc<ModelHealth>,
    device: usize,
    begin: Time,
    limit: Duration,
    /// The engine's progress in the run, and since when it has this value.
    progress: Option<(u64, Time)>,
    /// Whether it was told to end because no client waits for it.
    is_useless: bool,
    /// Since when it must end, and why.
    told: Option<(Time, String)>,
    /// Whether its executor process was ended because of it.
    is_killed: bool,
}

struct Load {
    model: String,
    begin: Time,
    /// The engine's run that was seen last, and when it was seen first.
    seen: Option<(u64, Time)>,
    told: Option<(Time, String)>,
    is_killed: bool,
}

impl Watchdog {
    /// Starts its thread, which ends with the last who knows the watchdog. `engine` is the one
    /// whose devices may be lost.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn start(limits: RunLimits, clock: Clock, engine: Arc<dyn Engine>) -> std::io::Result<Arc<Self>> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let watchdog = Arc::new(Watchdog {
            limits,
            clock,
            engine,
            activity: Arc::default(),
            posts: Mutex::default(),
            state: Mutex::default(),
            most_left_behind: u32::try_from(cores).unwrap_or(u32::MAX),
        });
        let (weak, activity) = (Arc::downgrade(&watchdog), watchdog.activity.clone());
        std::thread::Builder::new().name("watchdog".to_owned()).spawn(move || watch(&weak, &activity))?;
        Ok(watchdog)
    }

    /// Whether models run or load.
    pub fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    /// Watches the calling thread as long as the post lives.
    pub fn post(self: &Arc<Self>, owner: Weak<dyn Owner>) -> Arc<Post> {
        let stop = Stop::of_this_thread();
        let post = Arc::new(Post { watchdog: self.clone(), stop, doing: Mutex::new(Doing::Nothing), owner });
        let mut posts = self.posts.lock();
        posts.retain(|post| post.strong_count() > 0);
        posts.push(Arc::downgrade(&post));
        post
    }

    /// Ends the runs of a model version that no client waits for.
    pub fn end_runs(&self, health: &Arc<ModelHealth>) {
        for post in self.posts() {
            let mut doing = post.doing.lock();
            if let Doing::Run(run) = &mut *doing
                && run.told.is_none()
                && Arc::ptr_eq(&run.health, health)
            {
                run.told = Some((self.clock.now(), USELESS.to_owned()));
                post.stop.stop();
            }
        }
    }

    /// Tells all loads to end as soon as their engines can. Returns whether a load is under way.
    pub fn end_loads(&self) -> bool {
        let mut is_loading = false;
        for post in self.posts() {
            let mut doing = post.doing.lock();
            if let Doing::Load(load) = &mut *doing {
                is_loading = true;
                if load.told.is_none() {
                    load.told = Some((self.clock.now(), "the server is shutting down".to_owned()));
                    post.stop.stop();
                }
            }
        }
        is_loading
    }

    /// Whether a thread runs or loads a model, or was left behind.
    pub fn is_busy(&self) -> bool {
        let left_behind = self.state.lock().left_behind;
        left_behind > 0 || self.posts().iter().any(|post| !matches!(*post.doing.lock(), Doing::Nothing))
    }

    /// Notes that only a new process helps, for `reason`.
    pub fn give_up(&self, reason: String) {
        let mut state = self.state.lock();
        if state.hopeless.is_none() {
            tracing::error!(%reason, "the server is not live any more: only a new process can repair this");
            state.hopeless = Some(reason);
            self.activity.stir();
        }
    }

    /// Why only a new process helps; `None` if the server works.
    pub fn hopeless(&self) -> Option<String> {
        if let Some(reason) = self.engine.lost() {
            self.give_up(reason);
        }
        let state = self.state.lock();
        state.hopeless.clone().or_else(|| {
            (state.left_behind >= self.most_left_behind)
                .then(|| format!("{} runs do not end, and occupy cores", state.left_behind))
        })
    }

    fn posts(&self) -> Vec<Arc<Post>> {
        self.posts.lock().iter().filter_map(Weak::upgrade).collect()
    }

    fn look(&self) {
        // Logs the state, even if no probe asks.
        self.hopeless();
        for post in self.posts() {
            let Some(reason) = post.look(self.clock.now(), &self.limits) else { continue };
            let threads = self.state.lock().left_behind;
            if threads == self.most_left_behind {
                tracing::error!(threads, "the server is not live any more: abandoned threads occupy all cores");
            }
            if let Some(owner) = post.owner.upgrade() {
                owner.leave_behind(&reason);
            }
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // The watchdog's thread may be resting.
        self.activity.stir();
    }
}

/// Why a load must end whose run has gone on for `run`, and which has gone on for `all` in
/// total.
fn why_a_load_ends(limits: &RunLimits, run: Duration, all: Duration) -> Option<String> {
    let is_over = |took: Duration, limit: Duration| limit > Duration::ZERO && took > limit;
    if is_over(run, limits.load) {
        return Some(format!(
            "a run had not ended after {}, the most that it may take while the model is loaded \
             (load_run_timeout_s)",
            limits.load
        ));
    }
    is_over(all, limits.whole_load)
        .then(|| format!("the load had not ended after {}, its limit with warm-up (load_timeout_s)", limits.whole_load))
}

fn watch(watchdog: &Weak<Watchdog>, activity: &Activity) {
    let mut quiet = 0;
    while let Some(watchdog) = watchdog.upgrade() {
        watchdog.look();
        quiet = if watchdog.is_busy() { 0 } else { quiet + 1 };
        drop(watchdog);
        quiet = activity.sleep(quiet, TICK);
    }
}

impl Post {
    /// How long a run may take that takes `expected` by its profile.
    pub fn limit(&self, expected: Duration) -> Duration {
        let RunLimits { factor, least, .. } = self.watchdog.limits;
        if least == Duration::ZERO { Duration::MAX } else { expected.saturating_mul(u64::from(factor)).max(least) }
    }

    /// The thread begins a run that may take `limit`. Not so while it is in the middle of another
    /// one, behind which this one waits: `false`.
    pub fn begin(&self, health: &Arc<ModelHealth>, device: usize, limit: Duration) -> bool {
        let mut doing = self.doing.lock();
        let is_first = matches!(*doing, Doing::Nothing);
        if is_first {
            let (begin, health) = (self.watchdog.clock.now(), health.clone());
            *doing = Doing::Run(Run {
                health,
                device,
                begin,
                limit,
                progress: None,
                is_useless: false,
                told: None,
                is_killed: false,
            });
            drop(doing);
            self.watchdog.activity.stir();
        }
        is_first
    }

    /// The thread begins a load of a model.
    pub fn begin_load(&self, model: &str) {
        let begin = self.watchdog.clock.now();
        let load = Load { model: model.to_owned(), begin, seen: None, told: None, is_killed: false };
        *self.doing.lock() = Doing::Load(load);
        self.watchdog.activity.stir();
    }

    /// Ends the thread's work. Returns why it was told to end, if it was.
    pub fn end(&self) -> Option<String> {
        let doing = std::mem::replace(&mut *self.doing.lock(), Doing::Nothing);
        let reason = match doing {
            Doing::Nothing => None,
            Doing::Run(Run { is_useless: true, told: None, .. }) => Some(USELESS.to_owned()),
            Doing::Run(Run { told, .. }) | Doing::Load(Load { told, .. }) => told.map(|(_, reason)| reason),
            Doing::LeftBehind(reason, health) => {
                health.inspect(|health| health.run_came_back());
                self.watchdog.state.lock().left_behind -= 1;
                Some(reason)
            }
        };
        if reason.is_some() {
            self.stop.resume();
        }
        reason
    }

    /// Ends the executor process of the thread's run, once. Returns whether there is such a
    /// process.
    fn kill(&self, is_killed: &mut bool) -> bool {
        !std::mem::replace(is_killed, true) && self.stop.kill()
    }

    /// Ends work that takes too long. Returns why the thread must be left behind, if it must.
    fn look(&self, now: Time, limits: &RunLimits) -> Option<String> {
        let mut doing = self.doing.lock();
        let (reason, health) = match &mut *doing {
            Doing::Nothing | Doing::LeftBehind(..) => return None,
            Doing::Run(run) => (self.look_at_run(run, now)?, Some(run.health.clone())),
            Doing::Load(load) => (self.look_at_load(load, now, limits)?, None),
        };
        *doing = Doing::LeftBehind(reason.clone(), health);
        // The count rises under the lock of the thread's work: the work may come back right after.
        self.watchdog.state.lock().left_behind += 1;
        Some(reason)
    }

    /// Ends a run that takes too long, and at last its process. Returns why the thread must be
    /// left behind, if neither helps.
    fn look_at_run(&self, run: &mut Run, now: Time) -> Option<String> {
        let Run { health, device, begin, limit, progress, told, is_killed, .. } = run;
        let elapsed = now.since(*begin);
        // Answers before the end of a run are progress.
        let engine = self.stop.progress();
        let since = match *progress {
            Some((before, since)) if before == engine => since,
            Some(_) => now,
            None => *begin,
        };
        *progress = Some((engine, since));
        let ModelHealth { name, version, .. } = &**health;
        match told {
            None if now.since(since) <= *limit => {
                self.end_useless_run(run, elapsed);
                None
            }
            None => {
                tracing::error!(
                    model = %name, %version, device, %elapsed, %limit,
                    "a run takes too long and is ended (run_timeout_s, run_timeout_factor)"
                );
                let reason = format!("a run had not ended after {limit}, its limit");
                health.run_ended(reason.clone(), now);
                *told = Some((now, reason));
                self.stop.stop();
                None
            }
            Some((since, _)) if now.since(*since) <= GRACE.min(*limit) => None,
            Some((since, _)) if self.kill(is_killed) => {
                tracing::error!(
                    model = %name, %version, device, %elapsed,
                    "a run does not end; the server ends its process"
                );
                // The model is not ready until it has another process.
                health.run_killed();
                *since = now;
                None
            }
            Some((_, reason)) => {
                tracing::error!(
                    model = %name, %version, device, %elapsed,
                    "a run does not end; its thread is left behind, and the model is out of service until the run \
                     ends or the model is loaded again"
                );
                let reason = format!("{reason}, and the engine cannot end it; load the model again");
                health.run_left_behind(reason.clone());
                Some(reason)
            }
        }
    }

    /// Ends a run within its limit if it is not short and no client waits for it.
    fn end_useless_run(&self, run: &mut Run, elapsed: Duration) {
        let Run { health, device, is_useless, .. } = run;
        let ModelHealth { name, version, .. } = &**health;
        if elapsed > USELESS_AFTER && !*is_useless && !self.owner.upgrade().is_some_and(|o| o.is_awaited()) {
            tracing::debug!(
                model = %name, %version, device, %elapsed,
                "a run is ended, as no client waits for the run any more"
            );
            *is_useless = true;
            self.stop.stop();
        }
    }

    /// Ends a load that takes too long, and at last its process. Returns why the thread must be
    /// left behind, if neither helps.
    fn look_at_load(&self, load: &mut Load, now: Time, limits: &RunLimits) -> Option<String> {
        let Load { model, begin, seen, told, is_killed } = load;
        if let Some((since, reason)) = told {
            if now.since(*since) <= GRACE {
                return None;
            }
            if self.kill(is_killed) {
                *since = now;
                return None;
            }
            tracing::error!(%model, "the load of the model does not end; its thread is abandoned");
            return Some(std::mem::take(reason));
        }
        let run = self.stop.run_in_progress();
        let since = match (run, *seen) {
            (Some(run), Some((before, since))) if run == before => since,
            _ => now,
        };
        *seen = run.map(|run| (run, since));
        let reason = why_a_load_ends(limits, now.since(since), now.since(*begin))?;
        tracing::error!(%model, %reason, "the load of a model takes too long, and is ended");
        *told = Some((now, reason));
        self.stop.stop();
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use downbeat_engine::stop::Interrupt;

    use super::*;

    struct Nobody;

    impl Owner for Nobody {
        fn leave_behind(&self, _reason: &str) {}
    }

    /// A watchdog without a thread: the test calls `look` itself.
    fn without_a_thread(limits: RunLimits) -> Arc<Watchdog> {
        Arc::new(Watchdog {
            limits,
            clock: Clock::start(),
            engine: Arc::new(downbeat_engine::Emulated::new()),
            activity: Arc::default(),
            posts: Mutex::default(),
            state: Mutex::default(),
            most_left_behind: 1,
        })
    }

    #[test]
    fn a_thread_that_comes_back_before_its_work_is_seen_to_is_not_left_behind() {
        let limits = RunLimits::default();
        let watchdog = without_a_thread(limits);
        let post = watchdog.post(Weak::<Nobody>::new());
        let health = Arc::new(ModelHealth::new("m".into(), "1".into()));
        assert!(post.begin(&health, 0, Duration::ZERO));
        let hour = |hours: u64| Time::ZERO + Duration::from_millis(hours * 3_600_000);
        assert_eq!(post.look(hour(1), &limits), None, "it is told to end");
        assert!(post.look(hour(2), &limits).is_some());
        assert!(watchdog.is_busy() && watchdog.hopeless().is_some());
        assert!(post.end().is_some());
        assert!(!watchdog.is_busy() && watchdog.hopeless().is_none());
    }

    #[test]
    fn a_run_that_makes_progress_goes_on() {
        #[derive(Default)]
        struct Answers(AtomicU64);
        impl Interrupt for Answers {
            fn interrupt(&self) {}
            fn progress(&self) -> u64 {
                self.0.load(Ordering::Relaxed)
            }
        }
        let (limits, long) = (RunLimits::default(), Duration::from_millis(3_600_000));
        let (watchdog, owner): (_, Arc<dyn Owner>) = (without_a_thread(limits), Arc::new(Nobody));
        let post = watchdog.post(Arc::downgrade(&owner));
        let answers = Arc::new(Answers::default());
        let _call = downbeat_engine::stop::run(Some(answers.clone())).unwrap();
        assert!(post.begin(&Arc::new(ModelHealth::new("m".into(), "1".into())), 0, long));
        let hour = |hours: u64| Time::ZERO + Duration::from_millis(hours * 3_600_000);
        for hours in 1..10 {
            answers.0.fetch_add(1, Ordering::Relaxed);
            assert_eq!(post.look(hour(hours), &limits), None);
            assert!(!post.stop.is_stopped(), "an answer came within the limit");
        }
        assert_eq!(post.look(hour(10), &limits), None);
        assert!(!post.stop.is_stopped(), "the last answer is an hour old");
        assert_eq!(post.look(hour(11), &limits), None);
        assert!(post.stop.is_stopped(), "no answer came within the limit");
        post.end();
    }

    #[test]
    fn a_load_ends_by_its_run_or_by_all_that_it_does() {
        let second = |seconds: u64| Duration::from_millis(seconds * 1_000);
        let limits = RunLimits { load: second(10), whole_load: second(100), ..RunLimits::default() };
        assert_eq!(why_a_load_ends(&limits, second(10), second(100)), None);
        assert!(why_a_load_ends(&limits, second(11), second(11)).unwrap().contains("load_run_timeout_s"));
        assert!(why_a_load_ends(&limits, second(1), second(101)).unwrap().contains("load_timeout_s"));
        let none = RunLimits { load: Duration::ZERO, whole_load: Duration::ZERO, ..limits };
        assert_eq!(why_a_load_ends(&none, second(1_000), second(1_000)), None);
    }
}
