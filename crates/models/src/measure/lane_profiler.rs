//! Measures how many batches of a model are worth running at the same time on the CPU.

use downbeat_core::{Duration, median};
use downbeat_engine::{Lane, RunError};

use crate::measure::sampler::{Subject, at_once};

/// Twice as many lanes are worth having if they do at least this many times as much.
const WORTH: f64 = 1.25;
/// Lanes run together for this long with batches of one size, unless [`FEWEST`] runs take longer.
const SLICE: Duration = Duration::from_millis(20);
/// Runs of each lane before the timed ones.
const WARM_UP: usize = 2;
/// Timed runs of each lane, at least.
const FEWEST: usize = 3;

/// How many lanes of a model are worth having side by side: 1, 2, 4, ... up to `most`. Each lane
/// has a thread of its own. Twice the lanes must do at least 1.25 times as much, with batches of
/// each of `sizes`. `None` if `allows` refuses the expected time of the next step; the first step
/// takes `first`.
///
/// # Errors
/// The engine's error, if the engine cannot run such a batch or has no further lane.
pub fn lanes_worth_having(
    subject: &Subject<'_>,
    sizes: &[u32],
    most: usize,
    first: Duration,
    allows: impl Fn(Duration) -> bool,
) -> Result<Option<usize>, RunError> {
    let mut lanes = Vec::new();
    let mut before = Vec::new();
    let (mut count, mut expected) = (1, first);
    while count <= most {
        if !allows(expected) {
            return Ok(None);
        }
        let begin = subject.clock.now();
        while lanes.len() < count {
            lanes.push(subject.lane_at(Default::default())?);
        }
        let paces = sizes.iter().map(|batch| pace(subject, &mut lanes, *batch));
        let paces = paces.collect::<Result<Vec<f64>, RunError>>()?;
        if !are_worth_it(&before, &paces) {
            break;
        }
        // Twice the lanes share the cores.
        expected = subject.clock.now().since(begin).saturating_mul(2);
        (before, count) = (paces, count * 2);
    }
    Ok(Some((count / 2).max(1)))
}

/// The longest time of a step with batches of these latencies.
pub fn step(latencies: impl Iterator<Item = Duration>) -> Duration {
    let runs = (WARM_UP + FEWEST) as u64;
    latencies.fold(Duration::ZERO, |sum, latency| sum + latency.saturating_mul(runs).max(SLICE))
}

/// Whether lanes that do `more` batches a second are worth having instead of half as many, which do
/// `before`: by batch size.
fn are_worth_it(before: &[f64], more: &[f64]) -> bool {
    before.iter().zip(more).all(|(before, more)| *more >= WORTH * before)
}

/// Batches of `batch` items that all lanes do together in a second.
fn pace(subject: &Subject<'_>, lanes: &mut [Box<dyn Lane>], batch: u32) -> Result<f64, RunError> {
    let one = |lane: &mut dyn Lane| {
        let item = subject.item()?;
        let mut run = || subject.run(lane, &item, batch as usize);
        for _ in 0..WARM_UP {
            run()?;
        }
        let until = subject.clock.now() + SLICE;
        let mut runs = Vec::new();
        while runs.len() < FEWEST || subject.clock.now() < until {
            runs.push(run()?);
        }
        Ok(1.0 / median(runs).unwrap_or(Duration::MAX).as_secs_f64().max(1e-9))
    };
    let one = &one;
    Ok(at_once(lanes.iter_mut().map(|lane| move || one(&mut **lane)))?.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_worth_it_where_they_do_more_with_batches_of_all_sizes() {
        assert!(are_worth_it(&[], &[100.0, 10.0]), "the first");
        assert!(are_worth_it(&[100.0, 10.0], &[190.0, 12.5]));
        assert!(!are_worth_it(&[100.0, 10.0], &[190.0, 11.0]), "large ones share what they wait for");
        assert!(!are_worth_it(&[100.0], &[100.0]));
    }
}
