//! When a port looks at its connections.

use std::pin::Pin;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

use super::port_state::PortState;

/// Stands for a look that nothing asks for.
const NEVER: Duration = Duration::from_secs(24 * 3600);

/// When a port looks at its connections: every so often, and not while all of them are idle, so
/// that an idle server does nothing.
pub(super) struct Looks {
    every: Duration,
    timer: Pin<Box<Sleep>>,
}

impl Looks {
    pub fn new(every: Duration) -> Self {
        Looks { every, timer: Box::pin(sleep(every)) }
    }

    /// Completes when it is time to look.
    pub async fn due(&mut self) {
        self.timer.as_mut().await;
    }

    /// Notes that the port has looked, and must look again at `next` unless bytes move on a
    /// connection; `None`: never. Returns whether the port dozes from now on.
    pub fn looked(&mut self, next: Option<Instant>, port: &PortState) -> bool {
        let now = Instant::now();
        let soon = now + self.every;
        let next = next.unwrap_or(now + NEVER);
        // The first look of this kind only makes the port doze. The second one sees bytes that
        // moved at that moment.
        let at = if next > soon && port.dozes() { next } else { soon };
        if next > soon {
            port.doze();
        } else {
            port.stir();
        }
        self.timer.as_mut().reset(at);
        at > soon
    }

    /// Something has happened on a connection.
    pub fn stirred(&mut self) {
        self.timer.as_mut().reset(Instant::now() + self.every);
    }
}
