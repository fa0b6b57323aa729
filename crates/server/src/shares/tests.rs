//! Shares of a device on whose partitions lanes cannot always be made.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use downbeat_core::LatencyProfile;
use downbeat_core::device::{PolicyModel, PolicyName, SegmentProfile, WrittenSettings};
use downbeat_core::tensor::Signature;
use downbeat_engine::{Lane, LoadError, Model, Place, RunError, Share, State as Tensors};

use super::*;
use crate::host::test_support::{self, Served, item};
use crate::options::RunLimits;

/// Gives back what it is given. Lanes cannot be made in one of the partitions.
struct EchoModel(Signature, Arc<AtomicU32>);

struct Echo;

impl Lane for Echo {
    fn run(&mut self, _range: Range<usize>, _state: &mut Tensors) -> Result<(), RunError> {
        Ok(())
    }
}

impl Model for EchoModel {
    fn signature(&self) -> &Signature {
        &self.0
    }

    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError> {
        if place.share == Share::Part(self.1.load(Ordering::Relaxed)) {
            let (path, reason) = ("m".into(), "no memory for it".to_owned());
            return Err(LoadError::File { path, reason });
        }
        Ok(Box::new(Echo))
    }
}

fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let clock = crate::clock::Clock::start();
    while !reached() {
        assert!(clock.now() < Time::ZERO + Duration::from_millis(60_000), "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_share_for_which_lanes_cannot_be_made_is_tried_again_and_no_request_is_lost() {
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
    let broken = Arc::new(AtomicU32::new(1));
    let engine = Arc::new(EchoModel(test_support::signature(), broken.clone()));
    let served = Served::new(engine, policy.unwrap(), &parts, RunLimits::default(), Arc::new(|_, _, _| Ok(())));
    let options = DeviceOptions {
        share_hold_down: Duration::from_millis(20),
        share_period: Duration::from_millis(10),
        ..DeviceOptions::default()
    };
    let metrics = served.metrics.shares.clone();
    let shares =
        DeviceShares::new(served.host.clone(), parts.into(), &options, BTreeMap::new(), Arc::default(), metrics);
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
    // By hand, too, it is told.
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
fn cores_that_partitions_have_in_common_count_once() {
    let part = |(cpus, units): (&str, u32)| Part {
        share: Share::Cores(cpus.parse().unwrap()),
        threads: 1,
        units,
        size: String::new(),
    };
    assert_eq!(all_units(&[("0", 1), ("1", 1), ("0-1", 2)].map(part)), 2);
    assert_eq!(all_units(&[("0,4", 1), ("0-1,4-5", 2), ("2-3,6-7", 2)].map(part)), 4, "hyperthreads");
    assert_eq!(common(&[("0-1", 2), ("1-2", 2)].map(part), 0, 1), 1);
}
