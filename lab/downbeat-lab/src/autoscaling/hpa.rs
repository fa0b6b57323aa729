//! Kubernetes' HorizontalPodAutoscaler, by its published algorithm.
//!
//! Source: "Algorithm details" and "Configurable scaling behavior" of Kubernetes' page on
//! horizontal pod autoscaling, and `pkg/controller/podautoscaler/horizontal.go`. KEDA makes such an
//! autoscaler and answers its question for the metric, so that one algorithm stands for both.

use std::collections::VecDeque;

use downbeat_core::{Duration, Time};

/// The settings of an autoscaler on one external metric with an `AverageValue` of 1: the metric is
/// the number of pods.
#[derive(Clone, PartialEq, Debug)]
pub struct HpaOptions {
    /// Fewest pods (`minReplicas`).
    pub min_pods: u32,
    /// Most pods (`maxReplicas`).
    pub max_pods: u32,
    /// Nothing changes while metric and pods differ by at most this share of the pods. Default: 0.1, the
    /// flag `--horizontal-pod-autoscaler-tolerance`.
    pub tolerance: f64,
    /// The most pods that were wanted in this time stay
    /// (`behavior.scaleDown.stabilizationWindowSeconds`). Kubernetes' default is 300 s; 120 s is that of
    /// deploy/helm.
    pub down_window: Duration,
}

impl Default for HpaOptions {
    fn default() -> Self {
        HpaOptions { min_pods: 1, max_pods: 64, tolerance: 0.1, down_window: Duration::from_millis(120_000) }
    }
}

/// The time over which the default policies bound growth: by 4 pods, or by as many as there are if
/// that is more.
const GROWTH_PERIOD: Duration = Duration::from_millis(15_000);
/// The pods that may come in a [`GROWTH_PERIOD`], however few there are.
const GROWTH_PODS: u32 = 4;

/// An autoscaler with its memory.
#[derive(Clone, Debug)]
pub struct Hpa {
    options: HpaOptions,
    /// What the metric asked for, in the last `down_window`.
    asked: VecDeque<(Time, u32)>,
    /// Pods that came, by time.
    grown: VecDeque<(Time, u32)>,
}

impl Hpa {
    /// An autoscaler that has seen nothing.
    pub fn new(options: HpaOptions) -> Self {
        Hpa { options, asked: VecDeque::new(), grown: VecDeque::new() }
    }

    /// The number of pods from now on, by the number now and the metric. Without a metric nothing
    /// changes.
    pub fn sync(&mut self, now: Time, pods: u32, metric: Option<f64>) -> u32 {
        let bounds = (self.options.min_pods, self.options.max_pods);
        let Some(metric) = metric.filter(|metric| metric.is_finite() && *metric >= 0.0) else { return pods };
        let ratio = metric / f64::from(pods.max(1));
        let is_near = pods > 0 && (ratio - 1.0).abs() <= self.options.tolerance;
        // Values beyond u32 saturate.
        let asked = if is_near { pods } else { (metric - 1e-9).ceil() as u32 };
        self.asked.push_back((now, asked));
        while self.asked.front().is_some_and(|(at, _)| now.since(*at) > self.options.down_window) {
            self.asked.pop_front();
        }
        let most = self.asked.iter().map(|(_, pods)| *pods).max().unwrap_or(asked);
        let stable = if pods < asked { asked } else { pods.min(most) };
        while self.grown.front().is_some_and(|(at, _)| now.since(*at) >= GROWTH_PERIOD) {
            self.grown.pop_front();
        }
        let before = pods.saturating_sub(self.grown.iter().map(|(_, pods)| *pods).sum());
        let limit = before.saturating_add(before.max(GROWTH_PODS));
        let next = stable.min(limit.max(pods)).clamp(bounds.0, bounds.1);
        if next > pods {
            self.grown.push_back((now, next - pods));
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_millis(1000 * seconds)
    }

    #[test]
    fn the_metric_is_the_number_of_pods() {
        let mut hpa = Hpa::new(HpaOptions::default());
        assert_eq!(hpa.sync(at(0), 4, Some(7.0)), 7);
        assert_eq!(hpa.sync(at(15), 7, Some(7.2)), 7, "within the tolerance");
        assert_eq!(hpa.sync(at(30), 7, None), 7);
        assert_eq!(hpa.sync(at(45), 7, Some(f64::NAN)), 7);
    }

    #[test]
    fn a_metric_within_a_tenth_changes_nothing() {
        let mut hpa = Hpa::new(HpaOptions::default());
        assert_eq!(hpa.sync(at(0), 20, Some(21.0)), 20, "20 pods and 21 wanted: the tolerance hides it");
        assert_eq!(hpa.sync(at(15), 20, Some(23.0)), 23);
    }

    #[test]
    fn growth_is_bounded_by_four_pods_or_by_as_many() {
        let mut hpa = Hpa::new(HpaOptions::default());
        assert_eq!(hpa.sync(at(0), 1, Some(20.0)), 5);
        assert_eq!(hpa.sync(at(5), 5, Some(20.0)), 5, "the four count for 15 s");
        assert_eq!(hpa.sync(at(15), 5, Some(20.0)), 10);
        assert_eq!(hpa.sync(at(30), 10, Some(20.0)), 20);
    }

    #[test]
    fn fewer_pods_wait_until_no_more_were_wanted_for_the_window() {
        let mut hpa = Hpa::new(HpaOptions::default());
        assert_eq!(hpa.sync(at(0), 8, Some(8.0)), 8);
        for second in (15..=120).step_by(15) {
            assert_eq!(hpa.sync(at(second), 8, Some(4.0)), 8, "after {second} s");
        }
        assert_eq!(hpa.sync(at(135), 8, Some(4.0)), 4);
        assert_eq!(hpa.sync(at(150), 4, Some(0.0)), 4);
        let mut few = Hpa::new(HpaOptions { down_window: Duration::ZERO, ..HpaOptions::default() });
        assert_eq!(few.sync(at(0), 4, Some(0.0)), 1, "the bound");
    }
}
