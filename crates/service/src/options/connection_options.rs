//! The limits of connections.

use std::time::Duration;

/// The limits of connections.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectionOptions {
    /// Most connections at once. At the cap, an idle connection makes room for a new one; without
    /// an idle one the new one is refused.
    pub max: usize,
    /// Most connections of one address at once; `None`: as many as `max`.
    pub max_per_address: Option<usize>,
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
    pub fn least(&self) -> u64 {
        self.least_in(self.transfer_timeout.unwrap_or_default())
    }

    /// Fewest bytes in a time, at `min_rate`.
    pub fn least_in(&self, time: Duration) -> u64 {
        ((self.min_rate as f64 * time.as_secs_f64()) as u64).max(1)
    }

    /// How often the connections are looked at: a few times in the shortest limit.
    pub fn look_every(&self) -> Duration {
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
            max_per_address: None,
            idle_timeout: Some(Duration::from_secs(600)),
            transfer_timeout: Some(Duration::from_secs(30)),
            min_rate: 500,
            linger: Duration::from_secs(1),
        }
    }
}
