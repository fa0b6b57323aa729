//! Checks the free text of a configuration: parameters, and options of TensorRT.

use std::collections::BTreeMap;
use std::str::FromStr;

use downbeat_core::Duration;
use downbeat_core::pages::Pointer;
use downbeat_core::rollout::RolloutTerms;
use downbeat_protocol::inference::ModelConfig;
use downbeat_protocol::inference::model_config::SchedulingChoice;

use crate::config::check::Report;
use crate::config::finding::did_you_mean;

/// Parameters with a meaning in Downbeat. `docs/reference/config_pbtxt.md` tells their meaning.
const PARAMETERS: [&str; 8] =
    ["slo_ms", "scheduler", "device_policy", "drop", "run_once", "pixel_scale", "pixel_offset", ROLLOUT];

/// The parameter with the terms of a rollout, as JSON.
const ROLLOUT: &str = "rollout";

/// Parameters of Triton's onnxruntime backend. They tune that backend; nothing depends on them.
const ONNXRUNTIME_PARAMETERS: [&str; 9] = [
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
    "memory.enable_memory_arena_shrinkage",
    "session.use_device_allocator_for_initializers",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
];

/// Options of onnxruntime's TensorRT provider that a configuration may set. None names a file or
/// folder, which would be the server's.
const TENSORRT_OPTIONS: [&str; 13] = [
    "trt_bf16_enable",
    "trt_build_heuristics_enable",
    "trt_builder_optimization_level",
    "trt_fp16_enable",
    "trt_int8_enable",
    "trt_layer_norm_fp32_fallback",
    "trt_max_partition_iterations",
    "trt_max_workspace_size",
    "trt_min_subgraph_size",
    "trt_profile_max_shapes",
    "trt_profile_min_shapes",
    "trt_profile_opt_shapes",
    "trt_sparsity_enable",
];

impl Report<'_> {
    pub(crate) fn free_parameters(&mut self, config: &ModelConfig) {
        for key in config.parameters.keys() {
            if PARAMETERS.contains(&key.as_str()) {
                continue;
            }
            let path = format!("parameters[\"{key}\"]");
            if ONNXRUNTIME_PARAMETERS.contains(&key.as_str()) {
                self.pass_over(&path, "is ignored: the parameter tunes Triton's backend", Pointer::IGNORED_FIELDS);
                continue;
            }
            // Parameters are free, and clients read them too. Only a near miss of a name of ours
            // deserves a warning.
            let hint = did_you_mean(key, PARAMETERS);
            if !hint.is_empty() {
                self.warn(&path, format!("has no meaning to Downbeat{hint}"));
            }
        }
        for key in ["pixel_scale", "pixel_offset"] {
            if let Some(text) = parameter(config, key)
                && !text.parse::<f64>().is_ok_and(f64::is_finite)
            {
                self.error(&format!("parameters[\"{key}\"]"), format!("is '{text}'; must be a number"));
            }
        }
        if let Some(text) = parameter(config, "run_once").filter(|text| !["true", "false"].contains(text)) {
            self.error("parameters[\"run_once\"]", format!("is '{text}'; must be true or false"));
        }
    }

    pub(crate) fn slo(&mut self, config: &ModelConfig) -> Option<Duration> {
        let text = parameter(config, "slo_ms")?;
        let ms = text.parse().ok().filter(|ms| *ms > 0.0 && *ms <= 86_400_000.0);
        if ms.is_none() {
            let message =
                format!("is '{text}'; must be a time in milliseconds, more than 0 and at most a day, such as \"50\"");
            self.error("parameters[\"slo_ms\"]", message);
        }
        ms.map(Duration::from_millis_f64)
    }

    /// The terms of the rollout of the model's new version.
    pub(crate) fn rollout(&mut self, config: &ModelConfig) -> Option<RolloutTerms> {
        const FIELD: &str = "parameters[\"rollout\"]";
        let text = parameter(config, ROLLOUT)?;
        let example = r#"an example is {"share": 0.05, "header": "x-canary"}"#;
        let read =
            serde_json::from_str::<RolloutTerms>(text).map_err(|error| format!("is no rollout: {error}; {example}"));
        if config.model_transaction_policy.as_ref().is_some_and(|policy| policy.decoupled) {
            self.error(FIELD, "a model that gives any number of answers to a request cannot have a rollout");
        }
        if matches!(config.scheduling_choice, Some(SchedulingChoice::EnsembleScheduling(_))) {
            self.error(FIELD, "an ensemble cannot have a rollout; give it to a model of its steps");
        }
        read.and_then(|terms| terms.check().map(|()| terms)).map_err(|error| self.error(FIELD, error)).ok()
    }

    pub(crate) fn named<T: FromStr<Err: std::fmt::Display>>(&mut self, config: &ModelConfig, key: &str) -> Option<T> {
        let wrong = |e: T::Err| self.error(&format!("parameters[\"{key}\"]"), e.to_string());
        parameter(config, key)?.parse().map_err(wrong).ok()
    }

    /// The configuration's TensorRT options, as options of onnxruntime's provider. `None` if it
    /// does not ask for TensorRT.
    pub(crate) fn accelerators(&mut self, config: &ModelConfig) -> Option<BTreeMap<String, String>> {
        const FIELD: &str = "optimization.execution_accelerators";
        let accelerators = config.optimization.as_ref()?.execution_accelerators.as_ref()?;
        for (i, accelerator) in accelerators.cpu_execution_accelerator.iter().enumerate() {
            let field = format!("{FIELD}.cpu_execution_accelerator[{i}]");
            let message = format!("'{}' is not supported, and ignored", accelerator.name);
            self.pass_over(&field, &message, Pointer::IGNORED_FIELDS);
        }
        let mut tensorrt = None;
        for (i, accelerator) in accelerators.gpu_execution_accelerator.iter().enumerate() {
            let field = format!("{FIELD}.gpu_execution_accelerator[{i}]");
            if accelerator.name != "tensorrt" {
                let message = format!("'{}' is not supported, and ignored", accelerator.name);
                self.pass_over(&field, &message, Pointer::IGNORED_FIELDS);
                continue;
            }
            let options: &mut BTreeMap<String, String> = tensorrt.get_or_insert_default();
            let parameters: BTreeMap<_, _> = accelerator.parameters.iter().collect();
            for (key, value) in parameters {
                let field = format!("{field}.parameters[\"{key}\"]");
                let mut set = |key: &str, value: &str| drop(options.insert(key.to_owned(), value.to_owned()));
                match (key.as_str(), value.trim()) {
                    ("precision_mode", "FP32") => {}
                    ("precision_mode", "FP16") => set("trt_fp16_enable", "1"),
                    ("precision_mode", "INT8") => set("trt_int8_enable", "1"),
                    ("precision_mode", other) => {
                        self.error(&field, format!("is '{other}'; must be FP32, FP16 or INT8"));
                    }
                    ("max_workspace_size_bytes", bytes) => match bytes.parse::<u64>() {
                        Ok(_) => set("trt_max_workspace_size", bytes),
                        Err(_) => self.error(&field, format!("is '{bytes}'; must be a number of bytes")),
                    },
                    (key, value) if TENSORRT_OPTIONS.contains(&key) => set(key, value),
                    (key, _) if key.starts_with("trt_engine_cache") || key.starts_with("trt_timing_cache") => {
                        let message = "is ignored: the server keeps the models that TensorRT compiles beside the \
                                       profiles (profiling.cache_dir)";
                        self.pass_over(&field, message, Pointer::TENSORRT);
                    }
                    (key, _) => {
                        let hint = did_you_mean(key, TENSORRT_OPTIONS);
                        self.pass_over(&field, &format!("is not supported, and ignored{hint}"), Pointer::TENSORRT);
                    }
                }
            }
        }
        tensorrt
    }
}

/// The versions that a configuration without a version policy selects: the newest, and with a rollout
/// also the one before.
pub(crate) fn newest_versions(config: &ModelConfig) -> u32 {
    if config.parameters.contains_key(ROLLOUT) { 2 } else { 1 }
}

/// The terms of the rollout in a configuration that was checked; `None`: there is no rollout.
pub fn rollout_terms(config: &ModelConfig) -> Option<RolloutTerms> {
    serde_json::from_str(parameter(config, ROLLOUT)?).ok()
}

/// The value of a parameter.
fn parameter<'c>(config: &'c ModelConfig, key: &str) -> Option<&'c str> {
    config.parameters.get(key).map(|p| p.string_value.trim())
}

#[cfg(test)]
mod tests {
    use super::PARAMETERS;

    #[test]
    fn the_reference_names_every_parameter() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/config_pbtxt.md");
        let page = std::fs::read_to_string(page).unwrap();
        let (_, rows) = page.split_once("## Parameters").unwrap();
        for parameter in PARAMETERS {
            let is_named = |line: &str| line.starts_with("| ") && line.contains(&format!("`{parameter}`"));
            assert!(rows.lines().any(is_named), "{parameter}");
        }
    }
}
