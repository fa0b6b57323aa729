//! Answers the requests of a device, and counts each answer.

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::device::{DeviceDrop, DeviceReject, GuardEnd};
use downbeat_core::{Duration, Time};
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::statistics::Phases;
use downbeat_service::report::missed::Miss;
use downbeat_service::traces::open::batch_ran;
use downbeat_service::unanswered::Unanswered;

use super::placement::Placement;
use super::request_table::Entry;
use crate::request::batch_codec::Outputs;
use crate::request::call::Call;
use crate::request::reply::{Answered, BatchRun};
use crate::run::engine_run::RunFailure;

/// Answers a request that was given up.
pub fn drop_entry(mut entry: Entry, reason: DeviceDrop, now: Time) {
    let reason = match reason {
        DeviceDrop::Hopeless => {
            entry.watched.take().into_iter().for_each(|watched| watched.end(GuardEnd::Dropped));
            DropReason::Hopeless
        }
        DeviceDrop::Removed => DropReason::ModelRemoved,
    };
    entry.call.drop_for(reason, now);
}

/// Answers requests whose launch, of `rows` items, has ended.
pub fn reply(mut replies: Vec<Entry>, rows: u32, now: Time) {
    // A client that left while its request ran was counted by its ticket.
    replies.retain(|entry| !entry.call.reply.is_closed());
    let Some(first) = replies.first() else { return };
    let (executable, phases) = (first.call.loaded.clone(), first.phases);
    let times = |entry: &Entry| {
        let call = &entry.call;
        (entry.begin.unwrap_or(now).since(call.arrival), now.since(call.arrival), now > call.deadline)
    };
    first.call.reply.ran(BatchRun { rows, phases, ended: now });
    executable.record_batch(rows, phases, replies.iter().map(times));
    if replies.iter().any(|entry| entry.call.trace.is_some()) {
        trace(&replies, rows, now);
    }
    for entry in replies {
        entry.watched.into_iter().for_each(|watched| watched.end(GuardEnd::Answered));
        if entry.call.is_probe && now <= entry.call.deadline {
            executable.probes.lock().was_wrong();
        }
        if let Some(step) = &entry.call.step {
            step.set_began(entry.begin.unwrap_or(now));
        }
        let Some(outputs) = entry.outputs else {
            let model = &executable.name;
            tracing::error!(%model, "a request was to be answered without outputs: this is a defect");
            continue;
        };
        let Call { arrival, deadline, reply, .. } = entry.call;
        let waited = || entry.begin.unwrap_or(now).since(arrival);
        let miss = (now > deadline).then(|| Box::new(Miss::Late { waited: waited(), rows }));
        // The client may have left meanwhile: then the send reaches no one.
        reply.send_answered(Answered { answer: Ok(outputs), miss });
    }
}

/// Notes the run of a batch in the traces of its requests. The batch has `rows` items.
#[cold]
fn trace(replies: &[Entry], rows: u32, now: Time) {
    let traced = replies.iter().filter_map(|entry| entry.call.trace.as_deref().zip(Some(entry.begin.unwrap_or(now))));
    let phases = replies.first().map_or(Phases::default(), |first| first.phases);
    batch_ran(traced, (replies.len(), rows), phases, now);
}

/// Requests of a launch that failed as a whole: the ones that ran alone, and the ones that failed.
pub type Alone = (Vec<(Entry, Outputs)>, Vec<(Entry, RunFailure)>);

/// Answers the requests of a failed launch, which was on `device`.
pub fn answer_alone(device: usize, (answered, failed): Alone, now: Time) {
    for (entry, outputs) in answered {
        let took = std::iter::once((Duration::ZERO, now.since(entry.call.arrival), false));
        entry.call.loaded.record_batch(entry.rows, Phases::default(), took);
        if entry.call.trace.is_some() {
            trace(std::slice::from_ref(&entry), entry.rows, now);
        }
        // A client that is gone does not read its answer.
        entry.call.reply.send(Ok(outputs));
    }
    for (entry, reason) in failed {
        // A client that left was counted by its ticket.
        if !entry.call.reply.is_closed() {
            let failure = entry.call.loaded.failure(device, &reason);
            entry.call.fail(Unanswered::of(&failure), failure, now);
        }
    }
}

/// Answers a request of `rows` items that was not taken in.
pub fn reject_call(model: &Placement, call: Call, reject: DeviceReject, rows: u32, now: Time) {
    let reject = match reject {
        DeviceReject::NoModel(_) => Reject::UnknownModel,
        DeviceReject::QueueFull { bound } if rows > bound => return call.never_fits(rows, bound, now),
        DeviceReject::QueueFull { bound } => Reject::QueueFull { bound },
        DeviceReject::DeadlineImpossible { needed, allowed } => Reject::DeadlineImpossible { needed, allowed },
        other => {
            let message = format!("model '{}': {other}", model.name);
            return call.fail(Unanswered::Engine, ServiceError::InvalidArgument(message), now);
        }
    };
    call.reject(&reject, &model.profile, now);
}
