//! The order in which models that were measured on a busy machine are measured again.

use std::collections::BTreeMap;

/// Between two tries of a model the machine is idle for at most 2^6 spells.
const LONGEST: u32 = 6;

/// The order in which models are measured again. Each model has its turn in the first idle spell.
/// If the machine turns out to be busy again, the next turns come 2, 4, 8, ... idle spells later,
/// 64 at most.
#[derive(Debug, Default)]
pub struct Remeasuring {
    /// Idle spells so far.
    spells: u64,
    /// By model: how often it was tried, and the spell of its next try.
    tried: BTreeMap<String, (u32, u64)>,
}

impl Remeasuring {
    /// Notes that an idle spell is over. Returns the model to measure again, one of `unsettled`.
    pub fn next(&mut self, unsettled: &[String]) -> Option<String> {
        self.spells += 1;
        // A model that was measured meanwhile begins anew, should it become unsettled once more.
        self.tried.retain(|name, _| unsettled.contains(name));
        let due = |name: &&String| self.tried.get(*name).map_or(0, |(_, due)| *due);
        let name = unsettled.iter().min_by_key(due).filter(|name| due(name) <= self.spells)?;
        let (tries, due) = self.tried.entry(name.clone()).or_default();
        *tries = (*tries + 1).min(LONGEST);
        *due = self.spells + (1 << *tries);
        Some(name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_tried_ever_more_rarely_and_never_given_up() {
        let unsettled = ["a".to_owned()];
        let mut remeasuring = Remeasuring::default();
        let tried: Vec<u32> = (1..=300).filter(|_| remeasuring.next(&unsettled).is_some()).collect();
        assert_eq!(tried, [1, 3, 7, 15, 31, 63, 127, 191, 255]);
        assert_eq!(remeasuring.next(&[]), None, "it was measured");
        assert_eq!(remeasuring.next(&unsettled), Some("a".to_owned()));
    }

    #[test]
    fn who_was_not_tried_yet_goes_first() {
        let unsettled = ["a".to_owned(), "b".to_owned()];
        let mut remeasuring = Remeasuring::default();
        let tried: Vec<_> = (0..6).map(|_| remeasuring.next(&unsettled)).collect();
        let named = |name: &str| Some(name.to_owned());
        assert_eq!(tried, [named("a"), named("b"), named("a"), named("b"), None, None]);
    }
}
