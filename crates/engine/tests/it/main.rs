//! Tests of the engines through their trait.

mod answers;
mod batches;
mod buffers;
mod cores;
mod emulation;
mod files;
mod finding;
mod gpu;
mod gpu_device;
mod installing;
mod isolation;
mod model;
mod plans;
mod preflight;
mod quantised;
mod rewrites;
mod segments;
mod states;
mod support;
