//! A toy policy, which exists only in tests. It shows all that a new policy needs (`table.rs`), and
//! runs each request alone, one after another.

use serde::{Deserialize, Serialize};

use crate::device::auto_inputs::{AutoInputs, Overlap};
use crate::device::entry::{ModelSpec, PolicyEntry, PolicyName, PolicyOptions, PolicySettings};
use crate::device::launch::{InputSource, LaneSpec, Launch, SegmentRange, Span};
use crate::device::output::DeviceOutput;
use crate::device::policy::DevicePolicy;
use crate::device::request::{DeviceReject, DeviceRequest};
use crate::device::request_pool::RequestPool;
use crate::device::scheduler::{DeviceModel, DeviceScheduler};
use crate::device::segment_profile::SegmentProfile;
use crate::device::settings::{MOST_ROWS, PolicyModel, WrittenSettings, at_most};
use crate::device::table::read_one_of_any;
use crate::device::turn::Turn;
use crate::ids::{LaunchId, ModelId, PartitionId, RequestId};
use crate::profile::LatencyProfile;
use crate::time::{Duration, Time};

/// The options of a [`Toy`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToyOptions {
    pub profile: SegmentProfile,
    pub largest: u32,
    pub queue_bound: u32,
}

/// The user's settings of the policy.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ToySettings {
    /// The largest request in items; `None`: the model's largest batch.
    toy_largest: Option<u32>,
}

impl PolicySettings for ToySettings {
    fn spec(
        &self,
        PolicyModel { partition, profile, max_batch, queue_bound, .. }: PolicyModel,
    ) -> Result<ModelSpec, String> {
        let largest = self.toy_largest.unwrap_or(max_batch).min(max_batch);
        Ok(ModelSpec::new(&ToyOptions { profile, largest, queue_bound }, partition))
    }
}

impl PolicyOptions for ToyOptions {
    const ENTRY: &'static PolicyEntry = &PolicyEntry::new::<ToyOptions, ToySettings>("toy", "one request at a time")
        .predicted(|inputs, _| Some(inputs.rate(&[1], |_| 1.0)));

    fn check(&self) -> Result<(), String> {
        at_most("largest", self.largest, MOST_ROWS)
    }

    fn build(self) -> DeviceModel {
        let (pool, profile) = (RequestPool::new(self.queue_bound, 0, None), self.profile.clone());
        DeviceModel::new(Toy { options: self, pool, running: None }, profile)
    }
}

/// Runs each request alone.
#[derive(Debug)]
struct Toy {
    options: ToyOptions,
    pool: RequestPool,
    running: Option<(LaunchId, RequestId)>,
}

impl DevicePolicy for Toy {
    fn lanes(&self, partition: PartitionId) -> Vec<LaneSpec> {
        let segments = SegmentRange::new(0, self.options.profile.segments());
        vec![LaneSpec { partition, max_rows: self.options.largest, segments }]
    }

    fn pool(&self) -> Option<&RequestPool> {
        Some(&self.pool)
    }

    fn pool_mut(&mut self) -> Option<&mut RequestPool> {
        Some(&mut self.pool)
    }

    fn advance(&mut self, turn: &mut Turn<'_>) {
        let Some(DeviceRequest { id: request, size, .. }) = self.pool.oldest().map(|oldest| oldest.request) else {
            return;
        };
        if self.running.is_some() {
            return;
        }
        let (batch, length) = self.pool.begin_batch(turn, &[request], size);
        let id = turn.new_launch();
        turn.launch(Launch {
            id,
            batch,
            granted: None,
            model: turn.model(),
            lane: turn.lanes()[0],
            segments: SegmentRange::new(0, self.options.profile.segments()),
            members: vec![request],
            rows: size,
            computed_rows: size,
            length,
            inputs: InputSource::Host,
        });
        self.running = Some((id, request));
    }

    fn handle_request(&mut self, turn: &mut Turn<'_>, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.pool.push(turn, request, self.options.largest)?;
        self.advance(turn);
        Ok(())
    }

    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, _: Span, _: &[RequestId]) {
        let Some((_, request)) = self.running.take_if(|(running, _)| *running == launch) else { return };
        self.pool.finish(request, launch, turn);
        self.advance(turn);
    }
}

fn profile() -> SegmentProfile {
    SegmentProfile::whole(&LatencyProfile::linear(Duration::from_millis(1), Duration::from_millis(2), 8).unwrap())
}

fn spec(written: &WrittenSettings) -> ModelSpec {
    let chosen = "toy".parse::<PolicyName>().unwrap().read(written).unwrap();
    let model = PolicyModel {
        partition: PartitionId::default(),
        profile: profile(),
        max_batch: 8,
        padded: false,
        queue_delay: Duration::ZERO,
        drop: false,
        queue_bound: 16,
        ring_slots: 0,
        cores: None,
    };
    chosen.settings.spec(model).unwrap()
}

/// As `downbeat.toml`, the command line and `config.pbtxt` find the policy and its settings.
#[test]
fn texts_find_a_policy_of_the_table() {
    assert!(PolicyName::all().any(|policy| policy.name() == "toy"));
    assert!("tox".parse::<PolicyName>().unwrap_err().to_string().contains("overlap, toy, auto"));
    assert_eq!(read_one_of_any("toy_largest", &3.into()), Ok(()));
    let written = WrittenSettings::from([("toy_largest".to_owned(), "three".into())]);
    let error = "toy".parse::<PolicyName>().unwrap().read(&written).unwrap_err().to_string();
    assert!(error.starts_with("toy_largest: "), "{error}");
}

/// As the server, the simulator and the journal build the policy: from plain data.
#[test]
fn a_policy_of_the_table_runs_on_a_device() {
    let written = WrittenSettings::from([("toy_largest".to_owned(), 3.into())]);
    let journaled = serde_json::to_string(&spec(&written)).unwrap();
    let model = serde_json::from_str::<ModelSpec>(&journaled).unwrap().build().unwrap();
    let (mut device, id) = (DeviceScheduler::new(), ModelId(0));
    device.handle_model(Time::ZERO, id, Some(model)).unwrap();
    let request =
        |number, size| DeviceRequest { id: RequestId(number), model: id, deadline: Time::MAX, size, length: 0 };
    let refused = device.handle_request(Time::ZERO, &request(0, 4));
    assert_eq!(refused, Err(DeviceReject::TooLarge { size: 4, largest: 3 }));
    for number in [1, 2] {
        device.handle_request(Time::ZERO, &request(number, 1)).unwrap();
    }
    let outputs: Vec<DeviceOutput> = std::iter::from_fn(|| device.poll_output()).collect();
    let launches = outputs.iter().filter_map(|output| match output {
        DeviceOutput::Launch(launch) => Some(launch.members.clone()),
        _ => None,
    });
    assert_eq!(launches.collect::<Vec<_>>(), [vec![RequestId(1)]], "{outputs:?}");
}

#[test]
fn auto_predicts_a_policy_of_the_table() {
    let inputs = AutoInputs {
        profile: profile(),
        cut: None,
        is_batched: true,
        varies: false,
        max_batch: 8,
        launch: Duration::ZERO,
        cores: 4,
        threads: 1,
        at_once: 1,
        lanes: Vec::new(),
        stagings: Vec::new(),
    };
    let candidates = inputs.choose(&Overlap::default()).candidates;
    let toy = candidates.iter().find(|candidate| candidate.policy.name() == "toy").unwrap();
    assert_eq!(toy.items_per_second.round(), 333.0, "a request takes 3 ms: {candidates:?}");
}
