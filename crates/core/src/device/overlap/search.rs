//! The largest group of operators that lets the most urgent request keep its deadline.

use super::group::GroupPart;
use super::margin::Margins;
use super::multi_way::multi_way;
use super::predictor::Predictor;
use crate::device::launch::SegmentRange;
use crate::time::Duration;

/// The search for a group that fits into the headroom of the most urgent request by prediction. The
/// group holds all operators of this request, then operators of the others in their order (Abacus
/// §6.2, figure 12). Whole requests are added first, then operators of the first request that does
/// not fit whole (§6.3).
#[derive(Debug)]
pub struct GroupSearch<'a, P> {
    /// The predictor of group latencies.
    pub predictor: &'a P,
    /// The margins of the predictions; `None`: predictions are trusted as they are.
    pub margins: Option<&'a Margins>,
    /// The number of groups in one call of the predictor.
    pub ways: usize,
}

/// The result of a search.
#[derive(Clone, PartialEq, Debug)]
pub struct Found {
    /// The group, the most urgent request first; empty: that request does not fit even alone.
    pub parts: Vec<GroupPart>,
    /// The predicted latency; `None`: there is no group, or the predictor cannot tell (for one
    /// request).
    pub predicted: Option<Duration>,
    /// The number of calls of the predictor.
    pub passes: u32,
}

impl<P: Predictor> GroupSearch<'_, P> {
    /// Finds a group among the remaining operators of these requests. The most urgent request is
    /// first, and each has another model. `headroom` is that of the first request.
    pub fn find(&self, candidates: &[GroupPart], headroom: Duration) -> Found {
        let (mut passes, mut predicted) = (0, None);
        let mut fits = |groups: &[&[GroupPart]]| {
            passes += 1;
            let answers = self.predictor.predict(groups);
            let fits: Vec<bool> =
                groups.iter().zip(&answers).map(|(group, answer)| self.fits(group.len(), *answer, headroom)).collect();
            if let Some(last) = fits.iter().take_while(|fits| **fits).count().checked_sub(1) {
                predicted = answers[last];
            }
            fits
        };
        let whole = multi_way(candidates.len(), self.ways, |tries| {
            let groups: Vec<&[GroupPart]> = tries.iter().map(|count| &candidates[..*count]).collect();
            fits(&groups)
        });
        let mut parts = candidates[..whole].to_vec();
        if let (1.., Some(next)) = (whole, candidates.get(whole)) {
            let first = next.operators.first;
            let with = |count: usize| {
                let operators = SegmentRange { first, end: first + count as u16 };
                [&candidates[..whole], &[GroupPart { operators, ..*next }]].concat()
            };
            // All operators of this request together do not fit.
            let most = usize::from(next.operators.end - first) - 1;
            let count = multi_way(most, self.ways, |tries| {
                let groups: Vec<Vec<GroupPart>> = tries.iter().map(|count| with(*count)).collect();
                fits(&groups.iter().map(Vec::as_slice).collect::<Vec<_>>())
            });
            if count > 0 {
                parts = with(count);
            }
        }
        Found { predicted: predicted.filter(|_| whole > 0), parts, passes }
    }

    fn fits(&self, requests: usize, predicted: Option<Duration>, headroom: Duration) -> bool {
        match predicted {
            Some(predicted) => {
                self.margins.map_or(predicted, |margins| margins.needed(requests, predicted)) <= headroom
            }
            // There is no prediction. One request runs all the same, as it has nothing to wait for.
            // Several do not run together.
            None => requests == 1,
        }
    }
}
