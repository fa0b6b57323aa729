//! Fits the constants of a [`SegmentLaw`] and of a device to measured times.

use downbeat_core::Time;
use downbeat_core::device::LaneId;

use super::contended::{Completed, ContendedDevice};
use super::limits::{DeviceLimits, Sharing};
use super::measured::SegmentLaw;
use super::work::{Kernel, Work};

/// The measured time of a batch on a share of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SegmentSample {
    /// Items.
    pub batch: u32,
    /// Compute units that the batch could use.
    pub units: u32,
    /// The measured time in microseconds.
    pub time_us: f64,
}

/// The grid's steps for each of the two constants on which the time does not depend linearly.
const STEPS: u32 = 24;
/// The number of times that the search is narrowed.
const NARROWED: u32 = 10;

/// Returns the law that fits best, and its largest error as a share of a measured time; `None`
/// without a positive time.
///
/// For given `units_per_item` and `most_units` the law is linear in the other two constants. Least
/// squares of the relative errors gives these in closed form. The first two are searched on a grid
/// that is narrowed around the best. Where measurements leave a constant open, the law uses more
/// units rather than fewer.
pub fn fit_segment(samples: &[SegmentSample]) -> Option<(SegmentLaw, f64)> {
    let samples: Vec<SegmentSample> =
        samples.iter().copied().filter(|s| s.time_us > 0.0 && s.time_us.is_finite()).collect();
    let most = f64::from(samples.iter().map(|s| s.units).max()?).max(1.0);
    let largest = f64::from(samples.iter().map(|s| s.batch).max()?).max(1.0);
    // The ranges are logarithms.
    let mut per_item = ((1.0 / largest).ln(), most.ln());
    let mut units = (0.0, most.ln());
    let limits = (per_item, units);
    let mut best: Option<(f64, SegmentLaw)> = None;
    for _ in 0..=NARROWED {
        for units_per_item in steps(per_item) {
            for most_units in steps(units) {
                let law = linear(&samples, units_per_item, most_units);
                let error = squares(&law, &samples);
                // A gain within rounding does not count.
                if best.as_ref().is_none_or(|(least, _)| error < least * (1.0 - 1e-9) - 1e-18) {
                    best = Some((error, law));
                }
            }
        }
        let (_, law) = best.as_ref()?;
        per_item = narrowed(per_item, law.units_per_item.ln(), limits.0);
        units = narrowed(units, law.most_units.ln(), limits.1);
    }
    let (error, mut law) = best?;
    // A constant that the measurements leave open is taken to be large.
    for (units_per_item, most_units) in [(most, most), (law.units_per_item, most), (most, law.most_units)] {
        let larger = linear(&samples, units_per_item, most_units);
        if squares(&larger, &samples) <= error * 1.001 + 1e-9 {
            law = larger;
            break;
        }
    }
    let worst = samples.iter().map(|s| relative(&law, s).abs()).fold(0.0, f64::max);
    Some((law, worst))
}

/// Returns the sum of the squares of the relative errors.
fn squares(law: &SegmentLaw, samples: &[SegmentSample]) -> f64 {
    samples.iter().map(|sample| relative(law, sample).powi(2)).sum()
}

fn relative(law: &SegmentLaw, sample: &SegmentSample) -> f64 {
    law.time_us(sample.batch, sample.units) / sample.time_us - 1.0
}

/// Returns the grid's values, from the largest down.
fn steps((low, high): (f64, f64)) -> impl Iterator<Item = f64> {
    (0..=STEPS).map(move |step| (high - (high - low) * f64::from(step) / f64::from(STEPS)).exp())
}

/// Returns a range of a third of the width around `middle`.
fn narrowed((low, high): (f64, f64), middle: f64, limits: (f64, f64)) -> (f64, f64) {
    let half = (high - low) / 6.0;
    ((middle - half).max(limits.0), (middle + half).min(limits.1))
}

/// Fits `fixed_us` and `work_us` by least squares of the relative errors, neither below 0.
fn linear(samples: &[SegmentSample], units_per_item: f64, most_units: f64) -> SegmentLaw {
    let law = SegmentLaw { fixed_us: 0.0, work_us: 0.0, units_per_item, most_units };
    // fixed * f + work * w = 1 for each sample.
    let (mut ff, mut fw, mut ww, mut f, mut w) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for sample in samples {
        let fixed = 1.0 / sample.time_us;
        let work = f64::from(sample.batch) / law.units(sample.batch, sample.units) / sample.time_us;
        (ff, fw, ww, f, w) = (ff + fixed * fixed, fw + fixed * work, ww + work * work, f + fixed, w + work);
    }
    let determinant = ff * ww - fw * fw;
    let both =
        (determinant > ff * ww * 1e-12).then(|| ((f * ww - w * fw) / determinant, (w * ff - f * fw) / determinant));
    let (fixed_us, work_us) = match both {
        Some((fixed, work)) if fixed >= 0.0 && work >= 0.0 => (fixed, work),
        Some((_, work)) if work < 0.0 => (f / ff, 0.0),
        _ => (0.0, w / ww),
    };
    SegmentLaw { fixed_us, work_us, ..law }
}

/// Two batches that ran at the same time, each over and over.
#[derive(Clone, Debug, PartialEq)]
pub struct PairSample {
    /// The segments of each.
    pub segments: [Vec<SegmentLaw>; 2],
    /// The items of each.
    pub batches: [u32; 2],
    /// The time of each beside the other, as a multiple of its time alone.
    pub slowdowns: [f64; 2],
}

/// The largest crowding that is tried, in thousandths.
const MOST_CROWDING: u32 = 1000;
/// Steps of the search, coarse and fine, thousandths.
const COARSE: u32 = 100;
const FINE: u32 = 5;

/// The shares of the fixed times that issuing may be.
const ISSUE_SHARES: [f64; 5] = [1.0, 0.75, 0.5, 0.25, 0.0];

/// The constants of a device that pairs reveal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceFit {
    /// The sharing of units, and the crowding: the thousandths by which another launch lengthens
    /// issuing.
    pub limits: DeviceLimits,
    /// The share of the fixed times that is issuing. Launches issue one at a time.
    pub issue_share: f64,
    /// The error of the slowdowns: the root of the mean square of their logarithms.
    pub error: f64,
}

/// Searches the constants that make pairs slow down as measured; `None` without pairs.
pub fn fit_device(limits: DeviceLimits, pairs: &[PairSample]) -> Option<DeviceFit> {
    if pairs.is_empty() {
        return None;
    }
    let mut best: Option<DeviceFit> = None;
    let mut attempt = |sharing, issue_share, crowding_permille| {
        let limits = DeviceLimits { sharing, crowding_permille, ..limits };
        let off = |pair: &PairSample| -> f64 {
            let kernels = [0, 1].map(|index| {
                let laws = pair.segments[index].iter();
                laws.flat_map(|law| law.kernels(pair.batches[index], limits.units, issue_share)).collect()
            });
            let found = slowdowns(limits, &kernels);
            found.iter().zip(pair.slowdowns).map(|(found, measured)| (found / measured.max(1e-3)).ln().powi(2)).sum()
        };
        let error = (pairs.iter().map(off).sum::<f64>() / (2 * pairs.len()) as f64).sqrt();
        if best.is_none_or(|fit| error < fit.error - 1e-9) {
            best = Some(DeviceFit { limits, issue_share, error });
        }
        error
    };
    for sharing in [Sharing::InOrder, Sharing::Proportional] {
        for issue_share in ISSUE_SHARES {
            // Where nothing is issued, crowding changes nothing.
            let most = if issue_share > 0.0 { MOST_CROWDING } else { 0 };
            let (mut least, mut middle) = (f64::INFINITY, 0);
            for crowding in (0..=most).step_by(COARSE as usize) {
                let error = attempt(sharing, issue_share, crowding);
                if error < least {
                    (least, middle) = (error, crowding);
                }
            }
            for crowding in (middle.saturating_sub(COARSE)..=(middle + COARSE).min(most)).step_by(FINE as usize) {
                attempt(sharing, issue_share, crowding);
            }
        }
    }
    best
}

/// Runs of the slower model for a slowdown, and the most runs of the faster.
const RUNS: usize = 4;
const MOST_RUNS: usize = 400;

/// Returns how many times as long as alone each takes while the other runs one batch after another.
pub fn slowdowns(limits: DeviceLimits, kernels: &[Vec<Kernel>; 2]) -> [f64; 2] {
    let works = kernels.each_ref().map(|kernels| Work { kernels: kernels.clone(), ..Work::default() });
    let alone = works.each_ref().map(|work| work.alone(&limits).as_secs_f64().max(1e-9));
    let mut device = ContendedDevice::new(limits, 2);
    let mut began = [Time::ZERO; 2];
    let mut times: [Vec<f64>; 2] = [Vec::new(), Vec::new()];
    for (lane, work) in works.iter().enumerate() {
        device.launch(Time::ZERO, LaneId(lane as u32), 0, work.clone());
    }
    while times.iter().any(|times| times.len() < RUNS) && times.iter().all(|times| times.len() < MOST_RUNS) {
        let Some(now) = device.next_event() else { break };
        for completed in device.advance(now) {
            let Completed::Launch { lane, .. } = completed else { continue };
            let index = lane.0 as usize;
            times[index].push(now.since(began[index]).as_secs_f64());
            began[index] = now;
            device.launch(now, lane, 0, works[index].clone());
        }
    }
    [0, 1].map(|index| {
        let mean = times[index].iter().sum::<f64>() / times[index].len() as f64;
        if mean.is_nan() { 1.0 } else { mean / alone[index] }
    })
}
