//! What a process that is part of a cluster was asked for.

use std::net::SocketAddr;

use downbeat_core::Duration;

use downbeat_repository::named;

use crate::options::with_defaults;

/// Port of schedulers, where nobody says another.
pub const SCHEDULER_PORT: u16 = 8003;
/// Port at which frontends are connected to by backends, where nobody says another.
pub const FRONTEND_PORT: u16 = 8004;

/// Whether this build has UCX.
pub const HAS_UCX: bool = cfg!(feature = "ucx");
/// Says how to get UCX, in one sentence.
pub const NO_UCX: &str =
    "this build has no UCX (--ucx, `ucx` in [cluster]); `cargo build --release --features ucx` adds it";

named! {
    /// Which processes' large tensors are read by UCX.
    UcxUse as "use of UCX" {
        /// Nobody's.
        Off = "off",
        /// Those of processes whose memory cannot be mapped, as they are on other machines.
        Auto = "auto",
        /// Those of processes of the same machine, too, whose memory is not mapped then.
        Always = "always",
    }
}

with_defaults! {
    /// What a frontend, a scheduler or a backend was asked for.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub struct ClusterOptions {
        /// Where the schedulers are, `HOST:PORT`, in the order that all processes have: the first that is there leads. Empty: `etcd` knows, or there is one.
        pub schedulers: Vec<String> = Vec::new(),
        /// A scheduler's own place among them, from 0; `None`: 0, or where `etcd` has them the lowest that is free.
        pub rank: Option<u32> = None,
        /// `HOST:PORT` of the servers of an etcd that allots epochs to schedulers, and knows where they are; empty: none does.
        pub etcd: Vec<String> = Vec::new(),
        /// What its keys begin with.
        pub etcd_prefix: String = "downbeat".to_owned(),
        /// Where a scheduler or a frontend is connected to; `None`: at its port of [`ServerOptions::host`](crate::options::ServerOptions::host).
        pub listen: Option<SocketAddr> = None,
        /// Where others reach that, `HOST:PORT`; `None`: at the address that its connections to them come from.
        pub advertise: Option<String> = None,
        /// What the process is called in logs and `GET /v2/cluster`; `None`: its role and number.
        pub name: Option<String> = None,
        /// Longest silence between schedulers.
        pub heartbeat: Duration = Duration::from_millis(2),
        /// Silence of the scheduler that leads after which the next one does.
        pub takeover_after: Duration = Duration::from_millis(8),
        /// Silence after which any other process is lost.
        pub lost_after: Duration = Duration::from_millis(1_000),
        /// How long inputs of a batch may take to come to its backend.
        pub fetch_within: Duration = Duration::from_millis(100),
        /// Sub-clusters that backends are divided into, whose models the scheduler chooses; 0: which models a backend has is its own affair.
        pub sub_clusters: u32 = 0,
        /// How often models are divided among sub-clusters anew; 0: only when backends or models come and go, or somebody asks.
        pub plan_every: Duration = Duration::from_millis(300_000),
        /// Models that one plan may move from one sub-cluster to another; `None`: any number.
        pub plan_moves: Option<u32> = None,
        /// How often a request is tried again whose backend was lost.
        pub tries: u8 = 2,
        /// How long a process looks for what comes next before it sleeps; zero: it sleeps at once.
        pub busy_poll: Duration = Duration::ZERO,
        /// Whether large tensors are read by UCX.
        pub ucx: UcxUse = UcxUse::Off,
    }
}
