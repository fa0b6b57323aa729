//! Emulated models on devices that can be cut.

use super::layout::{SlotModel, SlotProblem};
use downbeat_core::device::spatial::{KNEE_TOLERANCE, knee};
use downbeat_core::{Duration, LatencyProfile, ProfileError};

use rand::RngExt;

use crate::device::{Architecture, Client, EmulatedModel, Platform, closed_loop};
use downbeat_sim::random;

/// A model of a mix.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MixModel {
    /// The network.
    pub architecture: Architecture,
    /// Milliseconds from a request's arrival to its deadline.
    pub slo_ms: f64,
    /// Requests, in proportion to the other models' rates.
    pub rate: f64,
}

/// Models on equal devices that can be cut in steps.
#[derive(Clone, PartialEq, Debug)]
pub struct SlotMix {
    /// The name of the mix.
    pub name: String,
    /// The devices.
    pub platform: Platform,
    /// The number of devices.
    pub devices: u32,
    /// The steps into which each device can be cut.
    pub steps: u32,
    /// The models of the mix.
    pub models: Vec<MixModel>,
}

/// The networks of random mixes. The list is separate, so that a mix stays the same when networks
/// are added.
const DRAWN: [Architecture; 12] = [
    Architecture::ResNet50,
    Architecture::ResNet101,
    Architecture::ResNet152,
    Architecture::Vgg16,
    Architecture::Vgg19,
    Architecture::AlexNet,
    Architecture::MobileNet,
    Architecture::InceptionV4,
    Architecture::UNet,
    Architecture::LinkNet,
    Architecture::BertBase,
    Architecture::BertLarge,
];

/// Tokens of a request of a model that has lengths.
pub(super) const LENGTH: u32 = 64;
/// The largest batch.
const MOST_ITEMS: u32 = 64;
/// The most slots of a device: each is a lane, and one host issues the kernels of all lanes.
pub const MOST_SLOTS: u32 = 6;
/// The time for which models are measured beside others.
const MEASURED: Duration = Duration::from_millis(500);

/// A mix with its measurements.
#[derive(Clone, Debug)]
pub struct MeasuredMix {
    /// The problem for the plan.
    pub problem: SlotProblem,
    /// The emulated networks. `None` if the profiles are of no emulated network; then batches take
    /// the profiles' times, however the device is shared.
    pub networks: Option<Networks>,
}

/// Networks on emulated devices.
#[derive(Clone, Debug)]
pub struct Networks {
    /// The devices.
    pub platform: Platform,
    /// The networks, by model.
    pub models: Vec<EmulatedModel>,
    /// By model, by the model beside it: the mean latencies of batches on a whole device, beside
    /// half of the other's largest batch.
    pub beside: Vec<Vec<LatencyProfile>>,
}

impl SlotMix {
    /// Draws the mix of this seed and number: 2 to 5 different networks on 2 to 6 devices. SLOs are
    /// 1.8 to 8 times the time of one request on a whole device. A model's share of the devices'
    /// time is up to ten times another's.
    pub fn draw(seed: u64, number: u32) -> SlotMix {
        let mut rng = random(seed, u64::from(number));
        let (platform, steps) =
            if rng.random_bool(0.5) { (Platform::V100_TENSORRT, 10) } else { (Platform::A100_CUDNN, 9) };
        let (devices, count) = (rng.random_range(2..=6), rng.random_range(2..=5));
        let mut models: Vec<MixModel> = Vec::new();
        while models.len() < count {
            let architecture = DRAWN[rng.random_range(0..DRAWN.len())];
            let (factor, share) = (rng.random_range(0.0..1.0f64), rng.random_range(0.0..1.0f64));
            if models.iter().all(|model| model.architecture != architecture) {
                let alone = EmulatedModel::new(architecture, platform).time(1, LENGTH).as_millis_f64();
                let slo_ms = alone * 1.8 * (8.0f64 / 1.8).powf(factor);
                models.push(MixModel { architecture, slo_ms, rate: 10.0f64.powf(share) / alone });
            }
        }
        let names: Vec<String> =
            models.iter().map(|model| format!("{} {:.0} ms", model.architecture, model.slo_ms)).collect();
        let name = format!("{number}: {devices} {}, {}", &platform.name[..4], names.join(", "));
        SlotMix { name, platform, devices, steps, models }
    }

    /// Returns the compute units of a slot of `steps` steps.
    pub fn units(&self, steps: u32) -> u32 {
        self.platform.units * steps / self.steps
    }

    /// Measures every model on every size of slot, alone. On less than the whole device it adds the
    /// longest delay of a batch beside the other models on equally large slots.
    ///
    /// # Errors
    /// If a latency is zero, as no network's is.
    pub fn measure(&self) -> Result<MeasuredMix, ProfileError> {
        let models: Vec<EmulatedModel> =
            self.models.iter().map(|model| EmulatedModel::new(model.architecture, self.platform)).collect();
        let mut measured = Vec::new();
        for (index, MixModel { slo_ms, rate, .. }) in self.models.iter().enumerate() {
            let slo = Duration::from_millis_f64(*slo_ms);
            let time = |batch: u32, steps: u32| models[index].time_on(batch, LENGTH, self.units(steps));
            // One item more than fits on the whole device: the latency with one more item decides
            // when a batch is sent.
            let largest = (1..MOST_ITEMS).find(|batch| time(*batch, self.steps) > slo).unwrap_or(MOST_ITEMS);
            let profiles = (1..=self.steps).map(|steps| {
                let points: Vec<_> = (1..=largest).map(|batch| (batch, time(batch, steps))).collect();
                let profile = LatencyProfile::from_points(&points)?;
                Ok(profile.with_margin(self.margin(&models, index, steps, profile.largest_within(slo))))
            });
            measured.push(SlotModel { rate: *rate, slo, profiles: profiles.collect::<Result<_, ProfileError>>()? });
        }
        let (devices, steps) = (self.devices, self.steps);
        let largest: Vec<u32> = measured.iter().map(|model| model.profiles[steps as usize - 1].max_batch()).collect();
        let beside = (0..models.len()).map(|index| self.beside(&models, index, &largest)).collect::<Result<_, _>>()?;
        let problem = SlotProblem { models: measured, devices, steps, most_slots: MOST_SLOTS, alike: false };
        Ok(MeasuredMix { problem, networks: Some(Networks { platform: self.platform, models, beside }) })
    }

    /// Returns the mean latencies of a model's batches on a whole device, beside half of the
    /// largest batch of each model.
    fn beside(
        &self,
        models: &[EmulatedModel],
        index: usize,
        largest: &[u32],
    ) -> Result<Vec<LatencyProfile>, ProfileError> {
        let units = self.units(self.steps);
        let most = largest[index];
        let mut sizes: Vec<u32> = (0..).map(|power| 1 << power).take_while(|size| *size < most).collect();
        sizes.push(most);
        let point = |batch: u32, other: usize| {
            let clients = [(index, batch), (other, largest[other].div_ceil(2))];
            let clients = clients.map(|(model, batch)| Client::new(&models[model], batch, 0, units));
            let (served, _) = closed_loop(self.platform.limits(), &[units], &clients, MEASURED);
            (batch, Duration::from_millis_f64(served[0].mean_ms()))
        };
        let of =
            |other| LatencyProfile::from_points(&sizes.iter().map(|batch| point(*batch, other)).collect::<Vec<_>>());
        (0..models.len()).map(of).collect()
    }

    /// Returns the most percent by which a batch on a slot slows down while the other models keep
    /// equally large slots beside it busy.
    fn margin(&self, models: &[EmulatedModel], index: usize, steps: u32, largest: u32) -> u8 {
        let count = (self.steps / steps).min(MOST_SLOTS);
        if count < 2 || largest == 0 {
            return 0;
        }
        let units = self.units(steps);
        let batch = largest.div_ceil(2);
        let clients: Vec<Client> = (0..count as usize)
            .map(|slot| Client::new(&models[(index + slot) % models.len()], batch, slot, units))
            .collect();
        let alone = models[index].time_on(batch, LENGTH, units).as_millis_f64();
        let (served, _) = closed_loop(self.platform.limits(), &vec![units; count as usize], &clients, MEASURED);
        let longest = served[0].latencies_ms.iter().copied().fold(alone, f64::max);
        ((longest / alone - 1.0) * 100.0).ceil().clamp(0.0, 100.0) as u8
    }
}

impl MeasuredMix {
    /// Returns the same models on devices of two steps. A device with a slot of two steps runs one
    /// batch at a time. A device with two slots of one step runs two side by side on all units.
    /// Only `paired` models run side by side. A batch is planned with its time beside the paired
    /// model that slows it most. Without `predicted`, or without networks, the plan takes the time
    /// alone.
    ///
    /// # Errors
    /// If a latency is zero, as no network's is.
    pub fn side_by_side(&self, paired: &[usize], predicted: bool) -> Result<SlotProblem, ProfileError> {
        let model = |(index, model): (usize, &SlotModel)| {
            let alone = model.profiles.last().ok_or(ProfileError::Empty)?;
            let networks = self.networks.as_ref().filter(|_| predicted);
            let two = match (paired.contains(&index), networks) {
                (true, None) => alone.clone(),
                (true, Some(Networks { beside, .. })) => {
                    let longest = |batch| paired.iter().map(|other| beside[index][*other].latency(batch)).max();
                    LatencyProfile::from_table((1..=alone.max_batch()).filter_map(longest).collect::<Vec<_>>())?
                }
                // This profile misses the SLO, so the model runs on no such slot.
                (false, _) => LatencyProfile::linear(Duration::ZERO, model.slo.saturating_mul(2), 1)?,
            };
            Ok(SlotModel { profiles: vec![two, alone.clone()], ..model.clone() })
        };
        let models = self.problem.models.iter().enumerate().map(model).collect::<Result<_, ProfileError>>()?;
        Ok(SlotProblem { models, devices: self.problem.devices, steps: 2, most_slots: 2, alike: false })
    }

    /// Returns the knee of a model in steps, for the largest batch that takes at most half of its
    /// SLO on the whole device.
    pub fn knee(&self, model: usize) -> u32 {
        let SlotModel { slo, profiles, .. } = &self.problem.models[model];
        let batch = profiles.last().map_or(1, |whole| whole.largest_within(half(*slo)).max(1));
        let throughput = |profile: &LatencyProfile| f64::from(batch) / profile.latency(batch).as_secs_f64();
        let points: Vec<(u32, f64)> = (1..).zip(profiles.iter().map(throughput)).collect();
        knee(&points, KNEE_TOLERANCE).unwrap_or(self.problem.steps)
    }
}

/// Returns half of an SLO. A batch may take this long if the next batch must still serve requests
/// that come while it runs.
pub(super) fn half(slo: Duration) -> Duration {
    Duration::from_nanos(slo.as_nanos() / 2)
}
