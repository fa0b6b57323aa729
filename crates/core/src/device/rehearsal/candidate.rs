//! The policies that a model may have, with their parameters, as far as they can be replayed with what was measured.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cluster::ModelOptions;
use crate::device::auto::Overlap;
use crate::device::segment_profile::SegmentProfile;
use crate::device::settings::{Cut, PolicyModel, WrittenSettings};
use crate::device::table::{ModelSpec, PolicyName};
use crate::time::Duration;

/// Windows of `windowed`, as shares of what the largest batch takes.
const WINDOWS: [f64; 3] = [0.0, 0.25, 1.0];
/// Two lanes that together do less than this of what one does disturb each other so much that three or more, which nobody measured, may do less still.
const LEAST_TOGETHER: f64 = 1.0;

/// A policy with its settings.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// Which.
    pub policy: PolicyName,
    /// Beside what was said about the model.
    pub settings: WrittenSettings,
}

impl Candidate {
    /// The policy that every model can have.
    pub fn exclusive() -> Self {
        Candidate { policy: PolicyName::EXCLUSIVE, settings: WrittenSettings::new() }
    }
}

impl std::fmt::Display for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.policy)?;
        let settings: Vec<String> = self.settings.iter().map(|(key, value)| format!("{key} = {value}")).collect();
        if settings.is_empty() { Ok(()) } else { write!(f, " ({})", settings.join(", ")) }
    }
}

/// A model whose policies are rehearsed, and what was measured of it.
#[derive(Clone, Debug)]
pub struct RehearsedModel {
    /// How the cluster's scheduler makes its batches, under `exclusive`.
    pub options: ModelOptions,
    /// As policies are made for it: in one segment, and without the ring, of which each policy says what it needs.
    pub model: PolicyModel,
    /// What two of its lanes do together; `None`: that was not measured, as no policy could have gained by it.
    pub overlap: Option<Overlap>,
    /// What its segments take, of each cut that was measured; in ascending order of their number.
    pub cuts: Vec<SegmentProfile>,
    /// What it takes to hand a launch over to its lane.
    pub launch: Duration,
    /// What was said about its policies' settings: it holds for each that knows it.
    pub written: WrittenSettings,
}

/// A candidate with the policy that comes of it.
#[derive(Clone, Debug)]
pub struct Replayable {
    /// Which.
    pub candidate: Candidate,
    /// The policy; `None`: the cluster's scheduler makes its batches.
    pub spec: Option<ModelSpec>,
}

impl RehearsedModel {
    /// What may be replayed, `exclusive` first. Each is predicted by what was measured: `exclusive` and `windowed`, which run one batch at a time, by the
    /// latencies; `elastic` where two lanes were measured together and do not slow each other down; `staged` where its segments were measured.
    pub fn candidates(&self) -> Vec<Replayable> {
        let mut found = vec![Replayable { candidate: Candidate::exclusive(), spec: None }];
        for (policy, settings, profile) in self.asked() {
            let known = policy.keys();
            let written = self.written.iter().filter(|(key, _)| known.contains(&key.as_str()));
            let own = settings.into_iter().filter(|(key, _)| !self.written.contains_key(key));
            let own: WrittenSettings = own.collect();
            let all = written.map(|(key, value)| (key.clone(), value.clone())).chain(own.clone()).collect();
            let candidate = Candidate { policy, settings: own };
            if !found.iter().any(|other| other.candidate == candidate)
                && let Some(spec) = self.spec(policy, &all, profile)
            {
                found.push(Replayable { candidate, spec: Some(spec) });
            }
        }
        found
    }

    /// What comes into question, with what each takes.
    fn asked(&self) -> Vec<(PolicyName, WrittenSettings, &SegmentProfile)> {
        let whole = &self.model.profile;
        let full = whole.total(self.model.max_batch, 0);
        let settings = |value: Value| serde_json::from_value::<WrittenSettings>(value).unwrap_or_default();
        let window = |share: &f64| json!({ "window_ms": (full.as_millis_f64() * share * 1e3).round() / 1e3 });
        let mut asked: Vec<_> =
            WINDOWS.iter().map(|share| (PolicyName::WINDOWED, settings(window(share)), whole)).collect();
        let together = |overlap: &Overlap| overlap.points().iter().all(|point| point.factor() >= LEAST_TOGETHER);
        if self.overlap.as_ref().is_some_and(together) {
            let most = self.model.max_batch;
            let naive = json!({});
            let one = json!({ "mixes": { "1": most.to_string() } });
            let two = json!({ "mixes": { "1": format!("{most},{most}") } });
            asked.extend([naive, one, two].map(|value| (PolicyName::ELASTIC, settings(value), whole)));
        }
        for cut in self.cuts.iter().filter(|_| self.overlap.is_some()) {
            let stages = cut.segments();
            let all = [
                json!({ "stages": stages }),
                json!({ "stages": stages, "buffer_pairs": 1 }),
                json!({ "stages": stages, "operators": false }),
                json!({ "stages": stages, "load": false }),
            ];
            asked.extend(all.map(|value| (PolicyName::STAGED, settings(value), cut)));
        }
        asked
    }

    /// The policy; `None` if it cannot have the model as it is: all its requests, and in so many segments.
    fn spec(&self, policy: PolicyName, written: &WrittenSettings, profile: &SegmentProfile) -> Option<ModelSpec> {
        let settings = policy.read(written).ok()?.settings;
        let stages = match settings.cut().0 {
            Cut::Whole => 1,
            Cut::Stages(stages) => stages,
            Cut::At(values) => values.len() + 1,
        };
        let max_batch = self.model.max_batch;
        // How often a request leaves early is not known.
        let is_known = stages == usize::from(profile.segments()) && settings.exits().is_empty();
        if !is_known || settings.largest_request(max_batch).ok()? < max_batch {
            return None;
        }
        let ring = settings.ring(max_batch, self.model.padded).ok()?;
        let ring_slots = ring.map_or(0, |ring| ring.least);
        let model = PolicyModel { profile: profile.clone(), ring_slots, ..self.model.clone() };
        let spec = settings.spec(model).ok()?;
        spec.build().is_ok().then_some(spec)
    }
}
