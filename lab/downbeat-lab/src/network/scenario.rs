//! What a run of a network is made of.

use std::fmt;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy};
use downbeat_core::{Duration, LatencyProfile, Time};

use super::outcome::NetworkOutcome;
use super::run::NetworkRun;
use super::sub_clusters::SubClusters;

/// A machine that one process runs on, by its role and number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Host {
    /// A frontend, with its clients.
    Frontend(u32),
    /// The scheduler of this rank.
    Scheduler(u32),
    /// A backend.
    Backend(u32),
}

/// `frontend-0`, `scheduler-1`, `backend-2`.
impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Frontend(n) => write!(f, "frontend-{n}"),
            Host::Scheduler(n) => write!(f, "scheduler-{n}"),
            Host::Backend(n) => write!(f, "backend-{n}"),
        }
    }
}

/// How many there are of each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Roles {
    /// Frontends.
    pub frontends: u32,
    /// Schedulers.
    pub schedulers: u32,
    /// Backends.
    pub backends: u32,
    /// Slots of each backend.
    pub slots: u32,
}

/// A model, the same on all backends.
#[derive(Clone, PartialEq, Debug)]
pub struct NetworkModel {
    /// `l(b)`.
    pub profile: LatencyProfile,
    /// Requests a second, of all frontends together.
    pub rate: f64,
    /// How long its requests may take; `None`: they have no deadline.
    pub slo: Option<Duration>,
    /// When a batch may start.
    pub dispatch: DispatchPolicy,
    /// What is given up.
    pub drop: DropPolicy,
    /// Whether a request may run twice.
    pub may_repeat: bool,
}

/// What wires do, all of them alike.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Wires {
    /// The median of a frame's way.
    pub delay: Duration,
    /// The 99.99th percentile, as so many medians; the distribution is lognormal.
    pub spread: f64,
    /// Share of the frames that are lost.
    pub loss: f64,
    /// Share that comes twice.
    pub doubled: f64,
    /// Whether frames keep their order.
    pub in_order: bool,
    /// From the end of a connection to a new one.
    pub redial: Duration,
}

/// How long processes wait for each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// Longest silence between schedulers.
    pub heartbeat: Duration,
    /// Silence of a leader after which another takes over.
    pub takeover_after: Duration,
    /// Longest silence of others.
    pub peer_heartbeat: Duration,
    /// Silence after which a peer is lost.
    pub lost_after: Duration,
    /// How long a batch waits for inputs.
    pub fetch_within: Duration,
    /// How often a request is tried again whose backend was lost.
    pub tries: u8,
    /// How late a process wakes up, at most.
    pub wakes_late: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Timing {
            heartbeat: ms(1),
            takeover_after: ms(3),
            peer_heartbeat: ms(5),
            lost_after: ms(50),
            fetch_within: ms(10),
            tries: 2,
            wakes_late: Duration::from_micros(50),
        }
    }
}

impl Default for Wires {
    fn default() -> Self {
        Wires {
            delay: Duration::from_micros(40),
            spread: 4.0,
            loss: 0.0,
            doubled: 0.0,
            in_order: true,
            redial: Duration::from_millis(10),
        }
    }
}

/// What goes wrong.
#[derive(Clone, PartialEq, Debug)]
pub enum Fault {
    /// A process ends at once; another one begins there after a while, if that is said.
    Kill {
        /// Where.
        host: Host,
        /// When another one begins there.
        restart_after: Option<Duration>,
        /// Its machine ends too: nobody is told that connections have ended.
        silently: bool,
    },
    /// A process does nothing for a while; what is sent to it waits (`SIGSTOP`).
    Pause {
        /// Where.
        host: Host,
        /// How long.
        lasts: Duration,
    },
    /// What a process is sent comes so much later for a while.
    Slow {
        /// Where.
        host: Host,
        /// How long.
        lasts: Duration,
        /// How much later.
        by: Duration,
    },
    /// These hosts and all others do not hear each other for a while.
    Cut {
        /// The hosts of one side.
        hosts: Vec<Host>,
        /// How long.
        lasts: Duration,
        /// Only what they send is lost, not what is sent to them.
        one_way: bool,
    },
    /// Wires lose a share of the frames for a while.
    Lossy {
        /// The share.
        loss: f64,
        /// How long.
        lasts: Duration,
    },
    /// A backend finishes what it has and goes; another one begins there after a while, if that is said.
    Drain {
        /// Its number.
        backend: u32,
        /// When another one begins there, after it has gone.
        restart_after: Option<Duration>,
    },
    /// A backend that was not there at first begins.
    Join {
        /// Its number.
        backend: u32,
    },
    /// Clients ask for a model more often from now on, or less.
    Rate {
        /// Which, from 0.
        model: usize,
        /// Requests a second, of all frontends together.
        rate: f64,
    },
    /// Somebody asks the scheduler that leads to divide models anew.
    Divide,
    /// The store that allots epochs is away for a while.
    StoreAway {
        /// How long.
        lasts: Duration,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let again =
            |after: &Option<Duration>| after.map_or(String::new(), |after| format!(", begins anew after {after}"));
        match self {
            Fault::Kill { host, restart_after, silently } => {
                let how = if *silently { "ends with its machine" } else { "is killed" };
                write!(f, "{host} {how}{}", again(restart_after))
            }
            Fault::Pause { host, lasts } => write!(f, "{host} is stopped for {lasts}"),
            Fault::Slow { host, lasts, by } => write!(f, "{host} hears everything {by} later for {lasts}"),
            Fault::Cut { hosts, lasts, one_way } => {
                let hosts: Vec<String> = hosts.iter().map(Host::to_string).collect();
                let how = if *one_way { "are not heard by" } else { "are cut off from" };
                write!(f, "{} {how} the others for {lasts}", hosts.join(", "))
            }
            Fault::Lossy { loss, lasts } => write!(f, "{}% of the frames are lost for {lasts}", loss * 100.0),
            Fault::Drain { backend, restart_after } => {
                write!(f, "{} is drained{}", Host::Backend(*backend), again(restart_after))
            }
            Fault::Join { backend } => write!(f, "{} joins", Host::Backend(*backend)),
            Fault::Rate { model, rate } => write!(f, "model {model} is asked for {rate} times a second"),
            Fault::Divide => write!(f, "models are divided anew"),
            Fault::StoreAway { lasts } => write!(f, "the store is away for {lasts}"),
        }
    }
}

/// What a run of a network is made of.
#[derive(Clone, PartialEq, Debug)]
pub struct NetworkScenario {
    /// Of all random numbers.
    pub seed: u64,
    /// How many there are of each.
    pub roles: Roles,
    /// What is served.
    pub models: Vec<NetworkModel>,
    /// What wires do.
    pub wires: Wires,
    /// How long processes wait for each other.
    pub timing: Timing,
    /// Whether a store allots epochs.
    pub has_store: bool,
    /// Sub-clusters; `None`: all backends have all models.
    pub sub_clusters: Option<SubClusters>,
    /// Share of the requests whose clients go before they are answered.
    pub cancelled: f64,
    /// Share of the requests that a model fails.
    pub failed: f64,
    /// How much longer or shorter than its profile a batch takes at most, as a share.
    pub noise: f64,
    /// Clients come from 0 until then; then everything is mended, and what is open has to end.
    pub span: Duration,
    /// What goes wrong, and when.
    pub faults: Vec<(Time, Fault)>,
    /// Backends that are not there at first.
    pub absent: Vec<u32>,
}

impl NetworkScenario {
    /// Runs it.
    pub fn run(&self) -> NetworkOutcome {
        NetworkRun::new(self).run()
    }

    /// All hosts.
    pub fn hosts(&self) -> Vec<Host> {
        let Roles { frontends, schedulers, backends, .. } = self.roles;
        let frontends = (0..frontends).map(Host::Frontend);
        frontends.chain((0..schedulers).map(Host::Scheduler)).chain((0..backends).map(Host::Backend)).collect()
    }
}
