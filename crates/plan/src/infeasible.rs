//! Why there is no partition, in words.

use std::fmt;

use crate::evaluation::Violation;
use crate::problem::Problem;
use crate::words::{bytes, number};

/// A reason why a problem has no partition that keeps its limits. Each is enough by itself.
#[derive(Clone, PartialEq, Debug)]
pub enum Reason {
    /// A model alone has more requests than a sub-cluster takes.
    ModelRate {
        /// Which.
        model: String,
        /// Its requests per second.
        rate: f64,
        /// The limit.
        limit: f64,
    },
    /// A model alone does not fit into a device.
    ModelMemory {
        /// Which.
        model: String,
        /// Bytes of its static memory.
        static_memory: u64,
        /// Bytes of its dynamic memory.
        dynamic_memory: u64,
        /// The limit.
        limit: u64,
    },
    /// All models together have more requests than all sub-clusters take.
    TotalRate {
        /// Requests per second in all.
        total: f64,
        /// What one sub-cluster takes.
        limit: f64,
        /// How many there are.
        sub_clusters: usize,
    },
    /// All models together need more memory than there is.
    TotalMemory {
        /// Bytes of static memory in all.
        total: u64,
        /// Bytes of dynamic memory that sub-clusters have to keep free at least, all together.
        dynamic: u64,
        /// What one device has.
        limit: u64,
        /// How many sub-clusters there are.
        sub_clusters: usize,
    },
    /// Models that run nowhere have to be loaded, and that alone costs too much.
    NewModels {
        /// How many.
        models: usize,
        /// What loading them costs.
        cost: f64,
        /// The limit.
        limit: f64,
    },
    /// The running assignment breaks a limit, and too much would have to be moved to mend it.
    Disruption {
        /// The least cost that would do, as far as it is known.
        least: Least,
        /// The limit.
        limit: f64,
    },
    /// No single limit is to blame: the models do not divide so that all limits are kept (proved by the solver).
    Together {
        /// The least that `Rmax` would have to be raised by in a partition with the least overrun, requests per second.
        rate: f64,
        /// The same of `Smax`, bytes.
        memory: u64,
        /// Whether less of both together would not do.
        exact: bool,
    },
}

/// The least value of something.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Least {
    /// It is this.
    Exactly(f64),
    /// This would do; whether less would is not known.
    AtMost(f64),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::ModelRate { model, rate, limit } => write!(
                f,
                "model '{model}' has {} requests/s, {} more than a sub-cluster takes ({})",
                number(*rate),
                number(rate - limit),
                number(*limit)
            ),
            Reason::ModelMemory { model, static_memory, dynamic_memory, limit } => write!(
                f,
                "model '{model}' fits nowhere: it needs {} ({} static and {} dynamic), {} more than a device has ({})",
                bytes(static_memory.saturating_add(*dynamic_memory)),
                bytes(*static_memory),
                bytes(*dynamic_memory),
                bytes(static_memory.saturating_add(*dynamic_memory) - limit),
                bytes(*limit)
            ),
            Reason::TotalRate { total, limit, sub_clusters } => {
                let room = limit * *sub_clusters as f64;
                write!(
                    f,
                    "all models have {} requests/s, {} more than {sub_clusters} sub-clusters take at {} each",
                    number(*total),
                    number(total - room),
                    number(*limit)
                )?;
                match (total / limit).ceil() {
                    needed if needed.is_finite() => write!(f, "; at least {needed} sub-clusters are needed"),
                    _ => Ok(()),
                }
            }
            Reason::TotalMemory { total, dynamic, limit, sub_clusters } => {
                let room = limit.saturating_mul(*sub_clusters as u64);
                write!(
                    f,
                    "all models need {} ({} static, and at least {} dynamic), {} more than devices of {} hold in \
                     {sub_clusters} sub-clusters",
                    bytes(total.saturating_add(*dynamic)),
                    bytes(*total),
                    bytes(*dynamic),
                    bytes(total.saturating_add(*dynamic).saturating_sub(room)),
                    bytes(*limit)
                )
            }
            Reason::NewModels { models, cost, limit } => write!(
                f,
                "loading the models that run nowhere yet ({models}) costs {}, {} more than the largest disruption ({})",
                number(*cost),
                number(cost - limit),
                number(*limit)
            ),
            Reason::Disruption { least, limit } => {
                let (least, how) = match least {
                    Least::Exactly(least) => (least, "the least disruption that would do is"),
                    Least::AtMost(least) => (least, "less than this may do, but this would:"),
                };
                write!(
                    f,
                    "the running assignment cannot be mended within the largest disruption ({}); {how} {}",
                    number(*limit),
                    number(*least)
                )
            }
            Reason::Together { rate, memory, exact } => {
                f.write_str("each limit can be kept, but not all at once: ")?;
                let would = if *exact { "there would be a partition with" } else { "there is a partition with" };
                f.write_str(would)?;
                match (*rate > 0.0, *memory > 0) {
                    (true, true) => {
                        write!(f, " {} requests/s and {} of memory more", number(*rate), bytes(*memory))
                    }
                    (true, false) => write!(f, " {} requests/s more", number(*rate)),
                    _ => write!(f, " {} of memory more", bytes(*memory)),
                }?;
                f.write_str(" for each sub-cluster")?;
                if *exact { f.write_str(", and with no less") } else { Ok(()) }
            }
        }
    }
}

/// What can be told from sums: reasons that need no search.
pub(crate) fn obvious(problem: &Problem) -> Vec<Reason> {
    let mut reasons = Vec::new();
    let beyond = |value: f64, limit: f64| value - limit > 1e-9 * value.max(limit);
    if let Some(limit) = problem.max_rate {
        for model in problem.models.iter().filter(|m| beyond(m.rate, limit)) {
            reasons.push(Reason::ModelRate { model: model.name.clone(), rate: model.rate, limit });
        }
        let total: f64 = problem.models.iter().map(|m| m.rate).sum();
        if reasons.is_empty() && beyond(total, limit * problem.sub_clusters as f64) {
            reasons.push(Reason::TotalRate { total, limit, sub_clusters: problem.sub_clusters });
        }
    }
    if let Some(limit) = problem.max_memory {
        let mut alone = false;
        for model in &problem.models {
            let (static_memory, dynamic_memory) = (model.static_memory, model.dynamic_memory);
            if static_memory.saturating_add(dynamic_memory) > limit {
                alone = true;
                reasons.push(Reason::ModelMemory { model: model.name.clone(), static_memory, dynamic_memory, limit });
            }
        }
        let total = problem.models.iter().fold(0_u64, |sum, m| sum.saturating_add(m.static_memory));
        let dynamic = least_dynamic(problem);
        let room = limit.saturating_mul(problem.sub_clusters as u64);
        if !alone && total.saturating_add(dynamic) > room {
            reasons.push(Reason::TotalMemory { total, dynamic, limit, sub_clusters: problem.sub_clusters });
        }
    }
    if let Some(limit) = problem.max_disruption {
        let new = || problem.models.iter().filter(|m| m.running.is_none());
        let cost: f64 = new().map(|m| m.load_cost).sum();
        if beyond(cost, limit) {
            reasons.push(Reason::NewModels { models: new().count(), cost, limit });
        }
    }
    reasons
}

/// Dynamic memory that any partition keeps free, over all sub-clusters: the largest once, and the smallest on each other
/// sub-cluster (an empty one leaves all of its memory unused, which is no less).
fn least_dynamic(problem: &Problem) -> u64 {
    let dynamic = || problem.models.iter().map(|m| m.dynamic_memory);
    let (least, most) = (dynamic().min().unwrap_or(0), dynamic().max().unwrap_or(0));
    least.saturating_mul(problem.sub_clusters as u64 - 1).saturating_add(most)
}

/// No partition was found, and none was proved impossible.
pub(crate) fn in_words(violations: &[Violation]) -> String {
    let words: Vec<String> = violations.iter().take(5).map(Violation::to_string).collect();
    let more = violations.len().saturating_sub(5);
    let rest = if more > 0 { format!("; and {more} more") } else { String::new() };
    format!("{}{rest}", words.join("; "))
}
