//! The last launches of a device, for timelines.

use std::collections::VecDeque;

use downbeat_core::device::{Launch, PartitionId};
use downbeat_core::{ModelId, Time};
use downbeat_service::report::timeline::{PastLaunch, REMEMBERED};

/// The most launches that are remembered; the oldest are forgotten first.
const MOST: usize = 16_384;

/// The last launches of a device.
#[derive(Debug, Default)]
pub struct History {
    launches: VecDeque<(ModelId, PastLaunch)>,
    /// The end of the last launch that was forgotten for want of room.
    forgotten: Time,
}

impl History {
    /// Remembers a launch with its model's lane and its partition. Lanes that end at nearly the
    /// same time may report in either order.
    pub fn push(&mut self, launch: &Launch, lane: usize, partition: PartitionId, begin: Time, end: Time) {
        while self.launches.front().is_some_and(|(_, first)| end.since(Time::from_nanos(first.end_ns)) > REMEMBERED) {
            self.launches.pop_front();
        }
        if self.launches.len() >= MOST
            && let Some((_, first)) = self.launches.pop_front()
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
        };
        self.launches.push_back((launch.model, past));
    }

    /// A model's launches that ended at `from` or later, and whether the list is complete.
    pub fn since(&self, model: ModelId, from: Time) -> (Vec<PastLaunch>, bool) {
        let its = self.launches.iter().filter(|(of, launch)| *of == model && launch.end_ns >= from.as_nanos());
        (its.map(|(_, launch)| launch.clone()).collect(), self.forgotten < from || self.forgotten == Time::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::BatchId;
    use downbeat_core::device::{InputSource, LaneId, LaunchId, SegmentRange};

    use super::*;

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
        history.push(&launch, 0, PartitionId(0), Time::ZERO, Time::from_nanos(20));
        history.push(&launch, 0, PartitionId(0), Time::ZERO, Time::from_nanos(10));
        let (launches, complete) = history.since(launch.model, Time::ZERO);
        assert_eq!((launches.len(), complete), (2, true));
    }
}
