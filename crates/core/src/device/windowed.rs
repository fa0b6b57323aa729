//! One batch after another, by a window and a largest size: what serving systems do without either paper.

use serde::{Deserialize, Serialize};

use super::launch::{InputSource, LaneSpec, Launch, SegmentRange, Span};
use super::policy::DevicePolicy;
use super::request::{DeviceReject, DeviceRequest};
use super::request_pool::RequestPool;
use super::scheduler::DeviceModel;
use super::segment_profile::SegmentProfile;
use super::settings::{self, PolicyModel, PolicySettings};
use super::table::{MOST_ROWS, ModelSpec, PolicyEntry, PolicyOptions, at_most};
use super::turn::{DeviceTimeout, Turn};
use crate::ids::{LaunchId, PartitionId, RequestId};
use crate::time::{Duration, Time};

/// How a [`Windowed`] batches.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowedOptions {
    /// What its batches take.
    pub profile: SegmentProfile,
    /// The most items of a batch.
    pub max_batch: u32,
    /// How long the oldest request may wait for others. Zero: E²bird's NO_Wait and DVABatch's ZeroBatch; tuned: OPT_Wait, DelayBatch.
    pub window: Duration,
    /// Fill every batch up to the largest with dummies (E²bird §3.2: Static).
    pub fill: bool,
    /// Give up requests that can no longer be answered by their deadline.
    pub drop: bool,
    /// The most items that wait.
    pub queue_bound: u32,
}

/// One lane, one batch at a time, which brings its inputs with it and takes its outputs back: the baseline of E²bird (§3.2) and DVABatch (§8.1).
///
/// A batch leaves when the lane is free and either it is as large as may be or its oldest request has waited for the window. Its members
/// are padded to the longest of them.
#[derive(Debug)]
pub struct Windowed {
    options: WindowedOptions,
    /// The most items of a batch now: no more than its options say.
    limit: u32,
    pool: RequestPool,
    /// The launch under way, with its members.
    running: Option<(LaunchId, Vec<RequestId>)>,
}

impl Windowed {
    /// Nothing waits. Asserts that batches have a size.
    pub fn new(options: WindowedOptions) -> Self {
        assert!(options.max_batch > 0, "a batch has at least one item");
        Windowed {
            pool: RequestPool::new(options.queue_bound, 0, options.drop.then(|| options.profile.clone())),
            running: None,
            limit: options.max_batch,
            options,
        }
    }

    fn segments(&self) -> SegmentRange {
        SegmentRange::new(0, self.options.profile.segments())
    }
}

/// What people say about it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct WindowedSettings {
    /// How long the oldest request may wait for others; `None`: the model's queue delay.
    #[serde(rename = "window_ms", deserialize_with = "settings::millis")]
    window: Option<Duration>,
    /// Fill every batch up to the largest with dummies.
    fill: bool,
}

impl PolicySettings for WindowedSettings {
    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String> {
        let PolicyModel { partition, profile, max_batch, queue_delay, drop, queue_bound, .. } = model;
        let (window, fill) = (self.window.unwrap_or(queue_delay), self.fill);
        let options = WindowedOptions { profile, max_batch, window, fill, drop, queue_bound };
        Ok(ModelSpec::new(&options, partition))
    }
}

impl PolicyOptions for WindowedOptions {
    const ENTRY: &'static PolicyEntry =
        &PolicyEntry::new::<WindowedOptions, WindowedSettings>("windowed", "one batch after another, by a window");

    fn check(&self) -> Result<(), String> {
        at_most("max_batch", self.max_batch, MOST_ROWS)
    }

    fn build(self) -> DeviceModel {
        let profile = self.profile.clone();
        DeviceModel::new(Windowed::new(self), profile)
    }
}

impl DevicePolicy for Windowed {
    fn lanes(&self, partition: PartitionId) -> Vec<LaneSpec> {
        vec![LaneSpec { partition, max_rows: self.options.max_batch, segments: self.segments() }]
    }

    fn pool(&self) -> Option<&RequestPool> {
        Some(&self.pool)
    }

    fn pool_mut(&mut self) -> Option<&mut RequestPool> {
        Some(&mut self.pool)
    }

    fn advance(&mut self, turn: &mut Turn<'_>) {
        self.pool.drop_hopeless(turn);
        let Some(oldest) = self.pool.oldest().filter(|_| self.running.is_none()) else { return };
        let waited = turn.now() >= oldest.arrival + self.options.window;
        if !waited && self.pool.rows() < self.limit {
            return;
        }
        // A request that is larger than the limit runs alone.
        let (members, rows, _) = self.pool.neighbours(self.limit.max(oldest.request.size));
        let (batch, length) = self.pool.begin_batch(turn, &members, rows);
        let id = turn.new_launch();
        turn.launch(Launch {
            id,
            batch,
            granted: None,
            model: turn.model(),
            lane: turn.lanes()[0],
            segments: self.segments(),
            members: members.clone(),
            rows,
            computed_rows: if self.options.fill { self.limit.max(rows) } else { rows },
            length,
            inputs: InputSource::Host,
        });
        self.running = Some((id, members));
    }

    fn handle_request(&mut self, turn: &mut Turn<'_>, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.pool.push(turn, request, self.options.max_batch)?;
        self.advance(turn);
        Ok(())
    }

    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, _: Span, _: &[RequestId]) {
        let Some((_, members)) = self.running.take_if(|(running, _)| *running == launch) else { return };
        for request in members {
            self.pool.finish(request, launch, turn);
        }
        self.advance(turn);
    }

    fn handle_limit(&mut self, turn: &mut Turn<'_>, rows: u32) {
        self.limit = rows.clamp(1, self.options.max_batch);
        self.advance(turn);
    }

    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        let window = self.pool.oldest().filter(|_| self.running.is_none());
        let window = window.map(|oldest| (oldest.arrival + self.options.window, DeviceTimeout::Window));
        window.into_iter().chain(self.pool.hopeless_at()).min()
    }

    fn backlog(&self) -> Duration {
        self.pool.backlog(&self.options.profile, self.limit)
    }
}
