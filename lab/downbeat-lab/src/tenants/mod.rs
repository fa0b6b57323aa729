//! Tenants under virtual time: play their requests, and judge the log.
//!
//! [`play`] runs the production scheduler with a [`Ledger`](downbeat_core::tenants::Ledger) of shares.
//! The result is a [`TenantLog`] of ends and batches. A [`TenantJudge`] knows the arrivals and this
//! log, and neither scheduler nor ledger.

mod judge;
mod play;
mod workload;

pub use judge::{BrokenTenantRule, TenantJudge, TenantVerdict};
pub use play::{Cluster, TenantBatch, TenantEnd, TenantLog, play};
pub use workload::{TenantArrival, TenantLoad, arrivals_of};
