//! Downbeat under virtual time, for users who plan a cluster.
//!
//! [`Simulation`] runs the production [`Scheduler`](downbeat_core::cluster::Scheduler) against
//! generated or recorded arrivals. Devices take the time of their latency profile. A [`Checker`]
//! judges every decision from outside. [`CapacityQuestion`] searches a cluster's capacity, and
//! [`what_if`] replays a decision log, and [`why`] tells what became of a request in one. [`pipelines`] plays requests of several models. All results
//! follow from the seed.
//!
//! Papers' figures, published systems and emulated GPUs are in `lab/downbeat-lab`.

mod arrivals;
mod bounds;
mod capacity;
pub mod device_replay;
pub mod parallel;
pub mod pipelines;
pub mod policy;
pub mod profiles;
mod scenario;
pub mod simulation;
pub mod tables;
pub mod what_if;
pub mod why;

pub use arrivals::arrival::Arrival;
pub use arrivals::feed::Feed;
pub use arrivals::pace::{BadPace, Pace};
pub use arrivals::{ArrivalStream, Arrivals, BadArrivals, Gaps, UnknownArrivals, random};
pub use bounds::{Staggered, fluid, staggered};
pub use capacity::{Bounds, Capacity, NoCapacity, Search, TOLERATED, capacity};
pub use policy::Policy;
pub use profiles::ModelProfile;
pub use scenario::{BadScenario, MOST_DEVICES, Popularity, Scenario, Shape, UnknownPopularity};
pub use simulation::checker::{Checker, Known};
pub use simulation::cluster::{ClusterScheduler, Decision};
pub use simulation::execution::{Devices, RunningDevices};
pub use simulation::network::{Delay, Network, UnknownDelay};
pub use simulation::system::{Downbeat, System};
pub use simulation::{Load, Simulation};
pub use tables::capacity_table::{BadQuestion, Capacities, CapacityCase, CapacityQuestion};
pub use tables::recording::{MAX_REQUESTS, RecordedBatch, RecordedRequest, Recording};
pub use tables::report::{DELAY_BINS, ModelReport, Report, Window, mean, quantile};
pub use tables::sample::{Delays, Outcome, Sample, Sizes, check_seeds};
