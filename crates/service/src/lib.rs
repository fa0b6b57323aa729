//! The lowest part of the server: what its other parts share.
//!
//! | module | has |
//! |---|---|
//! | [`service`] | the trait `Service`, which frontends know, and its requests and answers |
//! | [`error`], [`refusal`], [`unanswered`] | errors with their HTTP and gRPC status, refused requests, and why a request got no result |
//! | [`options`] | the options of a server, as plain data |
//! | [`metrics`] | metrics, statistics, and models in trouble |
//! | [`report`] | reports on devices, policies, the scheduler and the cluster |
//! | [`work`] | threads for work that a connection must not wait for |
//! | [`answers`] | the answers to one request, as many as the model gives |
//! | [`client`], [`budget`], [`memory`] | the sender of a request, the bytes of requests in flight, the memory of the machine |
//! | [`traces`] | traces of requests, their settings, and the access log |
//! | [`tenants`] | the tenants' parts of the devices' time |
//! | [`clock`], [`logging`], [`start`] | the only clock that decides, the log, and the start of a process |
//!
//! No module here names a part of the server above.

pub mod answers;
pub mod budget;
pub mod classification;
pub mod client;
pub mod clock;
pub mod error;
pub mod logging;
pub mod memory;
pub mod metrics;
pub mod options;
pub mod refusal;
pub mod report;
pub mod service;
pub mod start;
pub mod tenants;
pub mod traces;
pub mod unanswered;
pub mod work;
