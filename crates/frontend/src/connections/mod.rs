//! Connections of every port: accepted up to a cap, watched, and brought to an end without losing a
//! request.
//!
//! One table ([`Connections`]) holds the connections of the ports that share a cap. Each connection
//! counts its bytes and requests (`watched.rs`). Its port looks at the counts a few times in each
//! limit (`look.rs`). The port asks a connection to end if it was idle too long, sends a head too
//! slowly, or does not read its answers. Connections and requests have no timers of their own; only
//! a request whose body is awaited has one (`body.rs`). While all connections are idle the port
//! does not look (`looks.rs`), and an idle connection over HTTP is its socket and nothing else
//! (`keep.rs`).

mod accept;
mod body;
mod counted_socket;
mod file_limit;
mod frames;
mod keep;
mod look;
mod looks;
mod open;
mod port_state;
mod protocol;
mod refusal;
mod stage;
mod stream;
mod threads;
mod tls_stream;
mod traffic;
mod traffic_metrics;
mod watched;

pub use accept::bind;
pub use accept::serve;
pub use body::{BodyError, Framing, WatchedBody};
pub use downbeat_service::options::connection_options::ConnectionOptions;
pub use file_limit::{default_max_connections, raise_file_limit, room_for_connections};
pub use keep::{Driven, keep};
pub use open::Connections;
pub use protocol::Protocol;
pub use stage::reached;
pub use stage::{Stage, Stages};
pub use stream::WatchedStream;
pub use threads::FrontendThreads;
pub use threads::beside;
pub(crate) use traffic_metrics::TrafficMetrics;
pub use watched::Answering;
