//! The judge of networks notices each broken rule.

use downbeat_core::{BatchId, Duration, Time};
use downbeat_lab::network::NetworkJudge;
use downbeat_roles::{BatchKey, Epoch, Frame, Member, Message, NodeId, Outcome, Refusal, RequestEnd, RequestKey};

const FRONTEND: NodeId = NodeId(1);
const BACKEND: NodeId = NodeId(2);
const OTHER: NodeId = NodeId(3);
const REQUEST: RequestKey = RequestKey { frontend: FRONTEND, number: 0 };
const INPUT: u64 = 7;

fn ms(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn batch(epoch: u64, batch: u64) -> BatchKey {
    BatchKey { epoch: Epoch { number: epoch, rank: 0 }, batch: BatchId(batch) }
}

/// A judge that has seen a request asked at 0 with a deadline of 50 ms.
fn judge(may_repeat: bool) -> NetworkJudge {
    let mut judge = NetworkJudge::new(true, Duration::from_millis(10));
    judge.asked(Time::ZERO, REQUEST, ms(50), INPUT, may_repeat);
    judge
}

/// Sends the request's inputs to a batch, with this much time left.
fn inputs(judge: &mut NetworkJudge, at: Time, batch: BatchKey, left: Duration) {
    let messages = vec![Message::Inputs { batch, granted: vec![(0, left, INPUT)], gone: Vec::new() }];
    let frame =
        Frame { from: FRONTEND, session: 1, of: 1, first: 0, messages, ack: 0, sent: Duration::ZERO, echo: None };
    judge.sent(at, &frame);
}

/// Begins the request in a batch that was sent its inputs 1 ms before.
fn begins(judge: &mut NetworkJudge, at: Time, on: (NodeId, u32), batch: BatchKey, payload: u64) {
    let sent = Time::from_nanos(at.as_nanos().saturating_sub(1_000_000));
    inputs(judge, sent, batch, ms(50).since(sent));
    let member = Member { request: REQUEST, deadline: ms(50), payload };
    judge.begins(at, on, batch, &[member], at);
}

fn ran(outputs: u64) -> RequestEnd<u64> {
    RequestEnd::Ran(Outcome::Outputs(outputs), None)
}

fn broken(judge: &NetworkJudge) -> Option<&'static str> {
    judge.broken().map(|broken| broken.rule)
}

#[test]
fn what_is_well_is_no_misdeed() {
    let mut judge = judge(false);
    begins(&mut judge, ms(10), (BACKEND, 0), batch(1, 0), INPUT);
    judge.is_done(BACKEND, batch(1, 0), &[REQUEST]);
    assert!(judge.ended(ms(20), REQUEST, &ran(INPUT)));
    judge.finish(ms(100));
    assert_eq!(judge.broken(), None);
}

#[test]
fn section_4_3_no_request_runs_before_its_inputs_are_ready() {
    let mut early = judge(true);
    early.announced(REQUEST);
    begins(&mut early, ms(10), (BACKEND, 0), batch(1, 0), INPUT);
    assert_eq!(broken(&early), Some("inputs are ready"));
    let mut ready = judge(true);
    ready.announced(REQUEST);
    ready.ready(REQUEST);
    begins(&mut ready, ms(10), (BACKEND, 0), batch(1, 0), INPUT);
    assert_eq!(broken(&ready), None);
}

#[test]
fn a_request_ends_once_with_its_own_answer() {
    let refused = RequestEnd::Refused(Refusal::Lost);
    let mut twice = judge(true);
    twice.ended(ms(1), REQUEST, &refused);
    assert_eq!(broken(&twice), None);
    twice.ended(ms(2), REQUEST, &refused);
    let mut gone = judge(true);
    assert!(gone.cancelled(REQUEST));
    gone.ended(ms(2), REQUEST, &refused);
    let mut never_asked = judge(true);
    never_asked.ended(ms(2), RequestKey { number: 1, ..REQUEST }, &refused);
    let mut not_run = judge(true);
    not_run.ended(ms(2), REQUEST, &ran(INPUT));
    let mut of_another = judge(true);
    begins(&mut of_another, ms(10), (BACKEND, 0), batch(1, 0), INPUT);
    of_another.ended(ms(20), REQUEST, &ran(INPUT + 1));
    let mut too_early = judge(true);
    too_early.ended(ms(20), REQUEST, &RequestEnd::TooLate);
    let mut wrong_inputs = judge(true);
    begins(&mut wrong_inputs, ms(10), (BACKEND, 0), batch(1, 0), INPUT + 1);
    for judge in [twice, gone, never_asked, not_run, of_another, too_early, wrong_inputs] {
        assert_eq!(broken(&judge), Some("ends once"), "{judge:?}");
    }
}

/// Without a lost process, no frontend may end a request as lost.
#[test]
fn a_request_is_lost_only_where_somebody_is_lost() {
    let mut calm = judge(true);
    calm.ended(ms(20), REQUEST, &RequestEnd::Lost);
    assert_eq!(broken(&calm), Some("losses have causes"));
    let mut torn = judge(true);
    torn.lost(ms(10), FRONTEND, BACKEND);
    torn.ended(ms(20), REQUEST, &RequestEnd::Lost);
    assert_eq!(broken(&torn), None);
}

#[test]
fn epochs_grow_on_a_slot_and_on_a_backend() {
    let mut slot = judge(true);
    begins(&mut slot, ms(10), (BACKEND, 0), batch(2, 0), INPUT);
    slot.is_done(BACKEND, batch(2, 0), &[REQUEST]);
    begins(&mut slot, ms(20), (BACKEND, 1), batch(1, 0), INPUT);
    assert_eq!(broken(&slot), None, "another slot");
    slot.is_done(BACKEND, batch(1, 0), &[REQUEST]);
    begins(&mut slot, ms(30), (BACKEND, 0), batch(1, 1), INPUT);
    let mut obeyed = judge(true);
    obeyed.obeys(ms(1), BACKEND, Epoch { number: 2, rank: 0 });
    obeyed.obeys(ms(1), OTHER, Epoch { number: 1, rank: 0 });
    assert_eq!(broken(&obeyed), None, "another backend");
    obeyed.obeys(ms(2), BACKEND, Epoch { number: 2, rank: 1 });
    for judge in [slot, obeyed] {
        assert_eq!(broken(&judge), Some("epochs grow"), "{judge:?}");
    }
}

#[test]
fn a_request_runs_in_one_place_unless_that_is_lost() {
    let two_at_once = |lost: bool| {
        let mut judge = judge(true);
        begins(&mut judge, ms(10), (BACKEND, 0), batch(1, 0), INPUT);
        if lost {
            judge.lost(ms(12), BACKEND, FRONTEND);
        }
        begins(&mut judge, ms(20), (OTHER, 0), batch(1, 1), INPUT);
        judge
    };
    assert_eq!(broken(&two_at_once(false)), Some("one backend"));
    assert_eq!(broken(&two_at_once(true)), None);
    let mut must_not = judge(false);
    begins(&mut must_not, ms(10), (BACKEND, 0), batch(1, 0), INPUT);
    must_not.is_done(BACKEND, batch(1, 0), &[REQUEST]);
    begins(&mut must_not, ms(20), (BACKEND, 0), batch(1, 1), INPUT);
    assert_eq!(broken(&must_not), Some("one backend"));
}

#[test]
fn budgets_never_grow() {
    let mut given = judge(true);
    inputs(&mut given, ms(10), batch(1, 0), Duration::from_millis(41));
    let mut endless = judge(true);
    inputs(&mut endless, ms(10), batch(1, 0), Duration::MAX);
    let mut taken = judge(true);
    inputs(&mut taken, ms(10), batch(1, 0), Duration::from_millis(40));
    assert_eq!(broken(&taken), None);
    let member = Member { request: REQUEST, deadline: ms(53), payload: INPUT };
    taken.begins(ms(12), (BACKEND, 0), batch(1, 0), &[member], ms(12));
    for judge in [given, endless, taken] {
        assert_eq!(broken(&judge), Some("budgets shrink"), "{judge:?}");
    }
}

#[test]
fn with_a_store_epochs_are_somebodys_own() {
    let mut judge = judge(true);
    judge.leads(ms(1), BACKEND, Epoch { number: 1, rank: 0 });
    judge.leads(ms(2), BACKEND, Epoch { number: 1, rank: 0 });
    assert_eq!(broken(&judge), None);
    judge.leads(ms(3), OTHER, Epoch { number: 1, rank: 1 });
    assert_eq!(broken(&judge), Some("own epochs"));
}

#[test]
fn everything_ends() {
    let mut waits = judge(true);
    waits.finish(ms(1000));
    assert_eq!(broken(&waits), Some("nothing waits"));
    let mut dead = judge(true);
    assert_eq!(dead.died(FRONTEND), 1);
    dead.finish(ms(1000));
    assert_eq!(dead.broken(), None);
}
