//! Downbeat under virtual time: production code of `downbeat-core`, emulated devices, outside checkers.
//!
//! [`Simulation`] runs the production [`Scheduler`](downbeat_core::cluster::Scheduler) against generated arrivals and devices
//! that spend their profile's latency; a [`Checker`] judges every decision from outside. [`capacity`] searches the highest
//! rate that a cluster holds. Everything follows from the seed.

mod arrivals;
mod capacity;
mod checker;
mod cluster;
mod simulation;

pub use arrivals::{ArrivalStream, Arrivals, BadArrivals};
pub use capacity::{Capacity, capacity};
pub use checker::Checker;
pub use cluster::{Cluster, Decision};
pub use simulation::{Load, ModelReport, Report, Simulation};
