//! A thread that runs on some cores only.

use std::cell::Cell;
use std::marker::PhantomData;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::CoreSet;

thread_local! {
    /// The cores that Downbeat has bound the thread to.
    static BOUND: Cell<Option<CoreSet>> = const { Cell::new(None) };
    /// Whether the thread stays bound.
    static STAYS: Cell<bool> = const { Cell::new(false) };
}

/// As long as it lives, the thread that made it, and every thread that this one starts, run on some
/// cores only. Afterwards the thread has its former cores again, unless it [stays](Pinned::stay).
#[derive(Debug)]
pub struct Pinned {
    /// The thread's former cores; `None`: it was bound to the same ones.
    before: Option<(Option<CoreSet>, CpuSet)>,
    _of_this_thread: PhantomData<*const ()>,
}

impl Pinned {
    /// Binds the calling thread to these cores. Costs nothing if it is bound to them already.
    ///
    /// # Errors
    /// In words, if the process may use none of these cores.
    pub fn to(cores: &CoreSet) -> Result<Pinned, String> {
        let bound = BOUND.get();
        let before = if bound == Some(*cores) {
            None
        } else {
            let refused = |error: rustix::io::Errno| format!("no thread can be bound to the CPUs {cores}: {error}");
            let before = sched_getaffinity(None).map_err(refused)?;
            let mut wanted = CpuSet::new();
            cores.iter().for_each(|cpu| wanted.set(cpu));
            sched_setaffinity(None, &wanted).map_err(refused)?;
            BOUND.set(Some(*cores));
            Some((bound, before))
        };
        Ok(Pinned { before, _of_this_thread: PhantomData })
    }
}

impl Pinned {
    /// Makes the calling thread stay bound to the first cores that it is bound to from now on. It
    /// is for threads that run lanes of one partition: they move once, and not in every run.
    pub fn stay() {
        STAYS.set(true);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Some((bound, before)) = self.before else { return };
        if bound.is_none() && STAYS.get() {
            return;
        }
        BOUND.set(bound);
        // Fails only if all these CPUs have gone offline meanwhile; then the kernel lets the thread
        // run anywhere.
        let _ = sched_setaffinity(None, &before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cores::Topology;

    #[test]
    fn a_thread_and_those_that_it_starts_are_bound_until_the_end() {
        let usable = || Topology::here().usable();
        let all = usable();
        let last = CoreSet::from_iter(all.iter().last());
        let pinned = Pinned::to(&last).unwrap();
        let again = Pinned::to(&last).unwrap();
        drop(again);
        assert_eq!(usable(), last);
        assert_eq!(std::thread::spawn(usable).join().unwrap(), last);
        drop(pinned);
        assert_eq!(usable(), all);
    }

    #[test]
    fn a_thread_that_stays_is_bound_to_the_first_cores_for_good() {
        let stays = || {
            let usable = || Topology::here().usable();
            let all = usable();
            let last = CoreSet::from_iter(all.iter().last());
            Pinned::stay();
            drop(Pinned::to(&last).unwrap());
            assert_eq!(usable(), last);
            let elsewhere = Pinned::to(&all).unwrap();
            assert_eq!(usable(), all);
            drop(elsewhere);
            assert_eq!(usable(), last);
        };
        std::thread::spawn(stays).join().unwrap();
    }

    #[test]
    fn cores_that_are_not_there_are_an_error_and_change_nothing() {
        let before = Topology::here().usable();
        let error = Pinned::to(&CoreSet::from_iter([CoreSet::LIMIT - 1])).unwrap_err();
        assert!(error.starts_with("no thread can be bound to the CPUs 1023: "), "{error}");
        assert_eq!(Topology::here().usable(), before);
    }
}
