//! The judge of refusals: what would a scheduler refuse that knows the truth?

use std::collections::HashMap;

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::{Duration, Time};
use downbeat_roles::{Message, Refusal, RequestKey};

/// A refusal breaks the rule if there was no trouble for this long.
const CALM: Duration = Duration::from_millis(500);

/// A request that has not been refused, and has not ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Asked {
    model: usize,
    deadline: Time,
}

/// Judges the refusals for want of time. The simulation knows the true delays of the wires and the
/// idle slots, which the scheduler must guess.
///
/// A refusal is *needless* if the request could have run in time. A connected backend has the model,
/// and more idle slots than the scheduler has requests: no other request needs the slot. The
/// request's time would do for its run and for all messages, each with the worst delay of a wire. Example: the scheduler takes its own pause for the network's
/// delay. It then refuses all requests of an idle cluster for some seconds.
///
/// - *no refusal is wrong*: half a second after the last fault, no refusal is needless.
#[derive(Debug, Default)]
pub struct RefusalJudge {
    asked: HashMap<RequestKey, Asked>,
    troubled_until: Time,
    needless: u64,
}

impl RefusalJudge {
    /// Returns the number of needless refusals.
    pub fn needless(&self) -> u64 {
        self.needless
    }

    /// Records that something happens until then that may delay messages or requests.
    pub fn troubled(&mut self, until: Time) {
        self.troubled_until = self.troubled_until.max(until);
    }

    /// Records that a client asks for a model.
    pub fn asked(&mut self, request: RequestKey, model: usize, deadline: Time) {
        self.asked.insert(request, Asked { model, deadline });
    }

    /// Records that a request has ended.
    pub fn ended(&mut self, request: RequestKey) {
        self.asked.remove(&request);
    }

    /// Records a scheduler's message to a frontend. `could_run`: whether a request for this model
    /// with so much time left could run. Returns the text of a broken rule.
    pub fn sent(
        &mut self,
        now: Time,
        frontend: downbeat_roles::NodeId,
        message: &Message<u64>,
        could_run: impl Fn(usize, Duration) -> bool,
    ) -> Option<String> {
        let Message::Refused(refused) = message else { return None };
        let mut broken = None;
        for (number, refusal) in refused.iter().filter(|(_, refusal)| is_for_want_of_time(*refusal)) {
            let request = RequestKey { frontend, number: *number };
            // A message that is sent again is judged once.
            let Some(Asked { model, deadline }) = self.asked.remove(&request) else { continue };
            let left = deadline.since(now);
            if !could_run(model, left) {
                continue;
            }
            self.needless += 1;
            if now > self.troubled_until + CALM {
                broken = Some(format!("{request:?} has {left} left on an idle slot, and gets {refusal:?}"));
            }
        }
        broken
    }
}

fn is_for_want_of_time(refusal: Refusal) -> bool {
    matches!(
        refusal,
        Refusal::Rejected(Reject::DeadlineImpossible { .. } | Reject::NetworkTooSlow { .. })
            | Refusal::Dropped(DropReason::Hopeless)
    )
}
