//! Bounds that no scheduler can surpass on a trace of arrivals.
//!
//! | bound | of | says |
//! |---|---|---|
//! | [`Trace::impossible`] | any models, one trace of arrivals | no schedule, not even one that knows the future, keeps every model's bad share within what is tolerated *on this trace* |
//! | [`Trace::foreseen_bad`] | one model, one trace | the other side: what a schedule that knows the future does achieve |
//!
//! `downbeat_sim` has the bounds that `simulate capacity` shows: `staggered` and `fluid`. All
//! devices are of one kind: a model's first profile counts. A profile that ends before the largest
//! batch is extended, as the scheduler does.

mod foresight;
mod prices;

pub use prices::{ModelTrace, Trace, clairvoyant};
