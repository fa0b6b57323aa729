//! The candidates of a replay: policies with settings for a model. A policy is a candidate only if
//! the model's measurements suffice to replay it.

use downbeat_core::Duration;
use downbeat_core::cluster::ModelOptions;
use downbeat_core::device::{Cut, ModelSpec, Overlap, PolicyModel, PolicyName, SegmentProfile, WrittenSettings};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The windows of `windowed`, as shares of the latency of the largest batch.
const WINDOWS: [f64; 3] = [0.0, 0.25, 1.0];
/// The least work of two lanes together, as a multiple of the work of one, for `elastic` to be a
/// candidate. Below it lanes disturb each other so much that three or more, which were not
/// measured, may do even less.
const LEAST_TOGETHER: f64 = 1.0;

/// A policy with its settings.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// The policy.
    pub policy: PolicyName,
    /// The candidate's settings, beside the user's settings of the model.
    pub settings: WrittenSettings,
}

impl Candidate {
    /// The policy `exclusive`, which every model can have.
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

/// A model whose requests are replayed, with its measurements.
#[derive(Clone, Debug)]
pub struct ReplayedModel {
    /// The scheduler's options for the model's batches under `exclusive`.
    pub options: ModelOptions,
    /// The model as policies are made for it: in one segment, and without a ring. Each policy tells
    /// its own need of a ring.
    pub model: PolicyModel,
    /// The measured overlap of two lanes; `None`: it was not measured, as no policy could have
    /// gained by it.
    pub overlap: Option<Overlap>,
    /// The latencies of the segments for each measured cut, in ascending order of the number of
    /// segments.
    pub cuts: Vec<SegmentProfile>,
    /// The time to hand a launch over to its lane.
    pub launch: Duration,
    /// The user's settings of the model. They hold for each policy that knows them.
    pub written: WrittenSettings,
    /// The measured latencies of launches that had their device alone, as shares of the profile's.
    /// Empty: launches take what the profile says.
    pub shares: Vec<f64>,
}

/// A candidate with the policy that is made of it.
#[derive(Clone, Debug)]
pub struct Replayable {
    /// The candidate.
    pub candidate: Candidate,
    /// The policy; `None`: the cluster's scheduler makes the batches.
    pub spec: Option<ModelSpec>,
}

impl ReplayedModel {
    /// The candidates to replay, `exclusive` first. Measurements must allow a prediction of each.
    /// `exclusive` and `windowed` run one batch at a time, so that latencies suffice. `elastic`
    /// needs a measurement of two lanes that do not slow each other down. `staged` needs the
    /// latencies of its segments.
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

    /// The policies that may suit, each with its settings and profile. A policy whose settings are not
    /// varied here is tried as it is.
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
                json!({ "stages": stages, "joining": "always" }),
            ];
            asked.extend(all.map(|value| (PolicyName::STAGED, settings(value), cut)));
        }
        let varied = [PolicyName::WINDOWED, PolicyName::ELASTIC, PolicyName::STAGED];
        let others = PolicyName::all().filter(|policy| policy.makes_batches() && !policy.forms_groups());
        asked.extend(
            others.filter(|policy| !varied.contains(policy)).map(|policy| (policy, WrittenSettings::new(), whole)),
        );
        asked
    }

    /// The policy; `None`: it cannot take all requests of the model, or not in this number of
    /// segments.
    fn spec(&self, policy: PolicyName, written: &WrittenSettings, profile: &SegmentProfile) -> Option<ModelSpec> {
        let settings = policy.read(written).ok()?.settings;
        let stages = match settings.cut().0 {
            Cut::Whole => 1,
            Cut::Stages(stages) | Cut::UpTo(stages) => stages,
            Cut::At(values) => values.len() + 1,
        };
        let max_batch = self.model.max_batch;
        // It is not known how often a request leaves early.
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
