//! The scenario of a run: processes, models, wires, timing and faults.

use std::fmt;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy};
use downbeat_core::{Duration, LatencyProfile, Time};

use super::outcome::NetworkOutcome;
use super::run::NetworkRun;
use super::streams::Streaming;
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

/// The number of processes of each role.
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
    /// Whether the slots are seats of one device, whose device policy makes the batches.
    pub seats: bool,
}

/// A model, the same on all backends.
#[derive(Clone, PartialEq, Debug)]
pub struct NetworkModel {
    /// `l(b)`.
    pub profile: LatencyProfile,
    /// Requests a second, from the clients of all frontends together.
    pub rate: f64,
    /// The time from arrival to deadline; `None`: requests have no deadline.
    pub slo: Option<Duration>,
    /// The policy that chooses a batch's start.
    pub dispatch: DispatchPolicy,
    /// The policy that chooses requests to drop.
    pub drop: DropPolicy,
    /// True if a request may run twice.
    pub may_repeat: bool,
    /// How the frontends make a request's inputs; `None`: clients send the inputs.
    pub prepares: Option<Preparation>,
    /// The answers of a decoupled model; `None`: the model gives one answer to a request.
    pub streams: Option<Streaming>,
}

/// The making of a request's inputs at its frontend (Symphony §4.3).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Preparation {
    /// How long the frontend expects it to take. The true time is a fifth to two and a half times that.
    pub expected: Duration,
    /// Share of the requests whose inputs cannot be made.
    pub fails: f64,
}

/// The behaviour of all wires, which are alike.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Wires {
    /// The median delay of a frame.
    pub delay: Duration,
    /// The 99.99th percentile of the delay, in medians; the distribution is lognormal.
    pub spread: f64,
    /// The longest additional delay of a frame; all delays up to that are equally probable.
    pub jitter: Duration,
    /// Share of the frames that are lost.
    pub loss: f64,
    /// Share of the frames that come twice.
    pub doubled: f64,
    /// True if frames keep their order.
    pub in_order: bool,
    /// The time from the end of a connection to a new one.
    pub redial: Duration,
}

/// The pauses of all processes on a busy machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pauses {
    /// The mean time from one pause of a process to the next.
    pub every: Duration,
    /// The longest pause; all pauses up to that are equally probable.
    pub longest: Duration,
}

/// The time limits between processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// Longest silence between schedulers.
    pub heartbeat: Duration,
    /// Silence of a leader after which another takes over.
    pub takeover_after: Duration,
    /// Longest silence of other processes.
    pub peer_heartbeat: Duration,
    /// Silence after which a peer is lost.
    pub lost_after: Duration,
    /// Longest wait of a batch for its inputs.
    pub fetch_within: Duration,
    /// The number of retries of a request whose backend was lost.
    pub tries: u8,
    /// The largest lateness of a process's wake-up.
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
            jitter: Duration::ZERO,
            loss: 0.0,
            doubled: 0.0,
            in_order: true,
            redial: Duration::from_millis(10),
        }
    }
}

/// A fault or another change of the network.
#[derive(Clone, PartialEq, Debug)]
pub enum Fault {
    /// A process ends at once. Another one may begin on its host after a while.
    Kill {
        /// The host.
        host: Host,
        /// The time from the end to the begin of another process on this host; `None`: no other
        /// process begins.
        restart_after: Option<Duration>,
        /// The machine fails too: no peer is told that its connections have ended.
        silently: bool,
    },
    /// A process does nothing for a while, and messages to it wait (`SIGSTOP`).
    Pause {
        /// The host.
        host: Host,
        /// The duration.
        lasts: Duration,
    },
    /// Messages to a process come later for a while.
    Slow {
        /// The host.
        host: Host,
        /// The duration.
        lasts: Duration,
        /// The delay of each message.
        by: Duration,
    },
    /// These hosts and all others do not hear each other for a while.
    Cut {
        /// The hosts of one side.
        hosts: Vec<Host>,
        /// The duration.
        lasts: Duration,
        /// If true, only messages from these hosts are lost, not messages to them.
        one_way: bool,
    },
    /// Wires bring nothing for a while, and then all that was sent meanwhile.
    Stall {
        /// The duration.
        lasts: Duration,
    },
    /// Wires lose a share of the frames for a while.
    Lossy {
        /// The share.
        loss: f64,
        /// The duration.
        lasts: Duration,
    },
    /// A backend finishes its batches and goes. Another one may begin on its host after a while.
    Drain {
        /// Its number.
        backend: u32,
        /// The time from the end to the begin of another backend on this host; `None`: no other
        /// backend begins.
        restart_after: Option<Duration>,
    },
    /// A backend begins that was absent at first.
    Join {
        /// Its number.
        backend: u32,
    },
    /// The rate of a model changes from now on.
    Rate {
        /// The model's number, from 0.
        model: usize,
        /// Requests a second, from the clients of all frontends together.
        rate: f64,
    },
    /// An administrator asks the leader to divide the models anew.
    Divide,
    /// The store that allots epochs is away for a while.
    StoreAway {
        /// The duration.
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
            Fault::Stall { lasts } => write!(f, "wires bring nothing for {lasts}"),
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

/// The scenario of a run of a network.
#[derive(Clone, PartialEq, Debug)]
pub struct NetworkScenario {
    /// The seed of all random numbers.
    pub seed: u64,
    /// The number of processes of each role.
    pub roles: Roles,
    /// The models.
    pub models: Vec<NetworkModel>,
    /// The behaviour of the wires.
    pub wires: Wires,
    /// The time limits between processes.
    pub timing: Timing,
    /// Whether schedulers rehearse the behaviour of adaptive models while they lead.
    pub rehearsed: bool,
    /// The pauses of all processes until the end of the span; `None`: only those among the faults.
    pub pauses: Option<Pauses>,
    /// True if a store allots epochs.
    pub has_store: bool,
    /// Sub-clusters; `None`: all backends have all models.
    pub sub_clusters: Option<SubClusters>,
    /// Share of the requests whose clients go before they are answered.
    pub cancelled: f64,
    /// Share of the requests that a model fails.
    pub failed: f64,
    /// The largest deviation of a batch's time from its profile, as a share.
    pub noise: f64,
    /// Clients send from 0 until then. Then all faults are mended, and every open request has to
    /// end.
    pub span: Duration,
    /// The faults, with their times.
    pub faults: Vec<(Time, Fault)>,
    /// Backends that are absent at first.
    pub absent: Vec<u32>,
}

impl NetworkScenario {
    /// Runs the scenario.
    pub fn run(&self) -> NetworkOutcome {
        NetworkRun::new(self).run()
    }

    /// Returns all hosts.
    pub fn hosts(&self) -> Vec<Host> {
        let Roles { frontends, schedulers, backends, .. } = self.roles;
        let frontends = (0..frontends).map(Host::Frontend);
        frontends.chain((0..schedulers).map(Host::Scheduler)).chain((0..backends).map(Host::Backend)).collect()
    }
}
