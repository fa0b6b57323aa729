//! The decision log of a device, and the table of policies.

use std::collections::BTreeMap;

use downbeat_core::device::*;
use downbeat_core::journal::device::{DeviceInput, DeviceRecords};
use downbeat_core::journal::*;
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use crate::journal_checks::{check, does_no_harm, entries, joined, taken};

const MODEL: ModelId = ModelId(0);

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn profile() -> SegmentProfile {
    SegmentProfile::whole(&LatencyProfile::from_table(vec![Duration::from_millis(10); 8]).unwrap())
}

fn windowed() -> WindowedOptions {
    WindowedOptions {
        profile: profile(),
        max_batch: 8,
        window: Duration::ZERO,
        fill: false,
        drop: true,
        queue_bound: 2,
        ahead: 0,
    }
}

fn elastic() -> ElasticOptions {
    let mixes = MixTable::enhanced(vec![(4, "4".parse().unwrap()), (8, "4,4".parse().unwrap())]).unwrap();
    ElasticOptions {
        profile: profile(),
        mixes,
        max_running: 8,
        ring_slots: 16,
        drop: false,
        queue_bound: 50,
        cores: None,
    }
}

fn request(id: u64) -> DeviceInput {
    let deadline = at(1_000);
    DeviceInput::Request(DeviceRequest { id: RequestId(id), model: MODEL, deadline, size: 1, length: 0 })
}

/// Four requests for a model with this policy, and their inputs; then the end of a launch. The
/// policy windowed refuses the last request.
fn log(spec: ModelSpec) -> Vec<u8> {
    let mut journal = Journal::on(DeviceScheduler::numbered(3));
    let mut tell = |ms, input| {
        let _ = journal.apply(at(ms), input);
        while journal.poll().is_some() {}
    };
    tell(0, DeviceInput::Model(MODEL, Some(spec)));
    (0..4).for_each(|id| tell(1, request(id)));
    (0..4).for_each(|id| tell(2, DeviceInput::Input(MODEL, RequestId(id))));
    let span = Span { start: at(1), end: at(11) };
    tell(12, DeviceInput::Completion { launch: LaunchId(0), span, exits: Vec::new() });
    taken(journal)
}

/// The header of a log of one block, and its entries.
fn pieces(log: &[u8]) -> Vec<&[u8]> {
    let count = |length: usize| read::<DeviceRecords>(&log[..length]).map_or(0, |(_, entries)| 1 + entries.count());
    let ends: Vec<usize> = (1..=log.len()).filter(|end| count(*end) > count(end - 1)).collect();
    let begins = std::iter::once(0).chain(ends.iter().copied());
    let mut pieces: Vec<&[u8]> = begins.zip(&ends).map(|(begin, end)| &log[begin..*end]).collect();
    pieces[1] = &pieces[1][BlockHead::LENGTH..];
    pieces
}

fn spec(options: &impl PolicyOptions) -> ModelSpec {
    ModelSpec::new(options, PartitionId(0)).named("mlp 1".to_owned())
}

#[test]
fn a_log_plays_again_and_can_be_read() {
    for bytes in [log(spec(&windowed())), log(spec(&elastic()))] {
        check(DeviceScheduler::numbered(3), &bytes);
    }
    let bytes = log(spec(&windowed()));
    let replayed = replay(&bytes).unwrap();
    assert_eq!((replayed.inputs, replayed.divergence), (10, None));
    let shown: Vec<String> = show(&bytes, Form::Text).unwrap().map(Result::unwrap).collect();
    for expected in [
        "decision log of device 3: entry, milliseconds, event, -> decision",
        "mlp comes: mlp 1 with the policy windowed",
        "request r0: 1 items",
        "-> launch x0 on l0: b0",
        "-> refused: the queue is full",
        "x0 is done",
        "-> reply to r0 from x0",
    ] {
        assert!(shown.iter().any(|line| line.contains(expected)), "{expected}: {shown:#?}");
    }
}

/// Programs that read the lines of JSON of older versions find the same objects, and the model beside
/// them.
#[test]
fn a_log_has_the_objects_of_the_lines_of_json_before() {
    let objects: Vec<String> = show(&log(spec(&windowed())), Form::Json).unwrap().map(Result::unwrap).collect();
    let has = |line: &str| assert!(objects.iter().any(|object| object == line), "{line}: {objects:#?}");
    assert_eq!(objects[0], r#"{"at":0,"begin":"device 3"}"#);
    assert!(objects[1].starts_with(r#"{"at":0,"told":{"model":[0,{"name":"mlp 1","policy":"windowed","options":{"#));
    has(
        r#"{"at":1000000,"told":{"request":{"id":0,"model":0,"deadline":1000000000,"size":1,"length":0}},"model":"mlp"}"#,
    );
    has(r#"{"at":1000000,"refused":"the queue is full: its bound is 2 items"}"#);
    has(r#"{"at":2000000,"told":{"input":[0,3]},"model":"mlp"}"#);
    has(r#"{"at":12000000,"told":{"completion":{"launch":0,"span":{"start":1000000,"end":11000000},"exits":[]}}}"#);
    has(r#"{"at":12000000,"decision":{"Reply":{"request":0,"launch":0}}}"#);
}

/// A device that makes batches ahead has their number in the model's options in its log. A log
/// without the number is from a build that made none.
#[test]
fn a_log_with_frozen_batches_plays_again() {
    let options = WindowedOptions { max_batch: 1, ahead: 1, ..windowed() };
    let bytes = log(spec(&options));
    assert_eq!(replay(&bytes).unwrap().divergence, None);
    let mut without = pieces(&bytes);
    let model = DeviceInput::Model(MODEL, Some(spec(&WindowedOptions { ahead: 0, ..options })));
    let model = postcard::to_allocvec(&(0x40u8, 0i64, model)).unwrap();
    assert_ne!(std::mem::replace(&mut without[1], &model), model);
    let divergence = replay(&joined(&without)).unwrap().divergence.expect("no batch was made ahead of another");
    assert!(divergence.to_string().contains("b1"), "{divergence}");
}

#[test]
fn a_log_that_says_something_else_parts_from_its_replay_there() {
    let bytes = log(spec(&windowed()));
    let pieces = pieces(&bytes);
    let entries = entries::<DeviceRecords>(&bytes);
    assert_eq!(pieces.len(), 1 + entries.len());
    let reply = DeviceOutput::Reply { request: RequestId(77), launch: LaunchId(88) };
    let reply = postcard::to_allocvec(&(0x42u8, reply)).unwrap();
    for entry in entries.iter().filter(|entry| !matches!(entry.record, Record::Input(..))) {
        let index = entry.number as usize;
        let mut missing = pieces.clone();
        missing.remove(index);
        let next = replay(&joined(&missing)).unwrap().divergence;
        // The last entry may have been cut off.
        assert!(
            next.is_some_and(|divergence| divergence.entry >= entry.number) || index + 1 == pieces.len(),
            "without {entry:?}"
        );
        let mut other = pieces.clone();
        other[index] = &reply;
        let divergence = replay(&joined(&other)).unwrap().divergence.unwrap();
        assert_eq!(divergence.entry, entry.number);
        assert!(
            divergence.to_string().contains("the log says 'reply to r77 from x88', but now it is "),
            "{divergence}"
        );
    }
    let refused = postcard::to_allocvec(&(0x41u8, "so")).unwrap();
    let divergence = replay(&joined(&[pieces[0], &refused])).unwrap().divergence.unwrap();
    assert_eq!((divergence.entry, divergence.replayed), (1, None));
}

#[test]
fn a_cut_log_is_read_up_to_its_end_and_a_damaged_entry_is_named() {
    let bytes = log(spec(&windowed()));
    let header = pieces(&bytes)[0].len();
    for length in header..bytes.len() {
        assert_eq!(replay(&bytes[..length]).unwrap().divergence, None, "{length} bytes");
    }
    let mut damaged = bytes.clone();
    damaged.insert(header, 0x3f);
    let error = replay(&damaged).unwrap_err();
    assert!(matches!(&error, LogError::Damaged { after: 0, .. }), "{error}");
}

#[test]
fn options_that_are_none_are_refused_with_the_reason() {
    let mut scheduler = DeviceScheduler::new();
    let mut refused = |spec: ModelSpec| {
        let refusal = scheduler.apply(at(0), DeviceInput::Model(MODEL, Some(spec)));
        refusal.unwrap_err().to_string()
    };
    let error = refused(spec(&WindowedOptions { max_batch: 0, ..windowed() }));
    assert!(error.ends_with("'windowed' cannot have this model: max_batch is 0; it must be 1 to 16777216"), "{error}");
    let error = refused(spec(&WindowedOptions { ahead: 17, ..windowed() }));
    assert!(error.ends_with("'windowed' cannot have this model: ahead is 17; it must be 0 to 16"), "{error}");
    let error = refused(spec(&ElasticOptions { ring_slots: 7, ..elastic() }));
    assert!(error.contains("a ring of 7 slots holds less than the 8 items"), "{error}");
    let error = refused(spec(&ElasticOptions { mixes: MixTable::naive(1 << 10), ..elastic() }));
    assert!(error.contains("none for more than the 8 that run at once"), "{error}");
    let error = refused(ModelSpec::new(&windowed(), PartitionId(3)));
    assert_eq!(error, "the device has no partition p3");
    let layout = Layout { shared_lanes: vec![60_000, 5_537] };
    let error = scheduler.apply(at(0), DeviceInput::Layout(layout)).unwrap_err().to_string();
    assert_eq!(error, "65537 shared lanes are more than the 65536 that a device may have");
}

#[test]
fn a_policy_is_found_by_its_name_in_the_table() {
    let text = serde_json::to_string(&spec(&windowed())).unwrap();
    assert_eq!(serde_json::from_str::<ModelSpec>(&text).unwrap(), spec(&windowed()));
    let error = serde_json::from_str::<ModelSpec>(&text.replace("windowed", "toy")).unwrap_err().to_string();
    assert!(
        error.contains("unknown device policy 'toy'; expected one of: exclusive, windowed, elastic, staged"),
        "{error}"
    );
    let other: ModelSpec = serde_json::from_str(&text.replace("windowed", "elastic")).unwrap();
    assert!(matches!(other.build(), Err(BadPolicy::Options { policy: "elastic", .. })));
}

/// A policy that is not in the table: it answers each request after a launch of its own. A policy
/// needs only the code from here to the end of its `impl`s. With its `ENTRY` as a line of the table
/// a configuration could name it.
#[derive(Debug)]
struct Toy {
    profile: SegmentProfile,
    running: BTreeMap<LaunchId, RequestId>,
}

#[derive(Serialize, Deserialize)]
struct ToyOptions {
    profile: SegmentProfile,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ToySettings {}

impl PolicySettings for ToySettings {
    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String> {
        Ok(ModelSpec::new(&ToyOptions { profile: model.profile }, model.partition))
    }
}

impl PolicyOptions for ToyOptions {
    const ENTRY: &'static PolicyEntry = &PolicyEntry::new::<ToyOptions, ToySettings>("toy", "each by itself");

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn build(self) -> DeviceModel {
        let profile = self.profile.clone();
        DeviceModel::new(Toy { profile: self.profile, running: BTreeMap::new() }, profile)
    }
}

impl DevicePolicy for Toy {
    fn lanes(&self, partition: PartitionId) -> Vec<LaneSpec> {
        vec![LaneSpec { partition, max_rows: 1, segments: SegmentRange::new(0, self.profile.segments()) }]
    }

    fn handle_request(&mut self, turn: &mut Turn<'_>, request: &DeviceRequest) -> Result<(), DeviceReject> {
        let lane = turn.lanes()[0];
        if !turn.has_room(lane) {
            return Err(DeviceReject::LaneTaken(lane));
        }
        let (id, batch) = (turn.new_launch(), turn.new_batch());
        self.running.insert(id, request.id);
        turn.launch(Launch {
            id,
            batch,
            granted: None,
            model: turn.model(),
            lane,
            segments: SegmentRange::new(0, self.profile.segments()),
            members: vec![request.id],
            rows: request.size,
            computed_rows: request.size,
            length: request.length,
            inputs: InputSource::Host,
        });
        Ok(())
    }

    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, _: Span, _: &[RequestId]) {
        self.running.remove(&launch).into_iter().for_each(|request| turn.push(DeviceOutput::Reply { request, launch }));
    }

    fn handle_cancel(&mut self, _: &mut Turn<'_>, request: RequestId) -> bool {
        let launch = self.running.iter().find(|(_, other)| **other == request).map(|(launch, _)| *launch);
        launch.is_some_and(|launch| self.running.remove(&launch).is_some())
    }

    fn stats(&self) -> PoolStats {
        PoolStats { running: self.running.len() as u32, ..PoolStats::default() }
    }
}

#[test]
fn a_new_policy_is_its_options_with_their_check_and_itself() {
    let mut scheduler = DeviceScheduler::new();
    let toy = spec(&ToyOptions { profile: profile() });
    assert_eq!(scheduler.apply(at(0), DeviceInput::Model(MODEL, Some(toy))), Ok(true));
    assert_eq!(scheduler.apply(at(0), request(0)), Ok(true));
    assert!(matches!(scheduler.poll_output(), Some(DeviceOutput::Launch(_))));
    assert_eq!(scheduler.free_at(at(4), MODEL), at(10));
    let span = Span { start: at(0), end: at(10) };
    scheduler.apply(at(10), DeviceInput::Completion { launch: LaunchId(0), span, exits: Vec::new() }).unwrap();
    assert_eq!(scheduler.poll_output(), Some(DeviceOutput::Reply { request: RequestId(0), launch: LaunchId(0) }));
    assert_eq!(scheduler.apply(at(10), DeviceInput::Cancel(MODEL, RequestId(0))), Ok(false));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// Random changes of a log's bytes: it replays, diverges or is refused, and nothing else
    /// happens.
    #[test]
    fn nothing_in_a_log_does_harm(policy in 0..2u32, changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12)) {
        let mut bytes = log(if policy == 0 { spec(&windowed()) } else { spec(&elastic()) });
        for (index, byte) in changes {
            // Behind the header.
            let index = 7 + index.index(bytes.len() - 7);
            bytes[index] = byte;
        }
        does_no_harm(&bytes);
    }

    /// Changes digits of the log, which are the digits of a policy's options.
    #[test]
    fn no_options_in_a_log_do_harm(policy in 0..2u32, changes in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 1..12)) {
        let mut bytes = log(if policy == 0 { spec(&windowed()) } else { spec(&elastic()) });
        let digits: Vec<usize> = (0..bytes.len()).filter(|index| bytes[*index].is_ascii_digit()).collect();
        for (index, digit) in changes {
            bytes[digits[index.index(digits.len())]] = digit;
        }
        does_no_harm(&bytes);
    }
}

#[test]
fn a_limit_of_batches_holds_for_the_policies_that_follow_and_plays_again() {
    let mut journal = Journal::on(DeviceScheduler::new());
    let mut rows = Vec::new();
    let mut tell = |ms, input| {
        let told = journal.apply(at(ms), input);
        while let Some(output) = journal.poll() {
            if let DeviceOutput::Launch(launch) = output {
                rows.push(launch.rows);
            }
        }
        told
    };
    let end = |launch: u64, ms| {
        let span = Span { start: at(ms - 10), end: at(ms) };
        DeviceInput::Completion { launch: LaunchId(launch), span, exits: Vec::new() }
    };
    let unlimited = || ModelSpec::new(&WindowedOptions { queue_bound: 50, ..windowed() }, PartitionId(0));
    tell(0, DeviceInput::Model(MODEL, Some(ModelSpec::new(&elastic(), PartitionId(0))))).unwrap();
    assert_eq!(tell(0, DeviceInput::Limit(MODEL, 2)), Ok(false), "elastic is none whose batches can be limited");
    tell(1, DeviceInput::Model(MODEL, Some(unlimited()))).unwrap();
    assert_eq!(tell(2, DeviceInput::Limit(MODEL, 3)), Ok(true));
    (0..5).for_each(|id| assert_eq!(tell(3, request(id)), Ok(true)));
    // At 40 ms the policy changes while the device is idle.
    tell(13, end(0, 13)).unwrap();
    tell(23, end(1, 23)).unwrap();
    tell(33, end(2, 33)).unwrap();
    tell(40, DeviceInput::Model(MODEL, Some(unlimited()))).unwrap();
    (5..10).for_each(|id| assert_eq!(tell(41, request(id)), Ok(true)));
    tell(51, end(3, 51)).unwrap();
    tell(52, DeviceInput::Model(MODEL, None)).unwrap();
    tell(61, end(4, 61)).unwrap();
    assert_eq!(rows, [1, 3, 1, 1, 3]);
    check(DeviceScheduler::new(), &taken(journal));
}
