//! Nexus' division of an SLO among the steps of a query.

use downbeat_core::pipeline::Shape;
use downbeat_core::{Duration, LatencyProfile};

/// The SLO is divided in so many parts.
const PARTS: usize = 60;

/// By step: the part of the SLO that needs the fewest devices (Nexus, SOSP '19 §4.2).
///
/// A step with the budget `t` runs batches of `max b: 2 l(b) <= t` and needs `rate l(b) / b`
/// devices. A dynamic program over the levels of the graph finds the least sum. All steps of a level
/// have the level's budget; a level has the steps with equally many steps before them. For chains,
/// and for forks of single steps, that is the exact optimum of the grid.
pub fn nexus_budgets(shape: &Shape, profiles: &[&LatencyProfile], rate: f64, slo: Duration) -> Vec<Duration> {
    let mut level = vec![0usize; shape.len()];
    for &step in shape.order() {
        level[step] = shape.steps()[step].after.iter().map(|first| level[*first] + 1).max().unwrap_or(0);
    }
    let levels = level.iter().max().map_or(0, |last| last + 1);
    let time = |parts: usize| Duration::from_secs_f64(slo.as_secs_f64() * parts as f64 / PARTS as f64);
    let cost = |at: usize, parts: usize| -> f64 {
        let steps = (0..shape.len()).filter(|step| level[*step] == at);
        steps.map(|step| devices(profiles[step], rate, time(parts))).sum()
    };
    // least[l][p]: the devices of the first `l` levels with `p` parts, and the last level's parts.
    let mut least = vec![vec![(f64::INFINITY, 0usize); PARTS + 1]; levels + 1];
    least[0][0].0 = 0.0;
    for at in 0..levels {
        let costs: Vec<f64> = (0..=PARTS).map(|parts| if parts == 0 { 1e12 } else { cost(at, parts) }).collect();
        for used in 0..=PARTS {
            for parts in 0..=PARTS - used {
                let sum = least[at][used].0 + costs[parts];
                if sum < least[at + 1][used + parts].0 {
                    least[at + 1][used + parts] = (sum, parts);
                }
            }
        }
    }
    // All of the SLO is given out.
    let mut left = PARTS;
    let mut given = vec![0; levels];
    for at in (0..levels).rev() {
        given[at] = least[at + 1][left].1;
        left -= given[at];
    }
    (0..shape.len()).map(|step| time(given[level[step]])).collect()
}

/// Devices that keep up with `rate` within the budget. A budget below `2 l(1)` serves nothing: a
/// request may have to wait for the batch before it.
fn devices(profile: &LatencyProfile, rate: f64, budget: Duration) -> f64 {
    let half = Duration::from_nanos(budget.as_nanos() / 2);
    if half < profile.latency(1) {
        return 1e9 * profile.latency(1).as_secs_f64() / half.as_secs_f64().max(1e-9);
    }
    let batch = profile.largest_up_to(profile.max_batch(), half).max(1);
    rate * profile.latency(batch).as_secs_f64() / f64::from(batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_division_needs_the_fewest_devices_of_all() {
        let (strong, weak) =
            (LatencyProfile::linear_ms(1.0, 10.0, 64).unwrap(), LatencyProfile::linear_ms(2.0, 0.1, 64).unwrap());
        let slo = Duration::from_millis(120);
        let budgets = nexus_budgets(&Shape::chain(2), &[&strong, &weak], 100.0, slo);
        assert_eq!(budgets[0] + budgets[1], slo);
        let sum = |first: Duration| devices(&strong, 100.0, first) + devices(&weak, 100.0, slo.saturating_sub(first));
        let best = (1..PARTS as u64).map(|part| sum(Duration::from_millis(2 * part))).fold(f64::INFINITY, f64::min);
        assert!((sum(budgets[0]) - best).abs() < 1e-9);
        assert!(budgets[0] > budgets[1], "more time brings the first step larger batches");
    }
}
