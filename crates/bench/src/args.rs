//! The command line, as written.

use downbeat_report::{Html, Json};
use downbeat_sim::Arrivals;

/// Measure an inference server: offer load, and report latencies, failures, throughput or capacity.
///
/// Works with any server of the Open Inference Protocol (Downbeat, Triton). In an open loop (the
/// default) requests are sent when they are due, whether or not earlier ones were answered. Latency
/// counts from the time when each was due: a stalled server is charged for all requests that it
/// kept from being sent.
///
/// Examples:
///   downbeat bench -m mlp --rate 500
///   downbeat bench -m mlp:0.7 -m digits:0.3 --rate 2000 --arrivals gamma:0.05 --duration 30 --html report.html
///   downbeat bench -m mlp --closed --connections 32
///   downbeat bench -m widemlp --protocol grpc --capacity --target-p99-ms 50
#[derive(clap::Args, Debug, Clone)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Model to send requests to, and its share of them: NAME, NAME:SHARE or NAME@VERSION:SHARE.
    /// Repeatable. Only the ratios of shares count; without one it is 1.
    #[arg(short, long = "model", value_name = "NAME[:SHARE]", required = true)]
    pub models: Vec<String>,

    /// Server, as HOST:PORT, http://HOST:PORT or grpc://HOST:PORT. Default: 127.0.0.1:8000 for
    /// HTTP, 127.0.0.1:8001 for gRPC. https:// and grpcs:// speak TLS: DOWNBEAT_CA names a file of
    /// roots. Requests have the API key of DOWNBEAT_API_KEY.
    #[arg(short, long, value_name = "URL")]
    pub url: Option<String>,

    /// Protocol. Default: the URL's scheme, otherwise http.
    #[arg(short, long, value_enum)]
    pub protocol: Option<Protocol>,

    /// Form of tensors in HTTP bodies.
    #[arg(long, value_enum, default_value_t = Body::Binary)]
    pub body: Body,

    /// Mean arrivals per second, all models together. A capacity search begins at this rate.
    #[arg(short, long, default_value_t = 100.0, value_name = "PER_SECOND")]
    pub rate: f64,

    /// Variation of the gaps between arrivals: constant, poisson, or gamma:K with shape K
    /// (coefficient of variation 1/sqrt(K); gamma:0.05 is very bursty).
    #[arg(short, long, default_value = "poisson", value_name = "KIND")]
    pub arrivals: Arrivals,

    /// Rates one after another instead of --rate: comma-separated RATExREQUESTS or RATExSECONDSs,
    /// and FROM..TOxLENGTHxSTEPS for evenly rising (or falling) rates. The last may be a RATE
    /// alone, to the end. "66..4000x2000x16" rises from 66/s to 4000/s in 16 steps of 2000
    /// requests; "100x30s,900x5s,100" is a burst.
    #[arg(long, value_name = "LIST", conflicts_with_all = ["closed", "capacity"])]
    pub steps: Option<String>,

    /// Closed loop: --connections clients, each of which sends its next request when the last is
    /// answered.
    #[arg(long, conflicts_with = "capacity")]
    pub closed: bool,

    /// Clients of the closed loop (requests in flight).
    #[arg(short, long, default_value_t = 32, value_name = "N")]
    pub connections: usize,

    /// Open loop over HTTP: most connections. Other requests wait for a free one, and the wait
    /// counts in their latency.
    #[arg(long, default_value_t = 1024, value_name = "N")]
    pub max_connections: usize,

    /// gRPC: connections that all requests share, per thread.
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub grpc_connections: usize,

    /// Seconds whose requests are measured. Default: 10, or to the end of --steps.
    #[arg(short, long, value_name = "SECONDS")]
    pub duration: Option<f64>,

    /// Seconds of load before the measured time. Default: 1; none with --steps.
    #[arg(short, long, value_name = "SECONDS")]
    pub warmup: Option<f64>,

    /// End after this many requests, warm-up included, unless the duration ends the run before.
    #[arg(long, value_name = "N")]
    pub requests: Option<u64>,

    /// Seconds after which an unanswered request is given up, counted from when it was due.
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    pub request_timeout: f64,

    /// An answer that takes longer than this many milliseconds is late, and counts as bad.
    #[arg(long, value_name = "MS")]
    pub slo_ms: Option<f64>,

    /// Seed of arrivals, mix and data. Equal seeds offer equal load.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// Load threads. One is enough for tens of thousands of requests a second.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub threads: usize,

    /// Items in each request: the size of the batch dimension.
    #[arg(short, long, default_value_t = 1, value_name = "N")]
    pub batch: u32,

    /// Different requests prepared per model.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub variants: usize,

    /// Shape of an input whose dimensions vary, without the batch dimension or with it: INPUT:128
    /// or INPUT:1,128. Repeatable.
    #[arg(long = "shape", value_name = "INPUT:DIMS")]
    pub shapes: Vec<String>,

    /// Draw the variable dimensions of an input from a lognormal distribution, rounded, at least 1
    /// and at most MAX (512): INPUT:MU,SIGMA or INPUT:MU,SIGMA,MAX. INPUT `*` stands for every
    /// input. One draw per request: inputs with equal numbers get equal sizes. "*:4.11,0.52" is the
    /// sentence lengths of RTE. Repeatable.
    #[arg(long = "shape-lognormal", value_name = "INPUT:MU,SIGMA")]
    pub lognormal: Vec<String>,

    /// Values of an input are drawn evenly from LOW to HIGH (integers: both included):
    /// INPUT:LOW,HIGH. Without it, 0 to 1. Token ids need the size of the vocabulary. Repeatable.
    #[arg(long = "range", value_name = "INPUT:LOW,HIGH")]
    pub ranges: Vec<String>,

    /// Send the content of this file instead of random data. The file has one infer request in the
    /// protocol's JSON ({"inputs": [{"name", "datatype", "shape", "data"}]}), or a list of requests.
    /// For one of several models: MODEL=FILE. Repeatable.
    #[arg(long = "input", value_name = "FILE")]
    pub inputs: Vec<String>,

    /// `timeout` parameter of each request: the microseconds it may wait in the server's queue.
    #[arg(long, value_name = "US")]
    pub timeout_us: Option<u64>,

    /// `priority` parameter of each request.
    #[arg(long)]
    pub priority: Option<u64>,

    /// Header (HTTP) or metadata (gRPC) of each request: NAME:VALUE. Repeatable.
    #[arg(long = "header", value_name = "NAME:VALUE")]
    pub headers: Vec<String>,

    /// Find the highest rate that meets the targets, by doubling and binary search.
    #[arg(long)]
    pub capacity: bool,

    /// Capacity target: the 99th percentile of latency, in milliseconds.
    #[arg(long, value_name = "MS", requires = "capacity")]
    pub target_p99_ms: Option<f64>,

    /// Capacity target: at most this percentage of each model's requests is bad (failed, or later
    /// than --slo-ms).
    #[arg(long, default_value_t = 1.0, value_name = "PERCENT")]
    pub target_bad_percent: f64,

    /// Highest rate of a capacity search.
    #[arg(long, default_value_t = 1_000_000.0, value_name = "PER_SECOND")]
    pub max_rate: f64,

    /// The search ends when its bounds are within this percentage.
    #[arg(long, default_value_t = 2.0, value_name = "PERCENT")]
    pub precision: f64,

    /// Everything measured.
    #[command(flatten)]
    pub json: Json,

    /// The report with plots.
    #[command(flatten)]
    pub html: Html,

    /// Print only the table, no progress. Without a terminal there is no progress anyway.
    #[arg(short, long)]
    pub quiet: bool,
}

/// The protocol of the requests.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// HTTP/1.1.
    Http,
    /// gRPC over HTTP/2.
    Grpc,
}

impl Protocol {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Http => "http",
            Protocol::Grpc => "grpc",
        }
    }

    /// Triton's port for the protocol.
    pub fn default_port(self) -> u16 {
        match self {
            Protocol::Http => 8000,
            Protocol::Grpc => 8001,
        }
    }
}

/// The form of tensors in HTTP bodies.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body {
    /// The binary tensor extension, requests and responses.
    Binary,
    /// JSON numbers.
    Json,
}
