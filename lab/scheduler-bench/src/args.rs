//! The command line of the scheduler's benchmark, as written.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy};
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

    /// When batches leave: the scheduler of a server, by name. A timeout is 5 ms.
    #[arg(long, default_value = "deferred")]
    pub policy: DispatchPolicy,

    /// Which requests are dropped: window, head, adaptive, or none.
    #[arg(long, default_value = "window")]
    pub drop: DropPolicy,

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
