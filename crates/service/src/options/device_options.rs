//! Chooses the device policy of each model from the options.

use downbeat_core::device::{BadSettings, ChosenPolicy, WrittenSettings};
use downbeat_repository::config::policy::{DispatchPolicy, PolicyName};

use crate::options::{DeviceGroup, DeviceOptions, ServerOptions};

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
    /// The device policy of a model: of the group that names it, else of its configuration, else of
    /// the group of all others, else the default.
    pub fn device_policy(&self, model: &str, configured: Option<PolicyName>) -> PolicyName {
        let (group, others) = (self.device.group(model), self.device.others());
        let policy = group.and_then(|group| group.policy).or(configured).or(others.and_then(|group| group.policy));
        policy.unwrap_or(self.device.policy)
    }

    /// A model's [`device_policy`](Self::device_policy) with its settings: of the group that names
    /// it, else of the group of all others.
    ///
    /// # Errors
    /// If this policy does not know them, and the group assigns them to it.
    pub fn chosen_policy(&self, model: &str, configured: Option<PolicyName>) -> Result<ChosenPolicy, BadSettings> {
        self.settings_of(model, self.device_policy(model, configured))
    }

    /// A policy for a model, with the settings of the group that names the model, else of the group
    /// of all others.
    ///
    /// # Errors
    /// If this policy does not know them, and the group assigns them to it.
    pub fn settings_of(&self, model: &str, policy: PolicyName) -> Result<ChosenPolicy, BadSettings> {
        match self.device.group(model).or(self.device.others()) {
            None => policy.read(&WrittenSettings::new()),
            Some(group) if group.policy == Some(policy) => policy.read(&group.settings),
            Some(group) => policy.read_known(&group.settings),
        }
    }

    /// Whether the user chose a device policy for just this model, by a group or by its
    /// configuration. Otherwise the policy exclusive serves a model that its policy cannot have.
    pub fn names_device_policy(&self, model: &str, configured: Option<PolicyName>) -> bool {
        configured.is_some() || self.device.group(model).is_some()
    }

    /// Whether the device policy and the model's dispatch policy go together.
    ///
    /// # Errors
    /// The contradiction, with a remedy.
    pub fn check_dispatch(
        &self,
        model: &str,
        device: PolicyName,
        configured: Option<DispatchPolicy>,
    ) -> Result<(), String> {
        let own = self.models.get(model).and_then(|model| model.dispatch.clone()).or(configured);
        match (device.makes_batches(), &own) {
            (false, _) if own.as_ref().unwrap_or(&self.dispatch) == &DispatchPolicy::Route => Err(format!(
                "no part of the server would make the model's batches: the scheduler 'route' leaves them to the \
                 device policy, and the device policy '{device}' leaves them to the scheduler; give the model another \
                 device policy ([[device.groups]] with models = [\"{model}\"]) or another scheduler"
            )),
            (false, _) | (_, None | Some(DispatchPolicy::Route)) => Ok(()),
            (true, Some(dispatch)) => Err(format!(
                "the device policy '{device}' and the scheduler '{dispatch}' would both make the model's batches; \
                 leave one of them out (the scheduler may be 'route')"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> PolicyName {
        name.parse().unwrap()
    }

    fn group(models: &[&str], policy: &str, settings: &[(&str, i32)]) -> DeviceGroup {
        let models = models.iter().map(|name| (*name).to_owned()).collect();
        let settings = settings.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())).collect();
        DeviceGroup { models, policy: (!policy.is_empty()).then(|| named(policy)), settings }
    }

    #[test]
    fn a_naming_group_beats_the_configuration_which_beats_other_groups() {
        let mut options = ServerOptions::new("models".into());
        let policy = |options: &ServerOptions, model, configured: &str| {
            options.device_policy(model, configured.parse().ok()).to_string()
        };
        let max_length =
            |options: &ServerOptions, model| options.chosen_policy(model, None).unwrap().padding.max_length;
        assert_eq!(policy(&options, "a", ""), "exclusive");
        assert_eq!(policy(&options, "a", "staged"), "staged");
        options.device.policy = named("windowed");
        assert_eq!((policy(&options, "a", ""), max_length(&options, "a")), ("windowed".to_owned(), None));
        options.device.groups = vec![group(&["a"], "elastic", &[]), group(&["b", "*"], "staged", &[("max_length", 7)])];
        assert_eq!((policy(&options, "a", "exclusive"), max_length(&options, "a")), ("elastic".to_owned(), None));
        assert_eq!((policy(&options, "c", ""), max_length(&options, "c")), ("staged".to_owned(), Some(7)));
        assert_eq!(policy(&options, "c", "exclusive"), "exclusive");
        assert_eq!(options.device.named().collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn settings_belong_to_the_policy_that_the_group_comes_to_have() {
        let mut options = ServerOptions::new("models".into());
        options.device.groups = vec![group(&["a"], "", &[("max_length", 7), ("stages", 2)])];
        for policy in PolicyName::all() {
            let chosen = options.chosen_policy("a", Some(policy)).unwrap();
            assert_eq!(chosen.padding.max_length, policy.makes_batches().then_some(7), "{policy}");
        }
        options.device.groups = vec![group(&["a"], "windowed", &[("stages", 2)])];
        let error = options.chosen_policy("a", None).unwrap_err().to_string();
        assert!(
            error.starts_with("unknown setting 'stages': the policy windowed does not know it, only staged"),
            "{error}"
        );
    }

    #[test]
    fn only_one_of_device_and_scheduler_makes_batches() {
        let mut options = ServerOptions::new("models".into());
        let check = |options: &ServerOptions, device, configured| options.check_dispatch("a", device, configured);
        assert_eq!(check(&options, named("elastic"), None), Ok(()));
        assert_eq!(check(&options, named("elastic"), Some(DispatchPolicy::Route)), Ok(()));
        let error = check(&options, named("elastic"), Some(DispatchPolicy::Eager)).unwrap_err();
        assert!(error.contains("'elastic' and the scheduler 'eager' would both make"), "{error}");
        assert_eq!(check(&options, PolicyName::EXCLUSIVE, Some(DispatchPolicy::Eager)), Ok(()));
        options.dispatch = DispatchPolicy::Route;
        let error = check(&options, PolicyName::EXCLUSIVE, None).unwrap_err();
        assert!(error.contains("give the model another device policy"), "{error}");
        assert_eq!(check(&options, PolicyName::EXCLUSIVE, Some(DispatchPolicy::Eager)), Ok(()));
        assert_eq!(check(&options, named("windowed"), None), Ok(()));
    }
}
