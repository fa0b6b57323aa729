//! The part of the devices' time that batches needed, for the autoscale advice.

use std::collections::BTreeMap;

use downbeat_core::Duration;
use downbeat_core::cluster::ItemCost;
use downbeat_service::metrics::trouble::{Means, Sample};

/// Keeps the time that devices needed until now.
///
/// Devices that are idle take batches early and small. The counters have the time that such batches
/// took. The needed time follows from the number of batches and items since the last look
/// ([`ItemCost::needed_part`]).
#[derive(Debug, Default)]
pub(super) struct NeededTime {
    /// By model and version: launches and items until the last look.
    seen: BTreeMap<(String, String), (u64, u64)>,
    /// The devices' busy time until the last look.
    busy: Duration,
    needed: Duration,
}

impl NeededTime {
    /// Takes the busy time of all devices and the counts of all versions until now. Returns the needed
    /// time until now, which never falls.
    pub fn look(&mut self, busy: Duration, samples: &[Sample]) -> Duration {
        let (mut ran, mut needed) = (0.0, 0.0);
        for Sample { model, version, counts, means } in samples {
            let now = (counts.launches, counts.items);
            let before = self.seen.insert((model.clone(), version.clone()), now).unwrap_or_default();
            // A model that was unloaded and loaded again may count from zero.
            let (launches, items) = (now.0.saturating_sub(before.0), now.1.saturating_sub(before.1));
            let Some(Means { profile, slo, max_batch, at_once }) = means else { continue };
            if launches == 0 || items == 0 {
                continue;
            }
            // The time of a batch grows evenly with its size, so that batches of mean size take as long.
            let size = u32::try_from(items.div_ceil(launches)).unwrap_or(u32::MAX).min((*max_batch).max(1));
            let time = profile.latency(size);
            let cost = ItemCost::new(profile, *max_batch, slo.unwrap_or(Duration::MAX), *at_once);
            ran += launches as f64 * time.as_secs_f64();
            needed += launches as f64 * time.as_secs_f64() * cost.needed_part(size, time);
        }
        let part = if ran > 0.0 { needed / ran } else { 1.0 };
        let more = busy.saturating_sub(self.busy).as_secs_f64();
        self.busy = busy;
        self.needed += Duration::from_secs_f64(more * part);
        self.needed
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::LatencyProfile;
    use downbeat_service::metrics::trouble::Counts;

    use super::*;

    fn sample(launches: u64, items: u64) -> Sample {
        let profile = LatencyProfile::linear_ms(1.0, 9.0, 32).unwrap();
        let means = Means { profile, slo: Some(Duration::from_millis(40)), max_batch: 32, at_once: 2 };
        let counts = Counts { launches, items, answered: items, ..Counts::default() };
        Sample { model: "m".into(), version: "1".into(), counts, means: Some(means) }
    }

    /// Half of the SLO is for waiting, so that a typical batch has 11 items and takes 20 ms. A batch of
    /// one item takes 10 ms, and needs an eleventh of 20 ms.
    #[test]
    fn a_small_batch_needs_less_than_it_took() {
        let mut time = NeededTime::default();
        let second = Duration::from_millis(1000);
        let alone = time.look(second, &[sample(100, 100)]);
        assert!((alone.as_secs_f64() - 20.0 / 11.0 / 10.0).abs() < 1e-6, "{alone}");
        // Batches of 11 and more need all of their time.
        let whole = time.look(second + second, &[sample(200, 100 + 1100)]);
        assert!((whole.saturating_sub(alone).as_secs_f64() - 1.0).abs() < 1e-6, "{whole} after {alone}");
        assert_eq!(time.look(second + second, &[sample(200, 1200)]), whole);
    }

    #[test]
    fn counts_that_begin_anew_do_no_harm() {
        let mut time = NeededTime::default();
        let second = Duration::from_millis(1000);
        let before = time.look(second, &[sample(100, 100)]);
        let after = time.look(second + second, &[sample(3, 3)]);
        assert!((after.saturating_sub(before).as_secs_f64() - 1.0).abs() < 1e-6, "nothing is known of that second");
        assert_eq!(time.look(second, &[]), after);
    }
}
