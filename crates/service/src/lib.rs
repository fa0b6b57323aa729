//! What the parts of the server share: the service, its errors and options, metrics, reports, and threads for work.

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
pub mod unanswered;
pub mod work;
