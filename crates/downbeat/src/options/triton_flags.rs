//! Flags of Triton's server without a counterpart here. A command line for Triton also starts this
//! server. The server reports such flags once and ignores them. Flags with a counterpart are among
//! the [keys](crate::options::keys).

use anyhow::bail;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use downbeat_core::pages::Pointer;

/// Flags with a value and without a counterpart.
const PASSED_OVER: &str = "
    allow-cpu-metrics allow-sagemaker allow-vertex-ai backend-directory buffer-manager-thread-count cache-config
    cache-directory cuda-memory-pool-byte-size cuda-virtual-address-size enable-peer-access
    grpc-header-forward-pattern grpc-http2-max-ping-strikes grpc-http2-max-pings-without-data
    grpc-http2-min-recv-ping-interval-without-data grpc-infer-allocation-pool-size
    grpc-infer-response-compression-level grpc-infer-thread-count grpc-keepalive-permit-without-calls
    grpc-keepalive-time grpc-keepalive-timeout grpc-max-connection-age grpc-max-connection-age-grace
    grpc-max-response-pool-size grpc-root-cert grpc-server-cert grpc-server-key host-policy
    http-header-forward-pattern http-thread-count log-file metrics-config min-supported-compute-capability
    model-load-gpu-limit model-load-retry-count model-namespacing pinned-memory-pool-byte-size rate-limit
    rate-limit-resource repoagent-directory response-cache-byte-size reuse-grpc-port reuse-http-port
    sagemaker-port sagemaker-safe-port-range sagemaker-thread-count vertex-ai-default-model
    vertex-ai-port vertex-ai-thread-count
";

/// Flags that restrict access. Ignoring them would leave the server open; the value `false`
/// restricts nothing.
const REFUSED: &str = "grpc-use-ssl grpc-use-ssl-mutual";

/// The given flags of [`PASSED_OVER`] and [`REFUSED`], each name once.
#[derive(Clone, Debug, Default)]
pub struct OtherFlags {
    passed_over: Vec<&'static str>,
    refused: Vec<&'static str>,
}

impl OtherFlags {
    /// A notice about ignored flags, and ignored settings of `backend_config`. With `is_strict`,
    /// none may be ignored.
    ///
    /// # Errors
    /// If a flag of [`REFUSED`] is given, or with `is_strict` any other flag.
    pub fn notice(&self, backend_config: &[String], is_strict: bool) -> anyhow::Result<Option<String>> {
        if let Some(flag) = self.refused.first() {
            bail!(
                "--{flag}: here TLS covers HTTP, gRPC and metrics together, with --tls-certificate FILE, --tls-key FILE \
                 and perhaps --tls-client-ca FILE; leave --{flag} out ({})",
                Pointer::ACCESS
            );
        }
        let mut names: Vec<String> = self.passed_over.iter().map(|name| format!("--{name}")).collect();
        let settings = backend_config.iter().filter(|setting| default_max_batch_size(setting).is_none());
        names.extend(settings.map(|setting| format!("--backend-config={setting}")));
        if names.is_empty() {
            return Ok(None);
        }
        let names = names.join(", ");
        if is_strict {
            bail!(
                "flags of Triton without a counterpart here: {names}; leave these flags out, or leave out \
                 --strict-flags so that the server ignores them ({})",
                Pointer::FLAGS
            );
        }
        Ok(Some(format!(
            "ignored, because this server has no counterpart: {names}; --strict-flags refuses such flags ({})",
            Pointer::FLAGS
        )))
    }
}

/// The value of `[BACKEND,]default-max-batch-size=N`, a possible value of `--backend-config`.
pub fn default_max_batch_size(setting: &str) -> Option<u32> {
    let (name, value) = setting.split_once('=')?;
    let (backend, name) = name.rsplit_once(',').unwrap_or(("", name));
    let is_ours = matches!(backend, "" | "onnxruntime") && name == "default-max-batch-size";
    is_ours.then(|| value.parse().ok()).flatten()
}

impl Args for OtherFlags {
    fn augment_args(command: Command) -> Command {
        let flag =
            |name: &'static str| Arg::new(name).long(name).value_name("VALUE").action(ArgAction::Append).hide(true);
        command.args([PASSED_OVER, REFUSED].into_iter().flat_map(str::split_whitespace).map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for OtherFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let values = |name: &str| matches.get_many::<String>(name).into_iter().flatten();
        let asks = |value: &String| !matches!(value.to_ascii_lowercase().as_str(), "false" | "0");
        Ok(OtherFlags {
            passed_over: PASSED_OVER.split_whitespace().filter(|name| values(name).next().is_some()).collect(),
            refused: REFUSED.split_whitespace().filter(|name| values(name).any(asks)).collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
