//! The last launches of a device, for timelines.

use std::collections::VecDeque;
use std::sync::Arc;

use downbeat_core::device::{Launch, PartitionId, Span};
use downbeat_core::{ModelId, Time};
use downbeat_service::report::timeline::{PastLaunch, REMEMBERED};

use crate::request::step_mark::StepMark;

/// The most members of a launch that are remembered as steps of pipelines.
pub const MOST_STEPS: usize = 16;
/// The most launches that are remembered; the oldest are forgotten first.
const MOST: usize = 16_384;

/// A launch, its model, and its members that are steps of pipelines.
type Past = (ModelId, PastLaunch, Box<[Arc<StepMark>]>);

/// The last launches of a device.
#[derive(Debug, Default)]
pub struct History {
    launches: VecDeque<Past>,
    /// The end of the last launch that was forgotten for want of room.
    forgotten: Time,
}

impl History {
    /// Remembers a launch with its model's lane, its partition, and its members that are `steps` of
    /// pipelines. Lanes that end at nearly the same time may report in either order.
    pub fn push(
        &mut self,
        launch: &Launch,
        (lane, partition): (usize, PartitionId),
        steps: Box<[Arc<StepMark>]>,
        Span { start: begin, end }: Span,
    ) {
        while self.launches.front().is_some_and(|(_, first, _)| end.since(Time::from_nanos(first.end_ns)) > REMEMBERED)
        {
            self.launches.pop_front();
        }
        if self.launches.len() >= MOST
            && let Some((_, first, _)) = self.launches.pop_front()
        {
            self.forgotten = Time::from_nanos(first.end_ns);
        }
        let past = PastLaunch {
            lane: lane as u32,
            partition: partition.0,
            batch: launch.batch.0,
            granted: launch.granted.map(|batch| batch.0),
            segments: [launch.segments.first, launch.segments.end],
            rows: launch.rows,
            computed_rows: launch.computed_rows,
            length: launch.length,
            begin_ns: begin.as_nanos(),
            end_ns: end.as_nanos(),
            steps: Vec::new(),
        };
        self.launches.push_back((launch.model, past, steps));
    }

    /// A model's launches that ended at `from` or later, and whether the list is complete.
    pub fn since(&self, model: ModelId, from: Time) -> (Vec<PastLaunch>, bool) {
        let its = self.launches.iter().filter(|(of, launch, _)| *of == model && launch.end_ns >= from.as_nanos());
        let whole = |(_, launch, steps): &Past| PastLaunch {
            steps: steps.iter().map(|step| step.past()).collect(),
            ..launch.clone()
        };
        (its.map(whole).collect(), self.forgotten < from || self.forgotten == Time::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::BatchId;
    use downbeat_core::device::{InputSource, LaneId, LaunchId, SegmentRange};

    use downbeat_service::report::timeline::PastStep;
    use smallvec::SmallVec;

    use super::*;
    use crate::request::step_mark::Whole;

    #[test]
    fn two_lanes_may_report_in_the_other_order_than_they_ended() {
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
        for (end, steps) in [(20, vec![mark]), (10, Vec::new())] {
            let span = Span { start: Time::ZERO, end: Time::from_nanos(end) };
            history.push(&launch, (0, PartitionId(0)), steps.into(), span);
        }
        let (launches, complete) = history.since(launch.model, Time::ZERO);
        assert_eq!((launches.len(), complete), (2, true));
        let step = PastStep { pipeline: "photos".to_owned(), request: 7, step: "1.0".to_owned(), reached_ns: 3 };
        assert_eq!((&launches[0].steps[..], &launches[1].steps[..]), (&[step][..], &[][..]));
    }
}
