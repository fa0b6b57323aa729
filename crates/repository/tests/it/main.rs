//! Integration tests of the model repository.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod config_corpus;
mod examples;
mod hostile;
mod layout;
mod load_request;
mod normalised;
mod places;
mod warmup;
