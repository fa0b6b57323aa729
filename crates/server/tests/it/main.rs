//! The frontends over real sockets, and the way of a request behind them.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod auto;
mod classification;
mod executors;
mod exits;
mod grpc;
mod http;
mod lane_limits;
mod lanes;
mod loading;
#[allow(dead_code, reason = "the builders of the engine's tests, of which some are used here")]
#[path = "../../../engine/tests/it/model.rs"]
mod model;
mod overlap;
mod padding;
mod partitions;
mod pipelines;
mod placement;
mod preprocess;
mod rollouts;
mod rows;
mod serving;
mod shared_memory;
mod shares;
mod side_by_side;
mod staging;
mod support;
mod trial;
mod turns;
