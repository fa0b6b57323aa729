//! The state that a port shares with its connections.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use tokio::sync::Notify;

/// The state that a port shares with its connections. Connections only read this state. The first
/// connection that moves bytes while the port dozes writes it.
#[derive(Debug, Default)]
pub(super) struct PortState {
    /// The port has left [`Stage::Serving`](super::stage::Stage::Serving).
    leaving: AtomicBool,
    /// All connections are idle, and the port does not look at them.
    dozes: AtomicBool,
    stirred: Notify,
}

impl PortState {
    pub fn leave(&self) {
        self.leaving.store(true, Relaxed);
    }

    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Relaxed)
    }

    /// From now on a connection that moves bytes completes [`PortState::stirred`]. A connection
    /// that moves bytes at this moment may miss the change. So the port looks once more before it
    /// relies on the signal.
    pub fn doze(&self) {
        self.dozes.store(true, Relaxed);
    }

    pub fn dozes(&self) -> bool {
        self.dozes.load(Relaxed)
    }

    /// Something happens on a connection.
    pub fn stir(&self) {
        if self.dozes.load(Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if self.dozes.swap(false, Relaxed) {
            self.stirred.notify_one();
        }
    }

    /// Completes once something has happened on a connection while the port dozed.
    pub async fn stirred(&self) {
        self.stirred.notified().await;
    }
}
