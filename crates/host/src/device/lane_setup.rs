//! Brings a device policy into service for a loaded model: checks that it can, measures, starts its
//! lanes.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use anyhow::ensure;
use downbeat_core::device::{
    ChosenPolicy, Cores, LaneSpec, ModelSpec, PaddingSettings, PartitionId, PolicyModel, PolicyName, RingNeed,
    SegmentProfile,
};
use downbeat_core::{Duration, LatencyProfile, ModelId};
use downbeat_engine::{Lane, Model, Place, Share, State};
use downbeat_service::clock::Clock;
use downbeat_service::metrics::LaneMetricsFamily;
use parking_lot::Mutex;

use super::answer_watch::{AnswerLooker, AnswerWatch, PADDED_EVERY, Suspicion, Watched};
use super::device_host::DeviceHost;
use super::exits::Exit;
use super::input_rings::InputRings;
use super::padding::Padding;
use super::padding_check;
use super::placement::{EngineLanes, Placement, WarmUpLanes};
use super::placements::Placements;
use super::request_events::RequestEvents;
use super::tensors::BatchTensors;
use crate::groups::group_predictor::GroupMember;
use crate::model_memory::{HeldMemory, MemoryPart};
use crate::request::batch_codec::BatchCodec;
use crate::run::model_health::ModelHealth;

/// About how long requests of ever greater lengths are tried padded, at load.
const PADDING_BUDGET: Duration = Duration::from_millis(5_000);
/// The thread of a frontend may run launches up to this long. Its other clients do not notice such
/// a delay, and two threads need about as long to change places.
const BRIEF: Duration = Duration::from_micros(100);

/// Why a device policy cannot have a model that can be served otherwise.
#[derive(Debug, thiserror::Error)]
#[error("the device policy '{policy}' cannot have this model: {reason}")]
pub struct PolicyError {
    /// The device policy.
    pub policy: PolicyName,
    /// The obstacle, with a remedy.
    pub reason: String,
    /// The policy's check needs a request that the model answers, and no made-up request was one.
    /// The check then says nothing about the model.
    pub is_untried: bool,
}

impl PolicyError {
    /// The policy cannot have the model, for this reason.
    pub fn new(policy: PolicyName, reason: impl ToString) -> Self {
        PolicyError { policy, reason: reason.to_string(), is_untried: false }
    }
}

/// A loaded model, with the policy, devices and partitions that it will run with.
pub struct LaneSetup<'a> {
    /// The devices' name for the model.
    pub id: ModelId,
    /// The model's name.
    pub name: &'a str,
    /// The version's number.
    pub version: &'a str,
    /// The loaded model.
    pub model: &'a Arc<dyn Model>,
    /// Joins requests into batches.
    pub codec: Arc<BatchCodec>,
    /// The latencies of its batches. If its requests vary, they hold for the length that was
    /// measured.
    pub profile: LatencyProfile,
    /// The latencies of the model's segments.
    pub segments: SegmentProfile,
    /// The device policy with its settings.
    pub policy: &'a ChosenPolicy,
    /// Hears of the requests that the policy decides about.
    pub listener: Option<Arc<dyn RequestEvents>>,
    /// How long a request waits for company by the configuration
    /// ([`ServerOptions::queue_delay`](downbeat_service::options::ServerOptions::queue_delay)).
    pub queue_delay: Duration,
    /// Whether requests that cannot make their deadline are given up.
    pub drop: bool,
    /// The most items that wait, each device.
    pub queue_bound: u32,
    /// The model's part in operator groups, if its operators run in groups with other models.
    pub group: Option<GroupMember>,
    /// Cores that run its launches, if it is on the CPU.
    pub cores: Option<u32>,
    /// Compute units beyond which a launch of it is hardly faster, if known.
    pub knee: Option<u32>,
    /// The metrics of all lanes.
    pub metrics: &'a LaneMetricsFamily,
    /// Looks at answers in service.
    pub looker: &'a AnswerLooker,
    /// The watch looks at one in this many answers of shared batches. The flag says whether a wrong
    /// answer ends the sharing. `None`: no watch.
    pub watch_rows: Option<(u32, bool)>,
    /// The CPU memory that the model holds, if it is on the CPU.
    pub memory: Option<&'a HeldMemory>,
    /// The devices that will host it.
    pub hosts: &'a [Arc<DeviceHost>],
    /// Its partitions of these devices, first the one that it was loaded for. There are several
    /// only if the scheduler makes its batches.
    pub partitions: &'a [PartitionId],
    /// Warms up lanes that are made later.
    pub warm_up: WarmUpLanes,
}

/// How requests of different lengths share batches, if they do.
///
/// # Errors
/// A text with a remedy, if the model cannot have the device policy.
pub fn padding(codec: &BatchCodec, policy: &ChosenPolicy) -> anyhow::Result<Option<Arc<Padding>>> {
    let ChosenPolicy { name: policy, padding: PaddingSettings { pad, max_length, .. }, .. } = policy;
    ensure!(
        codec.batched,
        "the device policy '{policy}' makes batches, and the model has no batch dimension (max_batch_size is 0); use the policy exclusive"
    );
    if !pad {
        ensure!(
            !codec.has_varying_shapes(),
            "requests vary in shape, and the device policy '{policy}' puts all requests into the same batches; give `pad = true` where the model's answers \
             do not change when its inputs are padded with zeros, or use the policy exclusive, which keeps shapes apart"
        );
        return Ok(None);
    }
    let padding = Padding::new(codec, *max_length).map_err(|reason| anyhow::anyhow!("`pad`: {reason}"))?;
    Ok(Some(Arc::new(padding)))
}

/// Checks, on a device, that a model's answers do not change when its inputs are padded.
///
/// # Errors
/// If the answers change, or the model cannot run the requests of the check.
pub fn check_padding(
    codec: &BatchCodec,
    padding: &Padding,
    model: &dyn Model,
    device: usize,
    clock: Clock,
) -> anyhow::Result<()> {
    let mut lane = model.lane_at(Place { device, share: Share::Whole })?;
    let end = clock.now() + PADDING_BUDGET;
    let mut run = |state: State| -> Result<State, String> {
        let mut state = state;
        lane.run(0..model.segments(), &mut state).map_err(|error| error.to_string())?;
        Ok(state)
    };
    padding_check::check(codec, padding, &|| clock.now() < end, &mut run)
        .map_err(|reason| anyhow::anyhow!("`pad`: {reason}"))
}

impl LaneSetup<'_> {
    /// The partition that it was loaded for.
    fn home(&self) -> PartitionId {
        self.partitions.first().copied().unwrap_or_default()
    }

    /// Starts to look at one in `every` answers of the model.
    fn watch(
        &self,
        suspicion: Suspicion,
        padding: Option<Arc<Padding>>,
        every: u32,
        acts: bool,
    ) -> std::io::Result<Arc<AnswerWatch>> {
        let LaneSetup { name, version, model, codec, metrics, .. } = self;
        let mut devices = self.hosts.iter().map(|host| host.device);
        let device = devices.find(|device| model.lost(*device).is_none()).unwrap_or(0);
        let results = match suspicion {
            Suspicion::Padding => metrics.padding_checks(name, version),
            Suspicion::Rows => metrics.row_checks(name, version),
        };
        let watched = Watched {
            suspicion,
            model: (*name).to_owned(),
            version: (*version).to_owned(),
            codec: codec.clone(),
            padding,
            engine: (*model).clone(),
            place: Place { device, share: Share::Whole },
            results,
            acts,
            lane: Mutex::default(),
            is_suspected: AtomicBool::new(false),
            is_off: AtomicBool::new(false),
        };
        self.looker.watch(watched, every).map(Arc::new)
    }

    /// Starts to look at answers of shared batches, if the setup asks for it.
    fn row_watch(&self, padding: Option<&Arc<Padding>>) -> std::io::Result<Option<Arc<AnswerWatch>>> {
        let watch = |(every, acts)| self.watch(Suspicion::Rows, padding.cloned(), every, acts);
        self.watch_rows.map(watch).transpose()
    }
}

/// The engine's lanes of a model whose batches the scheduler makes, on each of its partitions.
pub enum LanesWanted {
    /// One lane on each device. The pair holds a device and a lane for its first partition, if the
    /// lane exists already.
    EachDevice(Option<(usize, Box<dyn Lane>)>),
    /// This many lanes for all devices, which are alike: no more of its batches run at once.
    AnyDevice(usize),
}

/// The most rows of a launch that a frontend's thread may run; 0: none.
pub(super) fn brief_rows(model: &dyn Model, codec: &BatchCodec, profile: &LatencyProfile) -> u32 {
    // If shapes vary, a shape that was not measured may take longer.
    let may_be_brief = model.is_bounded() && !codec.has_varying_shapes();
    (1..=profile.max_batch()).take_while(|rows| may_be_brief && profile.latency(*rows) <= BRIEF).last().unwrap_or(0)
}

/// A version on some of its devices. If a device fails to take it, the earlier devices forget it
/// again.
struct Started<'a> {
    setup: LaneSetup<'a>,
    health: Arc<ModelHealth>,
    devices: Vec<(Arc<DeviceHost>, Arc<Placement>)>,
}

impl<'a> Started<'a> {
    fn new(setup: LaneSetup<'a>) -> Self {
        let health = Arc::new(ModelHealth::new(setup.name.to_owned(), setup.version.to_owned()));
        Started { setup, health, devices: Vec::new() }
    }

    fn add(
        &mut self,
        host: &Arc<DeviceHost>,
        tensors: BatchTensors,
        exits: Arc<[Exit]>,
        engines: Arc<EngineLanes>,
        policy: ModelSpec,
        own: Vec<Box<dyn Lane>>,
    ) -> std::io::Result<()> {
        let (setup, device) = (&self.setup, host.device);
        let model = Arc::new(Placement {
            id: setup.id,
            name: setup.name.to_owned(),
            version: setup.version.to_owned(),
            model: setup.model.clone(),
            device,
            partition: setup.home(),
            policy_name: setup.policy.name.name(),
            tensors,
            profile: setup.profile.clone(),
            exits,
            knee: setup.knee.map(|knee| knee.saturating_mul(own.len().max(1) as u32)),
            listener: setup.listener.clone(),
            group: setup.group.clone(),
            work: Default::default(),
            batch_control: OnceLock::new(),
            metrics: setup.metrics.lanes(setup.name, setup.version, device),
            health: self.health.clone(),
            engines,
            warm_up: setup.warm_up.clone(),
            brief_rows: brief_rows(&**setup.model, &setup.codec, &setup.profile),
        });
        host.add_model(model.clone(), policy.named(format!("{} {}", setup.name, setup.version)), own)?;
        self.devices.push((host.clone(), model));
        Ok(())
    }

    fn finish(mut self, is_routed: bool, padding: Option<Arc<Padding>>) -> Placements {
        Placements::new(std::mem::take(&mut self.devices), is_routed, padding)
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        self.devices.iter().for_each(|(host, model)| host.remove_model(model));
    }
}

/// Brings a model version whose batches the scheduler makes onto all devices, once `warm_up` has
/// run its lanes.
///
/// # Errors
/// If the engine has no memory for a lane; the error of `warm_up`.
pub fn start_granted(
    setup: LaneSetup<'_>,
    lanes: LanesWanted,
    mut warm_up: impl FnMut(usize, &mut dyn Lane) -> anyhow::Result<()>,
) -> anyhow::Result<Placements> {
    let mut started = Started::new(setup);
    let LaneSetup { model, hosts, partitions, .. } = started.setup;
    let home = started.setup.home();
    let codec = started.setup.codec.clone();
    let (policy, _) = policy(&started.setup, 0, None).map_err(anyhow::Error::msg)?;
    let row_watch = started.setup.row_watch(None)?;
    let mut add = |host: &Arc<DeviceHost>, engines: Arc<EngineLanes>| {
        let (padding_watch, row_watch) = (None, row_watch.clone());
        let tensors = BatchTensors { codec: codec.clone(), rings: None, padding: None, padding_watch, row_watch };
        started.add(host, tensors, [].into(), engines, policy.clone(), Vec::new())
    };
    let share = |host: &DeviceHost, partition| if partition == home { Share::Whole } else { host.share(partition) };
    match lanes {
        LanesWanted::EachDevice(mut first) => {
            for host in hosts {
                let device = host.device;
                let mut lanes = Vec::new();
                for partition in partitions.iter().filter(|_| model.lost(device).is_none()) {
                    let mut lane = match first.take_if(|(on, _)| (*on, *partition) == (device, home)) {
                        Some((_, lane)) => lane,
                        None => model.lane_at(Place { device, share: share(host, *partition) })?,
                    };
                    warm_up(device, &mut *lane)?;
                    lanes.push((*partition, vec![lane]));
                }
                add(host, Arc::new(EngineLanes::new(lanes)))?;
            }
        }
        LanesWanted::AnyDevice(count) => {
            let mut lanes = Vec::new();
            for partition in partitions {
                let place =
                    Place { device: 0, share: hosts.first().map_or(Share::Whole, |host| share(host, *partition)) };
                let mut there = (0..count).map(|_| model.lane_at(place)).collect::<Result<Vec<_>, _>>()?;
                there.iter_mut().try_for_each(|lane| warm_up(0, &mut **lane))?;
                lanes.push((*partition, there));
            }
            let lanes = Arc::new(EngineLanes::new(lanes));
            hosts.iter().try_for_each(|host| add(host, lanes.clone()))?;
        }
    }
    Ok(started.finish(false, None))
}

/// Brings a model version, whose policy makes its batches, onto every device that works. `warm_up`
/// runs its lanes on each of them before.
///
/// # Errors
/// A [`PolicyError`] if the policy cannot have this model; the error of `warm_up`.
pub fn start(
    setup: LaneSetup<'_>,
    padding: Option<Arc<Padding>>,
    mut warm_up: impl FnMut(usize, &[LaneSpec], &mut [Box<dyn Lane>]) -> anyhow::Result<()>,
) -> anyhow::Result<Placements> {
    let mut started = Started::new(setup);
    let (chosen, model) = (started.setup.policy, started.setup.model);
    let refuses = |reason: String| PolicyError::new(chosen.name, reason);
    let exit = |rule| Exit::new(&**model, rule).map_err(refuses);
    let exits: Arc<[Exit]> = chosen.settings.exits().iter().map(exit).collect::<Result<_, _>>()?;
    let every = chosen.padding.pad_check_every.unwrap_or(PADDED_EVERY);
    let watch = |padding: &Arc<Padding>| started.setup.watch(Suspicion::Padding, Some(padding.clone()), every, true);
    let padding_watch = padding.as_ref().filter(|_| every > 0).map(watch).transpose()?;
    let row_watch = started.setup.row_watch(padding.as_ref())?;
    for host in started.setup.hosts.iter().filter(|host| model.lost(host.device).is_none()) {
        let (setup, device) = (&started.setup, host.device);
        let (policy, rings) = policy(setup, device, padding.as_deref()).map_err(refuses)?;
        if let (Some(memory), Some(rings)) = (setup.memory, &rings) {
            // The bytes are held before the ring is written: until then a ring takes no memory.
            memory.hold(MemoryPart::Rings, rings.bytes())?;
        }
        let built = policy.build().map_err(|error| refuses(error.to_string()))?;
        let lanes = built.policy.lanes(setup.home());
        let place = Place { device, share: Share::Whole };
        let mut engines = lanes.iter().map(|_| model.lane_at(place)).collect::<Result<Vec<_>, _>>()?;
        warm_up(device, &lanes, &mut engines)?;
        let (padding_watch, row_watch) = (padding_watch.clone(), row_watch.clone());
        let tensors =
            BatchTensors { codec: setup.codec.clone(), rings, padding: padding.clone(), padding_watch, row_watch };
        started.add(host, tensors, exits.clone(), Arc::default(), policy, engines)?;
    }
    let lost = started.setup.hosts.iter().find_map(|host| model.lost(host.device));
    ensure!(!started.devices.is_empty(), "all of its devices are lost: {}", lost.unwrap_or_default());
    Ok(started.finish(true, padding))
}

/// A policy, and the ring that its requests enter.
fn policy(
    setup: &LaneSetup<'_>,
    device: usize,
    padding: Option<&Padding>,
) -> Result<(ModelSpec, Option<InputRings>), String> {
    let (settings, max_batch) = (&setup.policy.settings, setup.codec.max_batch);
    let rings = match settings.ring(max_batch, padding.is_some())? {
        None => None,
        Some(RingNeed { least, must }) => match InputRings::new(&**setup.model, device, &setup.codec, padding, least) {
            Err(reason) if must => return Err(reason),
            rings => rings.ok(),
        },
    };
    let model = PolicyModel {
        partition: setup.home(),
        profile: setup.segments.clone(),
        max_batch,
        padded: padding.is_some(),
        queue_delay: setup.queue_delay,
        drop: setup.drop,
        queue_bound: setup.queue_bound,
        ring_slots: rings.as_ref().map_or(0, |rings| rings.slots),
        cores: setup.cores.map(|count| Cores { count, brief: BRIEF }),
    };
    Ok((settings.spec(model)?, rings))
}
