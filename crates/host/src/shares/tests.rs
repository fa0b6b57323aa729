//! Shares of a device on whose partitions lanes cannot always be made.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use downbeat_core::LatencyProfile;
use downbeat_core::device::{PolicyModel, PolicyName, SegmentProfile, Span, WrittenSettings};
use downbeat_core::tensor::Signature;
use downbeat_engine::{Lane, LoadError, Model, Place, RunError, Share, State as Tensors};
use downbeat_service::options::RunLimits;

use super::*;
use crate::device::test_support::{self, Served, item};

/// A model that gives back its inputs. Lanes cannot be made in the broken partition, and do not run
/// while a test holds the gate.
struct EchoModel {
    signature: Signature,
    broken: Arc<AtomicU32>,
    gate: Arc<Mutex<()>>,
}

struct Echo(Arc<Mutex<()>>);

impl EchoModel {
    fn new() -> Self {
        EchoModel { signature: test_support::signature(), broken: Arc::new(AtomicU32::new(9)), gate: Arc::default() }
    }
}

impl Lane for Echo {
    fn run(&mut self, _range: Range<usize>, _state: &mut Tensors) -> Result<(), RunError> {
        drop(self.0.lock());
        Ok(())
    }
}

impl Model for EchoModel {
    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError> {
        if place.share == Share::Part(self.broken.load(Ordering::Relaxed)) {
            let (path, reason) = ("m".into(), "no memory for it".to_owned());
            return Err(LoadError::File { path, reason });
        }
        Ok(Box::new(Echo(self.gate.clone())))
    }
}

fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let clock = downbeat_service::clock::Clock::start();
    while !reached() {
        assert!(clock.now() < Time::ZERO + Duration::from_millis(60_000), "{what}");
        std::thread::yield_now();
    }
}

/// A model in batches of up to four, on a device that is divided into one unit and two.
fn serve(engine: EchoModel, options: &DeviceOptions) -> (Served, DeviceShares) {
    let part = |(index, units)| Part { share: Share::Part(index), threads: 1, units, size: String::new() };
    let parts: Vec<Part> = [(0, 1), (1, 2)].map(part).to_vec();
    let profile = LatencyProfile::linear(Duration::from_micros(1), Duration::ZERO, 4).unwrap();
    let windowed = "windowed".parse::<PolicyName>().unwrap().read(&WrittenSettings::new()).unwrap();
    let policy = windowed.settings.spec(PolicyModel {
        partition: PartitionId(0),
        profile: SegmentProfile::whole(&profile),
        max_batch: 4,
        padded: false,
        queue_delay: Duration::ZERO,
        drop: false,
        queue_bound: 100,
        ring_slots: 0,
        cores: None,
    });
    let served =
        Served::new(Arc::new(engine), policy.unwrap(), &parts, RunLimits::default(), Arc::new(|_, _, _| Ok(())));
    let metrics = ShareMetrics::register(served.metrics.registry()).unwrap();
    let shares = DeviceShares::new(served.host.clone(), &parts, options, BTreeMap::new(), Arc::default(), metrics);
    (served, shares)
}

#[test]
fn a_share_without_lanes_is_tried_again_without_loss() {
    let options = DeviceOptions {
        share_hold_down: Duration::from_millis(20),
        share_period: Duration::from_millis(10),
        ..DeviceOptions::default()
    };
    let engine = EchoModel::new();
    engine.broken.store(1, Ordering::Relaxed);
    let broken = engine.broken.clone();
    let (served, shares) = serve(engine, &options);
    let models = [(served.model.clone(), None)];
    let mut sent = 0u8;
    let mut look = || {
        shares.tick(&models);
        let (_, answer) = served.send(sent);
        assert_eq!(item(answer), sent);
        sent = sent.wrapping_add(1);
    };
    let failures = || served.metric("event=\"prepare_failed\"");
    until("it is not tried again", || {
        look();
        failures() >= 3.0
    });
    assert_eq!(served.host.partition(&served.model), PartitionId(0), "it stays where it is");
    assert_eq!(shares.report(&served.model).unwrap().units, 0);
    // A move by the user fails, too, and the user hears of it.
    broken.store(1, Ordering::Relaxed);
    until("it is busy for ever", || {
        shares.report(&served.model).unwrap().preparing.is_none() || {
            look();
            false
        }
    });
    let mut answers = shares.set("m", Some(1)).unwrap();
    until("nobody is told", || {
        look();
        !answers[0].is_empty()
    });
    let told = answers[0].try_recv().unwrap().unwrap_err();
    assert!(told.contains("partition 1 cannot be made ready") && told.contains("no memory for it"), "{told}");
    assert!(!shares.is_by_hand("m"));
    broken.store(9, Ordering::Relaxed);
    until("it does not move", || {
        look();
        served.host.partition(&served.model) == PartitionId(1)
    });
    assert_eq!(shares.report(&served.model).unwrap().units, 3, "all there is");
}

#[test]
fn section_3_3_1_measured_times_size_batches_and_each_one_counts() {
    let options = DeviceOptions { share_batches: BatchesBy::Slab, ..DeviceOptions::default() };
    let engine = EchoModel::new();
    let gate = engine.gate.clone();
    let (served, shares) = serve(engine, &options);
    let models = [(served.model.clone(), Some(Duration::from_millis(60_000)))];
    let limit = || shares.report(&served.model).unwrap().batch_limit;
    let launches = || served.metric("downbeat_launches_total{");
    // One request runs, and three requests wait for its end.
    let four = || {
        let closed = gate.lock();
        let answers = [0, 1, 2, 3].map(|sent| served.send(sent).1);
        drop(closed);
        assert_eq!(answers.map(item), [0, 1, 2, 3]);
    };
    four();
    until("two are not counted", || launches() == 2.0);
    until("the model has no share", || {
        shares.tick(&models);
        shares.report(&served.model).unwrap().units == 3
    });
    assert_eq!(limit(), Some(1));
    // Launches do not wait for a thread that holds the shares.
    let looked_at = shares.state.lock();
    four();
    until("each does not run alone", || launches() == 6.0);
    drop(looked_at);
    shares.tick(&models);
    assert_eq!((limit(), served.metric("downbeat_share_batch_limit{")), (Some(4), 4.0), "they were in time");
    four();
    until("they do not run together", || launches() == 8.0);
    // Half of the SLO is for waiting.
    let now = served.host.clock.now();
    let late = Span { start: now, end: now + Duration::from_millis(40_000) };
    let tell = served.model.batch_control.get().unwrap();
    (0..4).for_each(|_| tell(&served.model, 4, late));
    assert!(limit() < Some(4), "{:?}", limit());
    assert_eq!(served.metric("downbeat_share_batch_limit{"), f64::from(limit().unwrap()));
}

#[test]
fn batches_are_left_to_the_device_policy_without_an_slo() {
    let options = DeviceOptions { share_batches: BatchesBy::Slab, ..DeviceOptions::default() };
    let (served, shares) = serve(EchoModel::new(), &options);
    shares.tick(&[(served.model.clone(), None)]);
    assert_eq!(shares.report(&served.model).unwrap().batch_limit, None);
    assert!(served.model.batch_control.get().is_none());
}
