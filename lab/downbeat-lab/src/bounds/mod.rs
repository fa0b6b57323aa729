//! Bounds that no scheduler can surpass on a trace of arrivals.
//!
//! | bound | of | says |
//! |---|---|---|
//! | [`Trace::impossible`] | any models, one trace of arrivals | *on this trace*, every schedule drops or misses more than the tolerated share of some model's requests, even if it knows the future |
//! | [`Trace::foreseen_bad`] | one model, one trace | the share of dropped or late requests of one schedule that knows the future: this much can be reached |
//!
//! `downbeat_sim` has the bounds that `simulate capacity` shows: `staggered` and `fluid`. The
//! bounds are for devices of one kind: they use the first profile of each model. A profile that
//! ends before the largest batch is extended, as the scheduler does.

mod foresight;
mod prices;

pub use prices::{ModelTrace, Trace, clairvoyant};
