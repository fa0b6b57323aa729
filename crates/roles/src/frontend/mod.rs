//! The frontend of a cluster, and the requests that it holds.

mod expiries;
mod frontend_node;
mod numbered;
mod open_requests;

pub use frontend_node::{FrontendNode, FrontendOptions, FrontendOutput, OrderFailure, RequestEnd};
pub use open_requests::{NewRequest, Way};
