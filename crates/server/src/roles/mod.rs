//! Frontends, schedulers and backends as processes of their own: the machines of `downbeat_core::roles` with sockets, clients and devices.
//!
//! | file | what |
//! |---|---|
//! | `processes.rs` | `downbeat frontend`, `downbeat scheduler`, and what makes a server of models a backend |
//! | `node.rs`, `machine.rs`, `timer.rs`, `busy_poll.rs` | the one thread that has a machine, its connections and its timer, and how it waits |
//! | `wire.rs`, `tensors.rs` | frames as bytes, tensors beside them |
//! | `arena.rs`, `peer_memory.rs` | large tensors in memory that other processes read: processes of one machine, and by UCX those of others |
//! | `ucx/` | reads by UCX, and their absence in a build without the feature `ucx` |
//! | `frontend_role.rs`, `scheduler_role.rs`, `backend_role.rs` | what each machine's decisions mean to its process |
//! | `remote_serving.rs`, `remote_models.rs`, `definition.rs` | a frontend's clients, and what it knows of models that are elsewhere |
//! | `backend_offer.rs` | what a backend has |
//! | `planner.rs`, `model_loader.rs` | plans that a scheduler asks for; models that a backend is told to have |
//! | `store.rs`, `membership.rs`, `etcd.rs` | epochs that are allotted, plans that are kept, and schedulers that are found, by etcd |
//! | `cluster_load.rs` | what a cluster's load is, for advice on how many devices it should have |
//! | `status.rs` | what people are told |

mod arena;
mod backend_offer;
mod backend_role;
mod busy_poll;
mod cluster_load;
mod definition;
mod etcd;
mod frontend_role;
mod machine;
mod membership;
mod model_loader;
mod node;
mod peer_memory;
mod planner;
mod processes;
mod remote_models;
mod remote_serving;
mod scheduler_role;
mod scheduler_service;
mod status;
mod store;
mod tensors;
mod timer;
#[cfg_attr(not(feature = "ucx"), path = "ucx/absent.rs")]
mod ucx;
mod wire;

use downbeat_core::roles::Message;
use tokio::io::AsyncReadExt as _;

pub use etcd::etcd_server;
pub use processes::{BackendProcess, serve_frontend, serve_scheduler};
pub use status::{ClusterStatus, StatusBoard};
pub use tensors::Tensors;
pub use wire::{Outbox, WireError, read_frame};

/// Asks the etcd server at this `HOST:PORT` what a scheduler asks, and reads the plan that a key has. For tests with any answers.
pub async fn ask_etcd(server: String) {
    let mut etcd = etcd::Etcd::new(vec![server]);
    if let Ok(Some(kept)) = etcd.get("downbeat/plan").await {
        let _ = serde_json::from_slice::<downbeat_core::roles::SubClusterPlan>(&kept.value);
    }
    let _ = etcd.list("downbeat/schedulers", 8).await;
    if let Ok(lease) = etcd.grant(std::time::Duration::from_secs(1)).await {
        let _ = etcd.replace("downbeat/epoch", 0, b"1", Some(&lease)).await;
        let _ = etcd.renew(&lease).await;
        let _ = etcd.revoke(lease).await;
    }
}

/// Reads bytes as what a peer sends: who it is, then frames, with at most `most` bytes of tensors each, and what they say of models. Gives how many frames could be read. For whoever tries this with
/// anything.
pub async fn read_as_peer(mut bytes: &[u8], most: u64) -> usize {
    let greeted = async {
        wire::read_greeting(&mut bytes).await?;
        if peer_memory::Transport::of_byte(bytes.read_u8().await?) == peer_memory::Transport::Ucx {
            peer_memory::read_offer(&mut bytes).await?;
            bytes.read_u8().await?;
        }
        Ok::<_, wire::WireError>(())
    };
    if greeted.await.is_err() {
        return 0;
    }
    let (mut scratch, mut frames) = (Vec::new(), 0);
    while let Ok(frame) = wire::read_frame(&mut bytes, &mut scratch, most, None).await {
        frames += 1;
        for message in frame.into_iter().flat_map(|frame| frame.messages) {
            if let Message::Models(models) = message {
                models.iter().for_each(|model| drop(definition::Definition::decode(&model.definition)));
            }
        }
    }
    frames
}
