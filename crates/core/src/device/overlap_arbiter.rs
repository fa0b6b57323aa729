//! The arbiter `overlap`: the control that forms operator groups, and the running group.

use std::collections::BTreeMap;

use super::arbiter::{ArbiterOutput, DeviceArbiter};
use super::launch::{Permit, Span};
use super::note::Note;
use super::overlap::{
    GroupPart, GroupSettings, GroupStats, LearnedPredictor, OperatorGroup, Overlap, OverlapModel, OverlapOptions,
    OverlapOutput, Predictor,
};
use super::request::{DeviceReject, DeviceRequest};
use super::segment_profile::SegmentProfile;
use super::turn::DeviceTimeout;
use crate::ids::{ModelId, RequestId};
use crate::time::{Duration, Time};

/// Predicts groups by the learned predictor. If it cannot tell, a single request is predicted by
/// the measured profile of its model.
#[derive(Debug, Default)]
struct DevicePredictor {
    learned: Option<LearnedPredictor>,
    profiles: BTreeMap<ModelId, SegmentProfile>,
}

impl Predictor for DevicePredictor {
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>> {
        let alone = |group: &[GroupPart]| {
            let [part] = group else { return None };
            let from = |segment| Some(self.profiles.get(&part.model)?.remaining(segment, part.rows, part.length));
            Some(from(part.operators.first)?.saturating_sub(from(part.operators.end)?))
        };
        let mut predicted = self.learned.as_ref().map_or(vec![None; groups.len()], |learned| learned.predict(groups));
        for (predicted, group) in predicted.iter_mut().zip(groups) {
            *predicted = predicted.or_else(|| alone(group));
        }
        predicted
    }
}

/// The arbiter `overlap` (Abacus): it forms groups of operators for all models under it.
#[derive(Debug)]
pub struct OverlapArbiter {
    overlap: Overlap<DevicePredictor>,
    /// The model of each request.
    models: BTreeMap<RequestId, ModelId>,
    /// The group whose launches the policies make now.
    beginning: Option<OperatorGroup>,
    running: Option<RunningGroup>,
}

#[derive(Debug)]
struct RunningGroup {
    group: OperatorGroup,
    /// The launches of the group that are not done.
    left: usize,
    span: Option<Span>,
}

impl Default for OverlapArbiter {
    fn default() -> Self {
        // The bound of the queue is set for each model.
        let options = OverlapOptions { queue_bound: u32::MAX, ..OverlapOptions::default() };
        let overlap = Overlap::new(options, DevicePredictor::default());
        OverlapArbiter { overlap, models: BTreeMap::new(), beginning: None, running: None }
    }
}

impl DeviceArbiter for OverlapArbiter {
    fn handle_model(&mut self, now: Time, model: ModelId, comes: Option<(OverlapModel, SegmentProfile)>) {
        let profiles = &mut self.overlap.predictor_mut().profiles;
        let comes = comes.map(|(comes, profile)| {
            profiles.insert(model, profile);
            comes
        });
        if comes.is_none() {
            profiles.remove(&model);
        }
        self.overlap.handle_model(now, model, comes);
    }

    fn handle_settings(&mut self, now: Time, GroupSettings { predictor, error, order }: GroupSettings) {
        let at_once = predictor.as_ref().map_or(1, |predictor| predictor.layout().at_once);
        self.overlap.predictor_mut().learned = predictor;
        self.overlap.handle_order(now, order);
        self.overlap.handle_predictor(now, at_once, error);
    }

    fn handle_request(&mut self, now: Time, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.overlap.handle_request(now, request)?;
        self.models.insert(request.id, request.model);
        Ok(())
    }

    fn handle_end(&mut self, now: Time, request: RequestId) {
        self.models.remove(&request);
        self.overlap.handle_cancel(now, request);
    }

    fn handle_begin(&mut self, now: Time, launches: usize) {
        let Some(group) = self.beginning.take() else { return };
        if launches == 0 {
            self.overlap.handle_completion(now, group.id, Span { start: now, end: now });
        } else {
            self.running = Some(RunningGroup { group, left: launches, span: None });
        }
    }

    fn handle_completion(&mut self, now: Time, span: Span) -> Option<(ModelId, Note)> {
        let running = self.running.as_mut()?;
        let whole = running.span.get_or_insert(span);
        *whole = Span { start: whole.start.min(span.start), end: whole.end.max(span.end) };
        running.left -= 1;
        let RunningGroup { group, span, .. } = self.running.take_if(|running| running.left == 0)?;
        let span = span.unwrap_or(Span { start: now, end: now });
        self.overlap.handle_completion(now, group.id, span);
        let OperatorGroup { parts, predicted, expected, .. } = group;
        let (model, took) = (parts.first()?.model, span.end.since(span.start));
        Some((model, Note::Group { parts, predicted, expected, took }))
    }

    fn handle_timeout(&mut self, now: Time) {
        self.overlap.handle_timeout(now);
    }

    fn poll_output(&mut self) -> Option<ArbiterOutput> {
        loop {
            match self.overlap.poll_output()? {
                OverlapOutput::Run(group) => {
                    let permit =
                        |part: &GroupPart| (part.model, Permit { request: part.request, segments: part.operators });
                    let permits = group.parts.iter().map(permit).collect();
                    self.beginning = Some(group);
                    return Some(ArbiterOutput::Permit(permits));
                }
                OverlapOutput::Drop { request, reason } => {
                    // A request that is unknown here was ended by its policy meanwhile.
                    if let Some(model) = self.models.get(&request) {
                        return Some(ArbiterOutput::Drop { model: *model, request, reason });
                    }
                }
                // The request's policy answered it at the end of its own launch.
                OverlapOutput::Reply { .. } => {}
            }
        }
    }

    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        self.overlap.poll_timeout().map(|at| (at, DeviceTimeout::NextGroup))
    }

    fn stats(&self) -> GroupStats {
        let (stats, margin) = (self.overlap.stats(), self.overlap.margins().of(2));
        let of_second = |margin: Duration| margin.as_secs_f64();
        let second = Duration::from_millis(1_000);
        GroupStats {
            groups: stats.groups,
            together: stats.together,
            overtaken: stats.overtaken,
            expected: of_second(margin.expected(second)),
            bound: of_second(margin.bound(second)),
        }
    }
}
