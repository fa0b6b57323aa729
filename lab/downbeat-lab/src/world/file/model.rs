//! A model of a world, as written in its file.

use std::collections::BTreeMap;

use downbeat_core::cluster::{ModelOptions, PriorityLevel, TimeoutAction};
use downbeat_core::device::{BadSettings, Cut, PartitionId, PolicyModel, PolicyName, SegmentProfile, WrittenSettings};
use downbeat_core::{Duration, LatencyProfile};
use serde::Deserialize;
use toml::Spanned;

use super::super::run::Serving;
use super::{MOST_STAGES, Misplaced, UNITS, find};
use crate::device::{Calibration, EmulatedModel};
use crate::numbers::{Number, some_millis, yes};
use downbeat_sim::policy::Policy;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelText {
    pub name: Spanned<String>,
    /// A batch of `b` takes `alpha * b + beta` on `units` units of a device.
    #[serde(default, deserialize_with = "some_millis")]
    pub alpha_ms: Option<Duration>,
    #[serde(default, deserialize_with = "some_millis")]
    pub beta_ms: Option<Duration>,
    pub units: Option<Number<1, 65536>>,
    /// Replaces these by a model of the calibration.
    pub calibrated: Option<Spanned<String>>,
    #[serde(default)]
    pub max_batch: Number<1, 1024, 8>,
    /// The time from arrival to deadline of its requests.
    #[serde(default, deserialize_with = "some_millis")]
    pub slo_ms: Option<Duration>,
    pub policy: Option<Spanned<PolicyName>>,
    #[serde(default)]
    pub settings: BTreeMap<Spanned<String>, Spanned<toml::Value>>,
    /// The devices where its policy makes batches. The default is all devices.
    #[serde(default)]
    pub devices: Vec<Spanned<String>>,
    pub partition: Option<Spanned<Number<0, 63>>>,
    /// The scheduler's policy, for the policy `exclusive`. The value is one that
    /// `downbeat simulate --policy` takes.
    pub dispatch: Option<Spanned<String>>,
    /// The most waiting items of each priority level.
    #[serde(default)]
    pub queue_bound: Number<0, 1_000_000, 1000>,
    #[serde(default)]
    pub priority_levels: Number<1, 16>,
    /// If true, hopeless requests are dropped.
    #[serde(default = "yes")]
    pub drop: bool,
    /// If true, the model is loaded from the start.
    #[serde(default = "yes")]
    pub loaded: bool,
}

impl ModelText {
    /// Returns the emulated model, the maker of its batches, and the name of its policy.
    pub fn resolve(
        &self,
        calibration: Option<&Calibration>,
        devices: &[&Spanned<String>],
    ) -> Result<(EmulatedModel, Serving, String), Misplaced> {
        let at = self.name.span().start;
        let Number(max_batch) = self.max_batch;
        let (name, policy_at) = match &self.policy {
            Some(policy) => (*policy.get_ref(), policy.span().start),
            None => (PolicyName::EXCLUSIVE, at),
        };
        let settings = self.settings(name)?;
        let chosen = name.read(&settings).map_err(|error| (policy_at, error.to_string()))?;
        let segments = match chosen.settings.cut().0 {
            Cut::Whole => 1,
            Cut::Stages(stages) | Cut::UpTo(stages) if stages <= MOST_STAGES => stages,
            Cut::Stages(stages) | Cut::UpTo(stages) => {
                return Err((policy_at, format!("{stages} stages are more than {MOST_STAGES}")));
            }
            Cut::At(_) => {
                return Err((policy_at, "an emulated model has no values to be cut at; give stages".to_owned()));
            }
        };
        let emulated = self.emulated(calibration, segments)?;
        let profile = emulated.profile(&[0], max_batch).map_err(|error| (at, error.to_string()))?;
        if name.makes_batches() {
            if let Some(dispatch) = &self.dispatch {
                return Err((dispatch.span().start, format!("dispatch is for the policy exclusive, not for {name}")));
            }
            let spec = self.spec(profile, &*chosen.settings).map_err(|error| (policy_at, error))?;
            let on: Result<Vec<usize>, Misplaced> =
                self.devices.iter().map(|device| find(devices, "device", device)).collect();
            let on = Some(on?).filter(|on| !on.is_empty()).unwrap_or_else(|| (0..devices.len()).collect());
            return Ok((emulated, Serving::Devices(spec, on), name.to_string()));
        }
        let kept = self.devices.first().map(|device| device.span().start);
        if let Some(at) = kept.or_else(|| self.partition.as_ref().map(|partition| partition.span().start)) {
            let message = format!("a model of the policy {name} runs on all slots; leave devices and partition out");
            return Err((at, message));
        }
        let options = self.options(&profile)?;
        let dispatch = self.dispatch.as_ref().map_or(String::new(), |dispatch| format!(" ({})", dispatch.get_ref()));
        Ok((emulated, Serving::Cluster(options), format!("{name}{dispatch}")))
    }

    fn settings(&self, policy: PolicyName) -> Result<WrittenSettings, Misplaced> {
        let mut settings = WrittenSettings::new();
        for (key, spanned) in &self.settings {
            // A value that is no number in TOML is none in JSON either.
            let value = serde_json::to_value(spanned.get_ref()).unwrap_or_default();
            policy.read_one(key.get_ref(), &value).map_err(|error| match error {
                BadSettings::Unknown { .. } => (key.span().start, error.to_string()),
                BadSettings::Value { .. } | BadSettings::Check(_) => (spanned.span().start, error.to_string()),
            })?;
            settings.insert(key.get_ref().clone(), value);
        }
        Ok(settings)
    }

    fn emulated(&self, calibration: Option<&Calibration>, segments: usize) -> Result<EmulatedModel, Misplaced> {
        let at = self.name.span().start;
        let name = self.name.get_ref();
        let emulated = match (&self.calibrated, self.alpha_ms, self.beta_ms) {
            (Some(calibrated), None, None) => {
                let at = calibrated.span().start;
                let missing = || (at, "there is no calibration; name one above all tables".to_owned());
                let model =
                    calibration.ok_or_else(missing)?.model(calibrated.get_ref(), self.units.map(|units| units.0));
                model.map_err(|error| (at, error.to_string()))?.cut(segments)
            }
            (None, Some(alpha), Some(beta)) => {
                let profile = LatencyProfile::linear(alpha, beta, self.max_batch.0);
                let profile = profile.map_err(|error| (at, format!("'{name}': {error}")))?;
                let units = self.units.map_or(UNITS, |Number(units)| units);
                return Ok(EmulatedModel::plain(SegmentProfile::even(&profile, segments), units));
            }
            _ => return Err((at, format!("'{name}' needs alpha_ms and beta_ms, or calibrated in place of both"))),
        };
        emulated.map_err(|error| (at, error.to_string()))
    }

    fn spec(
        &self,
        profile: SegmentProfile,
        settings: &dyn downbeat_core::device::PolicySettings,
    ) -> Result<downbeat_core::device::ModelSpec, String> {
        let Number(max_batch) = self.max_batch;
        let ring = settings.ring(max_batch, false)?;
        let model = PolicyModel {
            partition: PartitionId(self.partition.as_ref().map_or(0, |partition| partition.get_ref().0)),
            profile,
            max_batch,
            padded: false,
            queue_delay: Duration::ZERO,
            drop: self.drop,
            queue_bound: self.queue_bound.0,
            ring_slots: ring.filter(|ring| ring.must).map_or(0, |ring| ring.least),
            cores: None,
        };
        settings.spec(model)
    }

    /// Returns the options of the model at the cluster's scheduler.
    fn options(&self, profile: &SegmentProfile) -> Result<ModelOptions, Misplaced> {
        let at = self.dispatch.as_ref().map_or(self.name.span().start, |dispatch| dispatch.span().start);
        let text = self.dispatch.as_ref().map_or("adaptive", |dispatch| dispatch.get_ref());
        let policy: Policy =
            text.parse().map_err(|error: downbeat_sim::policy::UnknownPolicy| (at, error.to_string()))?;
        if text.contains('@') {
            return Err((
                at,
                format!("'{policy}' is an order of the turns of all models, which a world has none of; leave it out"),
            ));
        }
        if self.slo_ms.is_none() && text.contains('%') {
            return Err((at, format!("'{policy}' is a share of the model's slo_ms, which is missing")));
        }
        let points: Vec<(u32, Duration)> =
            (1..=self.max_batch.0).map(|items| (items, profile.total(items, 0))).collect();
        let profile = LatencyProfile::from_points(&points).map_err(|error| (at, error.to_string()))?;
        let level = PriorityLevel { max_queue: self.queue_bound.0, timeout_action: TimeoutAction::Reject };
        let drop = if self.drop { policy.drop() } else { downbeat_core::cluster::DropPolicy::None };
        Ok(ModelOptions {
            levels: vec![level; self.priority_levels.0 as usize],
            ..ModelOptions::new(profile, policy.dispatch(self.slo_ms.unwrap_or(Duration::MAX)), drop)
        })
    }
}
