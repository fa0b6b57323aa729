//! Downbeat under virtual time, for users who plan a cluster.
//!
//! [`Simulation`] runs the production [`Scheduler`](downbeat_core::cluster::Scheduler) against
//! generated or recorded arrivals. Devices take the time of their latency profile. A [`Checker`]
//! judges every decision from outside. [`CapacityQuestion`] searches a cluster's capacity, and
//! [`what_if`] replays a decision log. All results follow from the seed.
//!
//! Papers' figures, published systems and emulated GPUs are in `lab/downbeat-lab`.

mod arrival;
mod arrivals;
mod bounds;
mod capacity;
mod capacity_table;
mod checker;
mod cluster;
mod execution;
mod feed;
mod network;
pub mod node;
mod pace;
pub mod parallel;
pub mod policy;
pub mod profiles;
mod recording;
mod rehearsed;
mod report;
mod run;
mod sample;
pub mod sample_table;
mod scenario;
mod simulation;
mod system;
mod tally;
pub mod what_if;

pub use arrival::Arrival;
pub use arrivals::{ArrivalStream, Arrivals, BadArrivals, Gaps, UnknownArrivals, random};
pub use bounds::{Staggered, fluid, staggered};
pub use capacity::{Bounds, Capacity, NoCapacity, Search, TOLERATED, capacity};
pub use capacity_table::{BadQuestion, Capacities, CapacityCase, CapacityQuestion};
pub use checker::{Checker, Known};
pub use cluster::{ClusterScheduler, Decision};
pub use execution::{Devices, RunningDevices};
pub use feed::Feed;
pub use network::{Delay, Network, UnknownDelay};
pub use pace::{BadPace, Pace};
pub use policy::Policy;
pub use profiles::ModelProfile;
pub use recording::{MAX_REQUESTS, RecordedBatch, RecordedRequest, Recording};
pub use report::{DELAY_BINS, ModelReport, Report, Window, mean, quantile};
pub use sample::{Delays, Outcome, Sample, Sizes, check_seeds};
pub use scenario::{BadScenario, MOST_DEVICES, Popularity, Scenario, Shape, UnknownPopularity};
pub use simulation::{Load, Simulation};
pub use system::{Downbeat, System};
