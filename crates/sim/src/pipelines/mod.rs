//! Pipelines under virtual time: play arrivals, judge the ends, search the capacity.
//!
//! [`play`] runs a [`Flow`](downbeat_core::pipeline::Flow) with any
//! [`Division`](downbeat_core::pipeline::Division), and [`play_rehearsed`] runs it with weights that
//! are rehearsed meanwhile. The result is a log of ends alone. A [`PipelineJudge`] counts goodput
//! from this log and from the arrivals; it knows no scheduler and no division.

mod judge;
mod load;
mod play;

pub use judge::{BrokenRule, PipelineJudge, Verdict};
pub use load::{LoadSearch, at_load};
pub use play::{Rehearsing, play, play_rehearsed, play_while};
