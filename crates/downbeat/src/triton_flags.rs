//! Flags of Triton's server, so that a command line that was written for it starts this one: those with a counterpart here mean that, the others are
//! named once and passed over.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::bail;
use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use downbeat_core::Duration;
use downbeat_server::options::LogFormat;

use crate::layer::{Layer, Port};
use crate::units;

/// Flags with a value that nothing here corresponds to.
const PASSED_OVER: [&str; 54] = [
    "allow-cpu-metrics",
    "allow-sagemaker",
    "allow-vertex-ai",
    "backend-directory",
    "buffer-manager-thread-count",
    "cache-config",
    "cache-directory",
    "cuda-memory-pool-byte-size",
    "cuda-virtual-address-size",
    "enable-peer-access",
    "grpc-header-forward-pattern",
    "grpc-http2-max-ping-strikes",
    "grpc-http2-max-pings-without-data",
    "grpc-http2-min-recv-ping-interval-without-data",
    "grpc-infer-allocation-pool-size",
    "grpc-infer-response-compression-level",
    "grpc-infer-thread-count",
    "grpc-keepalive-permit-without-calls",
    "grpc-keepalive-time",
    "grpc-keepalive-timeout",
    "grpc-max-connection-age",
    "grpc-max-connection-age-grace",
    "grpc-max-response-pool-size",
    "grpc-root-cert",
    "grpc-server-cert",
    "grpc-server-key",
    "host-policy",
    "http-header-forward-pattern",
    "http-thread-count",
    "log-file",
    "metrics-config",
    "min-supported-compute-capability",
    "model-load-gpu-limit",
    "model-load-retry-count",
    "model-namespacing",
    "pinned-memory-pool-byte-size",
    "rate-limit",
    "rate-limit-resource",
    "repoagent-directory",
    "response-cache-byte-size",
    "reuse-grpc-port",
    "reuse-http-port",
    "sagemaker-port",
    "sagemaker-safe-port-range",
    "sagemaker-thread-count",
    "trace-config",
    "trace-count",
    "trace-file",
    "trace-level",
    "trace-log-frequency",
    "trace-rate",
    "vertex-ai-default-model",
    "vertex-ai-port",
    "vertex-ai-thread-count",
];

/// Flags that close something. To pass them over would leave it open; a value of `false` asks for nothing.
const REFUSED: [&str; 4] = ["grpc-restricted-protocol", "grpc-use-ssl", "grpc-use-ssl-mutual", "http-restricted-api"];

/// Triton's flags, as given.
#[derive(Args, Clone, Debug, Default)]
pub struct TritonFlags {
    /// Address of the HTTP port, where it is not that of all ports
    #[arg(long, value_name = "ADDRESS", value_parser = address, hide = true)]
    pub http_address: Option<IpAddr>,

    /// Address of the gRPC port
    #[arg(long, value_name = "ADDRESS", value_parser = address, hide = true)]
    pub grpc_address: Option<IpAddr>,

    /// Address of the metrics port; that of the HTTP port if it is not given
    #[arg(long, value_name = "ADDRESS", value_parser = address, hide = true)]
    pub metrics_address: Option<IpAddr>,

    /// Whether there is an HTTP port
    #[arg(long, value_name = "BOOL", value_parser = BoolishValueParser::new(), hide = true)]
    pub allow_http: Option<bool>,

    /// Whether there is a gRPC port
    #[arg(long, value_name = "BOOL", value_parser = BoolishValueParser::new(), hide = true)]
    pub allow_grpc: Option<bool>,

    /// Whether there is a metrics port
    #[arg(long, value_name = "BOOL", value_parser = BoolishValueParser::new(), hide = true)]
    pub allow_metrics: Option<bool>,

    /// Whether GPUs are measured for metrics
    #[arg(long, value_name = "BOOL", value_parser = BoolishValueParser::new(), hide = true)]
    pub allow_gpu_metrics: Option<bool>,

    /// How often they are
    #[arg(long, value_name = "MS", value_parser = units::positive_millis, hide = true)]
    pub metrics_interval_ms: Option<Duration>,

    /// 0: as the others say; from 1: debug
    #[arg(long, value_name = "N", hide = true)]
    pub log_verbose: Option<u32>,

    /// Whether there are log lines of level info
    #[arg(long, value_name = "BOOL", value_parser = BoolishValueParser::new(), hide = true)]
    pub log_info: Option<bool>,

    /// Whether there are log lines of level warn
    #[arg(long, value_name = "BOOL", value_parser = BoolishValueParser::new(), hide = true)]
    pub log_warning: Option<bool>,

    /// Whether there are log lines of level error
    #[arg(long, value_name = "BOOL", value_parser = BoolishValueParser::new(), hide = true)]
    pub log_error: Option<bool>,

    /// The opposite of completing configurations
    #[arg(long, value_name = "BOOL", value_parser = BoolishValueParser::new(), hide = true)]
    pub strict_model_config: Option<bool>,

    /// [BACKEND,]SETTING=VALUE: default-max-batch-size has a counterpart
    #[arg(long, value_name = "SETTING", hide = true)]
    pub backend_config: Vec<String>,

    /// Refuse flags of Triton that have no counterpart here, instead of passing them over with a warning
    #[arg(long, help_heading = "Operation")]
    pub strict_flags: bool,

    #[command(flatten)]
    others: Others,
}

impl TritonFlags {
    /// Adds what the flags mean to what other flags gave, which win.
    pub fn apply(&self, layer: &mut Layer) {
        layer.http_address = layer.http_address.or(self.http_address);
        layer.grpc_address = layer.grpc_address.or(self.grpc_address);
        layer.metrics_address = layer.metrics_address.or(self.metrics_address).or(self.http_address);
        for (port, allow) in [
            (&mut layer.http_port, self.allow_http),
            (&mut layer.grpc_port, self.allow_grpc),
            (&mut layer.metrics_port, self.allow_metrics),
        ] {
            if allow == Some(false) {
                *port = Some(Port::Off);
            }
        }
        let off = |flag: Option<bool>| flag == Some(false);
        let measured = if off(self.allow_gpu_metrics) { Some(Duration::ZERO) } else { self.metrics_interval_ms };
        layer.cuda.metrics_every = layer.cuda.metrics_every.or(measured);
        let level = match self.log_verbose {
            Some(1..) => Some("debug"),
            _ if !off(self.log_info) => None,
            _ if !off(self.log_warning) => Some("warn"),
            _ if !off(self.log_error) => Some("error"),
            _ => Some("off"),
        };
        layer.log.level = layer.log.level.take().or(level.map(str::to_owned));
        layer.auto_complete_config = layer.auto_complete_config.or(self.strict_model_config.map(|strict| !strict));
        layer.default_max_batch_size = layer.default_max_batch_size.or(self.default_max_batch_size());
    }

    fn default_max_batch_size(&self) -> Option<u32> {
        self.backend_config.iter().filter_map(|setting| default_max_batch_size(setting)).next_back()
    }

    /// What is to be said about the flags that are passed over.
    ///
    /// # Errors
    /// If one must not be, or none may be.
    pub fn notice(&self) -> anyhow::Result<Option<String>> {
        if let Some(flag) = self.others.refused.first() {
            bail!(
                "--{flag}: this server has nothing of the kind, and to pass it over would leave open what it is to close; leave it out, and put a \
                 proxy in front that closes it"
            );
        }
        let mut names: Vec<String> = self.others.passed_over.iter().map(|name| format!("--{name}")).collect();
        let settings = self.backend_config.iter().filter(|setting| default_max_batch_size(setting).is_none());
        names.extend(settings.map(|setting| format!("--backend-config={setting}")));
        if names.is_empty() {
            return Ok(None);
        }
        let names = names.join(", ");
        if self.strict_flags {
            bail!(
                "flags of Triton without a counterpart here: {names}; leave them out, or leave out --strict-flags to have them passed over"
            );
        }
        Ok(Some(format!("passed over, as nothing here corresponds to them: {names} (--strict-flags refuses them)")))
    }
}

/// The value of `[BACKEND,]default-max-batch-size=N`.
fn default_max_batch_size(setting: &str) -> Option<u32> {
    let (name, value) = setting.split_once('=')?;
    let (backend, name) = name.rsplit_once(',').unwrap_or(("", name));
    let is_ours = matches!(backend, "" | "onnxruntime") && name == "default-max-batch-size";
    is_ours.then(|| value.parse().ok()).flatten()
}

/// An address as Triton takes it.
fn address(text: &str) -> Result<IpAddr, String> {
    if text == "localhost" {
        return Ok(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    text.parse().map_err(|_| format!("'{text}' is not an IP address"))
}

/// The form of log lines, by our names or by Triton's, which are both for people.
pub fn log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "default" | "ISO8601" => Ok(LogFormat::Text),
        _ => text.parse().map_err(|error| format!("{error}")),
    }
}

/// Those of [`PASSED_OVER`] and [`REFUSED`] that were given, each name once.
#[derive(Clone, Debug, Default)]
struct Others {
    passed_over: Vec<&'static str>,
    refused: Vec<&'static str>,
}

impl Args for Others {
    fn augment_args(command: Command) -> Command {
        let flag =
            |name: &'static str| Arg::new(name).long(name).value_name("VALUE").action(ArgAction::Append).hide(true);
        command.args(PASSED_OVER.into_iter().chain(REFUSED).map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Others {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let values = |name: &str| matches.get_many::<String>(name).into_iter().flatten();
        let asks = |value: &String| !matches!(value.to_ascii_lowercase().as_str(), "false" | "0");
        Ok(Others {
            passed_over: PASSED_OVER.into_iter().filter(|name| values(name).next().is_some()).collect(),
            refused: REFUSED.into_iter().filter(|name| values(name).any(asks)).collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
