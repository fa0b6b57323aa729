//! The processes of a cluster: the state machines of `downbeat_roles` with sockets, clients and
//! devices.
//!
//! | module | has |
//! |---|---|
//! | `processes` | `downbeat frontend`, `downbeat scheduler`, and the backend part of a server of models |
//! | `node` | the thread of a state machine: its connections, timer, waits and status; the door, where peers prove themselves |
//! | `secrets` | the secrets that peers prove |
//! | `wire` | greetings and frames as bytes, and large tensors in memory that other processes read: mapped, or by UCX |
//! | `frontend` | a frontend's clients, and the models that run elsewhere |
//! | `backend` | the slots and models that a backend offers, and the loads that a scheduler orders |
//! | `scheduler` | a scheduler, the plans that it asks for, and the load of the cluster |
//! | `store` | epochs, plans and the list of schedulers, in etcd |

mod backend;
mod frontend;
mod node;
mod processes;
mod scheduler;
mod secrets;
mod store;
mod view;
mod wire;

use downbeat_roles::{Hello, Message, NodeId, PROTOCOL, Role};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};
use wire::greeting::Side;

pub use node::status::StatusBoard;
pub use processes::{BackendProcess, serve_frontend, serve_scheduler};
pub use secrets::add_secret;
pub use store::etcd::etcd_server;
pub use wire::read_budget::ReadBudget;
pub use wire::tensors::Tensors;
pub use wire::{Outbox, WireError, read_frame};

/// Sends each kind of a scheduler's request to the etcd server with this URL, and reads the
/// plan of a key. For tests with arbitrary answers.
pub async fn ask_etcd(server: String) {
    let mut etcd = store::etcd::Etcd::new(vec![server], store::etcd_access::EtcdAccess::default());
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

/// Greets a listener of a cluster without a secret, and returns its introduction. For simulated
/// peers.
///
/// # Errors
/// If the listener does not greet.
pub async fn greet_listener(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    me: &Hello,
) -> Result<Hello, WireError> {
    wire::greeting::greet(stream, Side::Dialler, me, &secrets::Secrets::default()).await
}

/// Reads the bytes of a peer in a cluster without a secret: a greeting, then frames with at most
/// `most` bytes of tensors each. The frames' model definitions are decoded, too. Returns the number
/// of readable frames. For tests with arbitrary bytes.
pub async fn read_as_peer(bytes: &[u8], most: u64) -> usize {
    let me = || Hello {
        protocol: PROTOCOL,
        node: NodeId(0),
        role: Role::Backend,
        name: String::new(),
        address: String::new(),
    };
    let greeted = async |side| {
        let mut both = tokio::io::join(bytes, tokio::io::sink());
        wire::greeting::greet(&mut both, side, &me(), &secrets::Secrets::default()).await?;
        let mut bytes = both.into_inner().0;
        if wire::peer_memory::Transport::of_byte(bytes.read_u8().await?) == wire::peer_memory::Transport::Ucx {
            wire::peer_memory::read_offer(&mut bytes).await?;
            bytes.read_u8().await?;
        }
        Ok::<_, wire::WireError>(bytes)
    };
    // The bytes are those of either end.
    let dialled = greeted(Side::Listener).await;
    let Ok(mut bytes) = (if dialled.is_ok() { dialled } else { greeted(Side::Dialler).await }) else { return 0 };
    let (mut scratch, mut frames, budget) = (Vec::new(), 0, ReadBudget::new(most));
    while let Ok(frame) = wire::read_frame(&mut bytes, &mut scratch, &budget, None).await {
        frames += 1;
        for message in frame.into_iter().flat_map(|frame| frame.messages) {
            if let Message::Models(models) = message {
                models.iter().for_each(|model| drop(backend::definition::Definition::decode(&model.definition)));
            }
        }
    }
    frames
}
