//! The measurements that a server makes when it loads a model under `auto`, and the choice that
//! `auto` makes from these numbers.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::device::{
    AutoInputs, LaneId, Overlap, OverlapPoint, PartitionId, PolicyModel, PolicyName, SegmentProfile, SegmentRange,
    Staging, WrittenSettings,
};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_sim::device_replay::{Candidate, Replayable, ReplayedModel, StagingSearch};

use super::contended::{Completed, ContendedDevice};
use super::failure::DeviceFailure;
use super::model::EmulatedModel;
use super::random::RandomModel;
use crate::world::Serving;

/// The numbers of stages that are tried: all that a random model of four segments can have.
const STAGES: [usize; 4] = [1, 2, 3, 4];
/// The batches that run beside one another when two lanes are measured together.
const TOGETHER: u64 = 8;
/// The most items that may wait.
const QUEUE_BOUND: u32 = 1 << 20;

/// The measurements that are made when a model is loaded under `auto`.
#[derive(Clone, Debug)]
pub struct MeasuredForAuto {
    /// The model with its measurements.
    pub model: ReplayedModel,
    /// The policies that the model may have.
    pub candidates: Vec<Replayable>,
    /// The number of the candidate that `auto` chooses when the model is loaded.
    pub start: usize,
    /// The model as each candidate cuts it.
    pub(super) cut: Vec<EmulatedModel>,
}

impl MeasuredForAuto {
    /// Measures a model as a server does: the latency of batches of each size, whole and in stages,
    /// and the throughput of two lanes together.
    ///
    /// # Errors
    /// If the model has too few operators for the stages that are tried, or no batch.
    pub fn new(model: &RandomModel) -> Result<Self, DeviceFailure> {
        let RandomModel { emulated, max_batch, slo, .. } = model;
        let profile = emulated.profile(&[0], *max_batch)?;
        let staged = STAGES.iter().map(|stages| emulated.cut(*stages)).collect::<Result<Vec<_>, _>>()?;
        let cuts = staged.iter().map(|cut| cut.profile(&[0], *max_batch)).collect::<Result<Vec<_>, _>>()?;
        let sizes = [1, max_batch.div_ceil(4), *max_batch];
        let overlap = Overlap::new(sizes.map(|rows| together(emulated, rows)).to_vec());
        let latencies: Vec<_> = (1..=*max_batch).map(|rows| (rows, profile.total(rows, 0))).collect();
        let adaptive = DispatchPolicy::Adaptive { consolidate: false };
        let model = ReplayedModel {
            options: ModelOptions::new(LatencyProfile::from_points(&latencies)?, adaptive, DropPolicy::Adaptive),
            model: PolicyModel {
                partition: PartitionId::default(),
                profile: profile.clone(),
                max_batch: *max_batch,
                padded: false,
                queue_delay: Duration::ZERO,
                drop: true,
                queue_bound: QUEUE_BOUND,
                ring_slots: 0,
                cores: None,
            },
            overlap: Some(overlap.clone()),
            cuts: cuts.clone(),
            // The profile includes the launch.
            launch: Duration::ZERO,
            written: WrittenSettings::new(),
            shares: Vec::new(),
        };
        let candidates = model.candidates();
        let stages = |one: &Replayable| one.candidate.settings.get("stages").and_then(serde_json::Value::as_u64);
        let cut = |one: &Replayable| {
            let index = STAGES.iter().position(|count| stages(one) == Some(*count as u64));
            index.and_then(|index| staged.get(index)).unwrap_or(emulated).clone()
        };
        let cut = candidates.iter().map(cut).collect();
        let finest = staged.last().unwrap_or(emulated);
        let start = start((&profile, &cuts, finest), &overlap, (*max_batch, *slo), &candidates)?;
        Ok(MeasuredForAuto { model, candidates, start, cut })
    }

    /// Returns how a candidate is served on this many devices.
    pub(super) fn serving(&self, candidate: usize, devices: usize) -> Serving {
        match &self.candidates[candidate].spec {
            None => Serving::Cluster(self.model.options.clone()),
            Some(spec) => Serving::Devices(spec.clone(), (0..devices).collect()),
        }
    }
}

/// Measures a batch alone, and while another batch runs beside it throughout.
pub(super) fn together(model: &EmulatedModel, rows: u32) -> OverlapPoint {
    let (all, units) = (SegmentRange::new(0, model.segment_count()), model.limits().units);
    let mut device = ContendedDevice::new(model.limits(), 2);
    let mut begin = [Time::ZERO; 2];
    for lane in 0..2 {
        device.launch(Time::ZERO, LaneId(lane), 0, model.work(all, rows, 0, units));
    }
    let (mut sum, mut count) = (Duration::ZERO, 0);
    while count < TOGETHER
        && let Some(at) = device.next_event()
    {
        for completed in device.advance(at) {
            let Completed::Launch { lane, token } = completed else { continue };
            let index = lane.0 as usize;
            if token > 0 {
                (sum, count) = (sum + at.since(begin[index]), count + 1);
            }
            begin[index] = at;
            device.launch(at, lane, token + 1, model.work(all, rows, 0, units));
        }
    }
    let together = Duration::from_nanos(sum.as_nanos() / count.max(1));
    OverlapPoint { batch: rows, alone: model.time(rows, 0), together }
}

/// Returns the latencies of a model's segments without the cost of a launch, and this cost. A stage
/// is one launch, of one segment or of several. With the launches, many stages would be free.
pub(super) fn without_launches(
    model: &EmulatedModel,
    max_batch: u32,
) -> Result<(SegmentProfile, Duration), DeviceFailure> {
    let (measured, launch) = (model.profile(&[0], max_batch)?, model.launch_overhead());
    let time = |segment, rows| measured.time(segment, rows, 0).saturating_sub(launch);
    let segment = |segment| {
        let points: Vec<_> = (1..=max_batch).map(|rows| (rows, time(segment, rows))).collect();
        Ok(vec![LatencyProfile::from_points(&points)?])
    };
    let segments = (0..measured.segments()).map(segment).collect::<Result<Vec<_>, DeviceFailure>>()?;
    Ok((SegmentProfile::new(vec![0], &segments)?, launch))
}

/// Returns the candidate that `auto` chooses when a model is loaded. As in the server, `staged` is
/// judged by all stages and buffer pairs. If `staged` is chosen, trials on measured latencies
/// find its stages and pairs.
fn start(
    (profile, cuts, finest): (&SegmentProfile, &[SegmentProfile], &EmulatedModel),
    overlap: &Overlap,
    (max_batch, slo): (u32, Duration),
    candidates: &[Replayable],
) -> Result<usize, DeviceFailure> {
    let naive = Candidate { policy: PolicyName::ELASTIC, settings: WrittenSettings::new() };
    let naive = candidates.iter().find(|one| one.candidate == naive);
    let lanes = naive.and_then(|one| one.spec.as_ref()?.build().ok());
    let lanes = lanes.map(|model| model.policy.lanes(PartitionId::default())).unwrap_or_default();
    let read = PolicyName::STAGED.read(&WrittenSettings::new());
    let settings = read.map_err(|error| DeviceFailure(error.to_string()))?.settings;
    let mut inputs = AutoInputs {
        profile: profile.clone(),
        cut: None,
        is_batched: true,
        varies: false,
        max_batch,
        launch: Duration::ZERO,
        cores: 1,
        threads: 0,
        at_once: 1,
        lanes: lanes.iter().map(|lane| lane.max_rows).collect(),
        stagings: Vec::new(),
    };
    settings.tell_auto(&mut inputs);
    let choice = inputs.choose(overlap);
    if choice.policy != PolicyName::STAGED {
        return Ok(place(candidates, choice.policy, WrittenSettings::new()));
    }
    let (segments, launch) = without_launches(finest, max_batch)?;
    let search = StagingSearch {
        settings: &*settings,
        segments,
        overlap: overlap.clone(),
        launch,
        max_batch,
        slo: Some(slo),
        seed: 1,
    };
    let default = || Staging::default_of(&search.choices(), search.segments.segments());
    let found = search.run().chosen.or_else(default);
    let Some(staging) = found else { return Ok(0) };
    // Now that the model is cut, the choice is made once more.
    inputs.cut = cuts.iter().find(|cut| cut.segments() == staging.stages).cloned();
    inputs.stagings = vec![staging];
    let choice = inputs.choose(overlap);
    let mut written = WrittenSettings::new();
    if choice.policy == PolicyName::STAGED {
        written.insert("stages".to_owned(), staging.stages.into());
        if staging.stages > 1 && staging.pairs == 1 {
            written.insert("buffer_pairs".to_owned(), staging.pairs.into());
        }
    }
    Ok(place(candidates, choice.policy, written))
}

/// Returns the number of the candidate with this policy and these settings, or that of `exclusive`.
fn place(candidates: &[Replayable], policy: PolicyName, settings: WrittenSettings) -> usize {
    let chosen = Candidate { policy, settings };
    candidates.iter().position(|one| one.candidate == chosen).unwrap_or(0)
}
