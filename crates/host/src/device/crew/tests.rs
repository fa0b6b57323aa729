//! Tests which thread runs the launches that follow from a launch. The model has two stages, each
//! with a lane of its own, and its engine waits where the test wants.

use std::ops::Range;
use std::sync::mpsc;
use std::thread::ThreadId;
use std::time::Duration as StdDuration;

use downbeat_core::LatencyProfile;
use downbeat_core::device::{Joining, ModelSpec, PartitionId, SegmentProfile, StagedOptions};
use downbeat_core::tensor::Signature;
use downbeat_engine::{LoadError, Model, Place, RunError, State};
use downbeat_service::options::RunLimits;

use super::super::test_support::{self, Served, item};
use super::*;

/// A time limit for events that are certain to come.
const LONG: StdDuration = StdDuration::from_secs(60);

/// The runs that the engine has begun: the stage and the thread of each.
#[derive(Default)]
struct Begun {
    runs: Mutex<Vec<(usize, ThreadId)>>,
    changed: Condvar,
}

impl Begun {
    fn wait_until(&self, what: &str, reached: impl Fn(&[(usize, ThreadId)]) -> bool) {
        let mut runs = self.runs.lock();
        while !reached(&runs) {
            assert!(!self.changed.wait_for(&mut runs, LONG).timed_out(), "{what}");
        }
    }
}

/// Called in each stage with its number; may wait.
type Waits = Arc<dyn Fn(usize) + Send + Sync>;

struct TwoStages {
    signature: Signature,
    begun: Arc<Begun>,
    waits: Waits,
}

struct Stage(Arc<Begun>, Waits);

impl Model for TwoStages {
    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn segments(&self) -> usize {
        2
    }

    fn lane_at(&self, _place: Place) -> Result<Box<dyn Lane>, LoadError> {
        Ok(Box::new(Stage(self.begun.clone(), self.waits.clone())))
    }
}

impl Lane for Stage {
    fn run(&mut self, range: Range<usize>, _state: &mut State) -> Result<(), RunError> {
        self.0.runs.lock().push((range.start, std::thread::current().id()));
        self.0.changed.notify_all();
        (self.1)(range.start);
        Ok(())
    }
}

fn two_stages(begun: &Arc<Begun>, waits: Waits) -> Served {
    let profile = LatencyProfile::linear(Duration::from_micros(1), Duration::ZERO, 1).unwrap();
    let options = StagedOptions {
        profile: SegmentProfile::even(&profile, 2),
        pairs: 2,
        max_batch: 1,
        by_length: false,
        by_operator: false,
        by_load: false,
        window: None,
        comp_wait: None,
        joining: Joining::default(),
        ring_slots: 0,
        drop: false,
        queue_bound: 100,
    };
    let model = TwoStages { signature: test_support::signature(), begun: begun.clone(), waits };
    let policy = ModelSpec::new(&options, PartitionId::default());
    Served::new(Arc::new(model), policy, &[], RunLimits::default(), Arc::new(|_, _, _| Ok(())))
}

#[test]
fn the_next_segment_runs_on_the_thread_that_ran_the_one_before() {
    for round in 0..20 {
        let begun = Arc::new(Begun::default());
        // Each round has a fresh server: a thread that has answered may still hold the lane for a
        // moment.
        let served = two_stages(&begun, Arc::new(|_| {}));
        assert_eq!(item(served.send(round).1), round);
        let runs = begun.runs.lock();
        let [(0, first), (1, second)] = runs[..] else { panic!("there are two stages: {runs:?}") };
        assert_eq!(first, second, "the batch changed threads");
    }
}

#[test]
fn what_else_follows_is_for_another_thread_at_once() {
    let begun = Arc::new(Begun::default());
    let (its, (send, sent)) = (begun.clone(), mpsc::channel::<()>());
    let sent = Mutex::new(sent);
    let first_stages = |runs: &[(usize, ThreadId)]| runs.iter().filter(|(stage, _)| *stage == 0).count();
    let waits = move |stage| match stage {
        // Waits until the second request has come, which follows as the first leaves the stage.
        0 => drop(sent.lock().recv()),
        _ => its.wait_until("the second request waits for the thread of the first", |runs| first_stages(runs) == 2),
    };
    let served = two_stages(&begun, Arc::new(waits));
    let first = served.send(1).1;
    begun.wait_until("the first request does not begin", |runs| first_stages(runs) == 1);
    let second = served.send(2).1;
    drop(send);
    assert_eq!((item(first), item(second)), (1, 2));
    let runs = begun.runs.lock();
    let threads = |stage| runs.iter().filter(move |run| run.0 == stage).map(|run| run.1).collect::<Vec<_>>();
    assert_eq!(threads(0)[0], threads(1)[0]);
    assert_ne!(threads(0)[0], threads(0)[1]);
}
