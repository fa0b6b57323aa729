//! Whether models run or load. While none does, periodic work rests, so that no thread of an idle
//! server runs.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

/// The watchdog must find no work in this many looks in a row before the server rests: 5 s.
const QUIET_LOOKS: u32 = 25;

/// Whether models run or load. The watchdog reports a quiet time, and the thread that begins a run
/// or a load reports its begin.
#[derive(Debug)]
pub struct Activity {
    /// The next run or load must wake the server. Every thread that begins a run reads this.
    rests: AtomicBool,
    lock: Mutex<()>,
    woken: Condvar,
    /// Whether the server is awake.
    awake: watch::Sender<bool>,
}

/// How a task rests.
pub type Awake = watch::Receiver<bool>;

impl Default for Activity {
    fn default() -> Self {
        Activity {
            rests: AtomicBool::new(false),
            lock: Mutex::new(()),
            woken: Condvar::new(),
            awake: watch::Sender::new(true),
        }
    }
}

impl Activity {
    /// Wakes the server, for a run or a load that has begun. Costs one load of a flag while the
    /// server is awake.
    pub fn stir(&self) {
        if self.rests.load(Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        let _lock = self.lock.lock();
        self.rests.store(false, Relaxed);
        self.awake.send_replace(true);
        self.woken.notify_all();
    }

    /// Whether nothing has run for a while.
    pub fn rests(&self) -> bool {
        !*self.awake.borrow()
    }

    /// The handle by which a task rests in [`tick`].
    pub fn awake(&self) -> Awake {
        self.awake.subscribe()
    }

    /// Blocks a thread while the server rests.
    pub fn wait(&self) {
        let mut lock = self.lock.lock();
        while self.rests.load(Relaxed) {
            self.woken.wait(&mut lock);
        }
    }

    /// The watchdog's sleep between two looks. The last `quiet` looks found no run and no load.
    /// After enough such looks this blocks until the next run or load begins. Returns how many of
    /// the looks count for the next sleep.
    ///
    /// A run may begin in the moment in which the server falls asleep, and not notice that it must
    /// wake the server. So the watchdog looks once more, a tick later, before this blocks.
    #[expect(clippy::disallowed_methods, reason = "a thread of its own, which decides nothing by the clock")]
    pub fn sleep(&self, quiet: u32, tick: Duration) -> u32 {
        if quiet < QUIET_LOOKS {
            self.stir();
        } else if quiet == QUIET_LOOKS {
            self.rests.store(true, Relaxed);
        } else if self.rests_for_good() {
            self.wait();
            return 0;
        } else {
            return 0;
        }
        std::thread::sleep(tick);
        quiet
    }

    /// Notes that the server rests, unless a run or load has begun.
    fn rests_for_good(&self) -> bool {
        let _lock = self.lock.lock();
        let rests = self.rests.load(Relaxed);
        if rests {
            self.awake.send_replace(false);
        }
        rests
    }
}

/// Completes after `every`. If the server rests by then, completes when the next run or load
/// begins.
pub async fn tick(awake: &mut Awake, every: Duration) {
    tokio::time::sleep(every).await;
    // An error: the server ends.
    let _ = awake.wait_for(|awake| *awake).await;
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Sleeps for as many quiet looks as it takes until the next one would block.
    fn lie_down(activity: &Activity) {
        assert_eq!(activity.sleep(QUIET_LOOKS, Duration::ZERO), QUIET_LOOKS);
    }

    #[test]
    fn a_server_rests_after_two_looks_and_a_run_wakes_it() {
        let activity = Arc::new(Activity::default());
        let awake = activity.awake();
        lie_down(&activity);
        assert!(!activity.rests(), "the second look is still to come");
        let watchdog = std::thread::spawn({
            let activity = activity.clone();
            move || activity.sleep(QUIET_LOOKS + 1, Duration::ZERO)
        });
        while !activity.rests() {
            std::thread::yield_now();
        }
        assert!(!*awake.borrow());
        activity.stir();
        assert_eq!(watchdog.join().unwrap(), 0, "it begins to count anew");
        assert!(*awake.borrow() && !activity.rests());
    }

    #[test]
    fn a_run_between_the_two_looks_keeps_the_server_awake() {
        let activity = Activity::default();
        lie_down(&activity);
        activity.stir();
        assert_eq!(activity.sleep(QUIET_LOOKS + 1, Duration::ZERO), 0);
        assert!(!activity.rests());
        // The run did not see that it had to wake anyone, but the look saw the run.
        lie_down(&activity);
        assert_eq!(activity.sleep(0, Duration::ZERO), 0);
        assert!(!activity.rests.load(Relaxed));
    }

    #[tokio::test]
    async fn a_resting_task_ticks_with_the_next_run() {
        let activity = Activity::default();
        let mut awake = activity.awake();
        tick(&mut awake, Duration::ZERO).await;
        lie_down(&activity);
        assert!(activity.rests_for_good());
        let ticks = tokio::spawn(async move { tick(&mut awake, Duration::ZERO).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!ticks.is_finished(), "nothing runs");
        activity.stir();
        ticks.await.unwrap();
    }
}
