//! Reports of the segments that run as CUDA graphs, and of the reasons why other segments run
//! without one.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::Duration;

/// The outcome for a segment on a lane, for inputs of some shapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphReport {
    /// Number of the device among those that the engine uses, from 0.
    pub device: usize,
    /// Number of the lane among the model's lanes, in the order in which they were made, from 0.
    pub lane: usize,
    /// Number of the segment in the model, from 0.
    pub segment: usize,
    /// The shapes of the segment's inputs; empty: any shapes.
    pub shapes: Vec<Vec<usize>>,
    /// Whether the segment runs as a graph.
    pub outcome: GraphOutcome,
}

/// Whether a segment runs as a graph. Times are medians on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GraphOutcome {
    /// The segment runs as a graph.
    Recorded {
        /// The nodes of the graph.
        nodes: GraphNodes,
        /// The time of a run without the graph.
        plain: Duration,
        /// The time of a run with the graph, the copies of the inputs included.
        graph: Duration,
    },
    /// The segment could run as a graph, and is slower that way.
    Slower {
        /// As in [`GraphOutcome::Recorded`].
        nodes: GraphNodes,
        /// The time of a run without the graph.
        plain: Duration,
        /// The time of a run with the graph.
        graph: Duration,
    },
    /// The segment cannot run as a graph, or is not allowed to.
    Refused {
        /// Why, in words.
        reason: String,
    },
}

/// The nodes of a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GraphNodes {
    /// All nodes: kernels, copies, fills, allocations and frees of memory.
    pub count: usize,
    /// Nodes that allocate memory, which the graph frees again, as cuBLAS does for its workspace.
    pub allocations: usize,
    /// The number of blocks of each kernel, in the order of the driver.
    pub grids: Vec<u64>,
}

/// The reports of a model with `segments` segments in a line. The line has the number that run as
/// graphs, and the reasons why others run without a graph. `None` if there are no reports.
pub fn summary(segments: usize, reports: &[GraphReport]) -> Option<String> {
    if reports.is_empty() {
        return None;
    }
    let (mut recorded, mut shapes) = (BTreeSet::new(), BTreeSet::new());
    let mut reasons = BTreeMap::<&str, usize>::new();
    for report in reports {
        let reason = match &report.outcome {
            GraphOutcome::Recorded { .. } => {
                recorded.insert(report.segment);
                shapes.insert((report.segment, &report.shapes));
                continue;
            }
            GraphOutcome::Slower { .. } => "it is slower as one",
            GraphOutcome::Refused { reason } => reason,
        };
        *reasons.entry(reason).or_default() += 1;
    }
    let mut line = format!("{} of {segments} segments run as CUDA graphs", recorded.len());
    if !shapes.is_empty() {
        line += &format!(", for {} shapes in all", shapes.len());
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    for (at, (reason, count)) in reasons.into_iter().enumerate() {
        line += if at == 0 { "; not, on a lane for some shape: " } else { ", " };
        line += &format!("{count} times as {reason}");
    }
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_counts_segments_and_reasons() {
        let times = Duration::from_micros(5);
        let nodes = GraphNodes::default();
        let recorded = GraphOutcome::Recorded { nodes: nodes.clone(), plain: times, graph: times };
        let slower = GraphOutcome::Slower { nodes, plain: times, graph: times };
        let refused = GraphOutcome::Refused { reason: "graphs are off".into() };
        let report = |lane, segment, rows: usize, outcome: &GraphOutcome| GraphReport {
            device: 0,
            lane,
            segment,
            shapes: vec![vec![rows, 4]],
            outcome: outcome.clone(),
        };
        assert_eq!(summary(2, &[]), None);
        let reports = [
            report(0, 0, 1, &recorded),
            report(1, 0, 1, &recorded),
            report(0, 0, 2, &recorded),
            report(0, 0, 4, &slower),
            report(0, 1, 1, &refused),
            report(1, 1, 1, &refused),
        ];
        let line = "1 of 2 segments run as CUDA graphs, for 2 shapes in all; not, on a lane for some shape: 2 times as graphs are off, 1 times as it is slower as one";
        assert_eq!(summary(2, &reports).as_deref(), Some(line));
        assert_eq!(
            summary(1, &reports[..1]).as_deref(),
            Some("1 of 1 segments run as CUDA graphs, for 1 shapes in all")
        );
    }
}
