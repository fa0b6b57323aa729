//! How a model's requests are queued and batched.

use downbeat_core::Duration;
use downbeat_protocol::inference::{ModelDynamicBatching, ModelQueuePolicy, model_queue_policy};

/// How a model's requests are queued and batched; Triton's `dynamic_batching`, resolved.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batching {
    /// Largest batch; 0: the model's tensors have no batch dimension.
    pub max_batch_size: u32,
    /// Whether the configuration (or its completion) has `dynamic_batching`. Downbeat shares batches between requests
    /// either way; `downbeat config check` and the curious can tell.
    pub dynamic: bool,
    /// Batch sizes worth waiting for, ascending; empty: the larger the better.
    pub preferred: Vec<u32>,
    /// How long a request may wait for company, from its arrival.
    pub max_queue_delay: Duration,
    /// Answers leave in the order of the requests.
    pub preserve_ordering: bool,
    /// Queues by priority, the most urgent first; at least one.
    pub levels: Vec<Level>,
    /// Index in `levels` of requests without a priority.
    pub default_level: usize,
}

/// The queue of one priority.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Level {
    /// Most requests that wait; 0: the configuration sets no bound (the server's default holds).
    pub max_queue_size: u32,
    /// What happens to a request whose time in the queue is over.
    pub timeout_action: TimeoutAction,
    /// Time a request may wait; zero: for ever.
    pub default_timeout: Duration,
    /// Whether a request's own `timeout` parameter counts.
    pub allow_timeout_override: bool,
}

/// What happens to a request whose time in the queue is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeoutAction {
    /// It is answered with an error.
    Reject,
    /// It waits on, behind the requests whose time is not over.
    Delay,
}

impl Level {
    /// The queue of a model that says nothing about queues: unlike Triton's, it honours a request's own `timeout`.
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

/// More levels than anyone tells apart; each costs a queue.
pub(crate) const MAX_LEVELS: u64 = 256;

impl Batching {
    /// Requests run as they come, each alone.
    pub(crate) fn plain(max_batch_size: u32) -> Batching {
        Batching {
            max_batch_size,
            dynamic: false,
            preferred: Vec::new(),
            max_queue_delay: Duration::ZERO,
            preserve_ordering: false,
            levels: vec![Level::UNCONFIGURED],
            default_level: 0,
        }
    }

    /// Resolves a checked configuration: levels in `1..=MAX_LEVELS` or none, sizes positive.
    pub(crate) fn dynamic(max_batch_size: u32, batching: &ModelDynamicBatching) -> Batching {
        let mut preferred: Vec<u32> =
            batching.preferred_batch_size.iter().filter_map(|size| u32::try_from(*size).ok()).collect();
        preferred.sort_unstable();
        preferred.dedup();
        let default_policy = batching.default_queue_policy.as_ref().map_or(Level::UNCONFIGURED, Level::new);
        let count = batching.priority_levels.clamp(1, MAX_LEVELS);
        let levels = (1..=count)
            .map(|priority| batching.priority_queue_policy.get(&priority).map_or(default_policy, Level::new))
            .collect();
        Batching {
            max_batch_size,
            dynamic: max_batch_size > 1,
            preferred,
            max_queue_delay: Duration::from_micros(batching.max_queue_delay_microseconds),
            preserve_ordering: batching.preserve_ordering,
            levels,
            default_level: usize::try_from(batching.default_priority_level.clamp(1, count) - 1).unwrap_or(0),
        }
    }

    /// The index in `levels` of a request's `priority`: 1 is the most urgent; 0 and what is beyond the last level mean
    /// the default, as in Triton.
    pub fn level_of(&self, priority: u64) -> usize {
        match usize::try_from(priority) {
            Ok(priority) if (1..=self.levels.len()).contains(&priority) => priority - 1,
            _ => self.default_level,
        }
    }
}
