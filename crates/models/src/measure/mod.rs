//! Measures the latencies of models, and keeps the profiles.

pub(crate) mod auto_profiler;
pub mod giving_way;
pub mod group_profiler;
pub(crate) mod lane_profiler;
pub(crate) mod measuring;
pub(crate) mod measuring_time;
pub mod mix_profiler;
pub mod pair_profiler;
pub mod profile_store;
pub mod profiler;
pub mod remeasuring;
pub mod sampler;
pub(crate) mod segment_profiler;
pub mod share_profiler;
pub(crate) mod sized_cases;
