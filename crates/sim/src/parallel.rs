//! Independent runs on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Runs `work` on each of `jobs` on `threads` threads. Returns the results in the order of the
/// jobs. After each job, its thread calls `done` with the number of finished jobs. A panic of a job
/// is passed on once all threads have stopped.
pub fn map<J: Sync, R: Send>(
    jobs: &[J],
    threads: usize,
    work: impl Fn(&J) -> R + Sync,
    done: impl Fn(usize) + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let finished = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(jobs.len()));
    let worker = || {
        while let Some((index, job)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, jobs.get(i)?)))
        {
            let result = work(job);
            results.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((index, result));
            done(finished.fetch_add(1, Ordering::Relaxed) + 1);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, jobs.len().max(1)) {
            scope.spawn(worker);
        }
        worker();
    });
    let mut results = results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Runs `work` as [`map`] does, until `goes_on` returns false. `goes_on` gets the number of finished
/// jobs, the first time before any job: 0. A job that did not begin has the result `None`.
pub fn map_while<J: Sync, R: Send>(
    jobs: &[J],
    threads: usize,
    work: impl Fn(&J) -> R + Sync,
    goes_on: impl Fn(usize) -> bool + Sync,
) -> Vec<Option<R>> {
    let over = AtomicBool::new(!goes_on(0));
    let work = |job: &J| (!over.load(Ordering::Relaxed)).then(|| work(job));
    map(jobs, threads, work, |done| {
        if !goes_on(done) {
            over.store(true, Ordering::Relaxed);
        }
    })
}

/// The cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
