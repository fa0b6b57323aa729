//! One batch after another, by a window and a largest size, as plain serving systems do it.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::entry::{ModelSpec, PolicyEntry, PolicyOptions, PolicySettings};
use super::launch::{InputSource, LaneSpec, Launch, SegmentRange, Span};
use super::output::DeviceOutput;
use super::policy::DevicePolicy;
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::request_pool::{PoolStats, RequestPool};
use super::resident::Arbitrated;
use super::scheduler::DeviceModel;
use super::segment_profile::SegmentProfile;
use super::settings::{self, MOST_ROWS, PolicyModel, at_most};
use super::turn::{DeviceTimeout, Turn};
use crate::ids::{BatchId, LaunchId, PartitionId, RequestId};
use crate::time::{Duration, Time};

/// The options of a [`Windowed`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowedOptions {
    /// The latencies of the batches.
    pub profile: SegmentProfile,
    /// The most items of a batch.
    pub max_batch: u32,
    /// The time that the oldest request may wait for others. Zero: E²bird's NO_Wait and DVABatch's
    /// ZeroBatch; tuned: OPT_Wait, DelayBatch.
    pub window: Duration,
    /// Whether to fill every batch up to the largest with dummies (E²bird §3.2: Static).
    pub fill: bool,
    /// Whether to give up requests that can no longer be answered by their deadline.
    pub drop: bool,
    /// The most items that wait, not counting batches that are made already.
    pub queue_bound: u32,
    /// The batches that are made ahead while one runs, at most [`MOST_AHEAD`]. No request joins
    /// them any more. Zero: today's Triton, where a batch grows until it begins. One: the Triton on
    /// which DVABatch was measured (21.10: its issue 3624, changed by its PR 3789).
    #[serde(default)]
    pub ahead: u32,
}

/// The most batches that a [`Windowed`] makes ahead.
pub const MOST_AHEAD: u32 = 16;

/// One lane, one batch at a time, with inputs and outputs copied in the launch: the baseline of
/// E²bird (§3.2) and DVABatch (§8.1).
///
/// A batch is made when it is full or its oldest request has waited for the window. Also the lane
/// must be free, or fewer batches than [`WindowedOptions::ahead`] wait for it. The members are
/// padded to the longest one. From then on the batch is frozen: no request joins, and none is given
/// up, even past its deadline. A request whose client goes leaves the batch, as its input is gone.
#[derive(Debug)]
pub struct Windowed {
    options: WindowedOptions,
    /// The most items of a batch now, at most [`WindowedOptions::max_batch`].
    limit: u32,
    pool: RequestPool,
    /// The batches that wait for the lane, oldest first. Empty while nothing runs.
    frozen: VecDeque<FrozenBatch>,
    /// The running launch, with its members.
    running: Option<(LaunchId, Vec<RequestId>)>,
}

/// A batch that waits for the lane.
#[derive(Debug)]
struct FrozenBatch {
    batch: BatchId,
    members: Vec<RequestId>,
    rows: u32,
    length: u32,
}

impl Windowed {
    /// A policy without requests. Asserts that the largest batch has at least one item.
    pub fn new(options: WindowedOptions) -> Self {
        assert!(options.max_batch > 0, "a batch has at least one item");
        Windowed {
            pool: RequestPool::new(options.queue_bound, 0, options.drop.then(|| options.profile.clone())),
            frozen: VecDeque::new(),
            running: None,
            limit: options.max_batch,
            options,
        }
    }

    fn segments(&self) -> SegmentRange {
        SegmentRange::new(0, self.options.profile.segments())
    }

    /// Whether another batch may be made.
    fn has_room(&self) -> bool {
        self.running.is_none() || self.frozen.len() < self.options.ahead as usize
    }

    fn begin(&mut self, turn: &mut Turn<'_>, frozen: FrozenBatch) {
        let FrozenBatch { batch, members, rows, length } = frozen;
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

    /// Takes a request out of a frozen batch; returns whether one had it.
    fn leave(&mut self, request: RequestId) -> bool {
        let holds = |frozen: &FrozenBatch| frozen.members.contains(&request);
        let Some(at) = self.frozen.iter().position(holds) else { return false };
        let frozen = &mut self.frozen[at];
        frozen.members.retain(|member| *member != request);
        frozen.rows -= self.pool.forget(request);
        if frozen.members.is_empty() {
            self.frozen.remove(at);
        }
        true
    }
}

/// The user's settings of the policy.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct WindowedSettings {
    /// The time that the oldest request may wait for others; `None`: the model's queue delay.
    #[serde(rename = "window_ms", deserialize_with = "settings::millis")]
    window: Option<Duration>,
    /// Whether to fill every batch up to the largest with dummies.
    fill: bool,
    /// The batches that are made ahead while one runs.
    ahead: u32,
}

/// Checks the number of batches that are made ahead.
fn check_ahead(ahead: u32) -> Result<(), String> {
    match ahead <= MOST_AHEAD {
        true => Ok(()),
        false => Err(format!("ahead is {ahead}; it must be 0 to {MOST_AHEAD}")),
    }
}

impl PolicySettings for WindowedSettings {
    fn check(&self) -> Result<(), String> {
        check_ahead(self.ahead)
    }

    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String> {
        let PolicyModel { partition, profile, max_batch, queue_delay, drop, queue_bound, .. } = model;
        let window = self.window.unwrap_or(queue_delay);
        let WindowedSettings { fill, ahead, .. } = *self;
        let options = WindowedOptions { profile, max_batch, window, fill, drop, queue_bound, ahead };
        Ok(ModelSpec::new(&options, partition))
    }
}

impl PolicyOptions for WindowedOptions {
    const ENTRY: &'static PolicyEntry = &PolicyEntry::new::<WindowedOptions, WindowedSettings>(
        "windowed",
        "one batch after another; a window collects requests",
    )
    .predicted(|inputs, _| Some(inputs.rate(&[inputs.max_batch.max(1)], |_| 1.0)));

    fn check(&self) -> Result<(), String> {
        at_most("max_batch", self.max_batch, MOST_ROWS)?;
        check_ahead(self.ahead)
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

    fn arbitrated(&self) -> Arbitrated {
        Arbitrated { under: None, limited: true }
    }

    fn pool(&self) -> Option<&RequestPool> {
        Some(&self.pool)
    }

    fn pool_mut(&mut self) -> Option<&mut RequestPool> {
        Some(&mut self.pool)
    }

    fn advance(&mut self, turn: &mut Turn<'_>) {
        let most = self.options.max_batch;
        self.limit = turn.limit().map_or(most, |rows| rows.clamp(1, most));
        self.pool.drop_hopeless(turn);
        loop {
            if self.running.is_none()
                && let Some(next) = self.frozen.pop_front()
            {
                self.begin(turn, next);
            }
            let Some(oldest) = self.pool.oldest().filter(|_| self.has_room()) else { return };
            let waited = turn.now() >= oldest.arrival + self.options.window;
            if !waited && self.pool.rows() < self.limit {
                return;
            }
            // A request that is larger than the limit runs alone.
            let (members, rows, _) = self.pool.neighbours(self.limit.max(oldest.request.size));
            let (batch, length) = self.pool.begin_batch(turn, &members, rows);
            self.frozen.push_back(FrozenBatch { batch, members, rows, length });
        }
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

    fn handle_cancel(&mut self, turn: &mut Turn<'_>, request: RequestId) -> bool {
        let was_there = self.leave(request) || self.pool.cancel(request, turn);
        self.advance(turn);
        was_there
    }

    fn drop_waiting(&mut self, turn: &mut Turn<'_>, reason: DeviceDrop) {
        for request in self.frozen.drain(..).flat_map(|frozen| frozen.members) {
            self.pool.forget(request);
            turn.push(DeviceOutput::Drop { request, reason });
        }
        self.pool.drop_all(turn, reason);
    }

    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        let window = self.pool.oldest().filter(|_| self.has_room());
        let window = window.map(|oldest| (oldest.arrival + self.options.window, DeviceTimeout::Window));
        window.into_iter().chain(self.pool.hopeless_at()).min()
    }

    fn backlog(&self) -> Duration {
        let frozen = self.frozen.iter().map(|frozen| self.options.profile.total(frozen.rows, frozen.length));
        frozen.fold(self.pool.backlog(&self.options.profile, self.limit), |sum, time| sum + time)
    }

    fn stats(&self) -> PoolStats {
        let stats = self.pool.stats();
        let frozen = self.frozen.iter().map(|frozen| frozen.rows).sum::<u32>();
        PoolStats { waiting: stats.waiting + frozen, running: stats.running - frozen, ..stats }
    }
}
