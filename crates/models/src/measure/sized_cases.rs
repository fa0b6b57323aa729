//! Times cases of one model that differ in size, and repeats a case that took far longer than the
//! other cases allow.

use downbeat_core::{Duration, median};
use downbeat_service::clock::Clock;

use crate::measure::sampler::{self, Turn, Watch};

/// A case lies far above its neighbours if it took more than this many times the time that they
/// allow.
const FAR: f64 = 2.0;
/// How often a case is repeated that lies far above its neighbours.
const MOST_REPEATS: u32 = 2;
/// Runs of a repetition: the fewest, however little time there is, and the most.
const REPEATED_RUNS: [usize; 2] = [2, 20];

/// The size of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CaseSize {
    /// Items in the batch.
    pub rows: u32,
    /// Compute units that it runs on; 1 where all cases run on the same.
    pub units: u32,
}

impl CaseSize {
    /// A case of `rows` items.
    pub fn rows(rows: u32) -> Self {
        CaseSize { rows, units: 1 }
    }

    /// How many times as long as `other` it takes at most: an item more adds at most its share, and
    /// so does a unit less. A case is no slower than a case of more items or on fewer units.
    fn at_most(self, other: CaseSize) -> f64 {
        let times = |more: u32, less: u32| (f64::from(more) / f64::from(less.max(1))).max(1.0);
        times(self.rows, other.rows) * times(other.units, self.units)
    }
}

/// Cases of one model that are timed in their order, in about `budget` for all.
pub struct SizedCases<'a, C> {
    pub clock: Clock,
    pub budget: Duration,
    /// The fewest and the most runs of a case, as [`Turn::runs`] has them.
    pub runs: [usize; 2],
    pub cases: &'a [C],
    /// The size of a case.
    pub size: fn(&C) -> CaseSize,
}

/// A case with its runs.
struct Timed<C, T> {
    case: C,
    size: CaseSize,
    runs: Vec<T>,
    repeats: u32,
    /// The number of these repetitions that the watch has heard of.
    told: u32,
}

impl<C, T: Ord> Timed<C, T> {
    fn fastest(&self, took: &impl Fn(&T) -> Duration) -> Duration {
        self.runs.iter().map(took).min().unwrap_or_default()
    }

    /// The most that a run of a case of this size takes, by the runs of this case.
    fn at_most(&self, size: CaseSize, took: &impl Fn(&T) -> Duration) -> Duration {
        Duration::from_secs_f64(self.fastest(took).as_secs_f64() * size.at_most(self.size))
    }

    /// Takes in the runs of a repetition. A stall only adds time: so if they are faster they count
    /// alone.
    fn repeat(&mut self, runs: Vec<T>, took: &impl Fn(&T) -> Duration) {
        self.repeats += 1;
        let is_faster = median(runs.iter().map(took)) < median(self.runs.iter().map(took));
        if is_faster {
            self.runs = runs;
        } else {
            self.runs.extend(runs);
        }
    }
}

impl<C: Copy> SizedCases<'_, C> {
    /// Times each case. If a case lies far above its neighbours, a run of it may have stalled: it
    /// is timed again, and the repetition decides. A single run without neighbours is repeated,
    /// too. `took` gives the time of a run, and `summary` the result of a case's runs. `watch`
    /// hears of each case, and once more of a case that was repeated later.
    ///
    /// Returns the results of all cases, or of the cases before `watch` ended the measuring.
    /// `watch` leaves out a case that would take too long if its time grew in proportion to its
    /// size.
    ///
    /// # Errors
    /// The error of `run`.
    pub fn measure<T: Ord, M, E>(
        &self,
        watch: &mut dyn Watch<M>,
        mut run: impl FnMut(C) -> Result<T, E>,
        took: impl Fn(&T) -> Duration,
        summary: impl Fn(C, &[T]) -> M,
    ) -> Result<Vec<M>, E> {
        let mut timed: Vec<Timed<C, T>> = Vec::with_capacity(self.cases.len());
        let cases = self.cases.iter().copied();
        let found = sampler::each(self.clock, self.budget, cases, watch, |case, turn: &Turn<'_>| {
            let size = (self.size)(&case);
            if timed.last().is_some_and(|last| !turn.fits(last.at_most(size, &took))) {
                turn.leave_out();
                return Ok(summary(case, &[]));
            }
            let runs = turn.runs(self.runs, || run(case))?;
            timed.push(Timed { case, size, runs, repeats: 0, told: 0 });
            while let Some(far) = self.next_outlier(&timed, &took) {
                if !turn.fits(timed[far].fastest(&took).saturating_mul(REPEATED_RUNS[0] as u64)) {
                    break;
                }
                let again = turn.again(REPEATED_RUNS, || run(timed[far].case))?;
                timed[far].repeat(again, &took);
            }
            let own = timed.last_mut();
            own.into_iter().for_each(|own| own.told = own.repeats);
            Ok(summary(case, timed.last().map_or(&[], |own| &own.runs)))
        })?;
        timed.truncate(found.len());
        for earlier in timed.iter().filter(|timed| timed.repeats > timed.told) {
            watch.measured(&summary(earlier.case, &earlier.runs), 1.0);
        }
        Ok(timed.iter().map(|timed| summary(timed.case, &timed.runs)).collect())
    }

    /// The first case that must be repeated.
    fn next_outlier<T>(&self, timed: &[Timed<C, T>], took: &impl Fn(&T) -> Duration) -> Option<usize> {
        let medians: Vec<f64> =
            timed.iter().map(|timed| median(timed.runs.iter().map(took)).map_or(0.0, |d| d.as_secs_f64())).collect();
        let is_far = |at: usize| {
            let allows = |(other, median): (&Timed<C, T>, &f64)| median * timed[at].size.at_most(other.size);
            let allowed = timed.iter().zip(&medians).map(allows).fold(f64::INFINITY, f64::min);
            // The minimum includes the case's own median.
            medians[at] > FAR * allowed || self.cases.len() == 1 && timed[at].runs.len() == 1
        };
        (0..timed.len()).find(|at| timed[*at].repeats < MOST_REPEATS && is_far(*at))
    }
}

/// Whether stored cases, `(size, median, runs)`, can be used. A case far above its neighbours with
/// fewer runs than a repetition makes them useless: an older program stored it without repeating
/// it.
pub fn are_trusted(cases: &[(CaseSize, Duration, u32)]) -> bool {
    let few = |runs: u32| (runs as usize) < REPEATED_RUNS[0];
    cases.iter().all(|(size, median, runs)| {
        let allows = |(other, median, _): &(CaseSize, Duration, u32)| median.as_secs_f64() * size.at_most(*other);
        let allowed = cases.iter().map(allows).fold(f64::INFINITY, f64::min);
        !(few(*runs) && median.as_secs_f64() > FAR * allowed)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Measures batches whose runs take the listed times; the last time repeats. There is no time
    /// for more runs than necessary. Returns each size with its runs, and the sizes that the watch
    /// heard of.
    fn measured(script: &[(u32, &[u64])]) -> (Vec<(u32, Vec<u64>)>, Vec<u32>) {
        let sizes: Vec<u32> = script.iter().map(|(size, _)| *size).collect();
        let mut left: Vec<VecDeque<u64>> = script.iter().map(|(_, runs)| runs.iter().copied().collect()).collect();
        let run = |size: u32| {
            let runs = &mut left[sizes.iter().position(|other| *other == size).unwrap()];
            Ok::<_, ()>(ms(if runs.len() > 1 { runs.pop_front().unwrap() } else { runs[0] }))
        };
        let mut heard = Vec::new();
        let mut watch = |measured: &(u32, Vec<u64>), _: f64| heard.push(measured.0);
        let cases = SizedCases {
            clock: Clock::start(),
            budget: Duration::ZERO,
            runs: [0, 9],
            cases: &sizes,
            size: |rows| CaseSize::rows(*rows),
        };
        let summary = |size, runs: &[Duration]| (size, runs.iter().map(|run| run.as_nanos() / 1_000_000).collect());
        let found = cases.measure(&mut watch, run, |run| *run, summary).unwrap();
        (found, heard)
    }

    #[test]
    fn a_stalled_run_is_repeated_and_the_repetition_decides() {
        let (found, heard) = measured(&[(1, &[2]), (2, &[3]), (4, &[8_400, 6]), (8, &[9]), (16, &[20])]);
        assert_eq!(found, [(1, vec![2]), (2, vec![3]), (4, vec![6, 6]), (8, vec![9]), (16, vec![20])]);
        assert_eq!(heard, [1, 2, 4, 8, 16], "it is told of once it is right");
    }

    #[test]
    fn a_stalled_run_of_the_first_or_the_last_size_is_repeated() {
        let (found, heard) = measured(&[(1, &[700, 2]), (2, &[3]), (4, &[90, 5])]);
        assert_eq!(found, [(1, vec![2, 2]), (2, vec![3]), (4, vec![5, 5])]);
        assert_eq!(heard, [1, 2, 4, 1], "the first is told of again");
        assert_eq!(measured(&[(1, &[700, 2])]).0, [(1, vec![2, 2])], "one that has no neighbours");
        // A stall that spans several sizes.
        let (found, _) = measured(&[(1, &[2]), (2, &[500, 3]), (4, &[900, 5])]);
        assert_eq!(found, [(1, vec![2]), (2, vec![3, 3]), (4, vec![5, 5])]);
    }

    #[test]
    fn what_is_slow_each_time_is_believed() {
        let (found, _) = measured(&[(1, &[2]), (2, &[100]), (4, &[110])]);
        assert_eq!(found, [(1, vec![2]), (2, vec![100; 5]), (4, vec![110; 5])]);
        // A repetition that is stalled as well has another.
        let (found, _) = measured(&[(1, &[2]), (2, &[300, 500, 500, 3])]);
        assert_eq!(found, [(1, vec![2]), (2, vec![3, 3])]);
    }

    #[test]
    fn cases_as_their_neighbours_allow_are_run_once() {
        let (found, heard) = measured(&[(1, &[10]), (2, &[19]), (4, &[41]), (8, &[40]), (16, &[41])]);
        assert!(found.iter().all(|(_, runs)| runs.len() == 1), "{found:?}");
        assert_eq!(heard.len(), 5);
    }

    #[test]
    fn fewer_units_may_take_longer_in_proportion() {
        let on = |rows, units| CaseSize { rows, units };
        assert_eq!(on(4, 10).at_most(on(1, 20)), 8.0);
        assert_eq!(on(1, 20).at_most(on(4, 10)), 1.0);
    }

    #[test]
    fn what_was_stored_of_a_single_far_run_is_not_trusted() {
        let stored = |runs| {
            [(1, 2, 90), (2, 3, 90), (4, 8_400, runs), (8, 57_000, 1)]
                .map(|(rows, median, runs)| (CaseSize::rows(rows), ms(median), runs))
        };
        assert!(!are_trusted(&stored(1)));
        assert!(are_trusted(&stored(3)[..3]), "it was repeated");
        assert!(are_trusted(&stored(1)[..2]) && are_trusted(&[]));
    }
}
