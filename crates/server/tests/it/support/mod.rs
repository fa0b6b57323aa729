//! What the frontends' tests share.

pub mod echo_service;
