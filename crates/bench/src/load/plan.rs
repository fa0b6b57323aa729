//! The resolved command line: the requests to send, when to send them, and when an answer is too
//! late or bad.

use std::net::ToSocketAddrs;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, anyhow, bail, ensure};
use bytes::Bytes;
use downbeat_core::Duration;
use downbeat_protocol::InferTensor;
use downbeat_protocol::http::RequestForm;
use downbeat_sim::Arrivals;

use crate::args::{Args, Body, Protocol};
use crate::client::authorization;
use crate::client::request::Envelope;
use crate::client::tensors::{InputRules, from_json};
use crate::client::tls::Tls;
use crate::load::Pace;
use crate::load::arrivals::{Schedule, Step, Until};
use crate::load::control::{Control, Target};
use crate::load::seed::Stream;

/// Largest number of steps.
const MOST_STEPS: usize = 10_000;

/// A model and its prepared requests.
#[derive(Clone, Debug)]
pub struct ModelPlan {
    /// The model's name and the other common parts of its requests.
    pub envelope: Envelope,
    /// The model's share of the requests; only ratios count.
    pub share: f64,
    /// The prepared requests.
    pub requests: Vec<Bytes>,
}

/// The complete description of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The server.
    pub target: Target,
    /// The form of tensors in HTTP bodies.
    pub body: Body,
    /// The models.
    pub models: Vec<ModelPlan>,
    /// Further metadata of each gRPC request.
    pub headers: Vec<(String, String)>,
    /// The rule for offering requests.
    pub pace: Pace,
    /// The user's words for `pace`, for the report.
    pub pace_text: String,
    /// The time before `duration` that is not measured.
    pub warmup: Duration,
    /// The measured time.
    pub duration: Duration,
    /// Most requests, warm-up included.
    pub most_requests: u64,
    /// Most time for an answer, from the scheduled time.
    pub request_timeout: Duration,
    /// Later answers are bad.
    pub slo: Option<Duration>,
    /// The seed of all random numbers.
    pub seed: u64,
    /// Load threads.
    pub threads: usize,
    /// Most HTTP connections of all threads.
    pub max_connections: usize,
    /// gRPC connections per thread.
    pub grpc_connections: usize,
    /// The capacity search, if the user asked for one.
    pub search: Option<Search>,
    /// Set to end the run; the measurements so far are its result.
    pub interrupted: Arc<AtomicBool>,
}

/// A capacity search.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Search {
    /// The first rate, requests per second.
    pub start: f64,
    /// The highest rate.
    pub most: f64,
    /// The search ends when the bounds are this close, as a part of the capacity.
    pub precision: f64,
    /// Variation of the gaps.
    pub gaps: Arrivals,
    /// The targets of each trial.
    pub targets: Targets,
}

/// The targets of a rate within the capacity.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Targets {
    /// 99th percentile of the latency of all requests.
    pub p99: Option<Duration>,
    /// Largest bad part of each model's requests.
    pub bad: f64,
}

impl Plan {
    /// Resolves the command line. Asks the server for the inputs of the models, unless all come
    /// from files.
    ///
    /// # Errors
    /// With the name of the wrong flag, or the server's message.
    pub fn resolve(args: &Args) -> Result<Self> {
        let target = target(args.url.as_deref(), args.protocol)?;
        let mut headers = args.headers.iter().map(|h| header(h)).collect::<Result<Vec<_>>>()?;
        if headers.iter().all(|(name, _)| !name.eq_ignore_ascii_case("authorization"))
            && let Some(key) = authorization()?
        {
            headers.push(("authorization".to_owned(), key.to_str()?.to_owned()));
        }
        let (pace, pace_text) = pace(args)?;
        let warmup = match args.warmup {
            Some(seconds) => duration("--warmup", seconds)?,
            None if args.steps.is_some() => Duration::ZERO,
            None => Duration::from_millis(1_000),
        };
        let length = length(args, &pace)?;
        let search = args.capacity.then(|| search(args)).transpose()?;
        let threads = args.threads;
        ensure!((1..=256).contains(&threads), "--threads {threads}: expected 1 to 256");
        let mut plan = Plan {
            models: Vec::new(),
            body: args.body,
            headers,
            pace,
            pace_text,
            warmup,
            duration: length,
            most_requests: args.requests.unwrap_or(u64::MAX),
            request_timeout: duration("--request-timeout", args.request_timeout)?,
            slo: args.slo_ms.map(|ms| millis("--slo-ms", ms)).transpose()?,
            seed: args.seed,
            threads,
            max_connections: if args.closed { args.connections } else { args.max_connections }.max(threads),
            grpc_connections: args.grpc_connections.clamp(1, 1024),
            search,
            interrupted: Arc::default(),
            target,
        };
        ensure!(plan.request_timeout > Duration::ZERO, "--request-timeout 0: every request would fail");
        plan.models = models(args, &plan)?;
        Ok(plan)
    }

    /// The prepared requests, by model and variant.
    pub fn requests(&self) -> Vec<Vec<Bytes>> {
        self.models.iter().map(|m| m.requests.clone()).collect()
    }
}

/// The rule for offering requests, and its words for the report.
fn pace(args: &Args) -> Result<(Pace, String)> {
    let gaps = args.arrivals;
    let rate = positive("--rate", args.rate)?;
    Ok(if args.closed {
        ensure!(args.connections > 0, "--connections 0: a closed loop needs a client");
        (Pace::Closed(args.connections), format!("closed loop, {} clients", args.connections))
    } else if let Some(text) = &args.steps {
        let schedule = Schedule { gaps, steps: steps(text)? };
        (Pace::Open(schedule), format!("open loop, {gaps} gaps, steps {text}"))
    } else {
        (Pace::Open(Schedule::steady(gaps, rate)), format!("open loop, {gaps} gaps, {rate}/s"))
    })
}

/// The measured time; [`Duration::MAX`] if the load ends by itself.
fn length(args: &Args, pace: &Pace) -> Result<Duration> {
    let length = match (&args.duration, pace) {
        (Some(seconds), _) => duration("--duration", *seconds)?,
        // Steps that are counted in requests may take longer than their mean.
        (None, Pace::Open(schedule)) if schedule.mean_length().is_some() => Duration::MAX,
        (None, _) if args.steps.is_none() && args.requests.is_some() && !args.capacity => Duration::MAX,
        (None, _) => Duration::from_millis(10_000),
    };
    ensure!(length > Duration::ZERO, "--duration 0: nothing would be measured");
    Ok(length)
}

/// The capacity search that the options describe.
fn search(args: &Args) -> Result<Search> {
    ensure!(
        (0.0..100.0).contains(&args.target_bad_percent),
        "--target-bad-percent {}: expected 0 to 100",
        args.target_bad_percent
    );
    let precision = positive("--precision", args.precision)? / 100.0;
    let (start, most) = (args.rate, positive("--max-rate", args.max_rate)?);
    ensure!(start <= most, "--rate {start}: beyond --max-rate {most}");
    let p99 = args.target_p99_ms.map(|ms| millis("--target-p99-ms", ms)).transpose()?;
    let targets = Targets { p99, bad: args.target_bad_percent / 100.0 };
    Ok(Search { start, most, precision, gaps: args.arrivals, targets })
}

fn positive(flag: &str, value: f64) -> Result<f64> {
    ensure!(value.is_finite() && value > 0.0, "{flag} {value}: expected a positive number");
    Ok(value)
}

fn duration(flag: &str, seconds: f64) -> Result<Duration> {
    ensure!(seconds.is_finite() && seconds >= 0.0, "{flag} {seconds}: expected seconds");
    Ok(Duration::from_secs_f64(seconds))
}

fn millis(flag: &str, ms: f64) -> Result<Duration> {
    Ok(Duration::from_millis_f64(positive(flag, ms)?))
}

fn target(url: Option<&str>, protocol: Option<Protocol>) -> Result<Target> {
    let (scheme, rest) = match url.and_then(|u| u.split_once("://")) {
        Some((scheme, rest)) => (Some(scheme), rest),
        None => (None, url.unwrap_or("127.0.0.1")),
    };
    let by_scheme = match scheme {
        None => None,
        Some("http" | "https") => Some(Protocol::Http),
        Some("grpc" | "grpcs") => Some(Protocol::Grpc),
        Some(other) => bail!("--url {other}://...: expected http://, https://, grpc:// or grpcs://"),
    };
    let protocol = protocol.or(by_scheme).unwrap_or(Protocol::Http);
    let authority = rest.trim_end_matches('/');
    ensure!(!authority.is_empty() && !authority.contains('/'), "--url {rest}: expected HOST:PORT without a path");
    // The port follows the last colon, unless that colon is inside the brackets of an IPv6 address.
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
    let host = if has_port { authority.to_owned() } else { format!("{authority}:{}", protocol.default_port()) };
    let address = host
        .to_socket_addrs()
        .with_context(|| format!("--url {host}"))?
        .next()
        .with_context(|| format!("--url {host}: no address of this name"))?;
    let spoken = match protocol {
        Protocol::Http => "http/1.1",
        Protocol::Grpc => "h2",
    };
    let is_secure = matches!(scheme, Some("https" | "grpcs"));
    let name = host.rsplit_once(':').map_or(&*host, |(name, _)| name).trim_matches(['[', ']']);
    let tls = is_secure.then(|| Tls::new(name, spoken)).transpose()?;
    Ok(Target { protocol, address, host, tls })
}

fn header(text: &str) -> Result<(String, String)> {
    let (name, value) = text.split_once(':').with_context(|| format!("--header {text}: expected NAME:VALUE"))?;
    let (name, value) = (name.trim(), value.trim());
    http::HeaderName::from_bytes(name.as_bytes()).with_context(|| format!("--header {text}"))?;
    http::HeaderValue::from_str(value).with_context(|| format!("--header {text}"))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Parses `--steps`.
///
/// # Errors
/// With the wrong step.
pub fn steps(text: &str) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    let items: Vec<&str> = text.split(',').map(str::trim).collect();
    for (i, item) in items.iter().enumerate() {
        let wrong = || {
            anyhow!(
                "--steps {item}: expected RATExREQUESTS, RATExSECONDSs, FROM..TOxLENGTHxSTEPS, or a RATE at the end"
            )
        };
        let number = |s: &str| s.parse::<f64>().ok().filter(|n| n.is_finite() && *n > 0.0).ok_or_else(wrong);
        let length = |s: &str| match s.strip_suffix('s') {
            Some(seconds) => number(seconds).map(|s| Until::Elapsed(Duration::from_secs_f64(s))),
            None => s.parse().map(Until::Requests).map_err(|_| wrong()),
        };
        let parts: Vec<&str> = item.split('x').collect();
        match parts[..] {
            [rate] if i + 1 == items.len() => steps.push(Step { rate: number(rate)?, until: Until::End }),
            [rate, part] => steps.push(Step { rate: number(rate)?, until: length(part)? }),
            [range, part, count] => {
                let (from, to) = range.split_once("..").ok_or_else(wrong)?;
                let (from, to, until) = (number(from)?, number(to)?, length(part)?);
                let count: usize = count.parse().map_err(|_| wrong())?;
                ensure!((2..=MOST_STEPS).contains(&count), "--steps {item}: expected 2 to {MOST_STEPS} steps");
                for n in 0..count {
                    let rate = from + (to - from) * n as f64 / (count - 1) as f64;
                    steps.push(Step { rate, until });
                }
            }
            _ => bail!(wrong()),
        }
        ensure!(steps.len() <= MOST_STEPS, "--steps: more than {MOST_STEPS} steps");
    }
    Ok(steps)
}

/// Parses `NAME`, `NAME:SHARE` or `NAME@VERSION:SHARE`.
fn model(text: &str) -> Result<(String, String, f64)> {
    let (name, share) = match text.rsplit_once(':') {
        Some((name, share)) => {
            let share: f64 =
                share.parse().map_err(|_| anyhow!("--model {text}: the share after the colon must be a number"))?;
            ensure!(share.is_finite() && share > 0.0, "--model {text}: the share must be positive");
            (name, share)
        }
        None => (text, 1.0),
    };
    let (name, version) = name.split_once('@').unwrap_or((name, ""));
    ensure!(!name.is_empty(), "--model {text}: expected NAME:SHARE");
    Ok((name.to_owned(), version.to_owned(), share))
}

fn models(args: &Args, plan: &Plan) -> Result<Vec<ModelPlan>> {
    ensure!((1..=100_000).contains(&args.variants), "--variants {}: expected 1 to 100000", args.variants);
    let rules = InputRules::parse(args.batch, &args.shapes, &args.lognormal, &args.ranges)?;
    let control = Control::new(plan.target.clone())?;
    let mut wanted = Vec::new();
    for text in &args.models {
        let (name, version, share) = model(text)?;
        let envelope = Envelope {
            model: name,
            version,
            timeout_us: args.timeout_us,
            priority: args.priority,
            headers: plan.headers.clone(),
        };
        let from_file = file_of(&args.inputs, &envelope.model).map(read_inputs).transpose()?;
        let specs = match from_file {
            Some(_) => Vec::new(),
            None => control.inputs(&envelope).with_context(|| format!("model '{}'", envelope.model))?,
        };
        wanted.push((envelope, share, specs, from_file));
    }
    let all: Vec<_> = wanted.iter().flat_map(|(_, _, specs, _)| specs).collect();
    rules.check_names(&all)?;
    wanted
        .into_iter()
        .enumerate()
        .map(|(index, (envelope, share, specs, from_file))| {
            let tensors = match from_file {
                Some(tensors) => tensors,
                None => {
                    let mut random = Stream::Data(index as u32).random(plan.seed);
                    (0..args.variants)
                        .map(|_| rules.generate(&specs, &mut random))
                        .collect::<Result<Vec<_>>>()
                        .with_context(|| format!("model '{}'", envelope.model))?
                }
            };
            let requests = tensors
                .iter()
                .map(|tensors| match (plan.target.protocol, plan.body) {
                    (Protocol::Grpc, _) => envelope.grpc(tensors),
                    (Protocol::Http, Body::Binary) => envelope.http(&plan.target.host, RequestForm::BINARY, tensors),
                    (Protocol::Http, Body::Json) => envelope.http(&plan.target.host, RequestForm::JSON, tensors),
                })
                .collect::<Result<_>>()?;
            Ok(ModelPlan { envelope, share, requests })
        })
        .collect()
}

/// The `--input` file for a model: the file with its name, otherwise the first without a name.
fn file_of<'a>(inputs: &'a [String], model: &str) -> Option<&'a str> {
    let named = inputs.iter().find_map(|i| i.strip_prefix(model)?.strip_prefix('='));
    named.or_else(|| inputs.iter().find(|i| !i.contains('=')).map(String::as_str))
}

fn read_inputs(path: &str) -> Result<Vec<Vec<InferTensor>>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("--input {path}"))?;
    from_json(&text).with_context(|| format!("--input {path}"))
}
