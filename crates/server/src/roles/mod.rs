//! Frontends, schedulers and backends as processes of their own: the machines of `downbeat_core::roles` with sockets, clients and devices.
//!
//! | file | what |
//! |---|---|
//! | `processes.rs` | `downbeat frontend`, `downbeat scheduler`, and what makes a server of models a backend |
//! | `node.rs`, `machine.rs`, `timer.rs` | the one thread that has a machine, its connections and its timer |
//! | `wire.rs`, `tensors.rs` | frames as bytes, tensors beside them |
//! | `frontend_role.rs`, `scheduler_role.rs`, `backend_role.rs` | what each machine's decisions mean to its process |
//! | `remote_serving.rs`, `remote_models.rs`, `definition.rs` | a frontend's clients, and what it knows of models that are elsewhere |
//! | `backend_offer.rs` | what a backend has |
//! | `status.rs`, `complaints.rs` | what people are told |

mod backend_offer;
mod backend_role;
mod complaints;
mod definition;
mod frontend_role;
mod machine;
mod node;
mod processes;
mod remote_models;
mod remote_serving;
mod scheduler_role;
mod scheduler_service;
mod status;
mod tensors;
mod timer;
mod wire;

pub use processes::{BackendProcess, serve_frontend, serve_scheduler};
pub use status::{ClusterStatus, StatusBoard};
