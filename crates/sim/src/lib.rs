//! Downbeat under virtual time: production code of `downbeat-core`, emulated devices, outside checkers.
//!
//! [`Simulation`] runs a [`System`], which is the production [`Scheduler`](downbeat_core::cluster::Scheduler) or one that it is
//! compared with, against generated arrivals and devices that spend their profile's latency; a [`Checker`] judges every decision from outside. [`capacity`] searches the highest
//! rate that a cluster holds. Everything follows from the seed.

mod arrivals;
mod capacity;
mod checker;
mod cluster;
mod feed;
mod simulation;
mod system;

pub use arrivals::{ArrivalStream, Arrivals, BadArrivals};
pub use capacity::{Capacity, capacity};
pub use checker::Checker;
pub use cluster::{Cluster, Decision};
pub use simulation::{Load, ModelReport, Report, Simulation};
pub use system::System;
