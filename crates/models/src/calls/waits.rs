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
    /// Notes that an instance of `caller` waits for `targets`: one model, or those of an ensemble.
    /// Returns whether it ever gets an answer, if every model has so many `instances`; if not,
    /// nothing is noted.
    pub fn begin<T: AsRef<str>>(
        &mut self,
        instance: u64,
        caller: &str,
        targets: &[T],
        instances: impl Fn(&str) -> usize,
    ) -> bool {
        let (_, all) = self.waiting.entry(instance).or_insert_with(|| (caller.to_owned(), Vec::new()));
        all.extend(targets.iter().map(|target| target.as_ref().to_owned()));
        let stuck = self.stuck(instances);
        if !targets.iter().any(|target| stuck.contains(target.as_ref())) {
            return true;
        }
        self.end(instance, targets);
        false
    }

    /// Notes the end of a wait.
    pub fn end<T: AsRef<str>>(&mut self, instance: u64, targets: &[T]) {
        let Some((_, all)) = self.waiting.get_mut(&instance) else { return };
        for target in targets {
            if let Some(at) = all.iter().position(|other| other == target.as_ref()) {
                all.swap_remove(at);
            }
        }
        if all.is_empty() {
            self.waiting.remove(&instance);
        }
    }

    /// The models none of whose instances takes a request again: each instance waits, and some model
    /// that it waits for cannot answer.
    fn stuck(&self, instances: impl Fn(&str) -> usize) -> BTreeSet<&str> {
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
                None => return stuck,
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
        assert!(!waits.begin(1, "a", &["a"], one));
        assert!(waits.begin(1, "a", &["b"], one), "the refused wait is forgotten");
        assert!(!waits.begin(2, "b", &["a"], one), "a waits for b");
        waits.end(1, &["b"]);
        assert!(waits.begin(2, "b", &["a"], one));
    }

    #[test]
    fn another_instance_can_answer() {
        let two = |_: &str| 2;
        let mut waits = Waits::default();
        assert!(waits.begin(1, "a", &["a"], two));
        assert!(!waits.begin(2, "a", &["a"], two), "both instances would wait");
        waits.end(1, &["a"]);
        assert!(waits.begin(2, "a", &["a"], two));
    }

    #[test]
    fn a_wait_that_ends_frees_those_behind_it() {
        let mut waits = Waits::default();
        assert!(waits.begin(1, "a", &["b"], one));
        assert!(waits.begin(2, "b", &["onnx"], one));
        // `b` waits for a model that answers, so `a` will be answered too.
        assert!(waits.begin(3, "c", &["a"], one));
        assert!(waits.begin(3, "c", &["b"], one), "several calls at a time");
        // A longer circle.
        waits.end(2, &["onnx"]);
        assert!(!waits.begin(2, "b", &["c"], one));
    }

    #[test]
    fn an_ensemble_with_the_caller_is_never_answered() {
        let mut waits = Waits::default();
        assert!(!waits.begin(1, "a", &["b", "a"], one));
        assert!(waits.begin(1, "a", &["b", "c"], one), "the refused wait is forgotten");
        assert!(!waits.begin(2, "c", &["a"], one));
        waits.end(1, &["b", "c"]);
        assert!(waits.begin(2, "c", &["a"], one));
    }
}
