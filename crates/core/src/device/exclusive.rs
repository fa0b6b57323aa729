//! The policy `exclusive`: it runs batches as the cluster's scheduler made them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::auto_inputs::{AutoInputs, Overlap};
use super::entry::{ModelSpec, PolicyEntry, PolicyOptions, PolicySettings};
use super::launch::{GrantedBatch, InputSource, Launch, SegmentRange, Span};
use super::output::DeviceOutput;
use super::policy::DevicePolicy;
use super::request::DeviceReject;
use super::request_pool::PoolStats;
use super::scheduler::DeviceModel;
use super::segment_profile::SegmentProfile;
use super::settings::PolicyModel;
use super::turn::Turn;
use crate::ids::{LaunchId, RequestId};

/// The options of an [`Exclusive`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExclusiveOptions {
    /// The latencies of the model's batches; all segments run in one launch.
    pub profile: SegmentProfile,
}

/// The settings of `exclusive`, which has none: the scheduler has all settings.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExclusiveSettings {}

impl PolicySettings for ExclusiveSettings {
    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String> {
        Ok(ModelSpec::new(&ExclusiveOptions { profile: model.profile }, model.partition))
    }
}

/// One batch after another, of the size with the highest throughput. Batches disturb each other only
/// if the policy runs several at once.
fn predict(inputs: &AutoInputs, overlap: &Overlap) -> Option<f64> {
    let own = |rows| if inputs.at_once > 1 { overlap.factor(rows) } else { 1.0 };
    Some((1..=inputs.max_batch.max(1)).map(|rows| inputs.rate(&[rows], own)).fold(0.0, f64::max))
}

impl PolicyOptions for ExclusiveOptions {
    const ENTRY: &'static PolicyEntry =
        &PolicyEntry::new::<ExclusiveOptions, ExclusiveSettings>("exclusive", "the scheduler")
            .granted()
            .predicted(predict);

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn build(self) -> DeviceModel {
        DeviceModel::new(Exclusive::new(self.profile.segments()), self.profile)
    }
}

/// Runs the batches that the cluster's scheduler made (Symphony §3.2), each on its granted lane
/// with the whole partition for itself. It is the simplest policy. Nothing waits in it, except the
/// batch that a lane holds behind the running one (Symphony appendix D).
#[derive(Debug)]
pub struct Exclusive {
    /// The segments of the model, which run in one launch.
    segments: SegmentRange,
    running: BTreeMap<LaunchId, (Vec<RequestId>, u32)>,
    /// The members of running batches whose clients have not gone.
    members: BTreeSet<RequestId>,
}

impl Exclusive {
    /// A policy for a model of so many segments, at least one.
    pub fn new(segments: u16) -> Self {
        Exclusive { segments: SegmentRange::new(0, segments), running: BTreeMap::new(), members: BTreeSet::new() }
    }
}

impl DevicePolicy for Exclusive {
    fn handle_batch(&mut self, turn: &mut Turn<'_>, batch: GrantedBatch) -> Result<(), DeviceReject> {
        let GrantedBatch { id: granted, lane, members, rows, .. } = batch;
        if !turn.has_room(lane) {
            return Err(DeviceReject::LaneTaken(lane));
        }
        if members.is_empty() || rows == 0 {
            return Err(DeviceReject::Empty);
        }
        if let Some(taken) = members.iter().find(|request| self.members.contains(request)) {
            return Err(DeviceReject::NameTaken(*taken));
        }
        let (id, batch) = (turn.new_launch(), turn.new_batch());
        self.members.extend(&members);
        self.running.insert(id, (members.clone(), rows));
        turn.launch(Launch {
            id,
            batch,
            granted: Some(granted),
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
        let running = self.running.values().fold(0u32, |sum, (_, rows)| sum.saturating_add(*rows));
        PoolStats { running, ..PoolStats::default() }
    }
}
