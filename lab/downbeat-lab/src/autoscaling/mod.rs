//! Autoscaling as a closed loop: load, scheduler, advisor (Symphony §3.5), Prometheus, Kubernetes'
//! autoscaler, and pods that take time to start.
//!
//! Example: the load of 8 devices doubles. Within seconds the advisor wants 16. Prometheus sees that
//! up to 30 s later, and Kubernetes up to 15 s after that. The new pods serve 20 s later.

mod cluster;
mod hpa;
mod scenario;

pub use cluster::{LoopOptions, ScaledCluster, Second, published};
pub use hpa::{Hpa, HpaOptions};
pub use scenario::{AutoscalingScenario, BadScaling, Change, Scaled};
