//! The command line of the scheduler's benchmark, as written.

use downbeat_core::{Duration, cluster};
use downbeat_report::Json;

/// Measure the scheduler alone: requests and devices are emulated in this process, without a server
/// or a network.
///
/// The scheduler gets Poisson arrivals for MODELS equally popular models. A batch of b takes
/// l(b) = 1.053 b + 5.072 ms, as ResNet does, and the SLO is 100 ms. A dispatched batch occupies an
/// emulated device for as long as the profile says. The whole thread is charged: drawing the
/// arrivals, the scheduler, the devices. Without --rate, time is virtual and the loop runs as fast
/// as it can. With --rate, time is real, and the latency of each decision is measured.
///
/// Examples:
///   downbeat-lab scheduler
///   downbeat-lab scheduler --models 1024 --devices 4096 --policy eager --drop head --json result.json
///   downbeat-lab scheduler --devices 8192 --rate 5000000
///   downbeat-lab scheduler --posting-threads 2 --shards 4 --devices 16384
///   downbeat-lab scheduler --sweep
#[derive(clap::Args, Debug, Clone)]
#[command(verbatim_doc_comment)]
pub struct SchedulerArgs {
    /// Models, all equally popular.
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub models: u32,

    /// Emulated devices.
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub devices: u32,

    /// Threads of model queues, each with its share of the load and of the devices. One: the
    /// single-threaded scheduler, unless --matchmaker-thread is given. With several, the matchmaker
    /// has one more thread of its own.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,

    /// Give the matchmaker a thread of its own even beside a single thread.
    #[arg(long)]
    pub matchmaker_thread: bool,

    /// Let this many threads post requests as fast as they are worked off, in real time. The
    /// posting thread does the work, as in a server, and looks after the devices that it sends
    /// batches to. The load needs enough --devices.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64),
        conflicts_with_all = ["rate", "load", "threads", "matchmaker_thread", "sweep"])]
    pub posting_threads: Option<u32>,

    /// Shards of the models' queues under --posting-threads; 0: one a core, as a server.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(..=64), requires = "posting_threads")]
    pub shards: u32,

    /// Offered load as a share of the load that the devices can serve in staggered batches.
    #[arg(long, default_value_t = 0.9, value_name = "SHARE", conflicts_with = "rate")]
    pub load: f64,

    /// Offer this many requests a second of real time, and measure how long each event waits for
    /// its decision.
    #[arg(long, value_name = "PER_SECOND")]
    pub rate: Option<f64>,

    /// When batches leave.
    #[arg(long, value_enum, default_value_t = Policy::Deferred)]
    pub policy: Policy,

    /// Which requests are dropped.
    #[arg(long, value_enum, default_value_t = Drop::Window)]
    pub drop: Drop,

    /// Largest batch.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub max_batch: u32,

    /// Seconds that are measured, after a warm-up.
    #[arg(long, default_value_t = 3.0, value_name = "SECONDS")]
    pub seconds: f64,

    /// Seed of the arrivals. Equal seeds offer equal load.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// Measure every combination of 16, 64, 256, 1024, 4096 and 16384 models and devices instead of
    /// --models and --devices.
    #[arg(long, conflicts_with_all = ["rate", "models", "devices"])]
    pub sweep: bool,

    /// The file for the measurements.
    #[command(flatten)]
    pub json: Json,
}

/// When batches leave.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// As late as one more request could join.
    Deferred,
    /// As soon as a device is free.
    Eager,
    /// At the last moment.
    Latest,
    /// Deferred or eager, whichever gains more at the present load.
    Adaptive,
    /// Adaptive, but deferred at low load.
    Consolidating,
    /// When the batch is full, or its first request has waited for 5 ms.
    Timeout,
}

impl From<Policy> for cluster::DispatchPolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Deferred => cluster::DispatchPolicy::Deferred,
            Policy::Eager => cluster::DispatchPolicy::Eager,
            Policy::Latest => cluster::DispatchPolicy::Latest,
            Policy::Adaptive => cluster::DispatchPolicy::Adaptive { consolidate: false },
            Policy::Consolidating => cluster::DispatchPolicy::Adaptive { consolidate: true },
            Policy::Timeout => {
                cluster::DispatchPolicy::Timeout { delay: Duration::from_millis(5), preferred: Vec::new() }
            }
        }
    }
}

/// Which requests are dropped.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drop {
    /// Also heads that would force a batch below the target.
    Window,
    /// Also heads that would force a batch too small to keep up with the arrivals.
    Adaptive,
    /// Only hopeless requests.
    Head,
}

impl From<Drop> for cluster::DropPolicy {
    fn from(drop: Drop) -> Self {
        match drop {
            Drop::Window => cluster::DropPolicy::WindowDrop,
            Drop::Adaptive => cluster::DropPolicy::Adaptive,
            Drop::Head => cluster::DropPolicy::HeadDrop,
        }
    }
}
