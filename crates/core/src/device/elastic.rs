//! E²bird: runs several batches at once, of sizes that suit the load, out of an input ring.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::auto_inputs::{AutoInputs, Overlap};
use super::entry::{ModelSpec, PolicyEntry, PolicyOptions, PolicySettings};
use super::input_ring::RingRun;
use super::launch::{InputSource, LaneSpec, Launch, SegmentRange, Span};
use super::mix::{BadMix, LaneMix, MixTable};
use super::note::Note;
use super::policy::DevicePolicy;
use super::request::{DeviceReject, DeviceRequest};
use super::request_pool::RequestPool;
use super::scheduler::DeviceModel;
use super::segment_profile::SegmentProfile;
use super::settings::{self, Cores, MOST_LANES, MOST_ROWS, PaddedTo, PolicyModel, RingNeed, at_most};
use super::turn::{DeviceTimeout, Turn};
use crate::ids::{LaunchId, PartitionId, RequestId};
use crate::time::{Duration, Time};

/// The ring slots for each item that runs at once, if no setting says otherwise: "several times"
/// (E²bird §5.1).
const SLOTS_AN_ITEM: u32 = 4;

/// The options of an [`Elastic`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ElasticOptions {
    /// The latencies of batches, used only to judge deadlines.
    pub profile: SegmentProfile,
    /// The lanes by load: [`MixTable::naive`] for N-Ebird, [`MixTable::enhanced`] for E-Ebird.
    pub mixes: MixTable,
    /// The most items that run at once (MaxInf, E²bird table 3): the largest batch that keeps the
    /// SLO when it runs alone.
    pub max_running: u32,
    /// The slots of the input ring, one an item; "several times" `max_running` (E²bird §5.1).
    pub ring_slots: u32,
    /// Whether to give up requests that can no longer be answered by their deadline.
    pub drop: bool,
    /// The most items that wait.
    pub queue_bound: u32,
    /// The cores that the lanes share; `None`: each lane runs as if alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Cores>,
}

/// E²bird's elastic batch scheduler (algorithms 1 and 2), driven by events instead of a loop.
///
/// Whenever an input arrives or a launch ends, ready requests fill lanes, the largest lane first.
/// Each lane takes a run of neighbouring ring slots of exactly its size. At most
/// [`ElasticOptions::max_running`] items run. The load decides which lanes may be used (E-Ebird).
/// Lanes of another mix that still run finish their launches.
///
/// These rules suit GPUs, which run lanes beside one another. On a CPU, lanes share a few cores
/// ([`ElasticOptions::cores`]). Then no more launches begin than there are cores, and brief
/// launches run one after another. Ready requests go into one lane together, not in parts into
/// several.
#[derive(Debug)]
pub struct Elastic {
    options: ElasticOptions,
    /// The batch sizes of the lanes.
    sizes: Vec<u32>,
    pool: RequestPool,
    /// The indices of idle lanes, by size: the idle queue (E²bird §6.1).
    idle: BTreeMap<u32, BTreeSet<usize>>,
    running: BTreeMap<LaunchId, Running>,
    /// The load for which the lanes in use were chosen.
    load: u32,
}

#[derive(Debug)]
struct Running {
    lane: usize,
    size: u32,
    /// Whether the launch takes at most [`Cores::brief`].
    brief: bool,
    slots: Option<RingRun>,
    members: Vec<RequestId>,
}

impl Elastic {
    /// A policy without requests, with all lanes idle. Asserts that `max_running` is above 0 and
    /// that the ring holds as many items.
    pub fn new(options: ElasticOptions) -> Self {
        assert!(
            options.max_running > 0 && options.ring_slots >= options.max_running,
            "the ring holds what runs at once"
        );
        let sizes: Vec<u32> = options.mixes.union().sizes().collect();
        let mut idle = BTreeMap::<u32, BTreeSet<usize>>::new();
        for (lane, size) in sizes.iter().enumerate() {
            idle.entry(*size).or_default().insert(lane);
        }
        Elastic {
            pool: RequestPool::new(
                options.queue_bound,
                options.ring_slots,
                options.drop.then(|| options.profile.clone()),
            ),
            load: options.mixes.at(0).0,
            sizes,
            idle,
            running: BTreeMap::new(),
            options,
        }
    }

    fn largest(&self) -> u32 {
        self.sizes.iter().copied().max().unwrap_or(0).min(self.options.max_running)
    }

    fn segments(&self) -> SegmentRange {
        SegmentRange::new(0, self.options.profile.segments())
    }

    /// The next launch: the largest idle lane of the mix that ready requests fill. Returns its
    /// size, members, items and slots (algorithm 1, lines 3 to 13).
    fn next_launch(&self) -> Option<(u32, Vec<RequestId>, u32, Option<RingRun>)> {
        let room = self.options.max_running - self.pool.running_rows();
        let DeviceRequest { size: head, length, .. } = self.pool.ready().next()?.request;
        // This check runs for each request that comes, so it precedes the slower ones.
        if !self.has_core_for(self.pool.ready_rows().min(room), length) {
            return None;
        }
        let (_, mix) = self.options.mixes.at(self.load);
        let may = |size: u32, count: u32| {
            self.running.values().filter(|run| run.size == size).count() < count as usize
                && self.idle.get(&size).is_some_and(|idle| !idle.is_empty())
        };
        let (_, together, _) = self.pool.neighbours(room);
        let sizes = || mix.counts().filter(|(size, count)| may(*size, *count)).map(|(size, _)| size);
        // The lane is filled exactly. If lanes share cores, the smallest lane that holds all ready
        // items is taken, or else the largest. A request of several items that no lane of the mix
        // can take gets the smallest idle lane that holds it.
        let fitting = match self.options.cores {
            Some(_) => sizes().find(|size| *size >= together).or_else(|| sizes().next_back()),
            None => sizes().rev().find(|size| *size <= together),
        };
        let idle = || self.idle.iter().filter(|(_, lanes)| !lanes.is_empty()).map(|(size, _)| *size);
        let other = || idle().find(|size| head > 1 && *size >= head && head <= room);
        let size = fitting.filter(|size| head <= *size).or_else(other)?;
        let (members, rows, slots) = self.pool.neighbours(size.min(room));
        let length = self.pool.longest(members.len());
        (!members.is_empty() && self.has_core_for(rows, length)).then_some((size, members, rows, slots))
    }

    /// Whether a core is free for a launch of at most `rows` items, padded to `length`. Brief
    /// launches do not run beside one another.
    fn has_core_for(&self, rows: u32, length: u32) -> bool {
        let Some(Cores { count, .. }) = self.options.cores.filter(|_| !self.running.is_empty()) else { return true };
        let are_brief = || self.is_brief(rows, length) && self.running.values().all(|run| run.brief);
        self.running.len() < count as usize && !are_brief()
    }

    fn is_brief(&self, rows: u32, length: u32) -> bool {
        self.options.cores.is_some_and(|cores| self.options.profile.total(rows, length) <= cores.brief)
    }

    fn launch(&mut self, turn: &mut Turn<'_>, size: u32, members: Vec<RequestId>, rows: u32, slots: Option<RingRun>) {
        let Some(lane) = self.idle.get_mut(&size).and_then(BTreeSet::pop_first) else { return };
        let (batch, length) = self.pool.begin_batch(turn, &members, rows);
        let (id, brief) = (turn.new_launch(), self.is_brief(rows, length));
        turn.launch(Launch {
            id,
            batch,
            granted: None,
            model: turn.model(),
            lane: turn.lanes()[lane],
            segments: self.segments(),
            members: members.clone(),
            rows,
            computed_rows: rows,
            length,
            inputs: slots.map_or(InputSource::Device, InputSource::Ring),
        });
        self.running.insert(id, Running { lane, size, brief, slots, members });
    }
}

/// The user's settings of the policy.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ElasticSettings {
    /// The lanes by load; `None`: naive.
    mixes: Option<WrittenMixes>,
    /// The most items that run at once; `None`: the items of the largest mix. Naive lanes go up to
    /// the model's largest batch.
    max_running: Option<u32>,
    /// The slots of the input ring, one an item.
    ring_slots: Option<u32>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "mixes is \"naive\", a file, or a table of lanes by load such as { 4 = \"4\", 16 = \"4,4,8\" }"
)]
enum WrittenMixes {
    Named(Naive),
    /// The lanes' batch sizes, by load.
    Table(BTreeMap<String, String>),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Naive {
    Naive,
}

impl ElasticSettings {
    /// The lanes by load, if the user chose them. A lane of one item and a lane of two are added
    /// for each load (E²bird §7.3.2).
    fn chosen(&self) -> Result<Option<MixTable>, String> {
        let Some(WrittenMixes::Table(table)) = &self.mixes else { return Ok(None) };
        let mut mixes = BTreeMap::new();
        for (load, sizes) in table {
            let number = load.parse::<u32>();
            let number = number.map_err(|_| format!("mixes: '{load}' is not a load: a number of items"))?;
            mixes.insert(number, sizes.parse::<LaneMix>().map_err(|error| format!("mixes: {error}"))?);
        }
        MixTable::enhanced(mixes.into_iter().collect()).map(Some).map_err(|error| format!("mixes: {error}"))
    }

    /// The lanes by load for a model with this largest batch, and the number of items that run at
    /// once.
    fn mixes(&self, max_batch: u32) -> Result<(MixTable, u32), String> {
        if max_batch <= 1 && self.chosen()?.is_some() {
            return Err(
                "mixes: the model takes one item at a time (max_batch_size is 1), so there is no mix of batch sizes to choose; leave mixes out"
                    .to_owned(),
            );
        }
        let largest = 1u32 << max_batch.max(1).ilog2();
        let naive = || MixTable::naive(self.max_running.unwrap_or(largest.saturating_mul(2)));
        let mixes = self.chosen()?.unwrap_or_else(naive);
        let all = mixes.union();
        let most = all.sizes().max().unwrap_or(1);
        if most > max_batch {
            return Err(format!(
                "mixes: a lane of {most} items is larger than the model's largest batch of {max_batch}; leave it out, lower max_running, or raise max_batch_size"
            ));
        }
        let lanes = all.sizes().count();
        if lanes > MOST_LANES as usize {
            return Err(format!("mixes: {lanes} lanes are more than the {MOST_LANES} that a device may have"));
        }
        let total = mixes.entries().iter().map(|(_, mix)| mix.total()).max().unwrap_or(1);
        let max_running = self.max_running.unwrap_or(total);
        if max_running < most {
            return Err(format!(
                "max_running of {max_running} is less than the largest lane of {most} items, which could never run; raise it or leave that lane out"
            ));
        }
        Ok((mixes, max_running))
    }
}

impl PolicySettings for ElasticSettings {
    fn check(&self) -> Result<(), String> {
        settings::at_least_one(&[("max_running", self.max_running), ("ring_slots", self.ring_slots)])?;
        self.chosen().map(drop)
    }

    /// All lanes may run at once, each on a core: the bound exceeds the cores of any machine.
    fn at_once(&self) -> u32 {
        MOST_LANES
    }

    fn largest_request(&self, max_batch: u32) -> Result<u32, String> {
        let (mixes, max_running) = self.mixes(max_batch)?;
        Ok(mixes.union().sizes().max().unwrap_or(1).min(max_running))
    }

    fn ring(&self, max_batch: u32, _: bool) -> Result<Option<RingNeed>, String> {
        let (_, max_running) = self.mixes(max_batch)?;
        let least = self.ring_slots.unwrap_or(max_running.saturating_mul(SLOTS_AN_ITEM));
        let needed = max_running.max(max_batch);
        if least < needed {
            return Err(format!(
                "an input ring of {least} slots is too small: the largest request has {max_batch} items and {max_running} run at once; ring_slots must be at \
                 least {needed}"
            ));
        }
        Ok(Some(RingNeed { least, must: true }))
    }

    fn costly_padding(&self) -> Option<PaddedTo> {
        Some(PaddedTo::Allowed)
    }

    fn tell_auto(&self, inputs: &mut AutoInputs) {
        let options = || {
            let (mixes, max_running) = self.mixes(inputs.max_batch)?;
            let ring_slots = self.ring(inputs.max_batch, false)?.map_or(0, |ring| ring.least);
            let (profile, drop, queue_bound, cores) = (inputs.profile.clone(), false, 1, None);
            let options = ElasticOptions { profile, mixes, max_running, ring_slots, drop, queue_bound, cores };
            options.check().map(|()| options)
        };
        inputs.lanes = options().map(|options| options.mixes.union().sizes().collect()).unwrap_or_default();
    }

    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String> {
        let PolicyModel { partition, profile, max_batch, drop, queue_bound, ring_slots, cores, .. } = model;
        let (mixes, max_running) = self.mixes(max_batch)?;
        let options = ElasticOptions { profile, mixes, max_running, ring_slots, drop, queue_bound, cores };
        Ok(ModelSpec::new(&options, partition))
    }
}

/// A batch on each lane. A request larger than the largest lane would be refused, while
/// `exclusive` answers it.
fn predict(inputs: &AutoInputs, overlap: &Overlap) -> Option<f64> {
    let fits = inputs.lanes.iter().any(|rows| *rows >= inputs.max_batch.max(1));
    fits.then(|| inputs.rate(&inputs.lanes, |rows| overlap.factor(rows)))
}

impl PolicyOptions for ElasticOptions {
    const ENTRY: &'static PolicyEntry = &PolicyEntry::new::<ElasticOptions, ElasticSettings>(
        "elastic",
        "several batches at once, whose sizes follow the load",
    )
    .predicted(predict);

    fn check(&self) -> Result<(), String> {
        at_most("max_running", self.max_running, MOST_ROWS)?;
        at_most("ring_slots", self.ring_slots, MOST_ROWS)?;
        if self.ring_slots < self.max_running {
            return Err(format!(
                "a ring of {} slots holds less than the {} items that run at once",
                self.ring_slots, self.max_running
            ));
        }
        let entries = self.mixes.entries();
        if entries.is_empty() || !entries.is_sorted_by(|(a, _), (b, _)| a < b) {
            return Err(BadMix::loads().to_string());
        }
        let lanes = self.mixes.union().counts().fold(0u32, |sum, (_, count)| sum.saturating_add(count));
        at_most("lanes", lanes, MOST_LANES)?;
        match entries.iter().all(|(_, mix)| mix.count(1) > 0 && mix.counts().all(|(size, _)| size <= self.max_running))
        {
            true => Ok(()),
            false => Err(format!(
                "each mix has a lane for one item, and none for more than the {} that run at once",
                self.max_running
            )),
        }
    }

    fn build(self) -> DeviceModel {
        let profile = self.profile.clone();
        DeviceModel::new(Elastic::new(self), profile)
    }
}

impl DevicePolicy for Elastic {
    fn lanes(&self, partition: PartitionId) -> Vec<LaneSpec> {
        self.sizes.iter().map(|size| LaneSpec { partition, max_rows: *size, segments: self.segments() }).collect()
    }

    fn pool(&self) -> Option<&RequestPool> {
        Some(&self.pool)
    }

    fn pool_mut(&mut self) -> Option<&mut RequestPool> {
        Some(&mut self.pool)
    }

    fn advance(&mut self, turn: &mut Turn<'_>) {
        self.pool.drop_hopeless(turn);
        // Algorithm 2, lines 2 to 4: the load is the number of items in the ring, waiting or
        // running.
        let (load, _) = self.options.mixes.at(self.pool.ready_rows() + self.pool.running_rows());
        if load != self.load {
            self.load = load;
            turn.note(Note::Switch { load });
        }
        while let Some((size, members, rows, slots)) = self.next_launch() {
            self.launch(turn, size, members, rows, slots);
        }
    }

    fn handle_request(&mut self, turn: &mut Turn<'_>, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.pool.push(turn, request, self.largest())
    }

    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, _: Span, _: &[RequestId]) {
        let Some(running) = self.running.remove(&launch) else { return };
        self.idle.entry(running.size).or_default().insert(running.lane);
        for request in running.members {
            self.pool.finish(request, launch, turn);
        }
        if let Some(slots) = running.slots {
            self.pool.release(slots, turn);
        }
        self.advance(turn);
    }

    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        self.pool.hopeless_at()
    }

    fn backlog(&self) -> Duration {
        self.pool.backlog(&self.options.profile, self.options.max_running)
    }
}
