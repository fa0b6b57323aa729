//! The order in which models are measured again that were measured in part, or on a busy machine.

use std::collections::BTreeMap;

/// Why a version must be measured again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unsettled {
    /// Measurements were left out, so that the version serves by guesses.
    InPart,
    /// Something else ran on the machine meanwhile.
    OnBusyMachine,
}

/// Between two tries of a model the machine is idle for at most 2^6 spells.
const LONGEST: u32 = 6;

/// The order in which models are measured again. A model that serves by guesses is measured at the
/// first chance ([`Remeasuring::soon`]). After that, each model has its turn in an idle spell.
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
    /// Returns a model that serves by guesses and was not tried yet, one of `guessed`.
    pub fn soon(&mut self, guessed: &[String]) -> Option<String> {
        let name = guessed.iter().find(|name| !self.tried.contains_key(*name))?;
        self.tried.insert(name.clone(), (1, self.spells + 2));
        Some(name.clone())
    }

    /// Whether [`Remeasuring::soon`] has a model to try.
    pub fn is_due_soon(&self, guessed: &[String]) -> bool {
        guessed.iter().any(|name| !self.tried.contains_key(name))
    }

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
    fn who_serves_by_guesses_is_tried_once_at_once() {
        let both = ["a".to_owned(), "b".to_owned()];
        let mut remeasuring = Remeasuring::default();
        assert!(remeasuring.is_due_soon(&both));
        let soon: Vec<_> = (0..3).map(|_| remeasuring.soon(&both)).collect();
        assert_eq!(soon, [Some("a".to_owned()), Some("b".to_owned()), None]);
        assert!(!remeasuring.is_due_soon(&both));
        // A try that failed waits for idle spells, as others do.
        let tried: Vec<_> = (0..4).map(|_| remeasuring.next(&both)).collect();
        assert_eq!(tried, [None, Some("a".to_owned()), Some("b".to_owned()), None]);
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
