//! The judge of refusals notices each refusal that a scheduler would not make that knows the truth.

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::{Duration, Time};
use downbeat_lab::network::RefusalJudge;
use downbeat_roles::{Message, NodeId, Refusal, RequestKey};

const FRONTEND: NodeId = NodeId(1);
const ALLOWED: Duration = Duration::from_millis(50);

fn ms(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

/// Refuses a request of 0 ms with a deadline of 50 ms, after trouble until then. Returns the number
/// of needless refusals, and whether a rule was broken.
fn judged(refusal: Refusal, troubled_until: u64, at: u64, could_run: bool) -> (u64, bool) {
    let mut judge = RefusalJudge::default();
    judge.troubled(ms(troubled_until));
    judge.asked(RequestKey { frontend: FRONTEND, number: 7 }, 3, ms(at) + ALLOWED);
    let message = Message::Refused(vec![(7, refusal), (8, refusal)]);
    let could = |model: usize, left: Duration| {
        assert_eq!((model, left), (3, ALLOWED));
        could_run
    };
    let broken = judge.sent(ms(at), FRONTEND, &message, could).is_some();
    assert_eq!(judge.sent(ms(at), FRONTEND, &message, could), None, "a message that is sent again counts once");
    (judge.needless(), broken)
}

#[test]
fn a_refusal_for_want_of_time_is_needless_if_there_is_time() {
    let (needed, allowed) = (ALLOWED, ALLOWED);
    let impossible = Refusal::Rejected(Reject::DeadlineImpossible { needed, allowed });
    let network = Refusal::Rejected(Reject::NetworkTooSlow { network: ALLOWED, needed, allowed });
    for refusal in [impossible, network, Refusal::Dropped(DropReason::Hopeless)] {
        assert_eq!(judged(refusal, 0, 501, true), (1, true), "{refusal:?}");
        assert_eq!(judged(refusal, 0, 500, true), (1, false), "{refusal:?}: trouble was a moment ago");
        assert_eq!(judged(refusal, 100, 600, true), (1, false), "{refusal:?}: trouble was a moment ago");
        assert_eq!(judged(refusal, 0, 501, false), (0, false), "{refusal:?}: the truth refuses it, too");
    }
}

#[test]
fn other_refusals_are_not_judged() {
    let full = Refusal::Rejected(Reject::QueueFull { bound: 1 });
    for refusal in [full, Refusal::Lost, Refusal::Dropped(DropReason::Sacrificed)] {
        assert_eq!(judged(refusal, 0, 501, true), (0, false), "{refusal:?}");
    }
}

#[test]
fn a_request_that_has_ended_is_not_judged() {
    let mut judge = RefusalJudge::default();
    let request = RequestKey { frontend: FRONTEND, number: 7 };
    judge.asked(request, 0, ms(900));
    judge.ended(request);
    let message = Message::Refused(vec![(7, Refusal::Dropped(DropReason::Hopeless))]);
    assert_eq!(judge.sent(ms(600), FRONTEND, &message, |_, _| true), None);
    assert_eq!(judge.needless(), 0);
}
