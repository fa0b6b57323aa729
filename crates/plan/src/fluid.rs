//! The least number of devices that a load needs under any scheduler.

use downbeat_core::{Duration, LatencyProfile};

/// The least that one model needs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FluidNeed {
    /// The batch size with the least `l(b) / b` among the sizes that meet the SLO under even
    /// arrivals. A size meets the SLO if its first request can wait for the others and for the
    /// batch to run: `(b - 1) / rate + l(b) <= SLO`. Where batching pays at all, the largest such
    /// size is the best.
    pub batch: u32,
    /// Devices, as a fraction: `rate * l(b) / b`.
    pub devices: f64,
}

/// The fluid need of a model: devices that are busy all the time with the best batches that its SLO
/// allows at its rate. A scheduler needs more, because arrivals are uneven and devices are whole.
/// The caller rounds the sum over all models up.
/// Returns `None` if not even one request alone makes its SLO.
pub fn fluid_need(rate: f64, profile: &LatencyProfile, slo: Duration) -> Option<FluidNeed> {
    let fits = |b: u32| {
        let gathered = if b <= 1 { 0.0 } else { f64::from(b - 1) / rate };
        gathered + profile.latency(b).as_secs_f64() <= slo.as_secs_f64() * (1.0 + 1e-12)
    };
    let each = |b: u32| profile.latency(b).as_secs_f64() / f64::from(b);
    // Both sides of the sum grow with the batch, so the first size that does not fit ends the
    // search.
    let batch = (1..=profile.max_batch()).take_while(|b| fits(*b)).min_by(|a, b| each(*a).total_cmp(&each(*b)))?;
    Some(FluidNeed { batch, devices: rate * each(batch) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(rate: f64, slo_ms: u64) -> Option<FluidNeed> {
        let ms = Duration::from_millis;
        fluid_need(rate, &LatencyProfile::linear(ms(1), ms(5), 64).unwrap(), ms(slo_ms))
    }

    #[test]
    fn the_batch_is_what_gathers_and_runs_within_the_slo() {
        // At 1000/s one request comes each millisecond: (b - 1) + b + 5 <= 20 gives b = 8, which
        // runs for 13 ms.
        let eight = need(1000.0, 20).unwrap();
        assert_eq!(eight.batch, 8);
        assert!((eight.devices - 1000.0 * 0.013 / 8.0).abs() < 1e-9);
        // Requests so rare that none meets another.
        assert_eq!(need(1.0, 20).unwrap().batch, 1);
        assert_eq!(need(0.0, 20), Some(FluidNeed { batch: 1, devices: 0.0 }));
        assert_eq!(need(1e12, 10_000).unwrap().batch, 64, "no larger than the profile");
    }

    #[test]
    fn an_slo_that_one_request_alone_misses_has_no_need() {
        assert_eq!(need(10.0, 5), None);
        assert_eq!(need(10.0, 6).unwrap().batch, 1);
    }
}
