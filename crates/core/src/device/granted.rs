//! Batches that somebody else made, run as they are: the policy `exclusive`.

use std::collections::{BTreeMap, BTreeSet};

use super::launch::{DeviceOutput, GrantedBatch, InputSource, Launch, SegmentRange, Span};
use super::policy::{DevicePolicy, Turn};
use super::request::DeviceReject;
use super::request_pool::PoolStats;
use crate::ids::{LaunchId, RequestId};

/// Runs the batches that the cluster's scheduler made (Symphony §3.2), each on the lane that it was granted, with the whole partition for itself: the
/// simplest policy there is. Nothing waits in it, but for the batch that a lane holds behind the one that runs (Symphony appendix D).
#[derive(Debug)]
pub struct Granted {
    /// Segments of the model, which run in one go.
    segments: SegmentRange,
    running: BTreeMap<LaunchId, (Vec<RequestId>, u32)>,
    /// Members of those whose clients have not gone.
    members: BTreeSet<RequestId>,
}

impl Granted {
    /// For a model of so many segments, at least one.
    pub fn new(segments: u16) -> Self {
        Granted { segments: SegmentRange::new(0, segments), running: BTreeMap::new(), members: BTreeSet::new() }
    }
}

impl DevicePolicy for Granted {
    fn handle_batch(&mut self, turn: &mut Turn<'_>, batch: GrantedBatch) -> Result<(), DeviceReject> {
        let GrantedBatch { id: batch, lane, members, rows, .. } = batch;
        if !turn.has_room(lane) {
            return Err(DeviceReject::LaneTaken(lane));
        }
        if members.is_empty() || rows == 0 {
            return Err(DeviceReject::Empty);
        }
        let id = turn.new_launch();
        self.members.extend(&members);
        self.running.insert(id, (members.clone(), rows));
        turn.launch(Launch {
            id,
            batch,
            model: turn.model(),
            lane,
            segments: self.segments,
            members,
            rows,
            computed_rows: rows,
            length: 0,
            inputs: InputSource::Host,
        });
        Ok(())
    }

    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, _: Span, _: &[RequestId]) {
        for request in self.running.remove(&launch).into_iter().flat_map(|(members, _)| members) {
            if self.members.remove(&request) {
                turn.push(DeviceOutput::Reply { request, launch });
            }
        }
    }

    fn handle_cancel(&mut self, _: &mut Turn<'_>, request: RequestId) -> bool {
        self.members.remove(&request)
    }

    fn stats(&self) -> PoolStats {
        PoolStats { running: self.running.values().map(|(_, rows)| rows).sum(), ..PoolStats::default() }
    }
}
