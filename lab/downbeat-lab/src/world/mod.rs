//! One world under virtual time: models, the cluster scheduler, partitioned devices, clients and
//! faults. Some models are under `exclusive`, and others under a device policy of their own.
//!
//! The deciding code is the server's. A [`Cluster`](downbeat_driver::Cluster) of one shard or
//! several makes the batches of `exclusive` models and grants them the shared lanes of the devices,
//! each a slot. One thread works its mailboxes off, in an order and with delays that follow from
//! the seed. Every device has a [`DeviceScheduler`](downbeat_core::device::DeviceScheduler) for all
//! models on it, with every policy. Only the execution is emulated: a
//! [`ContendedDevice`](crate::device::ContendedDevice) stands in for each device.
//!
//! | file | what |
//! |---|---|
//! | `scenario.rs` | [`WorldScenario`]: devices, models, clients, faults, and a report of what came of them |
//! | `file.rs`, `results.rs` | a [`WorldScenario`] as a file, and the report as a table |
//! | `run.rs` | what each event and each [`Fault`] does |
//! | `mailboxes.rs` | the cluster's scheduler: its shards and matchmaker on one thread |
//! | `host.rs` | one device: its scheduler, what runs on its lanes, copies |
//! | `ledger.rs` | the outside checker of requests and grants; that of launches is [`LaunchChecker`](crate::device::LaunchChecker) |

mod file;
mod host;
mod ledger;
mod mailboxes;
mod results;
mod run;
mod scenario;

pub(crate) use mailboxes::cluster;
pub(crate) use run::{Ask, Outside, World};

pub use file::{BadWorld, WorldFile};
pub use ledger::{Ending, Failure, Ledger};
pub use mailboxes::Order;
pub use results::{DeviceRow, ModelRow, WorldResults, WorldRun};
pub use run::{Fault, Serving};
pub use scenario::{Client, ModelOutcome, Pattern, WorldDevice, WorldModel, WorldReport, WorldScenario};
