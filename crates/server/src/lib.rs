//! The server, assembled from its parts: a process that serves its own clients, and the backend of
//! a cluster. The parts are crates of their own: `service`, `host`, `models`, `frontend`, `cluster`.

mod serve;

pub use downbeat_cluster::{add_secret, etcd_server, serve_frontend, serve_scheduler};
pub use downbeat_frontend::access::{NewKey, Scope, add_key};
pub use downbeat_frontend::own_file::new_secret;
pub use downbeat_models::load::warm_up::{Trial, find_answer};
pub use downbeat_service::logging::{check_level, escaped, last_words};
pub use downbeat_service::memory::{set_release, set_release_code};
pub use serve::{open_models, serve, serve_backend};
