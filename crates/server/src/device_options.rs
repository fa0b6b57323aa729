//! What makes batches on a device, for which models: plain data.

use downbeat_core::Duration;
use downbeat_core::device::MixTable;
use downbeat_repository::policy::{DevicePolicy, DispatchPolicy};

use crate::options::ServerOptions;

/// What makes batches on a device, for which models.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceOptions {
    /// Of models that are in no group and do not say it themselves.
    pub policy: DevicePolicy,
    /// Models with a policy and settings of their own. No model is in two.
    pub groups: Vec<DeviceGroup>,
    /// What each device is divided into, as its engine reads it: cores of the CPU, compute units of a GPU; empty: it is not.
    pub partitions: Vec<String>,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        DeviceOptions { policy: DevicePolicy::Exclusive, groups: Vec::new(), partitions: Vec::new() }
    }
}

/// Models with a device policy and settings of their own.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceGroup {
    /// Their names; `*`: all that no other group names.
    pub models: Vec<String>,
    /// What makes their batches; `None`: what the model's configuration says, or [`DeviceOptions::policy`].
    pub policy: Option<DevicePolicy>,
    /// How.
    pub settings: DeviceSettings,
}

/// Settings of a device policy. What a policy does not know, it passes over.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DeviceSettings {
    /// Requests of different lengths share batches, padded with zeros. The model's answers must not depend on it.
    pub pad: bool,
    /// The longest request that is taken; `None`: 4,096.
    pub max_length: Option<u32>,
    /// One in so many padded requests is run once more alone, off the path of requests, to see whether its answer is the same; 0: none; `None`: 256.
    pub pad_check_every: Option<u32>,
    /// Elastic: the lanes by load; `None`: naive (N-Ebird).
    pub mixes: Option<MixTable>,
    /// Elastic: the most items that run at once; `None`: what the largest mix holds; naive lanes are those up to the
    /// model's largest batch.
    pub max_running: Option<u32>,
    /// Elastic and staged: slots of the input ring, one an item; `None`: four times what runs at once.
    pub ring_slots: Option<u32>,
    /// Windowed and staged: how long the oldest request may wait for others; `None`: for windowed the configuration's
    /// `max_queue_delay_microseconds`, for staged not at all. DVABatch waits for as long as the first stage takes for the largest batch (§7.2); not to
    /// wait measured better (docs/results/dvabatch.md).
    pub window: Option<Duration>,
    /// Windowed: fill every batch up to the largest with dummies.
    pub fill: bool,
    /// Staged: into how many stages of about equal time the model is cut; `None`: 4.
    pub stages: Option<u16>,
    /// Staged: the tensors after which the model is cut, in place of `stages`.
    pub cut_at: Vec<String>,
    /// Staged: pairs of buffers; `None`: 2.
    pub buffer_pairs: Option<u16>,
    /// Staged: how old a batch may be that others still join; `None`: half the time of the largest batch.
    pub comp_wait: Option<Duration>,
    /// Staged: batches of like length, side by side (policy I); `None`: where requests vary in length.
    pub lengths: Option<bool>,
    /// Staged: split where the rest prefers smaller batches (policy II); `None`: yes.
    pub operators: Option<bool>,
    /// Staged: let requests join a batch that runs (policy III); `None`: where requests do not vary in length.
    pub load: Option<bool>,
    /// Staged: where requests may be answered before the last segment.
    pub exits: Vec<ExitRule>,
}

/// When a request of a model with several exits is answered before the last segment (DVABatch §9.2).
#[derive(Clone, PartialEq, Debug)]
pub struct ExitRule {
    /// The output that decides: the request is answered if in each vector along its last dimension some value is at least `confidence`.
    pub output: String,
    /// See `output`; for probabilities between 0 and 1.
    pub confidence: f32,
    /// The outputs that have no value yet, which are answered with the value of `output`.
    pub answers: Vec<String>,
}

impl DeviceOptions {
    fn group(&self, model: &str) -> Option<&DeviceGroup> {
        self.groups.iter().find(|group| group.models.iter().any(|name| name == model))
    }

    fn others(&self) -> Option<&DeviceGroup> {
        self.group("*")
    }

    /// The models that groups name.
    pub fn named(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flat_map(|group| &group.models).map(String::as_str).filter(|name| *name != "*")
    }
}

impl ServerOptions {
    /// What makes a model's batches on a device, and how: what the group that names it says, else its configuration, else the group of all others,
    /// else the default.
    pub fn device_policy(&self, model: &str, configured: Option<DevicePolicy>) -> (DevicePolicy, DeviceSettings) {
        let (group, others) = (self.device.group(model), self.device.others());
        let policy = group.and_then(|group| group.policy).or(configured).or(others.and_then(|group| group.policy));
        let settings = group.or(others).map(|group| group.settings.clone()).unwrap_or_default();
        (policy.unwrap_or(self.device.policy), settings)
    }

    /// Whether somebody chose a device policy for just this model: a group that names it, or its configuration. What a policy that was not cannot have
    /// is served by the policy exclusive.
    pub fn names_device_policy(&self, model: &str, configured: Option<DevicePolicy>) -> bool {
        configured.is_some() || self.device.group(model).is_some()
    }

    /// Whether the device policy and what is said about dispatching a model go together.
    ///
    /// # Errors
    /// Which two contradict each other, and what to do.
    pub fn check_dispatch(
        &self,
        model: &str,
        device: DevicePolicy,
        configured: Option<DispatchPolicy>,
    ) -> Result<(), String> {
        let own = self.models.get(model).and_then(|model| model.dispatch).or(configured);
        match (device, own) {
            (DevicePolicy::Exclusive, _) if own.unwrap_or(self.dispatch) == DispatchPolicy::Route => Err(format!(
                "the scheduler 'route' leaves batches to the device, and the device policy 'exclusive' leaves them to the scheduler; give the model \
                 another device policy ([[device.groups]] with models = [\"{model}\"]) or another scheduler"
            )),
            (DevicePolicy::Exclusive, _) | (_, None | Some(DispatchPolicy::Route)) => Ok(()),
            (device, Some(dispatch)) => Err(format!(
                "the device policy '{device}' makes the model's batches, and so does its scheduler '{dispatch}'; leave one of them out (the scheduler may be \
                 'route')"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(models: &[&str], policy: Option<DevicePolicy>, pad: bool) -> DeviceGroup {
        let models = models.iter().map(|name| (*name).to_owned()).collect();
        DeviceGroup { models, policy, settings: DeviceSettings { pad, ..DeviceSettings::default() } }
    }

    #[test]
    fn the_group_that_names_a_model_wins_over_its_configuration_and_that_over_all_others() {
        use DevicePolicy::*;
        let mut options = ServerOptions::new("models".into());
        assert_eq!(options.device_policy("a", None), (Exclusive, DeviceSettings::default()));
        assert_eq!(options.device_policy("a", Some(Staged)).0, Staged);
        options.device.policy = Windowed;
        assert_eq!(options.device_policy("a", None).0, Windowed);
        options.device.groups = vec![group(&["a"], Some(Elastic), false), group(&["b", "*"], Some(Staged), true)];
        assert_eq!(options.device_policy("a", Some(Exclusive)).0, Elastic);
        assert!(!options.device_policy("a", None).1.pad);
        assert_eq!(options.device_policy("c", None), (Staged, DeviceSettings { pad: true, ..Default::default() }));
        assert_eq!(options.device_policy("c", Some(Exclusive)).0, Exclusive);
        assert_eq!(options.device.named().collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn only_one_of_device_and_scheduler_makes_batches() {
        let mut options = ServerOptions::new("models".into());
        let check = |options: &ServerOptions, device, configured| options.check_dispatch("a", device, configured);
        assert_eq!(check(&options, DevicePolicy::Elastic, None), Ok(()));
        assert_eq!(check(&options, DevicePolicy::Elastic, Some(DispatchPolicy::Route)), Ok(()));
        let error = check(&options, DevicePolicy::Elastic, Some(DispatchPolicy::Eager)).unwrap_err();
        assert!(error.contains("'elastic' makes the model's batches, and so does its scheduler 'eager'"), "{error}");
        assert_eq!(check(&options, DevicePolicy::Exclusive, Some(DispatchPolicy::Eager)), Ok(()));
        options.dispatch = DispatchPolicy::Route;
        let error = check(&options, DevicePolicy::Exclusive, None).unwrap_err();
        assert!(error.contains("give the model another device policy"), "{error}");
        assert_eq!(check(&options, DevicePolicy::Exclusive, Some(DispatchPolicy::Eager)), Ok(()));
        assert_eq!(check(&options, DevicePolicy::Windowed, None), Ok(()));
    }
}
