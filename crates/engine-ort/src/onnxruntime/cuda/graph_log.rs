//! The outcomes of a lane's segments, for other threads to read.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use downbeat_engine::graph_report::{GraphOutcome, GraphReport};
use downbeat_engine::tensor::Tensor;

use super::graph_table::Shapes;

/// The most outcomes in the log of a lane.
const MOST_REPORTS: usize = 4096;

/// The outcomes of a lane's segments.
pub(super) struct GraphLog {
    device: usize,
    lane: usize,
    outcomes: Mutex<BTreeMap<(usize, Vec<usize>), GraphOutcome>>,
}

/// The shapes of tensors in the format of graph tables and logs.
pub(super) fn shapes(tensors: &[Tensor]) -> Vec<usize> {
    let mut shapes = Vec::with_capacity(tensors.iter().map(|tensor| tensor.shape.len() + 1).sum());
    for tensor in tensors {
        shapes.push(tensor.shape.len());
        shapes.extend_from_slice(&tensor.shape);
    }
    shapes
}

impl GraphLog {
    /// The log of the lane with the number `lane` in its model, on a device.
    pub(super) fn new(device: usize, lane: usize) -> Self {
        GraphLog { device, lane, outcomes: Mutex::default() }
    }

    /// Notes the outcome of a segment for inputs of these shapes. Empty shapes mean any.
    pub(super) fn note(&self, segment: usize, shapes: &Shapes, outcome: GraphOutcome) {
        tracing::debug!(device = self.device, lane = self.lane, segment, ?shapes, ?outcome, "a segment and its graph");
        let mut outcomes = self.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        outcomes.insert((segment, shapes.to_vec()), outcome);
        while outcomes.len() > MOST_REPORTS {
            outcomes.pop_first();
        }
    }

    /// Removes an outcome that is no longer true.
    pub(super) fn forget(&self, segment: usize, shapes: &Shapes) {
        self.outcomes.lock().unwrap_or_else(PoisonError::into_inner).remove(&(segment, shapes.to_vec()));
    }

    /// All outcomes as reports.
    pub(super) fn reports(&self) -> Vec<GraphReport> {
        let outcomes = self.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        let report = |((segment, shapes), outcome): (&(usize, Vec<usize>), &GraphOutcome)| {
            let mut apart = Vec::new();
            let mut rest = shapes.as_slice();
            while let Some((axes, after)) = rest.split_first() {
                let (shape, after) = after.split_at(*axes.min(&after.len()));
                apart.push(shape.to_vec());
                rest = after;
            }
            GraphReport {
                device: self.device,
                lane: self.lane,
                segment: *segment,
                shapes: apart,
                outcome: outcome.clone(),
            }
        };
        outcomes.iter().map(report).collect()
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::tensor::DataType;

    use super::*;

    #[test]
    fn shapes_come_back_as_they_were() {
        let tensor =
            |shape: &[usize]| Tensor { datatype: DataType::Fp32, shape: shape.to_vec(), data: Default::default() };
        let of = [vec![2, 3], vec![], vec![7]];
        let flat = shapes(&[tensor(&of[0]), tensor(&of[1]), tensor(&of[2])]);
        let log = GraphLog::new(1, 2);
        let refused = GraphOutcome::Refused { reason: "a test".into() };
        log.note(3, &flat, refused.clone());
        log.note(4, &[], refused.clone());
        let reports = log.reports();
        let first = GraphReport { device: 1, lane: 2, segment: 3, shapes: of.to_vec(), outcome: refused };
        assert_eq!((reports.len(), &reports[0], &reports[1].shapes), (2, &first, &Vec::new()));
        log.forget(3, &flat);
        assert_eq!(log.reports().len(), 1);
        for segment in 0..2 * MOST_REPORTS {
            log.note(segment, &[], first.outcome.clone());
        }
        assert_eq!(log.reports().len(), MOST_REPORTS);
    }
}
