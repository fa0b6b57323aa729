//! The last launches of a device, for timelines.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use downbeat_core::cluster::DispatchReason;
use downbeat_core::device::{Launch, PartitionId, SegmentRange, Span};
use downbeat_core::{BatchId, ModelId, RequestId, Time};
use downbeat_service::report::timeline::{PastDeparture, PastLaunch, PastLaunches, REMEMBERED};
use smallvec::SmallVec;

use super::tensors::Member;
use crate::request::step_mark::StepMark;

/// The most members of a launch that are remembered as steps of pipelines.
const MOST_STEPS: usize = 16;
/// The most members of a launch whose numbers are remembered.
const MOST_REQUESTS: usize = 8;
/// The most launches that are remembered; the oldest are forgotten first.
const MOST: usize = 16_384;

/// A launch that has ended, as small as there are many of them.
#[derive(Debug)]
struct Past {
    model: ModelId,
    lane: usize,
    partition: PartitionId,
    batch: BatchId,
    granted: Option<BatchId>,
    segments: SegmentRange,
    rows: u32,
    computed_rows: u32,
    length: u32,
    span: Span,
    riders: Riders,
}

/// The members of a launch, as far as they are remembered, and why their batch left.
#[derive(Debug)]
pub struct Riders {
    /// The numbers of the first members.
    requests: SmallVec<[RequestId; MOST_REQUESTS]>,
    /// The members that are steps of pipelines.
    steps: Box<[Arc<StepMark>]>,
    /// The number of all members.
    members: u32,
    /// The earliest deadline of the members; [`Time::MAX`]: none has one.
    deadline: Time,
    /// Why the scheduler let the batch leave.
    reason: Option<DispatchReason>,
}

impl Riders {
    /// The members of a launch whose batch left for this `reason`; `None`: it is not known here.
    pub fn of(members: &[Member], reason: Option<DispatchReason>) -> Riders {
        Riders {
            requests: members.iter().take(MOST_REQUESTS).map(|member| member.request).collect(),
            steps: members.iter().filter_map(|member| member.step.clone()).take(MOST_STEPS).collect(),
            members: u32::try_from(members.len()).unwrap_or(u32::MAX),
            deadline: members.iter().map(|member| member.deadline).min().unwrap_or(Time::MAX),
            reason,
        }
    }
}

impl Past {
    fn report(&self) -> PastLaunch {
        let at = |time: Time| (time < Time::MAX).then_some(time.as_nanos());
        let Riders { requests, steps, members, deadline, reason } = &self.riders;
        PastLaunch {
            lane: self.lane as u32,
            partition: self.partition.0,
            batch: self.batch.0,
            granted: self.granted.map(|batch| batch.0),
            segments: [self.segments.first, self.segments.end],
            rows: self.rows,
            computed_rows: self.computed_rows,
            length: self.length,
            begin_ns: self.span.start.as_nanos(),
            end_ns: self.span.end.as_nanos(),
            steps: steps.iter().map(|step| step.past()).collect(),
            members: *members,
            requests: requests.iter().map(|request| request.0).collect(),
            ids: Vec::new(),
            deadline_ns: at(*deadline),
            left: reason.map(|DispatchReason { bound, exec, latest, left, .. }| PastDeparture {
                rule: bound.name().to_owned(),
                window_ns: (exec > Time::ZERO).then_some(exec.as_nanos()),
                latest_ns: at(latest),
                behind: left,
            }),
        }
    }
}

/// The last launches of a device.
#[derive(Debug, Default)]
pub struct History {
    launches: VecDeque<Past>,
    /// The models that have left the device, as long as a launch of theirs is remembered. The entries
    /// have no launches.
    gone: BTreeMap<ModelId, PastLaunches>,
    /// The end of the last launch that was forgotten for want of room.
    forgotten: Time,
}

impl History {
    /// Remembers a launch with its model's lane, its partition, and its members. Lanes that end at
    /// nearly the same time may report in either order.
    pub fn push(&mut self, launch: &Launch, (lane, partition): (usize, PartitionId), riders: Riders, span: Span) {
        while self.launches.front().is_some_and(|first| span.end.since(first.span.end) > REMEMBERED) {
            self.launches.pop_front();
        }
        if self.launches.len() >= MOST
            && let Some(first) = self.launches.pop_front()
        {
            self.forgotten = first.span.end;
        }
        let Launch { model, batch, granted, segments, rows, computed_rows, length, .. } = *launch;
        let past = Past { model, lane, partition, batch, granted, segments, rows, computed_rows, length, span, riders };
        self.launches.push_back(past);
    }

    /// A model leaves the device. `model` describes the launches, which stay.
    pub fn leave(&mut self, id: ModelId, model: PastLaunches) {
        self.gone.insert(id, model);
        let launches = &self.launches;
        self.gone.retain(|id, _| launches.iter().any(|past| past.model == *id));
    }

    /// The launches of models that have left, if they ended at `from` or later. Models that the caller
    /// `has` are left out.
    pub fn of_gone(&self, from: Time, has: impl Fn(ModelId) -> bool) -> Vec<PastLaunches> {
        let its = |(id, model): (&ModelId, &PastLaunches)| {
            let (launches, complete) = self.since(*id, from);
            (!launches.is_empty()).then(|| PastLaunches { launches, complete, ..model.clone() })
        };
        self.gone.iter().filter(|(id, _)| !has(**id)).filter_map(its).collect()
    }

    /// A model's launches that ended at `from` or later, and whether the list is complete.
    pub fn since(&self, model: ModelId, from: Time) -> (Vec<PastLaunch>, bool) {
        let its = self.launches.iter().filter(|past| past.model == model && past.span.end >= from);
        (its.map(Past::report).collect(), self.forgotten < from || self.forgotten == Time::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::device::{InputSource, LaneId, LaunchId};

    use downbeat_core::cluster::StartBound;
    use downbeat_service::report::timeline::PastStep;

    use super::*;
    use crate::request::step_mark::Whole;

    #[test]
    fn launches_keep_members_and_reasons_in_any_order_of_their_ends() {
        let launch = Launch {
            id: LaunchId(0),
            batch: BatchId(0),
            granted: None,
            model: ModelId(0),
            lane: LaneId(0),
            segments: SegmentRange::new(0, 1),
            members: Vec::new(),
            rows: 1,
            computed_rows: 1,
            length: 0,
            inputs: InputSource::Host,
        };
        let mut history = History::default();
        let mark = Arc::new(StepMark::new(
            Whole { pipeline: "photos".into(), request: 7, path: SmallVec::from_slice(&[1, 0]) },
            Time::from_nanos(3),
        ));
        let member = |request, deadline, step| Member {
            request: RequestId(request),
            rows: 1,
            length: 0,
            input: None,
            slots: None,
            step,
            deadline: Time::from_nanos(deadline),
        };
        let reason = DispatchReason {
            bound: StartBound::Frontrun,
            exec: Time::from_nanos(2),
            latest: Time::from_nanos(9),
            deadline: Time::from_nanos(30),
            left: 4,
        };
        let first = (0..10).map(|request| member(request, 40 - request, None)).chain([member(10, 50, Some(mark))]);
        let second = vec![member(20, u64::MAX, None)];
        for (end, members, reason) in [(20, first.collect(), Some(reason)), (10, second, None)] {
            let span = Span { start: Time::ZERO, end: Time::from_nanos(end) };
            history.push(&launch, (0, PartitionId(0)), Riders::of(&members, reason), span);
        }
        let (launches, complete) = history.since(launch.model, Time::ZERO);
        assert_eq!((launches.len(), complete), (2, true));
        let [first, second] = &launches[..] else { panic!("{launches:?}") };
        let step = PastStep { pipeline: "photos".to_owned(), request: 7, step: "1.0".to_owned(), reached_ns: 3 };
        assert_eq!((&first.steps[..], &second.steps[..]), (&[step][..], &[][..]));
        assert_eq!((&first.requests[..], first.members), (&[0, 1, 2, 3, 4, 5, 6, 7][..], 11));
        assert_eq!((first.deadline_ns, second.deadline_ns), (Some(31), None));
        let left = PastDeparture { rule: "frontrun".to_owned(), window_ns: Some(2), latest_ns: Some(9), behind: 4 };
        assert_eq!((&first.left, &second.left), (&Some(left), &None));

        // Models that leave are described as long as a launch of theirs is remembered.
        let described = |name: &str| PastLaunches { model: name.to_owned(), ..PastLaunches::default() };
        history.leave(ModelId(7), described("never ran"));
        history.leave(launch.model, described("m"));
        let gone = |from| history.of_gone(Time::from_nanos(from), |id| id == ModelId(7));
        let [past] = &gone(15)[..] else { panic!("{:?}", gone(15)) };
        assert_eq!((&*past.model, past.launches.len(), past.complete), ("m", 1, true));
        assert_eq!(gone(21), []);
        let later = Span { start: Time::ZERO, end: Time::from_nanos(30) + REMEMBERED };
        history.push(&Launch { model: ModelId(8), ..launch }, (0, PartitionId(0)), Riders::of(&[], None), later);
        history.leave(ModelId(9), described("another"));
        assert!(history.gone.is_empty(), "{:?}", history.gone);
    }
}
