//! The tests and measurements of Downbeat: papers' figures, published systems, emulated GPUs,
//! random workloads and faulty networks.
//!
//! No user needs this crate to serve or to plan, so it has a program of its own, `downbeat-lab`. It
//! runs the production code of `downbeat-core` through `downbeat-sim`.
//!
//! | module | has |
//! |---|---|
//! | [`device`] | emulated GPUs, device policies on them, and the figures of E²bird, DVABatch, GSLICE and Abacus |
//! | [`experiment`] | experiments of the cluster scheduler from files, such as Symphony's figures |
//! | [`baseline`] | the published schedulers: Clockwork, Nexus, Shepherd |
//! | [`bounds`] | what no scheduler can surpass on a trace of arrivals |
//! | [`world`] | devices with partitions, models with any policy, and faults |
//! | [`network`] | frontends, schedulers and backends apart, on wires that lose and delay |
//! | [`slots`] | which division of devices into slots serves the highest load |
//! | [`partitions`] | random workloads for `downbeat plan`, and partitions by chance |
//! | [`pair_report`] | how two real models slow each other down |
//! | [`judgement`] | a policy beside all others on random workloads |
//! | [`tenants`] | shares of device time under bursts, and their judge |
//! | [`autoscaling`] | devices that come and go as Kubernetes' autoscaler says |
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod autoscaling;
pub mod baseline;
pub mod bounds;
mod commands;
pub mod device;
pub mod experiment;
pub mod judgement;
pub mod network;
mod numbers;
pub mod pair_report;
pub mod partitions;
pub mod policy;
pub mod random_workloads;
pub mod shared_devices;
pub mod slots;
pub mod tenants;
pub mod world;

pub use commands::main;
