//! The options of a process in a cluster.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use downbeat_core::Duration;
use downbeat_repository::named;

use crate::options::with_defaults;

/// The port of schedulers, unless the options give another.
pub const SCHEDULER_PORT: u16 = 8003;
/// The port of frontends for backends, unless the options give another.
pub const FRONTEND_PORT: u16 = 8004;

/// Whether this build has UCX.
pub const HAS_UCX: bool = cfg!(feature = "ucx");
/// How to get UCX, in one sentence.
pub const NO_UCX: &str =
    "this build has no UCX (--ucx, `ucx` in [cluster]); `cargo build --release --features ucx` adds it";

named! {
    /// Which processes' large tensors are read by UCX.
    UcxUse as "use of UCX" {
        /// No tensors.
        Off = "off",
        /// Tensors of processes on other machines, whose memory cannot be mapped.
        Auto = "auto",
        /// All large tensors: also between processes of one machine, whose memory is then not
        /// mapped.
        Always = "always",
    }
}

/// The most sub-clusters.
pub const MOST_SUB_CLUSTERS: u32 = 1024;

/// The number of sub-clusters of backends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SubClusters {
    /// This number; 0: each backend chooses its own models.
    Number(u32),
    /// The least number whose devices hold their models, and that keeps the limit of requests.
    Auto,
}

impl FromStr for SubClusters {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(SubClusters::Auto);
        }
        let number = text.parse().ok().filter(|number| *number <= MOST_SUB_CLUSTERS);
        number.map(SubClusters::Number).ok_or_else(|| format!("'{text}': expected 0 to {MOST_SUB_CLUSTERS}, or auto"))
    }
}

impl fmt::Display for SubClusters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SubClusters::Number(number) => write!(f, "{number}"),
            SubClusters::Auto => f.write_str("auto"),
        }
    }
}

with_defaults! {
    /// The options of a frontend, a scheduler or a backend.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub struct ClusterOptions {
        /// The addresses of the schedulers, `HOST:PORT`, in the same order for all processes: the
        /// first live one leads. Empty: `etcd` has them, or there is one scheduler.
        pub schedulers: Vec<String> = Vec::new(),
        /// A scheduler's own place among them, from 0. `None`: 0, or with `etcd` the lowest free
        /// one.
        pub rank: Option<u32> = None,
        /// The servers of an etcd, `http://HOST:PORT` or `https://HOST:PORT`, that allots epochs to schedulers and keeps their
        /// addresses; empty: no etcd.
        pub etcd: Vec<String> = Vec::new(),
        /// A file of certificates of authorities, in PEM, one of which must have signed the
        /// certificates of etcd's servers; `None`: those of this machine.
        pub etcd_ca: Option<PathBuf> = None,
        /// A certificate of this process for etcd, in PEM, and its key.
        pub etcd_certificate: Option<PathBuf> = None,
        /// The key of the certificate for etcd, in PEM.
        pub etcd_key: Option<PathBuf> = None,
        /// The name of the process's user at etcd; `None`: the process does not log in.
        pub etcd_user: Option<String> = None,
        /// A file with the password of that user.
        pub etcd_password: Option<PathBuf> = None,
        /// The prefix of its keys in etcd.
        pub etcd_prefix: String = "downbeat".to_owned(),
        /// A file of secrets, which the processes of the cluster prove to each other; `None`: they
        /// prove nothing.
        pub secret: Option<PathBuf> = None,
        /// Whether a process without a secret may listen for peers on other addresses than
        /// loopback ones.
        pub is_insecure: bool = false,
        /// The address where a scheduler or a frontend listens; `None`: its port of
        /// [`ServerOptions::host`](crate::options::ServerOptions::host).
        pub listen: Option<SocketAddr> = None,
        /// The address that others connect to, `HOST:PORT`; `None`: the source address of its
        /// connections to them.
        pub advertise: Option<String> = None,
        /// The process's name in logs and `GET /v2/cluster`; `None`: its role and number.
        pub name: Option<String> = None,
        /// Longest silence between schedulers.
        pub heartbeat: Duration = Duration::from_millis(2),
        /// Silence of the scheduler that leads after which the next one does, at least.
        pub takeover_after: Duration = Duration::from_millis(20),
        /// Silence after which any other process is lost.
        pub lost_after: Duration = Duration::from_millis(1_000),
        /// How long inputs of a batch may take to come to its backend, at least.
        pub fetch_within: Duration = Duration::from_millis(100),
        /// Sub-clusters of backends, whose models the scheduler chooses.
        pub sub_clusters: SubClusters = SubClusters::Number(0),
        /// How often models are divided among sub-clusters again. 0: only when backends or models
        /// come and go, or a client asks.
        pub plan_every: Duration = Duration::from_millis(300_000),
        /// Models that one plan may move from one sub-cluster to another; `None`: any number.
        pub plan_moves: Option<u32> = None,
        /// How long the models that one plan moves may take to load on a backend, all together;
        /// `None`: any time.
        pub plan_load: Option<Duration> = None,
        /// The most requests per second of a sub-cluster; `None`: any number.
        pub plan_rate: Option<u32> = None,
        /// How often a request is tried again if its backend is lost.
        pub tries: u8 = 2,
        /// How long a process polls for the next message before it sleeps; zero: it sleeps at once.
        pub busy_poll: Duration = Duration::ZERO,
        /// Whether large tensors are read by UCX.
        pub ucx: UcxUse = UcxUse::Off,
    }
}
