//! Integration tests of the model repository.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod config_corpus;
mod ensembles;
mod examples;
mod file_content;
mod hostile;
mod layout;
mod load_request;
mod normalised;
mod places;
mod plain_layouts;
mod rollouts;
mod symbolic_links;
mod version_folders;
mod warmup;
