//! The queues and batches of a model.

use std::collections::BTreeSet;

use downbeat_core::Duration;
use downbeat_core::cluster::TimeoutAction;
use downbeat_protocol::inference::{ModelDynamicBatching, ModelQueuePolicy, model_queue_policy};
use serde::{Deserialize, Serialize};

/// The queues and batches of a model; Triton's `dynamic_batching`, resolved.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Batching {
    /// Largest batch; 0: the model's tensors have no batch dimension.
    pub max_batch_size: u32,
    /// Whether the configuration (or its completion) has `dynamic_batching`. Downbeat shares
    /// batches between requests either way; only `downbeat config check` and curious users read it.
    pub dynamic: bool,
    /// Batch sizes worth waiting for, ascending; empty: the larger the better.
    pub preferred: Vec<u32>,
    /// How long a request may wait for others, from its arrival, as the configuration says.
    pub max_queue_delay: Duration,
    /// Whether answers leave in the order of the requests.
    pub preserve_ordering: bool,
    /// Queues by priority, the most urgent first; at least one.
    pub levels: Vec<Level>,
    /// The first priority of each level. Up to [`MAX_LEVELS`] priorities have a level each. With
    /// more, the named priorities and the ones at both ends have a level of their own, and all
    /// priorities between two of these share a level.
    firsts: Vec<u64>,
    /// The last priority.
    last: u64,
    /// The index in `levels` for requests without a priority.
    pub default_level: usize,
}

/// The queue of one priority.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Level {
    /// Most requests that wait; 0: the configuration sets no bound (the server's default holds).
    pub max_queue_size: u32,
    /// The action on a request whose time in the queue is over.
    pub timeout_action: TimeoutAction,
    /// The time that a request may wait; zero: no limit.
    pub default_timeout: Duration,
    /// Whether a request's own `timeout` parameter counts.
    pub allow_timeout_override: bool,
}

impl Level {
    /// The queue of a model whose configuration has no queue policy. Unlike Triton's, it honours a
    /// request's own `timeout`.
    const UNCONFIGURED: Level = Level {
        max_queue_size: 0,
        timeout_action: TimeoutAction::Reject,
        default_timeout: Duration::ZERO,
        allow_timeout_override: true,
    };

    fn new(policy: &ModelQueuePolicy) -> Level {
        Level {
            max_queue_size: policy.max_queue_size,
            timeout_action: match policy.timeout_action() {
                model_queue_policy::TimeoutAction::Reject => TimeoutAction::Reject,
                model_queue_policy::TimeoutAction::Delay => TimeoutAction::Delay,
            },
            default_timeout: Duration::from_micros(policy.default_timeout_microseconds),
            allow_timeout_override: policy.allow_timeout_override,
        }
    }
}

/// Most levels of a model. Each costs a queue, and more levels make no difference to users.
pub(crate) const MAX_LEVELS: u64 = 256;
/// With more priorities, this many at each end have a level of their own.
const ALONE: u64 = 32;
/// With more priorities, at most this many may have a policy of their own.
pub(crate) const MOST_POLICIES: usize = (MAX_LEVELS / 2 - 2 * ALONE - 1) as usize;

impl Batching {
    /// Longest queue delay. A longer one means that a batch waits until it is full: its author does
    /// not expect it to pass. `2^64-1` microseconds are 584,542 years.
    pub const LONGEST_QUEUE_DELAY: Duration = Duration::from_millis(3_600_000);

    /// Batching without a configuration: requests do not wait for others.
    pub(crate) fn plain(max_batch_size: u32) -> Batching {
        Batching {
            max_batch_size,
            dynamic: false,
            preferred: Vec::new(),
            max_queue_delay: Duration::ZERO,
            preserve_ordering: false,
            levels: vec![Level::UNCONFIGURED],
            firsts: vec![1],
            last: 1,
            default_level: 0,
        }
    }

    /// Resolves a checked configuration, whose sizes are positive.
    pub(crate) fn dynamic(max_batch_size: u32, batching: &ModelDynamicBatching) -> Batching {
        let mut preferred: Vec<u32> =
            batching.preferred_batch_size.iter().filter_map(|size| u32::try_from(*size).ok()).collect();
        preferred.sort_unstable();
        preferred.dedup();
        let default_policy = batching.default_queue_policy.as_ref().map_or(Level::UNCONFIGURED, Level::new);
        let last = batching.priority_levels.max(1);
        let default_priority = batching.default_priority_level.clamp(1, last);
        let firsts = firsts(last, default_priority, batching.priority_queue_policy.keys().copied());
        let level = |first| batching.priority_queue_policy.get(first).map_or(default_policy, Level::new);
        let levels = firsts.iter().map(level).collect();
        Batching {
            max_batch_size,
            dynamic: max_batch_size > 1,
            preferred,
            max_queue_delay: Duration::from_micros(batching.max_queue_delay_microseconds),
            preserve_ordering: batching.preserve_ordering,
            levels,
            default_level: level_in(&firsts, default_priority),
            firsts,
            last,
        }
    }

    /// The index in `levels` of a request's `priority`, where 1 is the most urgent. 0 and
    /// priorities beyond the last level mean the default, as in Triton.
    pub fn level_of(&self, priority: u64) -> usize {
        if (1..=self.last).contains(&priority) { level_in(&self.firsts, priority) } else { self.default_level }
    }
}

/// The first priority of each level, for priorities from 1 to `last`: one each, or at most
/// [`MAX_LEVELS`].
fn firsts(last: u64, default: u64, named: impl Iterator<Item = u64>) -> Vec<u64> {
    if last <= MAX_LEVELS {
        return (1..=last).collect();
    }
    let ends = (1..=ALONE).chain(last - ALONE + 1..=last);
    // Each of these takes one level, and the priorities up to the next one take another.
    let named = named.filter(|priority| (1..=last).contains(priority)).take(MOST_POLICIES);
    let alone: BTreeSet<u64> = ends.chain([default]).chain(named).collect();
    let after = alone.iter().filter_map(|priority| priority.checked_add(1)).filter(|next| *next <= last);
    let mut firsts: Vec<u64> = alone.iter().copied().chain(after).collect();
    firsts.sort_unstable();
    firsts.dedup();
    firsts
}

/// The level of a priority.
fn level_in(firsts: &[u64], priority: u64) -> usize {
    firsts.partition_point(|first| *first <= priority).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_and_outer_priorities_have_levels_of_their_own() {
        let few = ModelDynamicBatching { priority_levels: 3, default_priority_level: 2, ..Default::default() };
        let few = Batching::dynamic(1, &few);
        assert_eq!([0, 1, 2, 3, 4].map(|priority| few.level_of(priority)), [1, 0, 1, 2, 1]);
        let policy = ModelQueuePolicy { max_queue_size: 7, ..Default::default() };
        let many = ModelDynamicBatching {
            priority_levels: u64::MAX,
            default_priority_level: 1 << 40,
            priority_queue_policy: (1..=MOST_POLICIES as u64).map(|i| (i << 20, policy)).collect(),
            ..Default::default()
        };
        let many = Batching::dynamic(1, &many);
        assert!(many.levels.len() <= MAX_LEVELS as usize, "{}", many.levels.len());
        let order = [1, 2, 32, 1 << 39, 1 << 40, (1 << 40) + 1, u64::MAX - 1, u64::MAX].map(|p| many.level_of(p));
        assert!(order.is_sorted_by(|a, b| a < b), "{order:?}");
        assert_eq!(many.level_of(0), many.level_of(1 << 40));
        assert_eq!(many.levels.iter().filter(|level| level.max_queue_size == 7).count(), 63);
        assert_eq!(many.levels[many.level_of(1 << 41)].max_queue_size, 0, "what lies between has the default policy");
    }
}
