//! A network as a TOML file: the text form of a [`NetworkScenario`].
//!
//! `experiments/networks/` has examples. Times are milliseconds. Hosts have names such as
//! `frontend-0`, `scheduler-1` and `backend-2`.

use std::path::{Path, PathBuf};

use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_roles::{MoveLimit, SubClusterCount, SubClusterOptions};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use toml::Spanned;

use super::outcome::NetworkResults;
use super::scenario::{Fault, Host, NetworkModel, NetworkScenario, Pauses, Preparation, Roles, Timing, Wires};
use super::sub_clusters::{MODEL_BYTES, SubClusters};
use crate::numbers::{Number, Share, millis, some_millis, spoken, yes};
use downbeat_sim::policy::Policy;

/// A network that was read from a file.
#[derive(Clone, Debug)]
pub struct NetworkFile {
    /// The title.
    pub title: String,
    /// A note for readers.
    pub note: String,
    /// The network.
    pub scenario: NetworkScenario,
}

/// The reason why a file is no network. Lines and columns count from 1.
#[derive(Debug, thiserror::Error)]
pub enum BadNetwork {
    /// The file cannot be read.
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// A value in the file is wrong.
    #[error("{}:{line}:{column}: {message}", file.display())]
    At {
        /// The file.
        file: PathBuf,
        /// The line.
        line: usize,
        /// The column, in characters.
        column: usize,
        /// The wrong part, and the expected form.
        message: String,
    },
}

/// The position of an error in bytes, and its message.
type Misplaced = (usize, String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    title: String,
    #[serde(default)]
    note: String,
    seed: Option<u64>,
    /// The time when clients stop sending.
    #[serde(deserialize_with = "millis")]
    span_ms: Duration,
    #[serde(default)]
    frontends: Number<1, 64>,
    #[serde(default)]
    schedulers: Number<1, 16>,
    #[serde(default)]
    backends: Number<1, 256>,
    /// The slots of each backend.
    #[serde(default)]
    slots: Number<1, 64>,
    /// Whether the slots are seats of one device.
    #[serde(default)]
    seats: bool,
    /// If true, a store allots epochs.
    #[serde(default)]
    store: bool,
    /// Whether schedulers rehearse adaptive models.
    #[serde(default)]
    rehearsal: bool,
    sub_clusters: Option<SubClustersText>,
    /// The pauses of all processes, as on a busy machine.
    pauses: Option<PausesText>,
    #[serde(default)]
    noise: Share,
    /// The share of the requests whose clients go before the answer.
    #[serde(default)]
    cancelled: Share,
    /// The share of the requests that their model fails.
    #[serde(default)]
    failed: Share,
    /// Backends that are absent at first.
    #[serde(default)]
    absent: Vec<Spanned<HostName>>,
    #[serde(default)]
    wires: WiresText,
    #[serde(default)]
    timing: TimingText,
    model: Vec<ModelText>,
    #[serde(default)]
    fault: Vec<Spanned<FaultText>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct WiresText {
    #[serde(deserialize_with = "some_millis")]
    delay_ms: Option<Duration>,
    /// The 99.99th percentile of the delay, in medians.
    spread: Option<Number<1, 1000>>,
    /// The longest additional delay of a frame.
    #[serde(deserialize_with = "some_millis")]
    jitter_ms: Option<Duration>,
    loss: Share,
    doubled: Share,
    /// If true, frames overtake each other.
    reorder: bool,
    #[serde(deserialize_with = "some_millis")]
    redial_ms: Option<Duration>,
}

/// Sub-clusters: the leader decides which models each backend has.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SubClustersText {
    /// Without it: as few as hold the models.
    count: Option<Number<1, 64>>,
    /// The interval of the divisions of the models. Without it, no division happens by time.
    #[serde(default, deserialize_with = "some_millis")]
    plan_every_ms: Option<Duration>,
    most_moves: Option<Number<0, 1000>>,
    /// The most requests a second of a sub-cluster.
    most_requests: Option<Number<1, 1000000>>,
    /// The typical time to load a model.
    #[serde(deserialize_with = "millis")]
    load_ms: Duration,
    /// The share of the loads that fail.
    #[serde(default)]
    load_fails: Share,
    /// The number of models that a device's memory holds.
    holds: Option<Number<1, 1000>>,
    /// If true, backends begin with all models.
    #[serde(default)]
    begins_loaded: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PausesText {
    /// The mean time from one pause of a process to the next.
    #[serde(deserialize_with = "millis")]
    every_ms: Duration,
    #[serde(deserialize_with = "millis")]
    longest_ms: Duration,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TimingText {
    #[serde(deserialize_with = "some_millis")]
    heartbeat_ms: Option<Duration>,
    #[serde(deserialize_with = "some_millis")]
    takeover_after_ms: Option<Duration>,
    #[serde(deserialize_with = "some_millis")]
    peer_heartbeat_ms: Option<Duration>,
    #[serde(deserialize_with = "some_millis")]
    lost_after_ms: Option<Duration>,
    #[serde(deserialize_with = "some_millis")]
    fetch_within_ms: Option<Duration>,
    tries: Option<Number<0, 255>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelText {
    /// A batch of `b` takes `alpha * b + beta`.
    #[serde(deserialize_with = "millis")]
    alpha_ms: Duration,
    #[serde(deserialize_with = "millis")]
    beta_ms: Duration,
    #[serde(default)]
    max_batch: Number<1, 1024, 8>,
    /// Requests a second, from the clients of all frontends together.
    rate: Spanned<f64>,
    #[serde(default, deserialize_with = "some_millis")]
    slo_ms: Option<Duration>,
    /// The policy, in the words of `downbeat simulate --policy`.
    #[serde(default, deserialize_with = "spoken")]
    policy: Option<Policy>,
    #[serde(default = "yes")]
    may_repeat: bool,
    /// How long frontends expect to make a request's inputs.
    #[serde(default, deserialize_with = "some_millis")]
    prepare_ms: Option<Duration>,
}

#[derive(Clone, Copy)]
struct HostName(Host);

impl<'de> Deserialize<'de> for HostName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let host = text.rsplit_once('-').and_then(|(role, number)| {
            let number = number.parse().ok()?;
            match role {
                "frontend" => Some(Host::Frontend(number)),
                "scheduler" => Some(Host::Scheduler(number)),
                "backend" => Some(Host::Backend(number)),
                _ => None,
            }
        });
        let expected = "expected frontend-N, scheduler-N or backend-N, from 0";
        host.map(HostName).ok_or_else(|| D::Error::custom(format!("'{text}' is no host; {expected}")))
    }
}

/// A fault. Exactly one of the names tells its kind.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultText {
    #[serde(deserialize_with = "millis")]
    at_ms: Duration,
    kill: Option<Spanned<HostName>>,
    /// If true, no peer is told that its connections have ended.
    #[serde(default)]
    silently: bool,
    pause: Option<Spanned<HostName>>,
    slow: Option<Spanned<HostName>>,
    /// These hosts and all others do not hear each other.
    cut: Option<Vec<Spanned<HostName>>>,
    /// If true, only messages from these hosts are lost.
    #[serde(default)]
    one_way: bool,
    /// Wires lose this share of the frames.
    loss: Option<Share>,
    /// If true, wires bring nothing for a while, and then all that was sent meanwhile.
    #[serde(default)]
    stall: bool,
    drain: Option<Spanned<HostName>>,
    join: Option<Spanned<HostName>>,
    /// The model, from 0, whose rate changes from now on.
    busy: Option<Number<0, 1000>>,
    rate: Option<f64>,
    /// If true, the models are divided anew.
    #[serde(default)]
    divide: bool,
    #[serde(default)]
    store_away: bool,
    #[serde(default, deserialize_with = "some_millis")]
    lasts_ms: Option<Duration>,
    #[serde(default, deserialize_with = "some_millis")]
    by_ms: Option<Duration>,
    #[serde(default, deserialize_with = "some_millis")]
    restart_after_ms: Option<Duration>,
}

/// The highest rate of a model, requests a second.
const MOST_RATE: f64 = 1e6;

impl NetworkFile {
    /// Reads a network.
    ///
    /// # Errors
    /// If the file cannot be read, is no network, or has an impossible value. The error has the
    /// line.
    pub fn read(file: &Path) -> Result<NetworkFile, BadNetwork> {
        let text = std::fs::read_to_string(file).map_err(|error| BadNetwork::Read(file.to_owned(), error))?;
        NetworkFile::parse(&text, file)
    }

    /// Parses `text`, the contents of `file`, as [`NetworkFile::read`] does.
    ///
    /// # Errors
    /// As [`NetworkFile::read`].
    pub fn parse(text: &str, file: &Path) -> Result<NetworkFile, BadNetwork> {
        let of_toml = |error: toml::de::Error| {
            (error.span().map_or(0, |span| span.start), error.message().trim().replace('\n', "; "))
        };
        let parsed = toml::from_str(text).map_err(of_toml);
        parsed.and_then(Text::resolve).map_err(|(at, message)| {
            let before = text.get(..at).unwrap_or(text);
            let start = before.rfind('\n').map_or(0, |newline| newline + 1);
            let (line, column) = (before.matches('\n').count() + 1, before[start..].chars().count() + 1);
            BadNetwork::At { file: file.to_owned(), line, column, message }
        })
    }

    /// Runs the network with each of these seeds, or with the file's own seed if there are none.
    pub fn run(&self, seeds: &[u64]) -> NetworkResults {
        let own = [self.scenario.seed];
        let seeds = if seeds.is_empty() { &own } else { seeds };
        let run = |seed: &u64| NetworkScenario { seed: *seed, ..self.scenario.clone() }.run();
        NetworkResults {
            title: self.title.clone(),
            note: self.note.clone(),
            faults: self.scenario.faults.iter().map(|(_, fault)| fault.to_string()).collect(),
            runs: seeds.iter().map(run).collect(),
        }
    }
}

impl Text {
    fn resolve(self) -> Result<NetworkFile, Misplaced> {
        let roles = Roles {
            frontends: self.frontends.0,
            schedulers: self.schedulers.0,
            backends: self.backends.0,
            slots: self.slots.0,
            seats: self.seats,
        };
        if self.model.is_empty() {
            return Err((0, "there is no model; give a [[model]]".to_owned()));
        }
        let absent: Result<Vec<u32>, Misplaced> = self.absent.iter().map(|host| backend(roles, host)).collect();
        let models: Result<Vec<NetworkModel>, Misplaced> = self.model.iter().map(ModelText::resolve).collect();
        let mut faults = Vec::new();
        for fault in &self.fault {
            let resolved = fault.get_ref().resolve(fault.span().start, roles)?;
            if let Fault::Rate { model, .. } = resolved
                && model >= self.model.len()
            {
                return Err((
                    fault.span().start,
                    format!("there is no model {model}; there are {}, from 0", self.model.len()),
                ));
            }
            faults.push((Time::ZERO + fault.get_ref().at_ms, resolved));
        }
        faults.sort_by_key(|(at, _)| *at);
        let scenario = NetworkScenario {
            seed: self.seed.unwrap_or(1),
            roles,
            rehearsed: self.rehearsal,
            models: models?,
            wires: self.wires.resolve(),
            pauses: self.pauses.map(|pauses| Pauses {
                every: pauses.every_ms.max(Duration::from_millis(1)),
                longest: pauses.longest_ms,
            }),
            timing: self.timing.resolve(),
            has_store: self.store,
            sub_clusters: self.sub_clusters.map(SubClustersText::resolve),
            cancelled: self.cancelled.0,
            failed: self.failed.0,
            noise: self.noise.0,
            span: self.span_ms,
            faults,
            absent: absent?,
        };
        Ok(NetworkFile { title: self.title, note: self.note, scenario })
    }
}

impl SubClustersText {
    fn resolve(self) -> SubClusters {
        SubClusters {
            options: SubClusterOptions {
                count: self.count.map_or(SubClusterCount::Least, |count| SubClusterCount::Fixed(count.0)),
                plan_every: self.plan_every_ms.map_or(Duration::MAX, |every| every.max(Duration::from_millis(10))),
                moves: self.most_moves.map_or(MoveLimit::Any, |moves| MoveLimit::Models(moves.0)),
                most_requests: self.most_requests.map(|requests| requests.0),
            },
            load_time: self.load_ms,
            load_fails: self.load_fails.0,
            memory: self.holds.map(|models| u64::from(models.0) * MODEL_BYTES),
            begins_loaded: self.begins_loaded,
        }
    }
}

impl WiresText {
    fn resolve(&self) -> Wires {
        let usual = Wires::default();
        Wires {
            delay: self.delay_ms.unwrap_or(usual.delay),
            spread: self.spread.map_or(usual.spread, |spread| spread.0.into()),
            jitter: self.jitter_ms.unwrap_or(usual.jitter),
            loss: self.loss.0,
            doubled: self.doubled.0,
            in_order: !self.reorder,
            redial: self.redial_ms.map_or(usual.redial, |redial| redial.max(Duration::from_micros(100))),
        }
    }
}

impl TimingText {
    fn resolve(&self) -> Timing {
        let usual = Timing::default();
        // A process that sends all the time does nothing else, so no interval is shorter than 100
        // us.
        let some = |ms: Option<Duration>, usual| ms.map_or(usual, |ms| ms.max(Duration::from_micros(100)));
        Timing {
            heartbeat: some(self.heartbeat_ms, usual.heartbeat),
            takeover_after: some(self.takeover_after_ms, usual.takeover_after),
            peer_heartbeat: some(self.peer_heartbeat_ms, usual.peer_heartbeat),
            lost_after: some(self.lost_after_ms, usual.lost_after),
            fetch_within: some(self.fetch_within_ms, usual.fetch_within),
            tries: self.tries.map_or(usual.tries, |tries| tries.0 as u8),
            wakes_late: usual.wakes_late,
        }
    }
}

impl ModelText {
    fn resolve(&self) -> Result<NetworkModel, Misplaced> {
        let at = self.rate.span().start;
        let rate = *self.rate.get_ref();
        if !(1e-6..=MOST_RATE).contains(&rate) {
            return Err((at, format!("a rate of {rate}; it must be above 0 and up to {MOST_RATE} a second")));
        }
        let profile = LatencyProfile::linear(self.alpha_ms, self.beta_ms, self.max_batch.0);
        let profile = profile.map_err(|error| (at, error.to_string()))?;
        let policy = match &self.policy {
            Some(policy) => policy.clone(),
            None => "deferred".parse().map_err(|error: downbeat_sim::policy::UnknownPolicy| (at, error.to_string()))?,
        };
        Ok(NetworkModel {
            profile,
            rate,
            slo: self.slo_ms,
            dispatch: policy.dispatch(self.slo_ms.unwrap_or(Duration::MAX)),
            drop: policy.drop(),
            may_repeat: self.may_repeat,
            prepares: self.prepare_ms.map(|expected| Preparation { expected, fails: 0.0 }),
            streams: None,
        })
    }
}

fn host(roles: Roles, name: &Spanned<HostName>) -> Result<Host, Misplaced> {
    let HostName(host) = *name.get_ref();
    let (number, there_are) = match host {
        Host::Frontend(n) => (n, roles.frontends),
        Host::Scheduler(n) => (n, roles.schedulers),
        Host::Backend(n) => (n, roles.backends),
    };
    match number < there_are {
        true => Ok(host),
        false => Err((name.span().start, format!("there is no {host}; there are {there_are} such, from 0"))),
    }
}

fn backend(roles: Roles, name: &Spanned<HostName>) -> Result<u32, Misplaced> {
    match host(roles, name)? {
        Host::Backend(number) => Ok(number),
        host => Err((name.span().start, format!("{host} is no backend"))),
    }
}

impl FaultText {
    fn resolve(&self, at: usize, roles: Roles) -> Result<Fault, Misplaced> {
        let lasts = || self.lasts_ms.ok_or_else(|| (at, "this fault needs lasts_ms: how long it lasts".to_owned()));
        let mut faults = Vec::new();
        if let Some(name) = &self.kill {
            let (restart_after, silently) = (self.restart_after_ms, self.silently);
            faults.push(Fault::Kill { host: host(roles, name)?, restart_after, silently });
        }
        if let Some(name) = &self.pause {
            faults.push(Fault::Pause { host: host(roles, name)?, lasts: lasts()? });
        }
        if let Some(name) = &self.slow {
            let by = self.by_ms.ok_or_else(|| (at, "slow needs by_ms: how much later frames come".to_owned()))?;
            faults.push(Fault::Slow { host: host(roles, name)?, lasts: lasts()?, by });
        }
        if let Some(names) = &self.cut {
            let hosts: Result<Vec<Host>, Misplaced> = names.iter().map(|name| host(roles, name)).collect();
            faults.push(Fault::Cut { hosts: hosts?, lasts: lasts()?, one_way: self.one_way });
        }
        if let Some(Share(loss)) = self.loss {
            faults.push(Fault::Lossy { loss, lasts: lasts()? });
        }
        if self.stall {
            faults.push(Fault::Stall { lasts: lasts()? });
        }
        if let Some(name) = &self.drain {
            faults.push(Fault::Drain { backend: backend(roles, name)?, restart_after: self.restart_after_ms });
        }
        if let Some(name) = &self.join {
            faults.push(Fault::Join { backend: backend(roles, name)? });
        }
        if let Some(Number(model)) = self.busy {
            let rate = self.rate.filter(|rate| (1e-6..=MOST_RATE).contains(rate));
            let rate = rate.ok_or_else(|| (at, format!("busy needs rate: above 0 and up to {MOST_RATE} a second")))?;
            faults.push(Fault::Rate { model: model as usize, rate });
        }
        if self.divide {
            faults.push(Fault::Divide);
        }
        if self.store_away {
            faults.push(Fault::StoreAway { lasts: lasts()? });
        }
        <[Fault; 1]>::try_from(faults).map(|[fault]| fault).map_err(|faults| {
            let expected =
                "exactly one of kill, pause, slow, cut, loss, stall, drain, join, busy, divide and store_away";
            (at, format!("a fault is {expected}; here are {}", faults.len()))
        })
    }
}
