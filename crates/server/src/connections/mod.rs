//! Connections of every port: accepted up to a cap, watched, and brought to an end without losing a
//! request.
//!
//! One table ([`Connections`]) holds the connections of the ports that share a cap. Each connection
//! counts its bytes and requests (`watched.rs`). Its port looks at the counts a few times in each
//! limit (`look.rs`). The port asks a connection to end if it was idle too long, sends a head too
//! slowly, or does not read its answers. Connections and requests have no timers of their own; only
//! a request whose body is awaited has one (`body.rs`). While all connections are idle the port
//! does not look (`looks.rs`), and an idle connection over HTTP is its socket and nothing else
//! (`keep.rs`).

mod accept;
mod body;
mod file_limit;
mod frames;
mod keep;
mod look;
mod looks;
mod open;
mod port_state;
mod refusal;
mod stream;
mod threads;
mod watched;

use std::time::Duration;

use tokio::sync::watch;

pub use accept::bind;
pub(crate) use accept::serve;
pub(crate) use body::{BodyError, Framing, WatchedBody};
pub use file_limit::{default_max_connections, raise_file_limit, room_for_connections};
pub(crate) use keep::{Driven, keep};
pub use open::Connections;
pub(crate) use stream::WatchedStream;
pub use threads::FrontendThreads;
pub(crate) use threads::beside;
pub(crate) use watched::Answering;

/// The limits of connections.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectionOptions {
    /// Most connections at once. At the cap, an idle connection makes room for a new one; without
    /// an idle one the new one is refused.
    pub max: usize,
    /// How long a connection may be without a request; `None`: for ever.
    pub idle_timeout: Option<Duration>,
    /// How long the head of a request may take once it has begun, and the time in which `min_rate`
    /// is measured; `None`: for ever.
    pub transfer_timeout: Option<Duration>,
    /// Least rate of a request's body, and of a client's reading of its answer, bytes per second on
    /// average over each `transfer_timeout`. At least one byte must move in that time.
    pub min_rate: u64,
    /// How long a used or new connection may yet bring a request once the server drains. A request
    /// that has come in part must come at `min_rate` in each such time, or in each second if that
    /// is longer.
    pub linger: Duration,
}

impl ConnectionOptions {
    /// Fewest bytes in each `transfer_timeout`.
    fn least(&self) -> u64 {
        self.least_in(self.transfer_timeout.unwrap_or_default())
    }

    /// Fewest bytes in a time, at `min_rate`.
    fn least_in(&self, time: Duration) -> u64 {
        ((self.min_rate as f64 * time.as_secs_f64()) as u64).max(1)
    }

    /// How often the connections are looked at: a few times in the shortest limit.
    fn look_every(&self) -> Duration {
        let limits = [self.idle_timeout, self.transfer_timeout].into_iter().flatten();
        limits.map(|limit| limit / 4).fold(MOST_BETWEEN_LOOKS, Duration::min).max(LEAST_BETWEEN_LOOKS)
    }
}

const MOST_BETWEEN_LOOKS: Duration = Duration::from_secs(1);
const LEAST_BETWEEN_LOOKS: Duration = Duration::from_millis(10);

impl Default for ConnectionOptions {
    fn default() -> Self {
        ConnectionOptions {
            max: 32_768,
            idle_timeout: Some(Duration::from_secs(600)),
            transfer_timeout: Some(Duration::from_secs(30)),
            min_rate: 500,
            linger: Duration::from_secs(1),
        }
    }
}

/// The protocol of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protocol {
    Http,
    Grpc,
}

impl Protocol {
    fn name(self) -> &'static str {
        match self {
            Protocol::Http => "HTTP",
            Protocol::Grpc => "gRPC",
        }
    }
}

/// How far the server is on its way out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub enum Stage {
    /// The server does not drain.
    #[default]
    Serving,
    /// Still accepting and answering while clients learn that they should go elsewhere: HTTP
    /// answers end their connection.
    Leaving,
    /// The ports accept no more. Requests under way are finished, then the connections are closed.
    Draining,
    /// Everything is broken off.
    Stopped,
}

/// Tells ports the [`Stage`]. A sender that is gone means [`Stage::Stopped`].
pub type Stages = watch::Receiver<Stage>;

/// Completes once the server is at `stage` or further.
pub(crate) async fn reached(mut stages: Stages, stage: Stage) {
    // An error: the sender is gone.
    let _ = stages.wait_for(|now| *now >= stage).await;
}
