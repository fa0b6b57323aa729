//! Self-learning adaptive batching: batches as large as the SLO allows.

use super::average::Average;
use crate::time::Duration;

/// The band of the SLO in which an average latency should be. Outside of it, the batch is made for
/// the middle of the band. GSLICE has one number, 5%.
const BAND: [f64; 2] = [0.90, 0.95];
/// This many equal verdicts in a row are a signal (GSLICE §3.3.1).
const IN_A_ROW: u32 = 5;
/// A size that was given up may be tried again once the latency has fallen below this part of its
/// value at that time.
const CHANGED: f64 = 0.9;
/// Otherwise the size is tried again after this many batches, as it may have been given up by
/// chance. The number doubles each time that the size is given up again.
const AGAIN: u32 = 64;
/// The most batches before a size is tried again.
const MOST_AGAIN: u32 = 1_024;

/// The verdict on a model's share of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Provision {
    /// The model misses its SLO with batches of one.
    Under,
    /// The model keeps its SLO with room to spare.
    Over,
}

/// Self-learning adaptive batching, SLAB (GSLICE §3.3.1). The largest batch follows from the
/// current one, its average latency, and the distance of this latency from the SLO. The rule knows
/// no profile, so that every change of latencies (another share, interference) changes the batch.
///
/// A size that took too long is given up. For a while it is tried again only if the current size
/// has become faster. If latencies rise in steps, every other batch would be late otherwise.
#[derive(Clone, Debug)]
pub struct Slab {
    slo: f64,
    most: u32,
    limit: u32,
    /// The average latency of batches with the current limit, in seconds.
    latency: Average,
    given_up: Option<GivenUp>,
    /// The latest verdict, and the number of batches in a row with it.
    signal: (Option<Provision>, u32),
}

/// A size that took too long.
#[derive(Clone, Copy, Debug)]
struct GivenUp {
    size: u32,
    /// The first average latency of the smaller limit that followed.
    then: Option<f64>,
    /// The batches since the size was given up.
    batches: u32,
    /// The number of batches after which the size is tried again.
    again: u32,
}

impl GivenUp {
    /// Whether the size may be tried again.
    fn is_due(&self) -> bool {
        self.batches > self.again
    }
}

impl Slab {
    /// A rule that begins with batches of one. A batch has at most `most` items.
    pub fn new(slo: Duration, most: u32) -> Self {
        let (latency, signal) = (Average::new(0.25), (None, 0));
        Slab { slo: slo.as_secs_f64(), most: most.max(1), limit: 1, latency, given_up: None, signal }
    }

    /// The most items of a batch.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Handles a change of the model's share, after which nothing learned still holds.
    pub fn handle_share(&mut self) {
        self.latency.forget();
        (self.given_up, self.signal) = (None, (None, 0));
    }

    /// Handles the latency of a batch. Returns a signal after five equal verdicts in a row.
    pub fn handle_batch(&mut self, rows: u32, latency: Duration) -> Option<Provision> {
        let seconds = latency.as_secs_f64();
        let is_full = rows >= self.limit;
        // A batch that was not full can only show that its size is too large.
        if is_full || seconds > self.slo {
            self.latency.add(seconds);
            let average = self.latency.value().unwrap_or(seconds);
            self.adapt(rows.min(self.limit), average);
        }
        self.signal(rows, seconds)
    }

    fn adapt(&mut self, rows: u32, average: f64) {
        let [low, high] = BAND;
        if let Some(given_up) = &mut self.given_up {
            given_up.batches += 1;
            let is_other = average < *given_up.then.get_or_insert(average) * CHANGED;
            if is_other || rows >= given_up.size && average <= high * self.slo {
                self.given_up = None;
            }
        }
        let batch = f64::from(rows);
        // In proportion to the headroom: batch * (1 + (aim - average) / average).
        let fits = batch * (low + high) / 2.0 * self.slo / average;
        let limit = if average > high * self.slo {
            (fits.floor() as u32).min(rows.saturating_sub(1)).max(1)
        } else if average < low * self.slo && rows >= self.limit {
            let most = self.given_up.map_or(self.most, |given_up| given_up.size - u32::from(!given_up.is_due()));
            // The limit grows by at least one. Time that does not depend on the batch size leaves
            // room, too.
            (fits.floor() as u32).max(rows + 1).min(most).max(self.limit)
        } else {
            self.limit
        };
        if limit < self.limit {
            let again = self.given_up.map_or(AGAIN, |former| match former.is_due() {
                true => (former.again * 2).min(MOST_AGAIN),
                false => former.again,
            });
            self.given_up = Some(GivenUp { size: rows.max(2), then: None, batches: 0, again });
        }
        if limit != self.limit {
            self.limit = limit;
            self.latency.forget();
        }
    }

    fn signal(&mut self, rows: u32, seconds: f64) -> Option<Provision> {
        let says = match () {
            () if seconds > self.slo && rows <= 1 => Some(Provision::Under),
            () if seconds < self.slo * BAND[1] => Some(Provision::Over),
            () => None,
        };
        let (former, count) = self.signal;
        let count = if says == former { count + 1 } else { 1 };
        let is_due = says.is_some() && count >= IN_A_ROW;
        self.signal = if is_due { (None, 0) } else { (says, count) };
        says.filter(|_| is_due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLO: Duration = Duration::from_millis(50);

    /// Runs full batches with the latency of `takes`. Returns the time until the limit has settled,
    /// and the limit.
    fn settle(slab: &mut Slab, takes: impl Fn(u32) -> f64) -> (f64, u32) {
        let (mut now, mut last) = (0.0, 0.0);
        for _ in 0..200 {
            let before = slab.limit();
            let ms = takes(before);
            now += ms;
            let _ = slab.handle_batch(before, Duration::from_millis_f64(ms));
            if slab.limit() != before {
                last = now;
            }
        }
        (last, slab.limit())
    }

    #[test]
    fn section_4_5_it_settles_within_500_ms_for_slos_of_25_to_100_ms() {
        // VGG-19 on TensorRT: 14 ms for one, about 63 for 32 (§4.5, table 5).
        let takes = |batch: u32| 12.4 + 1.6 * f64::from(batch);
        for slo in [25, 50, 75, 100] {
            let mut slab = Slab::new(Duration::from_millis(slo), 64);
            let (ms, batch) = settle(&mut slab, takes);
            assert!(ms < 500.0, "SLO {slo} ms: {ms} ms");
            let latency = takes(batch) / slo as f64;
            assert!((0.8..=1.0).contains(&latency), "SLO {slo} ms: {batch} take {latency} of it");
        }
    }

    #[test]
    fn section_3_3_1_batches_follow_the_share() {
        let mut slab = Slab::new(SLO, 64);
        let (_, whole) = settle(&mut slab, |batch| 10.0 + f64::from(batch));
        slab.handle_share();
        let (_, half) = settle(&mut slab, |batch| 2.0 * (10.0 + f64::from(batch)));
        // The rule is not told of this change.
        let (_, again) = settle(&mut slab, |batch| 10.0 + f64::from(batch));
        assert!(half < whole / 2 + 1 && again >= whole - 1, "{whole}, {half}, {again}");
    }

    #[test]
    fn where_latencies_rise_in_steps_the_batch_stays_below_the_step() {
        let takes = |batch: u32| 20.0 * f64::from(batch.div_ceil(8));
        let mut slab = Slab::new(SLO, 64);
        let mut late = 0;
        for _ in 0..2_000 {
            let batch = slab.limit();
            late += u32::from(takes(batch) > 50.0);
            let _ = slab.handle_batch(batch, Duration::from_millis_f64(takes(batch)));
        }
        assert!(takes(slab.limit()) <= 50.0 && slab.limit() > 8, "{}", slab.limit());
        assert!(late <= 16, "{late} of 2000 are late");
    }

    #[test]
    fn a_batch_that_is_not_full_says_nothing_of_larger_ones() {
        let mut slab = Slab::new(SLO, 64);
        settle(&mut slab, |batch| 10.0 + f64::from(batch));
        let limit = slab.limit();
        let _ = slab.handle_batch(2, Duration::from_millis(3));
        assert_eq!(slab.limit(), limit);
    }

    #[test]
    fn section_3_3_1_five_in_a_row_are_a_signal_and_four_are_none() {
        let mut slab = Slab::new(SLO, 64);
        let (late, early) = (Duration::from_millis(60), Duration::from_millis(30));
        let mut say = |latency| (0..5).map(|_| slab.handle_batch(1, latency)).collect::<Vec<_>>();
        assert_eq!(say(late), [None, None, None, None, Some(Provision::Under)]);
        assert_eq!(say(late).last(), Some(&Some(Provision::Under)));
        let said: Vec<_> = [late, late, late, late, early, late].map(|latency| slab.handle_batch(1, latency)).to_vec();
        assert_eq!(said, [None; 6], "not in a row");
        let said: Vec<_> = (0..5).map(|_| slab.handle_batch(4, late)).collect();
        assert_eq!(said, [None; 5], "batches of more than one can be made smaller");
        let said: Vec<_> = (0..5).map(|_| slab.handle_batch(1, early)).collect();
        assert_eq!(said, [None, None, None, None, Some(Provision::Over)]);
    }
}
