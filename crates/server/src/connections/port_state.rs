//! What a port and its connections tell each other.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use tokio::sync::Notify;

/// What a port and its connections tell each other. The connections only read it, but for the first one that moves bytes
/// after a while in which none did.
#[derive(Debug, Default)]
pub(super) struct PortState {
    /// The port has left [`Stage::Serving`](super::Stage::Serving).
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

    /// From now on a connection that moves bytes completes [`PortState::stirred`]. One that does so at this very moment may
    /// not, but then the next look at it, a moment later, sees that it has.
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
