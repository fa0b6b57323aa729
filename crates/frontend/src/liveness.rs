//! The parts of a process that must go on, as its health port sees them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// A part that gives no sign of life for so long hangs. No turn of a part takes seconds, and a busy
/// machine still gives each thread a turn.
pub const HUNG_AFTER: Duration = Duration::from_secs(30);

/// A part of a process that can be asked for a sign of life.
pub struct Part {
    name: &'static str,
    /// Passes the question on. A part that hangs keeps the sender.
    ask: Box<dyn Fn(oneshot::Sender<()>) + Send + Sync>,
}

impl Part {
    /// An event loop, which takes a turn if it goes on. A loop that has ended drops the question, which
    /// counts as an answer: the process ends.
    pub fn event_loop(name: &'static str, event_loop: Handle) -> Self {
        let ask = move |answer: oneshot::Sender<()>| {
            event_loop.spawn(async move {
                // Only the end of the process drops the receiver.
                let _ = answer.send(());
            });
        };
        Part { name, ask: Box::new(ask) }
    }

    /// Threads that share locks. `visit` waits for each lock once, on a thread that may wait.
    pub fn locks(name: &'static str, visit: impl Fn() + Send + Sync + 'static) -> Self {
        let visit = Arc::new(visit);
        let ask = move |answer| {
            let visit = visit.clone();
            tokio::task::spawn_blocking(move || {
                visit();
                drop(answer);
            });
        };
        Part { name, ask: Box::new(ask) }
    }
}

/// The parts that must go on for a process to be live.
///
/// Each call of [`go_on`](Self::go_on) asks every part for a sign of life. Nothing asks between the
/// calls, so an idle process rests.
#[derive(Clone, Debug)]
pub struct Liveness {
    parts: Arc<[Watched]>,
    limit: Duration,
}

struct Watched {
    part: Part,
    /// Whether a question to the part is open.
    asked: AtomicBool,
    hung: AtomicBool,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watched").field(&self.part.name).field(&self.hung).finish()
    }
}

impl Liveness {
    /// Watches these parts. A part hangs if it leaves a question open for longer than `limit`.
    pub fn new(parts: impl IntoIterator<Item = Part>, limit: Duration) -> Self {
        let watched = |part| Watched { part, asked: AtomicBool::new(false), hung: AtomicBool::new(false) };
        Liveness { parts: parts.into_iter().map(watched).collect(), limit }
    }

    /// Whether no part hangs, by the questions of earlier calls. The calling runtime waits for the
    /// answers, and must be none of the parts.
    pub fn go_on(&self) -> bool {
        for (index, watched) in self.parts.iter().enumerate() {
            if !watched.asked.swap(true, Relaxed) {
                tokio::spawn(self.clone().ask(index));
            }
        }
        !self.parts.iter().any(|watched| watched.hung.load(Relaxed))
    }

    async fn ask(self, index: usize) {
        let Some(watched) = self.parts.get(index) else { return };
        let (name, (answer, mut answered)) = (watched.part.name, oneshot::channel());
        (watched.part.ask)(answer);
        if timeout(self.limit, &mut answered).await.is_err() {
            watched.hung.store(true, Relaxed);
            tracing::error!(seconds = self.limit.as_secs(), "{name} hangs; this process is not live until it goes on");
            let _ = answered.await;
            watched.hung.store(false, Relaxed);
            tracing::warn!("{name} goes on");
        }
        watched.asked.store(false, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::runtime::Builder;
    use tokio::time::sleep;

    use super::*;

    /// Far longer than a machine takes for anything in these tests.
    const PATIENCE: Duration = Duration::from_secs(60);

    async fn wait_until(parts: &Liveness, goes_on: bool) {
        let seen = async {
            while parts.go_on() != goes_on {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, seen).await.expect("the state is seen");
    }

    #[tokio::test]
    async fn a_loop_that_takes_no_turn_hangs_until_it_takes_one() {
        let other = Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
        let parts = Liveness::new([Part::event_loop("a loop", other.handle().clone())], Duration::from_millis(1));
        let (go_on, blocked) = mpsc::channel::<()>();
        let (entered, is_blocked) = oneshot::channel();
        other.spawn(async move {
            let _ = entered.send(());
            let _ = blocked.recv();
        });
        is_blocked.await.expect("the loop is blocked");
        wait_until(&parts, false).await;
        drop(go_on);
        wait_until(&parts, true).await;
        other.shutdown_background();
    }

    #[tokio::test]
    async fn locks_that_a_thread_keeps_hang_until_it_lets_go() {
        let lock = Arc::new(parking_lot::Mutex::new(()));
        let its = lock.clone();
        let parts = Liveness::new([Part::locks("a lock", move || drop(its.lock()))], Duration::from_millis(1));
        let (go_on, kept) = mpsc::channel::<()>();
        let (locked, is_locked) = oneshot::channel();
        std::thread::spawn(move || {
            let _guard = lock.lock();
            let _ = locked.send(());
            let _ = kept.recv();
        });
        is_locked.await.expect("the lock is kept");
        wait_until(&parts, false).await;
        drop(go_on);
        wait_until(&parts, true).await;
    }

    #[tokio::test]
    async fn loops_that_answer_are_asked_again_and_never_hang() {
        let other = Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
        let parts = Liveness::new([Part::event_loop("a loop", other.handle().clone())], PATIENCE);
        for _ in 0..3 {
            assert!(parts.go_on());
            let answered = async {
                while parts.parts[0].asked.load(Relaxed) {
                    sleep(Duration::from_millis(1)).await;
                }
            };
            timeout(PATIENCE, answered).await.expect("the loop answers");
        }
        other.shutdown_background();
    }

    #[tokio::test]
    async fn a_loop_that_has_ended_does_not_hang() {
        let other = Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
        let parts = Liveness::new([Part::event_loop("a loop", other.handle().clone())], Duration::from_millis(1));
        let ended = tokio::task::spawn_blocking(move || other.shutdown_timeout(PATIENCE));
        ended.await.expect("the loop has ended");
        for _ in 0..100 {
            assert!(parts.go_on());
            sleep(Duration::from_millis(1)).await;
        }
    }
}
