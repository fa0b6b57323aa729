//! Tests of all engines through their trait.

mod answers;
mod batches;
mod cores;
mod engines;
mod files;
mod finding;
mod gpu;
mod gpu_device;
mod installing;
mod isolation;
#[path = "../../../engine/tests/it/model.rs"]
mod model;
mod preflight;
mod quantised;
mod rewrites;
mod segments;
#[path = "../../../engine/tests/it/support.rs"]
mod support;
