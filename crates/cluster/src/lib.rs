//! Frontends, schedulers and backends as separate processes: the state machines of
//! `downbeat_roles` with sockets, clients and devices.
//!
//! | file | contents |
//! |---|---|
//! | `processes.rs` | `downbeat frontend`, `downbeat scheduler`, and the backend part of a server of models |
//! | `node.rs`, `machine.rs`, `timer.rs`, `busy_poll.rs` | the thread of a state machine, its connections, its timer and its waits |
//! | `wire.rs`, `tensors.rs` | frames as bytes, tensors beside them |
//! | `arena.rs`, `peer_memory.rs` | large tensors in memory that other processes read: on one machine mapped, elsewhere by UCX |
//! | `ucx/` | reads by UCX, and their absence in a build without the feature `ucx` |
//! | `frontend_role.rs`, `scheduler_role.rs`, `backend_role.rs` | the effects of each state machine's decisions on its process |
//! | `remote_serving.rs`, `remote_models.rs`, `definition.rs` | a frontend's clients, and its knowledge of models that run elsewhere |
//! | `backend_offer.rs` | the slots and models that a backend offers |
//! | `planner.rs`, `model_loader.rs` | makes the plans that a scheduler asks for; loads and unloads models on its orders |
//! | `store.rs`, `membership.rs`, `etcd.rs` | epochs, plans and the list of schedulers, in etcd |
//! | `cluster_load.rs` | a cluster's load, for advice on the number of its devices |
//! | `status.rs` | the status and the metrics for people |

mod backend;
mod frontend;
mod node;
mod processes;
mod scheduler;
mod store;
mod wire;

use downbeat_roles::Message;
use tokio::io::AsyncReadExt as _;

pub use node::status::StatusBoard;
pub use processes::{BackendProcess, serve_frontend, serve_scheduler};
pub use store::etcd::etcd_server;
pub use wire::tensors::Tensors;
pub use wire::{Outbox, WireError, read_frame};

/// Sends each kind of a scheduler's request to the etcd server at this `HOST:PORT`, and reads the
/// plan of a key. For tests with arbitrary answers.
pub async fn ask_etcd(server: String) {
    let mut etcd = store::etcd::Etcd::new(vec![server]);
    if let Ok(Some(kept)) = etcd.get("downbeat/plan").await {
        let _ = serde_json::from_slice::<downbeat_roles::SubClusterPlan>(&kept.value);
    }
    let _ = etcd.list("downbeat/schedulers", 8).await;
    if let Ok(lease) = etcd.grant(std::time::Duration::from_secs(1)).await {
        let _ = etcd.replace("downbeat/epoch", 0, b"1", Some(&lease)).await;
        let _ = etcd.renew(&lease).await;
        let _ = etcd.revoke(lease).await;
    }
}

/// Reads bytes as those of a peer: its greeting, then frames with at most `most` bytes of tensors
/// each, and their model definitions. Returns the number of readable frames. For tests with
/// arbitrary bytes.
pub async fn read_as_peer(mut bytes: &[u8], most: u64) -> usize {
    let greeted = async {
        wire::read_greeting(&mut bytes).await?;
        if wire::peer_memory::Transport::of_byte(bytes.read_u8().await?) == wire::peer_memory::Transport::Ucx {
            wire::peer_memory::read_offer(&mut bytes).await?;
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
                models.iter().for_each(|model| drop(backend::definition::Definition::decode(&model.definition)));
            }
        }
    }
    frames
}
