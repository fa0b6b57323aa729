//! The promises of [`DeviceScheduler`] under every policy: lanes, models that come, change and go,
//! forecasts.

use std::collections::{BTreeMap, VecDeque};

use downbeat_core::device::*;
use downbeat_core::{BatchId, Duration, LatencyProfile, ModelId, RequestId, Time};

const P0: PartitionId = PartitionId(0);
const P1: PartitionId = PartitionId(1);

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn model(id: u32) -> ModelId {
    ModelId(id)
}

/// Ten milliseconds for a batch of any size.
fn profile() -> SegmentProfile {
    SegmentProfile::whole(&LatencyProfile::from_table(vec![Duration::from_millis(10); 8]).unwrap())
}

fn request(id: u64, of: u32) -> DeviceRequest {
    DeviceRequest { id: RequestId(id), model: model(of), deadline: Time::MAX, size: 1, length: 0 }
}

fn batch(id: u64, of: u32, lane: LaneId) -> GrantedBatch {
    GrantedBatch { id: BatchId(id), model: model(of), lane, members: vec![RequestId(id)], rows: 1 }
}

/// A policy that runs batches of at most two requests one after another.
fn windowed() -> Windowed {
    Windowed::new(WindowedOptions {
        profile: profile(),
        max_batch: 2,
        window: Duration::ZERO,
        fill: false,
        drop: false,
        queue_bound: 100,
        ahead: 0,
    })
}

fn add(scheduler: &mut DeviceScheduler, id: u32, policy: impl DevicePolicy + 'static) {
    scheduler.handle_model(Time::ZERO, model(id), Some(DeviceModel::new(policy, profile()))).unwrap();
}

fn outputs(scheduler: &mut DeviceScheduler) -> Vec<DeviceOutput> {
    let outputs = std::iter::from_fn(|| scheduler.poll_output());
    outputs.filter(|output| !matches!(output, DeviceOutput::Note { note: Note::New { .. }, .. })).collect()
}

fn launches(scheduler: &mut DeviceScheduler) -> Vec<Launch> {
    let launch = |output| match output {
        DeviceOutput::Launch(launch) => launch,
        other => panic!("{other:?}"),
    };
    outputs(scheduler).into_iter().map(launch).collect()
}

fn complete(scheduler: &mut DeviceScheduler, launch: &Launch, start: u64, end: u64) {
    scheduler.handle_completion(at(end), launch.id, Span { start: at(start), end: at(end) }, &[]);
}

/// A policy that launches each request by itself, on the first of its two lanes.
#[derive(Debug, Default)]
struct Test {
    waiting: VecDeque<RequestId>,
    running: BTreeMap<LaunchId, RequestId>,
}

impl Test {
    fn launch(&mut self, turn: &mut Turn<'_>, request: RequestId) -> Launch {
        let (id, batch) = (turn.new_launch(), turn.new_batch());
        self.running.insert(id, request);
        Launch {
            id,
            batch,
            granted: None,
            model: turn.model(),
            lane: turn.lanes()[0],
            segments: SegmentRange::new(0, 1),
            members: vec![request],
            rows: 1,
            computed_rows: 1,
            length: 0,
            inputs: InputSource::Host,
        }
    }
}

impl DevicePolicy for Test {
    fn lanes(&self, partition: PartitionId) -> Vec<LaneSpec> {
        vec![LaneSpec { partition, max_rows: 1, segments: SegmentRange::new(0, 1) }; 2]
    }

    fn advance(&mut self, turn: &mut Turn<'_>) {
        while turn.has_room(turn.lanes()[0])
            && let Some(request) = self.waiting.pop_front()
        {
            let launch = self.launch(turn, request);
            turn.launch(launch);
        }
    }

    fn handle_request(&mut self, turn: &mut Turn<'_>, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.waiting.push_back(request.id);
        self.advance(turn);
        Ok(())
    }

    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, _: Span, _: &[RequestId]) {
        if let Some(request) = self.running.remove(&launch) {
            turn.push(DeviceOutput::Reply { request, launch });
        }
        self.advance(turn);
    }

    fn handle_cancel(&mut self, _: &mut Turn<'_>, _: RequestId) -> bool {
        false
    }

    fn drop_waiting(&mut self, turn: &mut Turn<'_>, reason: DeviceDrop) {
        self.waiting.drain(..).for_each(|request| turn.push(DeviceOutput::Drop { request, reason }));
    }

    fn stats(&self) -> PoolStats {
        let [waiting, running] = [self.waiting.len(), self.running.len()].map(|count| count as u32);
        PoolStats { waiting, running, ..PoolStats::default() }
    }
}

/// Two partitions with a shared lane each, and a [`Test`] in the first: its lanes are l2 and l3.
fn divided() -> DeviceScheduler {
    let mut scheduler = DeviceScheduler::new();
    scheduler.handle_layout(Time::ZERO, &Layout { shared_lanes: vec![1, 1] }).unwrap();
    add(&mut scheduler, 0, Test::default());
    assert_eq!(scheduler.lanes(model(0)), [LaneId(2), LaneId(3)]);
    scheduler
}

#[test]
fn ids_are_unique_over_all_models() {
    let mut scheduler = DeviceScheduler::new();
    add(&mut scheduler, 0, windowed());
    add(&mut scheduler, 1, windowed());
    scheduler.handle_request(at(0), &request(0, 0)).unwrap();
    scheduler.handle_request(at(0), &request(1, 1)).unwrap();
    let launches = launches(&mut scheduler);
    let names: Vec<_> = launches.iter().map(|launch| (launch.id, launch.batch, launch.lane, launch.model)).collect();
    let of = |n| (LaunchId(n), BatchId(n), LaneId(n as u32), ModelId(n as u32));
    assert_eq!(names, [of(0), of(1)]);
    complete(&mut scheduler, &launches[1], 0, 10);
    assert_eq!(outputs(&mut scheduler), [DeviceOutput::Reply { request: RequestId(1), launch: LaunchId(1) }]);
}

#[test]
fn a_lane_runs_one_and_holds_one_behind_it() {
    let mut scheduler = DeviceScheduler::new();
    add(&mut scheduler, 0, Test::default());
    (0..4).for_each(|id| scheduler.handle_request(at(0), &request(id, 0)).unwrap());
    let first = launches(&mut scheduler);
    assert_eq!(first.len(), 2);
    complete(&mut scheduler, &first[0], 0, 10);
    assert!(
        matches!(&outputs(&mut scheduler)[..], [DeviceOutput::Reply { .. }, DeviceOutput::Launch(launch)] if launch.id == LaunchId(2))
    );
}

#[test]
fn granted_batches_run_as_they_are_on_shared_lanes() {
    let mut scheduler = DeviceScheduler::new();
    scheduler.handle_layout(Time::ZERO, &Layout { shared_lanes: vec![1] }).unwrap();
    let lane = scheduler.shared_lanes(P0)[0];
    add(&mut scheduler, 0, Exclusive::new(3));
    add(&mut scheduler, 1, Exclusive::new(1));
    scheduler.handle_batch(at(0), batch(7, 0, lane)).unwrap();
    scheduler.handle_batch(at(0), batch(8, 1, lane)).unwrap();
    assert_eq!(scheduler.handle_batch(at(0), batch(9, 1, lane)), Err(DeviceReject::LaneTaken(lane)));
    let launches = launches(&mut scheduler);
    let granted: Vec<_> = launches.iter().map(|launch| launch.granted).collect();
    assert_eq!(granted, [Some(BatchId(7)), Some(BatchId(8))]);
    assert_eq!((launches[0].segments, launches[1].segments), (SegmentRange::new(0, 3), SegmentRange::new(0, 1)));
    assert!(scheduler.handle_cancel(at(1), model(1), RequestId(8)));
    assert!(!scheduler.handle_cancel(at(1), model(1), RequestId(8)), "it has gone");
    complete(&mut scheduler, &launches[0], 0, 10);
    complete(&mut scheduler, &launches[1], 10, 20);
    assert_eq!(outputs(&mut scheduler), [DeviceOutput::Reply { request: RequestId(7), launch: LaunchId(0) }]);
    assert_eq!(scheduler.stats(model(0)), PoolStats::default());
}

#[test]
fn a_batch_has_a_name_of_its_own_on_the_device_whoever_made_it() {
    let mut scheduler = DeviceScheduler::new();
    scheduler.handle_layout(Time::ZERO, &Layout { shared_lanes: vec![1] }).unwrap();
    let lane = scheduler.shared_lanes(P0)[0];
    add(&mut scheduler, 0, windowed());
    add(&mut scheduler, 1, Exclusive::new(1));
    scheduler.handle_request(at(0), &request(5, 0)).unwrap();
    scheduler.handle_batch(at(0), batch(0, 1, lane)).unwrap();
    scheduler.handle_batch(at(0), batch(7, 1, lane)).unwrap();
    let names: Vec<_> =
        launches(&mut scheduler).iter().map(|launch| (launch.batch, launch.granted, launch.model)).collect();
    let granted = |own, theirs| (BatchId(own), Some(BatchId(theirs)), model(1));
    assert_eq!(names, [(BatchId(0), None, model(0)), granted(1, 0), granted(2, 7)]);
}

#[test]
fn what_a_policy_does_not_take_is_refused() {
    let mut scheduler = DeviceScheduler::new();
    scheduler.handle_layout(Time::ZERO, &Layout { shared_lanes: vec![1] }).unwrap();
    let lane = scheduler.shared_lanes(P0)[0];
    add(&mut scheduler, 0, windowed());
    add(&mut scheduler, 1, Exclusive::new(1));
    assert_eq!(scheduler.handle_batch(at(0), batch(0, 0, lane)), Err(DeviceReject::WrongWay(model(0))));
    assert_eq!(scheduler.handle_request(at(0), &request(0, 1)), Err(DeviceReject::WrongWay(model(1))));
    assert_eq!(scheduler.handle_request(at(0), &request(0, 5)), Err(DeviceReject::NoModel(model(5))));
    assert_eq!(scheduler.handle_batch(at(0), batch(0, 5, lane)), Err(DeviceReject::NoModel(model(5))));
    let its = scheduler.lanes(model(0))[0];
    assert_eq!(scheduler.handle_batch(at(0), batch(0, 1, its)), Err(DeviceReject::LaneTaken(its)), "another model's");
    let nobody = GrantedBatch { members: Vec::new(), rows: 0, ..batch(0, 1, lane) };
    assert_eq!(scheduler.handle_batch(at(0), nobody), Err(DeviceReject::Empty));
    assert_eq!(outputs(&mut scheduler), []);
}

#[test]
fn a_removed_model_answers_its_launches_and_frees_its_lanes() {
    let mut scheduler = DeviceScheduler::new();
    add(&mut scheduler, 0, windowed());
    scheduler.handle_request(at(0), &request(0, 0)).unwrap();
    scheduler.handle_request(at(0), &request(1, 0)).unwrap();
    let launches = launches(&mut scheduler);
    scheduler.handle_model(at(1), model(0), None).unwrap();
    assert_eq!(outputs(&mut scheduler), [DeviceOutput::Drop { request: RequestId(1), reason: DeviceDrop::Removed }]);
    assert_eq!(scheduler.handle_request(at(2), &request(2, 0)), Err(DeviceReject::NoModel(model(0))));
    complete(&mut scheduler, &launches[0], 0, 10);
    let (reply, lanes) = (DeviceOutput::Reply { request: RequestId(0), launch: LaunchId(0) }, vec![LaneId(0)]);
    assert_eq!(outputs(&mut scheduler), [reply, DeviceOutput::Free { model: Some(model(0)), lanes }]);
    assert_eq!(scheduler.lane(LaneId(0)), None);
    scheduler.handle_model(at(11), model(0), None).unwrap();
    assert_eq!(outputs(&mut scheduler), [], "one that is not there may go");
    add(&mut scheduler, 1, windowed());
    assert_eq!(scheduler.lanes(model(1)), [LaneId(0)]);
}

#[test]
fn a_model_that_changes_ends_by_the_former_policy_what_that_has_taken() {
    let mut scheduler = DeviceScheduler::new();
    add(&mut scheduler, 0, windowed());
    scheduler.handle_request(at(0), &request(0, 0)).unwrap();
    scheduler.handle_request(at(0), &request(1, 0)).unwrap();
    let former = launches(&mut scheduler).remove(0);
    add(&mut scheduler, 0, Test::default());
    assert_eq!(scheduler.lanes(model(0)), [LaneId(1), LaneId(2)]);
    scheduler.handle_request(at(2), &request(2, 0)).unwrap();
    assert_eq!(launches(&mut scheduler)[0].lane, LaneId(1));
    assert_eq!(scheduler.stats(model(0)).waiting, 1);
    complete(&mut scheduler, &former, 0, 10);
    let [DeviceOutput::Reply { .. }, DeviceOutput::Launch(last)] = &outputs(&mut scheduler)[..] else {
        panic!("the next")
    };
    assert_eq!((last.lane, &last.members[..]), (LaneId(0), &[RequestId(1)][..]));
    complete(&mut scheduler, last, 10, 20);
    let freed = DeviceOutput::Free { model: Some(model(0)), lanes: vec![LaneId(0)] };
    assert_eq!(outputs(&mut scheduler), [DeviceOutput::Reply { request: RequestId(1), launch: last.id }, freed]);
}

#[test]
fn a_model_moves_between_two_launches_once_its_other_lanes_are_ready() {
    let mut scheduler = divided();
    (0..3).for_each(|id| scheduler.handle_request(at(50), &request(id, 0)).unwrap());
    let before = launches(&mut scheduler);
    scheduler.handle_move(at(100), model(0), P1).unwrap();
    assert_eq!(scheduler.handle_move(at(100), model(0), P1), Err(BadMove::Busy(model(0))));
    let lanes = vec![LaneId(4), LaneId(5)];
    let (from, to) = (vec![LaneId(2), LaneId(3)], lanes.clone());
    assert_eq!(outputs(&mut scheduler), [DeviceOutput::Prepare { model: model(0), lanes, partition: P1 }]);
    assert_eq!(scheduler.lane(LaneId(4)).map(|lane| lane.partition), Some(P1));
    assert!(!scheduler.handle_switch(at(100), model(0)), "the lanes are not ready");
    scheduler.handle_prepared(at(101), model(0), Ok(()));
    assert_eq!(outputs(&mut scheduler), []);
    assert!(scheduler.handle_switch(at(101), model(0)));
    let moved = outputs(&mut scheduler);
    assert_eq!(moved[0], DeviceOutput::Switch { model: model(0), from, to });
    assert_eq!(moved[1], DeviceOutput::Free { model: Some(model(0)), lanes: vec![LaneId(3)] });
    assert!(
        matches!(&moved[2..], [DeviceOutput::Launch(launch)] if launch.lane == LaneId(4) && launch.members == [RequestId(2)]),
        "a waiting request begins on the new lanes at once"
    );
    // The launch that runs and the one behind it end on the old lane.
    complete(&mut scheduler, &before[0], 50, 102);
    assert_eq!(outputs(&mut scheduler), [DeviceOutput::Reply { request: RequestId(0), launch: before[0].id }]);
    complete(&mut scheduler, &before[1], 102, 112);
    let freed = DeviceOutput::Free { model: Some(model(0)), lanes: vec![LaneId(2)] };
    assert_eq!(outputs(&mut scheduler), [freed, DeviceOutput::Reply { request: RequestId(1), launch: before[1].id }]);
    scheduler.handle_prepared(at(120), model(0), Ok(()));
    assert_eq!(outputs(&mut scheduler), [], "a second result does no harm");
    assert!(!scheduler.handle_switch(at(120), model(0)));
}

#[test]
fn lanes_that_cannot_be_made_change_nothing_and_give_a_note() {
    let mut scheduler = divided();
    scheduler.handle_move(at(100), model(0), P1).unwrap();
    outputs(&mut scheduler);
    scheduler.handle_prepared(at(101), model(0), Err("no memory".to_owned()));
    let freed = DeviceOutput::Free { model: Some(model(0)), lanes: vec![LaneId(4), LaneId(5)] };
    let note = Note::PrepareFailed { partition: P1, reason: "no memory".to_owned() };
    assert_eq!(outputs(&mut scheduler), [freed, DeviceOutput::Note { model: model(0), note }]);
    assert!(!scheduler.handle_switch(at(101), model(0)));
    assert_eq!(scheduler.lanes(model(0)), [LaneId(2), LaneId(3)]);
    scheduler.handle_request(at(102), &request(0, 0)).unwrap();
    assert_eq!(launches(&mut scheduler)[0].lane, LaneId(2));
    scheduler.handle_move(at(200), model(0), P1).unwrap();
    assert!(matches!(&outputs(&mut scheduler)[..], [DeviceOutput::Prepare { .. }]));
}

#[test]
fn a_model_removed_during_preparation_keeps_its_lane_ids() {
    for made in [Ok(()), Err("no memory".to_owned())] {
        let mut scheduler = divided();
        scheduler.handle_move(at(100), model(0), P1).unwrap();
        outputs(&mut scheduler);
        scheduler.handle_model(at(101), model(0), None).unwrap();
        assert_eq!(outputs(&mut scheduler), []);
        add(&mut scheduler, 1, windowed());
        assert_eq!(scheduler.lanes(model(1)), [LaneId(6)]);
        scheduler.handle_prepared(at(102), model(0), made);
        let freed = outputs(&mut scheduler).into_iter().filter_map(|output| match output {
            DeviceOutput::Free { lanes, .. } => Some(lanes),
            _ => None,
        });
        assert_eq!(freed.flatten().collect::<Vec<_>>(), [4, 5, 2, 3].map(LaneId));
        assert_eq!(scheduler.lanes(model(0)), [] as [LaneId; 0]);
    }
}

#[test]
fn a_partition_that_models_are_in_stays() {
    let mut scheduler = DeviceScheduler::new();
    assert_eq!(scheduler.handle_layout(at(0), &Layout { shared_lanes: Vec::new() }), Err(BadLayout::Empty));
    scheduler.handle_layout(at(0), &Layout { shared_lanes: vec![1, 2] }).unwrap();
    assert_eq!(scheduler.shared_lanes(P1), [LaneId(1), LaneId(2)]);
    let at_1 = || DeviceModel { partition: P1, ..DeviceModel::new(windowed(), profile()) };
    scheduler.handle_model(at(0), model(0), Some(at_1())).unwrap();
    assert_eq!(scheduler.lane(scheduler.lanes(model(0))[0]).map(|lane| lane.partition), Some(P1));
    let in_use = BadLayout::InUse { partition: P1, model: model(0) };
    assert_eq!(scheduler.handle_layout(at(1), &Layout { shared_lanes: vec![1] }), Err(in_use));
    assert_eq!(outputs(&mut scheduler), []);
    scheduler.handle_layout(at(1), &Layout { shared_lanes: vec![2, 1] }).unwrap();
    assert_eq!(
        (scheduler.shared_lanes(P0), scheduler.shared_lanes(P1)),
        (&[LaneId(0), LaneId(4)][..], &[LaneId(1)][..])
    );
    assert_eq!(outputs(&mut scheduler), [DeviceOutput::Free { model: None, lanes: vec![LaneId(2)] }]);
    scheduler.handle_model(at(2), model(0), None).unwrap();
    scheduler.handle_layout(at(2), &Layout { shared_lanes: vec![1] }).unwrap();
    let refused = scheduler.handle_model(at(3), model(0), Some(at_1()));
    assert_eq!(refused, Err(BadPolicy::NoPartition(P1)));
}

#[test]
fn a_removed_shared_lane_ends_its_launch_and_starts_none() {
    let mut scheduler = DeviceScheduler::new();
    scheduler.handle_layout(at(0), &Layout { shared_lanes: vec![1] }).unwrap();
    let lane = scheduler.shared_lanes(P0)[0];
    add(&mut scheduler, 0, Exclusive::new(1));
    scheduler.handle_batch(at(0), batch(0, 0, lane)).unwrap();
    let launch = launches(&mut scheduler).remove(0);
    scheduler.handle_layout(at(1), &Layout { shared_lanes: vec![0] }).unwrap();
    assert_eq!(scheduler.handle_batch(at(1), batch(1, 0, lane)), Err(DeviceReject::LaneTaken(lane)));
    complete(&mut scheduler, &launch, 0, 10);
    assert_eq!(outputs(&mut scheduler)[0], DeviceOutput::Free { model: None, lanes: vec![lane] });
}

#[test]
fn a_forecast_has_the_work_of_all_models_in_the_partition() {
    let mut scheduler = DeviceScheduler::new();
    scheduler.handle_layout(at(0), &Layout { shared_lanes: vec![1, 1] }).unwrap();
    let lane = scheduler.shared_lanes(P0)[0];
    add(&mut scheduler, 0, Exclusive::new(1));
    add(&mut scheduler, 1, windowed());
    let elsewhere = DeviceModel { partition: P1, ..DeviceModel::new(windowed(), profile()) };
    scheduler.handle_model(at(0), model(2), Some(elsewhere)).unwrap();
    assert_eq!(scheduler.free_at(at(5), model(1)), at(5), "nothing is there");
    scheduler.handle_batch(at(10), batch(0, 0, lane)).unwrap();
    scheduler.handle_batch(at(10), batch(1, 0, lane)).unwrap();
    assert_eq!(scheduler.free_at(at(10), model(1)), at(30), "one that runs, one behind it");
    assert_eq!(scheduler.free_at(at(16), model(1)), at(30), "it goes on");
    // 3 requests: one runs. The 2 that wait for its end are one batch.
    (2..5).for_each(|id| scheduler.handle_request(at(16), &request(id, 1)).unwrap());
    assert_eq!(scheduler.free_at(at(16), model(0)), at(50), "14 ms of the first model, 20 of the second");
    assert_eq!(scheduler.free_at(at(16), model(2)), at(16), "another partition");
    assert_eq!(scheduler.free_at(at(16), model(9)), at(16), "not there");
}

#[test]
fn a_load_is_the_work_of_models_with_lanes_of_their_own() {
    let mut scheduler = DeviceScheduler::new();
    scheduler.handle_layout(at(0), &Layout { shared_lanes: vec![1, 1] }).unwrap();
    let lane = scheduler.shared_lanes(P0)[0];
    add(&mut scheduler, 0, Exclusive::new(1));
    add(&mut scheduler, 1, windowed());
    scheduler.handle_batch(at(0), batch(0, 0, lane)).unwrap();
    scheduler.handle_batch(at(0), batch(1, 0, lane)).unwrap();
    assert_eq!(scheduler.load(at(0), P0), Time::ZERO, "who granted these knows of them");
    // One request runs. The two that wait for its end are one batch.
    (2..5).for_each(|id| scheduler.handle_request(at(0), &request(id, 1)).unwrap());
    assert_eq!(scheduler.load(at(0), P0), at(20));
    assert_eq!(scheduler.load(at(0), P1), Time::ZERO, "another partition");
    assert_eq!(scheduler.load(at(0), PartitionId(9)), Time::ZERO, "not there");
    assert_eq!(scheduler.load(at(4), P0), at(22), "it shares the partition with the batch that runs");
    let its: Vec<Launch> = launches(&mut scheduler).into_iter().filter(|launch| launch.model == model(1)).collect();
    assert_eq!(scheduler.load(at(40), P0), at(50), "what is late is as good as done, and still there");
    complete(&mut scheduler, &its[0], 0, 40);
    let next = outputs(&mut scheduler).into_iter().find_map(|output| match output {
        DeviceOutput::Launch(launch) => Some(launch),
        _ => None,
    });
    assert_eq!(scheduler.load(at(50), P0), at(50));
    complete(&mut scheduler, &next.unwrap(), 40, 50);
    assert_eq!(scheduler.load(at(50), P0), Time::ZERO);
}

#[test]
fn a_completion_corrects_the_forecast() {
    for end in [4, 10, 25] {
        let mut scheduler = DeviceScheduler::new();
        scheduler.handle_layout(at(0), &Layout { shared_lanes: vec![1] }).unwrap();
        let lane = scheduler.shared_lanes(P0)[0];
        add(&mut scheduler, 0, Exclusive::new(1));
        scheduler.handle_batch(at(0), batch(0, 0, lane)).unwrap();
        scheduler.handle_batch(at(0), batch(1, 0, lane)).unwrap();
        let first = launches(&mut scheduler).remove(0);
        assert_eq!(scheduler.free_at(at(0), model(0)), at(20));
        assert_eq!(scheduler.free_at(at(25), model(0)), at(35), "one that is overdue is as good as done");
        // The scheduler learns of the end a millisecond later.
        let span = Span { start: at(0), end: at(end) };
        scheduler.handle_completion(at(end + 1), first.id, span, &[]);
        assert_eq!(scheduler.free_at(at(end + 1), model(0)), at(end + 10), "the next has run since {end}");
    }
}

/// Two stages of 10 ms for a batch of any size, with two pairs of buffers.
fn staged() -> DeviceModel {
    let stage = || vec![LatencyProfile::from_table(vec![Duration::from_millis(10); 8]).unwrap()];
    let profile = SegmentProfile::new(vec![0], &[stage(), stage()]).unwrap();
    let options = StagedOptions {
        profile: profile.clone(),
        pairs: 2,
        max_batch: 8,
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
    DeviceModel::new(Staged::new(options), profile)
}

/// Two requests come, the second when the first is in the second stage.
#[test]
fn batches_run_side_by_side_until_other_models_slow_them_down() {
    let mut scheduler = DeviceScheduler::new();
    scheduler.handle_model(at(0), model(0), Some(staged())).unwrap();
    add(&mut scheduler, 1, windowed());
    let begun = |scheduler: &mut DeviceScheduler| -> Vec<Launch> {
        let launch = |output| if let DeviceOutput::Launch(launch) = output { Some(launch) } else { None };
        outputs(scheduler).into_iter().filter_map(launch).collect()
    };
    let ask = |scheduler: &mut DeviceScheduler, now, id, of| {
        scheduler.handle_request(at(now), &request(id, of)).unwrap();
        begun(scheduler)
    };
    let other = ask(&mut scheduler, 0, 100, 1).remove(0);
    let mut now = 0;
    // Returns the number of batches that begin beside the first batch. A launch takes so many ms.
    let mut beside = |scheduler: &mut DeviceScheduler, takes: u64| {
        let mut running = ask(scheduler, now, 0, 0);
        let (mut count, mut is_first) = (0, true);
        while let Some(launch) = running.pop() {
            complete(scheduler, &launch, now, now + takes);
            now += takes;
            running.extend(begun(scheduler));
            if std::mem::take(&mut is_first) {
                let more = ask(scheduler, now, 1, 0);
                count = more.len();
                running.extend(more);
            }
        }
        count
    };
    assert_eq!(beside(&mut scheduler, 10), 1, "there is room beside the other model");
    beside(&mut scheduler, 40);
    assert_eq!(beside(&mut scheduler, 40), 0, "the other model slows it down");
    complete(&mut scheduler, &other, 0, 360);
    assert_eq!(beside(&mut scheduler, 10), 1, "the model is alone");
}
