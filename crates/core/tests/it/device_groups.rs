//! Groups of operators on a device (Abacus §6): launches of several models that begin together, the
//! barrier, failures, and models that come and go.

use downbeat_core::device::overlap::{FeatureLayout, FeatureModel, Layer, LearnedPredictor, Mlp};
use downbeat_core::device::*;
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};

const OPERATORS: u16 = 4;

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

/// Predicts 40 ms, and up to 50 ms for a group of two: the more operators of the second, the
/// longer.
fn predictor() -> LearnedPredictor {
    let known = |model| FeatureModel { model: ModelId(model), operators: OPERATORS };
    let layout = FeatureLayout { models: (0..3).map(known).collect(), at_once: 2 };
    let mut weights = vec![0.0; layout.len()];
    let (second, operator) = (layout.models.len() + 4, 1.25_f32.ln() / f32::from(OPERATORS));
    (weights[second], weights[second + 1]) = (-operator, operator);
    let layer = Layer { weights, biases: vec![40.0_f32.ln()] };
    let mlp = Mlp::new(vec![0.0; layout.len()], vec![1.0; layout.len()], vec![layer]).unwrap();
    LearnedPredictor::new(layout, mlp).unwrap()
}

/// A device with three models of four operators. Each operator takes 10 ms alone.
struct Device {
    scheduler: DeviceScheduler,
    /// Launches under way.
    launches: Vec<Launch>,
}

impl Device {
    fn new(drop: bool) -> Self {
        let mut device = Device { scheduler: DeviceScheduler::new(), launches: Vec::new() };
        let operator = || vec![LatencyProfile::linear(Duration::ZERO, Duration::from_millis(10), 8).unwrap()];
        let profile = SegmentProfile::new(vec![0], &(0..OPERATORS).map(|_| operator()).collect::<Vec<_>>()).unwrap();
        for model in 0..3 {
            let options = OverlappedOptions { profile: profile.clone(), max_batch: 8, drop, queue_bound: 20 };
            let model_of = DeviceModel::new(Overlapped::new(options), profile.clone());
            device.scheduler.handle_model(at(0), ModelId(model), Some(model_of)).unwrap();
        }
        device.scheduler.handle_groups(
            at(0),
            GroupSettings { predictor: Some(predictor()), error: 0.0, ..GroupSettings::default() },
        );
        device
    }

    fn request(&mut self, now: u64, id: u64, model: u32, deadline: u64) -> Vec<String> {
        let (id, model) = (RequestId(id), ModelId(model));
        let request = DeviceRequest { id, model, deadline: at(deadline), size: 1, length: 0 };
        self.scheduler.handle_request(at(now), &request).unwrap();
        self.decided()
    }

    /// Ends the launch that holds a request.
    fn complete(&mut self, from: u64, now: u64, id: u64) -> Vec<String> {
        let is_in = |launch: &Launch| launch.members.contains(&RequestId(id));
        let launch = self.launches.remove(self.launches.iter().position(is_in).unwrap());
        self.scheduler.handle_completion(at(now), launch.id, Span { start: at(from), end: at(now) }, &[]);
        self.decided()
    }

    fn decided(&mut self) -> Vec<String> {
        let mut said = Vec::new();
        loop {
            while let Some(output) = self.scheduler.poll_output() {
                said.push(match output {
                    DeviceOutput::Launch(launch) => self.begin(launch),
                    DeviceOutput::Group(launches) => {
                        let parts: Vec<String> = launches.into_iter().map(|launch| self.begin(launch)).collect();
                        format!("together {}", parts.join(" "))
                    }
                    DeviceOutput::Reply { request, .. } => format!("reply {}", request.0),
                    DeviceOutput::Drop { request, reason } => format!("drop {} {reason:?}", request.0),
                    DeviceOutput::Note { note: Note::Group { parts, predicted, took, .. }, .. } => {
                        let about = predicted.unwrap().as_millis_f64().round();
                        format!("{} took {took}, predicted {about}", parts.len())
                    }
                    DeviceOutput::Free { model, .. } => format!("free of {}", model.unwrap().0),
                    DeviceOutput::Note { note: Note::New { .. }, .. } => continue,
                    other => panic!("no part of it: {other:?}"),
                });
            }
            let Some((now, reason)) = self.scheduler.poll_timeout() else { return said };
            assert_eq!(reason, DeviceTimeout::NextGroup);
            self.scheduler.handle_timeout(now);
        }
    }

    fn begin(&mut self, launch: Launch) -> String {
        assert!(self.launches.iter().all(|other| other.lane != launch.lane), "each on a lane of its own");
        let is_new = launch.segments.first == 0;
        assert_eq!(launch.inputs, if is_new { InputSource::Host } else { InputSource::Device });
        let said = format!("{}:{}-{}", launch.members[0].0, launch.segments.first, launch.segments.end);
        self.launches.push(launch);
        said
    }
}

#[test]
fn section_6_1_a_group_begins_together_and_the_next_waits_for_its_barrier() {
    let mut device = Device::new(true);
    assert_eq!(device.request(0, 1, 2, 400), ["1:0-4"], "nobody else is there");
    assert!(device.request(1, 2, 0, 400).is_empty());
    assert!(device.request(2, 3, 1, 401).is_empty());
    let first = device.complete(0, 40, 1);
    assert_eq!(first, ["reply 1", "1 took 40 ms, predicted 40", "together 2:0-4 3:0-4"]);
    assert_eq!(device.complete(40, 70, 3), ["reply 3"], "who is done is answered");
    assert!(device.request(71, 4, 2, 400).is_empty(), "and what comes next waits for the others");
    let second = device.complete(41, 90, 2);
    assert_eq!(second, ["reply 2", "2 took 50 ms, predicted 50", "4:0-4"]);
    let stats = device.scheduler.groups();
    assert_eq!((stats.groups, stats.together), (3, 1));
}

#[test]
fn section_6_2_operators_that_do_not_fit_are_left_for_the_next_group() {
    let mut device = Device::new(true);
    device.request(0, 1, 2, 400);
    device.request(0, 2, 0, 86);
    device.request(0, 3, 1, 400);
    // 46 ms are left: 2 operators of the third request make 44.7 ms, 3 make 47.3.
    assert_eq!(device.complete(0, 40, 1).last().unwrap(), "together 2:0-4 3:0-2");
    let batch =
        |device: &Device, id| device.launches.iter().find(|launch| launch.members == [RequestId(id)]).unwrap().batch;
    let before = batch(&device, 3);
    assert!(device.complete(40, 60, 3).is_empty(), "it is not done, and the other is not");
    assert_eq!(device.complete(40, 84, 2), ["reply 2", "2 took 44 ms, predicted 45", "3:2-4"]);
    assert_eq!(batch(&device, 3), before, "it goes on where it was");
}

#[test]
fn a_launch_that_fails_ends_its_request_and_the_group_goes_on() {
    let mut device = Device::new(true);
    device.request(0, 1, 2, 400);
    device.request(0, 2, 0, 400);
    device.request(0, 3, 1, 401);
    device.request(0, 4, 0, 402);
    device.complete(0, 40, 1);
    // As a driver does: it answers the request with the error, and then reports the launch as
    // done.
    assert!(device.scheduler.handle_cancel(at(50), ModelId(0), RequestId(2)));
    assert!(device.complete(40, 50, 2).is_empty(), "nothing begins before the barrier");
    assert_eq!(device.complete(40, 80, 3), ["reply 3", "2 took 40 ms, predicted 50", "4:0-4"]);
}

#[test]
fn a_model_that_goes_is_let_go_of_when_its_part_is_done() {
    let mut device = Device::new(true);
    device.request(0, 1, 2, 400);
    for (id, model) in [(2, 0), (3, 1), (4, 0)] {
        device.request(0, id, model, 400 + id);
    }
    device.complete(0, 40, 1);
    device.scheduler.handle_model(at(50), ModelId(0), None).unwrap();
    assert_eq!(device.decided(), ["drop 4 Removed"], "what runs is answered");
    assert_eq!(device.complete(40, 80, 2), ["reply 2", "free of 0"]);
    assert_eq!(device.complete(40, 90, 3), ["reply 3", "2 took 50 ms, predicted 50"]);
}

#[test]
fn a_model_that_goes_with_the_last_part_ends_the_group_first() {
    let mut device = Device::new(true);
    device.request(0, 1, 2, 400);
    for (id, model) in [(2, 0), (3, 1)] {
        device.request(0, id, model, 400 + id);
    }
    device.complete(0, 40, 1);
    device.scheduler.handle_model(at(50), ModelId(0), None).unwrap();
    assert_eq!(device.complete(40, 80, 3), ["reply 3"]);
    assert_eq!(device.complete(40, 90, 2), ["reply 2", "2 took 50 ms, predicted 50", "free of 0"]);
}

#[test]
fn without_a_predictor_requests_run_alone_by_measured_latencies() {
    let mut device = Device::new(true);
    device.scheduler.handle_groups(at(0), GroupSettings::default());
    device.request(0, 1, 2, 400);
    device.request(0, 2, 0, 390);
    device.request(0, 3, 1, 380);
    let mut said = Vec::new();
    for (id, from) in [(1, 0), (3, 40), (2, 80)] {
        said.extend(device.complete(from, from + 40, id));
    }
    let took = |id: u64| [format!("reply {id}"), "1 took 40 ms, predicted 40".to_owned()];
    let expected = [&took(1)[..], &["3:0-4".to_owned()], &took(3), &["2:0-4".to_owned()], &took(2)].concat();
    assert_eq!(said, expected, "the most urgent first");
}

#[test]
fn who_may_not_be_given_up_runs_late_beside_whatever_is_worth_it() {
    let mut device = Device::new(false);
    device.request(0, 1, 2, 400);
    device.request(0, 2, 0, 30);
    device.request(0, 3, 1, 400);
    assert_eq!(device.complete(0, 40, 1).last().unwrap(), "together 2:0-4 3:0-4");
}
