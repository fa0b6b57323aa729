//! Frontends, drivers (the only clock), model life cycle, metrics.

pub mod error;
pub mod options;
pub mod service;
