//! The checker of the world notices each broken rule. A checker that never objects is useless.

use downbeat_core::{BatchId, DeviceId, ModelId, RequestId, Time};
use downbeat_lab::world::{Ending, Failure, Ledger};

const NOW: Time = Time::from_nanos(1_000);
const SLOT: DeviceId = DeviceId(0);

/// Requests r0 and r1 of model 0 and r2 of model 1, of two items each; r3 was refused.
fn ledger() -> Ledger {
    let mut ledger = Ledger::new(42, false);
    for (id, model) in [(0, 0), (1, 0), (2, 1), (3, 0)] {
        ledger.request(Time::ZERO, RequestId(id), ModelId(model), 2);
        ledger.taken(Time::ZERO, RequestId(id), id < 3);
    }
    ledger
}

fn grant(ledger: &mut Ledger, batch: u64, members: &[u64], size: u32) {
    let members: Vec<RequestId> = members.iter().copied().map(RequestId).collect();
    ledger.granted(NOW, SLOT, BatchId(batch), ModelId(0), &members, size);
}

fn end(ledger: &mut Ledger, id: u64, ending: Ending) {
    ledger.end_request(NOW, RequestId(id), ending);
}

#[test]
fn a_run_by_the_rules_passes() {
    let mut ledger = ledger();
    grant(&mut ledger, 0, &[0, 1], 4);
    end(&mut ledger, 0, Ending::Replied);
    ledger.lost(1, true);
    end(&mut ledger, 1, Ending::Failed(Failure::Lost(1)));
    ledger.completed(NOW, SLOT, BatchId(0));
    end(&mut ledger, 2, Ending::Cancelled);
    ledger.end(NOW);
}

#[test]
#[should_panic(expected = "seed 42, t=1 us: r0 is Dropped after Some(Replied)")]
fn answered_twice() {
    let mut ledger = ledger();
    end(&mut ledger, 0, Ending::Replied);
    end(&mut ledger, 0, Ending::Dropped);
}

#[test]
#[should_panic(expected = "r3 is Replied and was not accepted")]
fn answered_though_it_was_refused() {
    end(&mut ledger(), 3, Ending::Replied);
}

#[test]
#[should_panic(expected = "r4 is Replied and was not accepted")]
fn answered_before_it_is_accepted() {
    let mut ledger = ledger();
    ledger.request(NOW, RequestId(4), ModelId(0), 2);
    end(&mut ledger, 4, Ending::Replied);
}

#[test]
#[should_panic(expected = "it is said twice whether r3 is accepted")]
fn accepted_after_it_was_refused() {
    ledger().taken(NOW, RequestId(3), true);
}

#[test]
#[should_panic(expected = "r0 fails for device 1, which is there")]
fn failed_for_nothing() {
    end(&mut ledger(), 0, Ending::Failed(Failure::Lost(1)));
}

#[test]
#[should_panic(expected = "r0 is refused by device 1 as it was")]
fn refused_for_nothing() {
    end(&mut ledger(), 0, Ending::Failed(Failure::Refused(1)));
}

#[test]
#[should_panic(expected = "r2 of m1 is in b0 of m0")]
fn members_of_two_models() {
    grant(&mut ledger(), 0, &[0, 2], 4);
}

#[test]
#[should_panic(expected = "b0 has 4 items and says 3")]
fn a_wrong_size() {
    grant(&mut ledger(), 0, &[0, 1], 3);
}

#[test]
#[should_panic(expected = "r0 is in b1 and in another")]
fn in_two_batches() {
    let mut ledger = ledger();
    grant(&mut ledger, 0, &[0], 2);
    ledger.completed(NOW, SLOT, BatchId(0));
    grant(&mut ledger, 1, &[0], 2);
}

#[test]
#[should_panic(expected = "d0 has [b0, b1]")]
fn two_batches_in_a_slot() {
    let mut ledger = ledger();
    grant(&mut ledger, 0, &[0], 2);
    grant(&mut ledger, 1, &[1], 2);
}

#[test]
#[should_panic(expected = "d0 completes b1, which it does not have")]
fn completed_what_was_not_sent() {
    let mut ledger = ledger();
    grant(&mut ledger, 0, &[0], 2);
    ledger.completed(NOW, SLOT, BatchId(1));
}

#[test]
#[should_panic(expected = "3 requests never ended, the first r0")]
fn lost() {
    ledger().end(NOW);
}
