//! What a candidate is made of: the drop policies and the batch size they aim at.

use crate::profile::LatencyProfile;
use crate::time::Duration;

/// Which requests of the queue are given up for their deadlines.
///
/// | policy | gives up | a batch is shrunk for its head's deadline | used by |
/// |---|---|---|---|
/// | `HeadDrop` | the hopeless: `now + l(size) > deadline` | yes | Clipper, Shepherd (Symphony §3.2, *GetBatch*) |
/// | `WindowDrop` | also heads that would force a batch below the target | yes, down to the target | Nexus's early drop (Symphony §3.2); the Symphony prototype |
/// | `None` | nothing | no | Triton, TensorFlow Serving |
///
/// With `None` a late request is still served, in a batch as large as the queue allows: under overload small batches
/// would only make more requests late.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DropPolicy {
    /// Only what can no longer be met.
    HeadDrop,
    /// Also heads that stand in the way of a batch of the target size.
    #[default]
    WindowDrop,
    /// Nothing.
    None,
}

/// The batch size of the staggered pattern (Symphony §3.3): the largest `b` with
/// `(1 + 1/n) * l(b) <= budget` on the `n = rate * l(b) / b` devices that the arrivals keep busy, but at
/// most `devices`; at least 1.
///
/// `l(b) / n` is the longest wait for the next device of the pattern: with fewer requests than devices it is the time
/// `b / rate` that the batch takes to gather. Without a `rate` (items per second): half the budget for
/// waiting. `O(log max_batch)`.
pub fn staggered_batch(
    profile: &LatencyProfile,
    max_batch: u32,
    budget: Duration,
    rate: Option<f64>,
    devices: u32,
) -> u32 {
    let fits = |b: u32| {
        let latency = profile.latency(b);
        let wait = match rate {
            None => latency,
            Some(rate) => {
                let share = Duration::from_nanos(latency.as_nanos() / u64::from(devices.max(1)));
                share.max(Duration::from_secs_f64(f64::from(b) / rate))
            }
        };
        latency + wait <= budget
    };
    // Both terms grow with b, so that `fits` is true up to some size and false from there.
    let (mut good, mut bad) = (1, max_batch.saturating_add(1));
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if fits(middle) { good = middle } else { bad = middle }
    }
    good
}
