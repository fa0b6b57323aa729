//! The instances of models that wait for answers of other models, to find those that would wait for
//! themselves.

use std::collections::{BTreeMap, BTreeSet};

/// The waits of all instances. An instance that waits takes no request.
#[derive(Default)]
pub struct Waits {
    /// By instance: its model, and the models that it waits for.
    waiting: BTreeMap<u64, (String, Vec<String>)>,
}

impl Waits {
    /// Notes that an instance of `caller` waits for `target`. Returns whether it ever gets an
    /// answer, if every model has so many `instances`; if not, nothing is noted.
    pub fn begin(&mut self, instance: u64, caller: &str, target: &str, instances: impl Fn(&str) -> usize) -> bool {
        let (_, targets) = self.waiting.entry(instance).or_insert_with(|| (caller.to_owned(), Vec::new()));
        targets.push(target.to_owned());
        if self.can_answer(target, instances) {
            return true;
        }
        self.end(instance, target);
        false
    }

    /// Notes the end of a wait.
    pub fn end(&mut self, instance: u64, target: &str) {
        let Some((_, targets)) = self.waiting.get_mut(&instance) else { return };
        if let Some(at) = targets.iter().position(|other| other == target) {
            targets.swap_remove(at);
        }
        if targets.is_empty() {
            self.waiting.remove(&instance);
        }
    }

    /// Whether some instance of the model can take a request: it does not wait, or all that it
    /// waits for can answer.
    fn can_answer(&self, model: &str, instances: impl Fn(&str) -> usize) -> bool {
        let mut waiting: BTreeMap<&str, usize> = BTreeMap::new();
        for (caller, _) in self.waiting.values() {
            *waiting.entry(caller).or_default() += 1;
        }
        let mut stuck: BTreeSet<&str> =
            waiting.iter().filter(|(caller, count)| **count >= instances(caller)).map(|(caller, _)| *caller).collect();
        loop {
            let freed = self.waiting.values().find(|(caller, targets)| {
                stuck.contains(caller.as_str()) && targets.iter().all(|target| !stuck.contains(target.as_str()))
            });
            match freed {
                Some((caller, _)) => stuck.remove(caller.as_str()),
                None => return !stuck.contains(model),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn one(_: &str) -> usize {
        1
    }

    #[test]
    fn a_model_does_not_wait_for_itself() {
        let mut waits = Waits::default();
        assert!(!waits.begin(1, "a", "a", one));
        assert!(waits.begin(1, "a", "b", one), "the refused wait is forgotten");
        assert!(!waits.begin(2, "b", "a", one), "a waits for b");
        waits.end(1, "b");
        assert!(waits.begin(2, "b", "a", one));
    }

    #[test]
    fn another_instance_can_answer() {
        let two = |_: &str| 2;
        let mut waits = Waits::default();
        assert!(waits.begin(1, "a", "a", two));
        assert!(!waits.begin(2, "a", "a", two), "both instances would wait");
        waits.end(1, "a");
        assert!(waits.begin(2, "a", "a", two));
    }

    #[test]
    fn a_wait_that_ends_frees_those_behind_it() {
        let mut waits = Waits::default();
        assert!(waits.begin(1, "a", "b", one));
        assert!(waits.begin(2, "b", "onnx", one));
        // `b` waits for a model that answers, so `a` will be answered too.
        assert!(waits.begin(3, "c", "a", one));
        assert!(waits.begin(3, "c", "b", one), "several calls at a time");
        // A longer circle.
        waits.end(2, "onnx");
        assert!(!waits.begin(2, "b", "c", one));
    }
}
