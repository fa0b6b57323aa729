//! Says in words why there is no partition. Each reason is enough by itself.

use crate::problem::Problem;
use crate::words::{bytes, number};

/// Finds the reasons that follow from sums and need no search.
pub(crate) fn obvious(problem: &Problem) -> Vec<String> {
    let mut reasons = problem.max_rate.map_or_else(Vec::new, |limit| rate_reasons(problem, limit));
    reasons.extend(problem.max_memory.map_or_else(Vec::new, |limit| memory_reasons(problem, limit)));
    reasons.extend(problem.max_disruption.and_then(|limit| disruption_reason(problem, limit)));
    reasons
}

/// Whether `value` is larger than `limit` by more than a rounding error.
fn is_beyond(value: f64, limit: f64) -> bool {
    value - limit > 1e-9 * value.max(limit)
}

/// The models that are too busy for any sub-cluster. If there are none: the models' sum, if it is
/// larger than all sub-clusters take.
fn rate_reasons(problem: &Problem, limit: f64) -> Vec<String> {
    let mut reasons = Vec::new();
    let sub_clusters = problem.sub_clusters;
    for model in problem.models.iter().filter(|m| is_beyond(m.requests, limit)) {
        reasons.push(format!(
            "model '{}' has {} requests/s, {} more than a sub-cluster takes ({})",
            model.name,
            number(model.requests),
            number(model.requests - limit),
            number(limit)
        ));
    }
    let total: f64 = problem.models.iter().map(|m| m.requests).sum();
    let room = limit * sub_clusters as f64;
    if reasons.is_empty() && is_beyond(total, room) {
        let needed = (total / limit).ceil();
        reasons.push(format!(
            "all models have {} requests/s, {} more than {sub_clusters} sub-clusters take at {} each{}",
            number(total),
            number(total - room),
            number(limit),
            if needed.is_finite() { format!("; at least {needed} sub-clusters are needed") } else { String::new() }
        ));
    }
    reasons
}

/// The models that are too large for any device. If there are none: the models' sum, if it is
/// larger than the memory of all sub-clusters.
fn memory_reasons(problem: &Problem, limit: u64) -> Vec<String> {
    let mut reasons = Vec::new();
    let sub_clusters = problem.sub_clusters;
    for model in &problem.models {
        let needed = model.static_memory.saturating_add(model.dynamic_memory);
        if needed > limit {
            reasons.push(format!(
                "model '{}' fits on no device: the model needs {} ({} static and {} dynamic), {} more than a device \
                 has ({})",
                model.name,
                bytes(needed),
                bytes(model.static_memory),
                bytes(model.dynamic_memory),
                bytes(needed - limit),
                bytes(limit)
            ));
        }
    }
    let total = problem.models.iter().fold(0_u64, |sum, m| sum.saturating_add(m.static_memory));
    let dynamic = least_dynamic(problem);
    let needed = total.saturating_add(dynamic);
    let room = limit.saturating_mul(sub_clusters as u64);
    if reasons.is_empty() && needed > room {
        reasons.push(format!(
            "all models need {} ({} static, and at least {} dynamic), {} more than devices of {} hold in {sub_clusters} sub-clusters",
            bytes(needed),
            bytes(total),
            bytes(dynamic),
            bytes(needed - room),
            bytes(limit)
        ));
    }
    reasons
}

/// The cost of loading the new models, if it is larger than the largest disruption.
fn disruption_reason(problem: &Problem, limit: f64) -> Option<String> {
    let new = || problem.models.iter().filter(|m| m.running.is_none());
    let cost: f64 = new().filter(|m| m.loaded_in.is_empty()).map(|m| m.load_cost).sum();
    is_beyond(cost, limit).then(|| {
        format!(
            "loading the models that run nowhere yet ({}) costs {}, {} more than the largest disruption ({})",
            new().count(),
            number(cost),
            number(cost - limit),
            number(limit)
        )
    })
}

/// Bytes of dynamic memory that any partition keeps free over all sub-clusters: the largest once,
/// and the smallest on each other sub-cluster. (An empty sub-cluster leaves all of its memory
/// unused, which is no less.)
fn least_dynamic(problem: &Problem) -> u64 {
    let dynamic = || problem.models.iter().map(|m| m.dynamic_memory);
    let (least, most) = (dynamic().min().unwrap_or(0), dynamic().max().unwrap_or(0));
    least.saturating_mul(problem.sub_clusters as u64 - 1).saturating_add(most)
}

/// Words for a running assignment that breaks a limit, where more than `limit` would have to be
/// moved to mend it. Moves that cost `least` would mend it; if `proved`, no cheaper ones would.
pub(crate) fn too_many_moves(least: f64, proved: bool, limit: f64) -> String {
    let how = match proved {
        true => "the least disruption that would be enough is",
        false => "a smaller one may be enough, but this one certainly is:",
    };
    let (limit, least) = (number(limit), number(least));
    format!("the largest disruption ({limit}) allows too few moves to repair the running assignment; {how} {least}")
}

/// Words for limits that can be kept one by one, but not all at once. With `rate` more requests per
/// second and `memory` more bytes on each sub-cluster there is a partition. If `proved`, there is
/// none with less of both.
pub(crate) fn not_together(rate: f64, memory: u64, proved: bool) -> String {
    let more = match (rate > 0.0, memory > 0) {
        (true, true) => format!("{} requests/s and {} of memory", number(rate), bytes(memory)),
        (true, false) => format!("{} requests/s", number(rate)),
        _ => format!("{} of memory", bytes(memory)),
    };
    let (would, less) = if proved { ("would be", ", and with no less") } else { ("is", "") };
    format!(
        "a partition can keep each limit alone, but not all of them: there {would} a partition with {more} more for \
         each sub-cluster{less}"
    )
}

/// Joins the first five items and the number of the others, called `more`.
pub(crate) fn first_few(all: &[impl ToString], more: &str) -> String {
    let shown: Vec<String> = all.iter().take(5).map(ToString::to_string).collect();
    let rest = all.len().saturating_sub(5);
    format!("{}{}", shown.join("; "), if rest > 0 { format!("; and {rest} {more}") } else { String::new() })
}
