//! The largest group of operators that lets the most urgent request keep its deadline.

use super::group::GroupPart;
use super::margin::Margins;
use super::multi_way::multi_way;
use super::predictor::Predictor;
use crate::device::launch::SegmentRange;
use crate::time::Duration;

/// The search for a group: all operators of the most urgent request, then of the others in their order, as long as the predicted group fits into the headroom of
/// the first (Abacus §6.2, figure 12). Whole requests first, then operators of the first that does not fit whole (§6.3).
#[derive(Debug)]
pub struct GroupSearch<'a, P> {
    /// What groups take.
    pub predictor: &'a P,
    /// How far that is to be trusted; `None`: as it is.
    pub margins: Option<&'a Margins>,
    /// How many groups the predictor is asked for at a time.
    pub ways: usize,
}

/// A group that was found.
#[derive(Clone, PartialEq, Debug)]
pub struct Found {
    /// The most urgent request first; empty: it does not fit even alone.
    pub parts: Vec<GroupPart>,
    /// What the predictor says that the group takes; `None` if it cannot say, for one request, or if there is no group.
    pub predicted: Option<Duration>,
    /// How often the predictor was asked.
    pub passes: u32,
}

impl<P: Predictor> GroupSearch<'_, P> {
    /// The group out of what is left of these requests, the most urgent first, each of another model. `headroom` is what the first has left.
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
            // All of them do not fit.
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
            // Nobody knows: one request cannot wait for somebody who does, others can.
            None => requests == 1,
        }
    }
}
