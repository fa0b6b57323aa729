//! Downbeat under virtual time: production code of `downbeat-core`, emulated devices, outside checkers.
//!
//! [`Simulation`] runs a [`System`], which is the production [`Scheduler`](downbeat_core::cluster::Scheduler) or one that it is
//! compared with, against generated arrivals and devices that spend their profile's latency; a [`Checker`] judges every decision from outside. [`world`] has models of both
//! kinds on devices with lanes and partitions, and what goes wrong. [`capacity`] searches the highest
//! rate that a cluster holds. Everything follows from the seed.

mod arrivals;
mod baseline;
mod bounds;
mod capacity;
mod checker;
mod cluster;
pub mod device;
mod execution;
pub mod experiment;
mod feed;
mod judgement;
pub mod network;
mod numbers;
mod pace;
pub mod parallel;
pub mod policy;
pub mod profiles;
mod random_workloads;
mod recording;
mod rehearsed;
mod report;
mod scenario;
mod simulation;
pub mod slots;
mod system;
mod tally;
pub mod what_if;
pub mod world;

pub use arrivals::{ArrivalStream, Arrivals, BadArrivals, Gaps, UnknownArrivals, random};
pub use baseline::{Clockwork, Gather, Nexus, NexusOptions, Pinned, Shepherd};
pub use bounds::{ModelTrace, Staggered, Trace, clairvoyant, fluid, staggered};
pub use capacity::{Capacity, NoCapacity, Search, TOLERATED, capacity};
pub use checker::{Checker, Known};
pub use cluster::{Cluster, Decision};
pub use execution::{SharedDevices, SharedPlace};
pub use feed::Arrival;
pub use judgement::{Judge, Judged, Judgement, Spread};
pub use network::{Delay, Network, UnknownDelay};
pub use pace::{BadPace, Pace};
pub use policy::Policy;
pub use profiles::ModelProfile;
pub use random_workloads::RandomWorkload;
pub use recording::{MAX_REQUESTS, RecordedBatch, RecordedRequest, Recording};
pub use rehearsed::EVENTS_PER_SECOND;
pub use report::{DELAY_BINS, ModelReport, Report, Window, mean, quantile};
pub use scenario::{BadScenario, Popularity, Scenario, Shape, UnknownPopularity};
pub use simulation::{Load, Simulation};
pub use system::System;
