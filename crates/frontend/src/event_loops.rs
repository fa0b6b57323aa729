//! The event loops of a process, as its health port sees them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// An event loop that takes no turn for so long hangs. No work on a loop takes seconds, and a busy
/// machine still gives each thread a turn.
pub const HUNG_AFTER: Duration = Duration::from_secs(30);

/// The event loops that must go on for a process to be live.
///
/// Each call of [`go_on`](Self::go_on) asks every loop for a sign of life. Nothing asks between the
/// calls, so an idle process rests.
#[derive(Clone, Debug)]
pub struct EventLoops {
    loops: Arc<[EventLoop]>,
    limit: Duration,
}

#[derive(Debug)]
struct EventLoop {
    handle: Handle,
    /// Whether a question to the loop is open.
    asked: AtomicBool,
    hung: AtomicBool,
}

impl EventLoops {
    /// Watches these loops. A loop hangs if it leaves a question open for longer than `limit`.
    pub fn new(handles: impl IntoIterator<Item = Handle>, limit: Duration) -> Self {
        let watched = |handle| EventLoop { handle, asked: AtomicBool::new(false), hung: AtomicBool::new(false) };
        EventLoops { loops: handles.into_iter().map(watched).collect(), limit }
    }

    /// Whether no loop hangs, by the questions of earlier calls. The calling runtime waits for the
    /// answers, and must be none of the loops.
    pub fn go_on(&self) -> bool {
        for (index, watched) in self.loops.iter().enumerate() {
            if !watched.asked.swap(true, Relaxed) {
                tokio::spawn(self.clone().ask(index));
            }
        }
        !self.loops.iter().any(|watched| watched.hung.load(Relaxed))
    }

    async fn ask(self, index: usize) {
        let Some(watched) = self.loops.get(index) else { return };
        let (answer, mut answered) = oneshot::channel();
        watched.handle.spawn(async move {
            // Only the end of the process drops the receiver.
            let _ = answer.send(());
        });
        // A loop that has ended drops the question, which counts as an answer: the process ends.
        if timeout(self.limit, &mut answered).await.is_err() {
            watched.hung.store(true, Relaxed);
            tracing::error!(
                seconds = self.limit.as_secs(),
                "an event loop hangs; this process is not live until it goes on"
            );
            let _ = answered.await;
            watched.hung.store(false, Relaxed);
            tracing::warn!("the event loop goes on");
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

    async fn wait_until(loops: &EventLoops, goes_on: bool) {
        let seen = async {
            while loops.go_on() != goes_on {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, seen).await.expect("the state is seen");
    }

    #[tokio::test]
    async fn a_loop_that_takes_no_turn_hangs_until_it_takes_one() {
        let other = Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
        let loops = EventLoops::new([other.handle().clone()], Duration::from_millis(1));
        let (go_on, blocked) = mpsc::channel::<()>();
        let (entered, is_blocked) = oneshot::channel();
        other.spawn(async move {
            let _ = entered.send(());
            let _ = blocked.recv();
        });
        is_blocked.await.expect("the loop is blocked");
        wait_until(&loops, false).await;
        drop(go_on);
        wait_until(&loops, true).await;
        other.shutdown_background();
    }

    #[tokio::test]
    async fn loops_that_answer_are_asked_again_and_never_hang() {
        let other = Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
        let loops = EventLoops::new([other.handle().clone()], PATIENCE);
        for _ in 0..3 {
            assert!(loops.go_on());
            let answered = async {
                while loops.loops[0].asked.load(Relaxed) {
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
        let loops = EventLoops::new([other.handle().clone()], Duration::from_millis(1));
        let ended = tokio::task::spawn_blocking(move || other.shutdown_timeout(PATIENCE));
        ended.await.expect("the loop has ended");
        for _ in 0..100 {
            assert!(loops.go_on());
            sleep(Duration::from_millis(1)).await;
        }
    }
}
