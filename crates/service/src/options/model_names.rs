//! Which options name models: the list of them, and the models that no repository has.
//!
//! Example: `--slo-ms digitz=5` gives the model `digits` no SLO, and the server would serve it
//! without a warning. [`ServerOptions::named_models`] lists every option that names models.

use crate::options::{ModelControl, ModelOptions, ServerOptions};

/// The kinds of options that name models.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NamedBy {
    /// `--load-model`.
    Load,
    /// `[placement]`.
    Placement,
    /// `--plan`.
    Plan,
    /// `[[device.groups]]`.
    Group,
    /// `[models.NAME]` and `--slo-ms NAME=MS`.
    Models,
}

/// A model that an option names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedModel<'a> {
    /// The kind of the option.
    pub by: NamedBy,
    /// The option, as it is written.
    pub option: String,
    /// The model's name.
    pub model: &'a str,
}

/// An option for a model that no repository has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownModel {
    /// The kind of the option.
    pub by: NamedBy,
    /// The message, with the name that was probably meant.
    pub message: String,
}

impl UnknownModel {
    /// Whether a server with this model control must not start: the model cannot come later, or the
    /// plan is another's.
    pub fn is_error(&self, control: &ModelControl) -> bool {
        match self.by {
            NamedBy::Plan => true,
            NamedBy::Placement | NamedBy::Group => *control == ModelControl::None,
            NamedBy::Load | NamedBy::Models => false,
        }
    }
}

impl ServerOptions {
    /// Every model that an option names, in the order of the options. `--load-model *` names none,
    /// and neither does an empty `[models.NAME]`.
    pub fn named_models(&self) -> Vec<NamedModel<'_>> {
        let load = match &self.model_control {
            ModelControl::Explicit { load } => &load[..],
            ModelControl::None | ModelControl::Poll { .. } => &[],
        };
        let load = load
            .iter()
            .filter(|name| *name != "*")
            .map(|name| (NamedBy::Load, "--load-model".to_owned(), name.as_str()));
        let placement = self.placement.keys();
        let placement = placement.map(|name| (NamedBy::Placement, "[placement]".to_owned(), name.as_str()));
        let plan = self.plan.iter().flat_map(|plan| &plan.sub_clusters).flat_map(|sub_cluster| &sub_cluster.models);
        let plan = plan.map(|name| (NamedBy::Plan, "--plan".to_owned(), name.as_str()));
        let groups = self.device.named().map(|name| (NamedBy::Group, "[[device.groups]]".to_owned(), name));
        let models = self.models.iter().filter(|(_, options)| **options != ModelOptions::default());
        let models = models.map(|(name, options)| (NamedBy::Models, written(name, options), name.as_str()));
        let all = load.chain(placement).chain(plan).chain(groups).chain(models);
        all.map(|(by, option, model)| NamedModel { by, option, model }).collect()
    }

    /// The options that name a model which is not among `names`, the models of the repositories.
    pub fn unknown_models(&self, names: &[String]) -> Vec<UnknownModel> {
        let named = self.named_models().into_iter().filter(|named| !names.iter().any(|name| name == named.model));
        let unknown = |NamedModel { by, option, model }: NamedModel<'_>| {
            let hint = match model {
                "*" => "; write options for all models outside of [models], or give them as flags".to_owned(),
                _ => downbeat_repository::did_you_mean(model, names.iter().map(String::as_str)),
            };
            let repository = self.shown_repositories();
            UnknownModel { by, message: format!("{option}: the repository {repository} has no model '{model}'{hint}") }
        };
        named.map(unknown).collect()
    }
}

/// How the options of a model are written. An SLO alone may come from a flag.
fn written(name: &str, options: &ModelOptions) -> String {
    let slo_alone = ModelOptions { slo: options.slo, ..ModelOptions::default() };
    match *options == slo_alone {
        true => format!("--slo-ms {name}=MS, or slo_ms in [models.{name}]"),
        false => format!("[models.{name}]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::DeviceOptions;
    use crate::options::cluster_options::ClusterOptions;

    /// The fields of the options that [`ServerOptions::named_models`] reads.
    const NAME_MODELS: &str = "placement plan models device groups model_control";
    /// The fields that name no model.
    const NAME_NONE: &str = "
        repositories remote server_name host allow_host tls access health_port trial_timeout executor python python_memory_bytes allow_uploaded_python http_address grpc_address metrics_address http_port grpc_port metrics_port metrics_detailed_models engine threads
        devices load_threads cuda gpu_metrics_every scheduler_shards rehearsal_cpu dispatch drop order default_slo
        max_queue_size max_queue_wait default_max_batch_size max_body_bytes max_grpc_message_bytes max_in_flight_bytes
        preprocess_threads max_megapixels shared_memory run_memory_bytes isolation model_memory_bytes max_connections
        idle_timeout transfer_timeout min_rate shutdown_grace drain_timeout run_limits strict_readiness allow_empty
        follow_symlinks model_config_name auto_complete_config exit_on_error exit_when_not_live row_check_every profiling
        autoscale cluster decision_log decision_log_bytes decision_log_age log notices policy predictor partitions shares share_batches share_period
        share_hold_down schedulers rank etcd etcd_ca etcd_certificate etcd_key etcd_user etcd_password etcd_prefix secret is_insecure listen advertise name heartbeat takeover_after lost_after fetch_within
        sub_clusters plan_every plan_moves plan_load plan_rate tries busy_poll ucx traces
    ";

    #[test]
    fn every_option_is_known_to_name_models_or_none() {
        let is_in = |list: &str, field: &str| list.split_whitespace().any(|known| known == field);
        for field in [ServerOptions::FIELDS, DeviceOptions::FIELDS, ClusterOptions::FIELDS].concat() {
            let (names, none) = (is_in(NAME_MODELS, field), is_in(NAME_NONE, field));
            assert!(
                names != none,
                "does the option {field} name a model? Then add it to `named_models` and NAME_MODELS, else to NAME_NONE"
            );
        }
    }

    #[test]
    fn an_option_for_an_unknown_model_has_the_name_that_was_meant() {
        let mut options = ServerOptions::new("models".into());
        let slo = ModelOptions { slo: Some(downbeat_core::Duration::from_millis(5)), ..ModelOptions::default() };
        options.models.insert("digitz".to_owned(), slo);
        options.models.insert("digits".to_owned(), ModelOptions { threads: Some(2), ..ModelOptions::default() });
        options.models.insert("empty".to_owned(), ModelOptions::default());
        let unknown = options.unknown_models(&["digits".to_owned()]);
        assert_eq!(unknown.len(), 1, "{unknown:?}");
        assert_eq!(
            unknown[0].message,
            "--slo-ms digitz=MS, or slo_ms in [models.digitz]: the repository models has no model 'digitz'; did you mean 'digits'?"
        );
        assert!(!unknown[0].is_error(&ModelControl::None));
    }

    #[test]
    fn a_section_for_all_models_says_where_their_options_stand() {
        let mut options = ServerOptions::new("models".into());
        options.models.insert("*".to_owned(), ModelOptions { threads: Some(2), ..ModelOptions::default() });
        options.model_control = ModelControl::Explicit { load: vec!["*".to_owned()] };
        let [unknown] = &options.unknown_models(&["digits".to_owned()])[..] else { panic!("one option is wrong") };
        let expected = "[models.*]: the repository models has no model '*'; write options for all models outside of [models], or give them as flags";
        assert_eq!(unknown.message, expected);
    }
}
