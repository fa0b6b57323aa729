//! The HTTP frontend: Open Inference Protocol v2 with Triton's extensions, over any
//! [`Service`](downbeat_service::service::Service).
//!
//! [`serve`] accepts connections and answers them until told to stop; [`checked_router`] offers the
//! same protocol as an axum router, for use in another server (`examples/embed`). In [`serve`] inference requests bypass
//! the router, because the router would add to their cost.

mod answer;
mod autoscale;
mod body;
mod cluster;
mod docs_page;
mod encoding;
mod generate;
mod health;
mod host_names;
mod infer;
mod live;
mod metadata;
mod needs;
mod openapi;
mod path;
mod repository;
mod rollout;
mod router;
mod scheduler;
mod scope;
mod sender;
mod serve;
mod settings;
mod shared_memory;
mod slashes;
mod state;
mod timeline;
mod ui_page;
mod what_if;

pub(crate) use health::{live, ready};
pub(crate) use router::{admitted, health_routes, health_routes_with_page};
pub use router::{checked_router, router};
pub(crate) use sender::Sender;
pub use serve::serve;
pub(crate) use serve::{Routed, serve_answers};
pub(crate) use slashes::with_slashes;
pub use state::{HttpOptions, HttpState};
