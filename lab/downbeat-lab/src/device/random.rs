//! Random workloads of a few devices. Nothing favours a policy in these workloads, so they judge
//! `auto` fairly.

use std::fmt;

use downbeat_core::Duration;
use rand_distr::{Distribution, StandardUniform};
use rand_pcg::Pcg64;

use super::limits::{DeviceLimits, Sharing};
use super::measured::{MeasuredModel, SegmentLaw};
use super::model::EmulatedModel;
use downbeat_sim::{Arrivals, random};

/// Devices, the models on all of them, and the requests for these models. A workload follows from
/// its seed and its number.
#[derive(Clone, Debug)]
pub struct RandomDeviceWorkload {
    /// The workload's number among the seed's workloads, from 1.
    pub number: u32,
    /// The limits of each device.
    pub limits: DeviceLimits,
    /// The number of devices.
    pub devices: usize,
    /// The models.
    pub models: Vec<RandomModel>,
    /// The arrival process of requests.
    pub arrivals: Arrivals,
    /// The load, as a share of the devices' throughput with one batch after another, of the largest
    /// size that the SLO allows.
    pub load: f64,
    /// The standard deviation of a launch's time, as a share of the time.
    pub noise: f64,
}

/// A model of a random workload.
#[derive(Clone, Debug)]
pub struct RandomModel {
    /// The model's emulated launches.
    pub emulated: EmulatedModel,
    /// The model's largest batch.
    pub max_batch: u32,
    /// The time from arrival to deadline.
    pub slo: Duration,
    /// Requests a second.
    pub rate: f64,
}

/// The segments of a model; each uses its own number of units.
const SEGMENTS: usize = 4;
/// The time of one item in milliseconds, before times are stretched to keep rates low.
const SINGLE_MS: (f64, f64) = (1.0, 20.0);
/// SLOs as multiples of one item's time.
const SLO_FACTORS: (f64, f64) = (2.0, 20.0);
/// See [`RandomDeviceWorkload::load`].
const LOADS: (f64, f64) = (0.2, 1.3);
/// The most requests a second of a workload. Above it all times are stretched, which only changes
/// decisions that depend on absolute times.
const MOST_RATE: f64 = 1_000.0;
const ARRIVALS: [Arrivals; 6] = [
    Arrivals::Poisson,
    Arrivals::Poisson,
    Arrivals::Constant,
    Arrivals::Gamma(0.05),
    Arrivals::Gamma(0.2),
    Arrivals::Gamma(0.5),
];

struct Dice(Pcg64);

impl Dice {
    fn between(&mut self, (least, most): (f64, f64)) -> f64 {
        let share: f64 = StandardUniform.sample(&mut self.0);
        least + (most - least) * share
    }

    fn log_between(&mut self, (least, most): (f64, f64)) -> f64 {
        self.between((least.ln(), most.ln())).exp()
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[(self.between((0.0, of.len() as f64)) as usize).min(of.len() - 1)]
    }
}

impl RandomDeviceWorkload {
    /// Draws the workload of this seed and number.
    pub fn draw(seed: u64, number: u32) -> Self {
        let mut dice = Dice(random(seed, (1 << 40) + u64::from(number)));
        let limits = DeviceLimits {
            sharing: dice.one_of(&[Sharing::Proportional, Sharing::InOrder]),
            crowding_permille: dice.one_of(&[0, 20, 60]),
            own_hosts: false,
            copy_bytes_per_second: f64::INFINITY,
            ..DeviceLimits::plain(dice.one_of(&[32, 64, 128]))
        };
        let (devices, count) = (dice.one_of(&[1, 1, 2, 3]), dice.one_of(&[1, 1, 2]));
        let issue_share = dice.one_of(&[0.0, 0.5, 1.0]);
        let load = dice.between(LOADS);
        let arrivals = dice.one_of(&ARRIVALS);
        let noise = dice.one_of(&[0.0, 0.02, 0.05]);
        let mut drawn: Vec<_> = (0..count).map(|_| draw_model(&mut dice, limits, issue_share)).collect();
        let rate = |(model, max_batch, factor): &(MeasuredModel, u32, f64), stretch: f64| {
            let emulated = EmulatedModel::measured(stretched(model, stretch));
            let slo = Duration::from_secs_f64(emulated.time(1, 0).as_secs_f64() * factor);
            let best = |rows: u32| f64::from(rows) / emulated.time(rows, 0).as_secs_f64();
            let fits = |rows: &u32| *rows == 1 || emulated.time(*rows, 0) + emulated.time(*rows, 0) <= slo;
            let most = (1..=*max_batch).filter(fits).map(best).fold(0.0, f64::max);
            let rate = most * load * devices as f64 / count as f64;
            RandomModel { emulated, max_batch: *max_batch, slo, rate }
        };
        let total: f64 = drawn.iter().map(|drawn| rate(drawn, 1.0).rate).sum();
        let stretch = (total / MOST_RATE).max(1.0);
        let models = drawn.drain(..).map(|drawn| rate(&drawn, stretch)).collect();
        RandomDeviceWorkload { number, limits, devices, models, arrivals, load, noise }
    }
}

/// Draws a model, its largest batch, and its SLO as a multiple of one item's time.
fn draw_model(dice: &mut Dice, limits: DeviceLimits, issue_share: f64) -> (MeasuredModel, u32, f64) {
    let single_us = dice.log_between(SINGLE_MS) * 1e3 / SEGMENTS as f64;
    let fixed = dice.between((0.05, 0.9));
    let most = f64::from(limits.units);
    let segment = |dice: &mut Dice| {
        let uneven = dice.log_between((0.5, 2.0));
        let most_units = dice.log_between((most / 8.0, most));
        let units_per_item = dice.log_between((0.5, most_units));
        let law = SegmentLaw { fixed_us: single_us * fixed * uneven, work_us: 0.0, units_per_item, most_units };
        SegmentLaw { work_us: single_us * (1.0 - fixed) * uneven * law.units(1, limits.units), ..law }
    };
    let segments = (0..SEGMENTS).map(|_| segment(dice)).collect();
    let model = MeasuredModel {
        name: "random".to_owned(),
        segments,
        item_bytes: (0, 0),
        launch_overhead: Duration::from_micros(dice.one_of(&[5, 20, 80])),
        limits,
        issue_share,
    };
    (model, dice.one_of(&[8, 16, 32]), dice.log_between(SLO_FACTORS))
}

fn stretched(model: &MeasuredModel, stretch: f64) -> MeasuredModel {
    let slower =
        |law: &SegmentLaw| SegmentLaw { fixed_us: law.fixed_us * stretch, work_us: law.work_us * stretch, ..*law };
    MeasuredModel { segments: model.segments.iter().map(slower).collect(), ..model.clone() }
}

/// Writes the workload in one line.
impl fmt::Display for RandomDeviceWorkload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RandomDeviceWorkload { number, limits, devices, models, arrivals, load, noise } = self;
        write!(
            f,
            "workload {number}: {} models on {devices} devices of {} units, {arrivals}, load {load:.2}, noise {:.0}%",
            models.len(),
            limits.units,
            100.0 * noise
        )?;
        for RandomModel { emulated, max_batch, slo, rate } in models {
            let (one, full) = (emulated.time(1, 0).as_millis_f64(), emulated.time(*max_batch, 0).as_millis_f64());
            write!(f, "; {rate:.0}/s within {:.0} ms, l(1) {one:.1}, l({max_batch}) {full:.1}", slo.as_millis_f64())?;
        }
        Ok(())
    }
}
