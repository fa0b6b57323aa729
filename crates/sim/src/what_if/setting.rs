//! The changes to a log, and the resulting run.

use std::collections::BTreeMap;
use std::sync::Arc;

use downbeat_core::cluster::{Behaviour, Order, OrderPolicy};
use downbeat_core::{Duration, ModelId, Time};

use super::comparison::Row;
use super::figures::{Figures, ModelFigures, Samples};
use super::interval::PARTS;
use super::recorded::{Recorded, RecordedModel};
use crate::arrivals::arrival::Arrival;
use crate::arrivals::pace::Pace;
use crate::arrivals::{Arrivals, BadArrivals};
use crate::policy::Policy;
use crate::simulation::network::Network;
use crate::simulation::system::{Downbeat, System};
use crate::simulation::{Load, Simulation};
use crate::tables::report::Report;

/// The settings that the rehearsal of a running server has found.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Found {
    /// The behaviours of adaptive models, by the log's ids. Other models follow the load of the moment.
    pub behaviours: BTreeMap<ModelId, Behaviour>,
    /// The order in which candidates get devices; `None`: the rehearsal has found none.
    pub order: Option<Order>,
}

/// The changes to a log.
#[derive(Clone, PartialEq, Debug)]
pub struct Setting {
    /// The policy of all models; `None`: each model's own.
    pub policy: Option<Policy>,
    /// The number of devices.
    pub devices: u32,
    /// The factor by which requests come faster: their distances are divided by it.
    pub rate: f64,
    /// For each model: the new time from arrival to deadline of all its requests. Other models keep
    /// theirs.
    pub slos: BTreeMap<ModelId, Duration>,
    /// The factor for all times from arrival to deadline.
    pub slo_factor: f64,
    /// The largest batch, in items, besides each model's own limit; `None`: the limits alone.
    pub max_batch: Option<u32>,
    /// Whether adaptive models are rehearsed, as in a server.
    pub rehearse: bool,
    /// The settings that stay as a rehearsal has found them. A policy of all models overrides them, and so
    /// does `rehearse`.
    pub found: Found,
}

/// The reason why a setting cannot be run.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum BadSetting {
    /// A changed SLO of a model without requests in the log.
    #[error("the log has no requests of a model {0}; models with requests are {1}")]
    UnknownModel(String, String),
    /// The rate is no positive number.
    #[error("the rate is {0}; the rate must be a number above 0")]
    Rate(f64),
    /// The setting has no device.
    #[error("there is no device; a cluster needs at least one")]
    NoDevices,
    /// The arrivals are invalid.
    #[error(transparent)]
    Arrivals(#[from] BadArrivals),
}

impl Setting {
    /// The setting of the log itself, without changes.
    pub fn of(recorded: &Recorded) -> Setting {
        Setting {
            policy: None,
            devices: recorded.devices,
            rate: 1.0,
            slos: BTreeMap::new(),
            slo_factor: 1.0,
            max_batch: None,
            rehearse: true,
            found: Found::default(),
        }
    }
}

fn scaled(span: Duration, factor: f64) -> Duration {
    if factor == 1.0 { span } else { Duration::from_nanos((span.as_nanos() as f64 * factor).round() as u64) }
}

impl Recorded {
    /// The models with this name in the log: several, if requests of each shape have a queue.
    ///
    /// # Errors
    /// If no model has this name.
    pub fn models_called(&self, name: &str) -> Result<Vec<ModelId>, BadSetting> {
        let found: Vec<ModelId> =
            self.models.iter().filter(|model| model.is_called(name)).map(|model| model.id).collect();
        let known = || self.models.iter().map(RecordedModel::name).collect::<Vec<_>>().join(", ");
        if found.is_empty() { Err(BadSetting::UnknownModel(name.to_owned(), known())) } else { Ok(found) }
    }

    /// The simulation of the log's requests under this setting.
    ///
    /// # Errors
    /// If the setting is invalid.
    pub fn simulation(&self, setting: &Setting) -> Result<Simulation, BadSetting> {
        let Setting { policy, devices, rate, slo_factor, .. } = setting;
        if !(rate.is_finite() && *rate > 0.0) {
            return Err(BadSetting::Rate(*rate));
        }
        if *devices == 0 {
            return Err(BadSetting::NoDevices);
        }
        let own: Vec<Option<Duration>> =
            self.models.iter().map(|model| setting.slos.get(&model.id).map(|slo| scaled(*slo, *slo_factor))).collect();
        let arrival = |arrival: &Arrival| {
            let at = Time::ZERO + scaled(arrival.at.since(Time::ZERO), 1.0 / rate);
            let later = |then: Time, factor: f64| {
                if then == Time::MAX { then } else { at + scaled(then.since(arrival.at), factor) }
            };
            let own = own.get(arrival.model.0 as usize).copied().flatten();
            let deadline = own.map_or_else(|| later(arrival.deadline, *slo_factor), |slo| at + slo);
            Arrival { at, deadline, queue_expiry: later(arrival.queue_expiry, 1.0), ..*arrival }
        };
        let arrivals: Arc<[Arrival]> = self.arrivals.iter().map(arrival).collect();
        let span = Duration::from_nanos(scaled(self.span, 1.0 / rate).as_nanos().max(1));
        let mut counts = vec![0u64; self.models.len()];
        arrivals.iter().for_each(|arrival| counts[arrival.model.0 as usize] += 1);
        let loads = self.models.iter().zip(&own).zip(&counts).map(|((model, own), count)| {
            let rate = *count as f64 / span.as_secs_f64();
            self.load(setting, model, *own, rate)
        });
        let rehearsal = Simulation::default().rehearsal;
        let none = Found::default();
        let found = if policy.is_some() || setting.rehearse { &none } else { &setting.found };
        let order = policy.as_ref().and_then(Policy::own_order).or(found.order.map(OrderPolicy::Fixed));
        Ok(Simulation {
            rehearsal: if setting.rehearse { rehearsal } else { 0 },
            system: policy.as_ref().map_or_else(|| Arc::new(Downbeat) as Arc<dyn System>, Policy::system),
            behaviours: self.models.iter().map(|model| found.behaviours.get(&model.id).copied()).collect(),
            order: order.unwrap_or(self.order),
            loads: loads.collect(),
            executions: self.models.iter().map(|model| model.executions.clone()).collect(),
            wake_margin: self.wake_margin,
            devices: *devices,
            warm_up: Duration::ZERO,
            span,
            network: Network { budget: self.network, ..Network::default() },
            recorded: Some(arrivals),
            ..Simulation::default()
        })
    }

    fn load(&self, setting: &Setting, model: &RecordedModel, own: Option<Duration>, rate: f64) -> Load {
        let mut options = model.options.clone();
        // Models without deadlines need an SLO for timeouts that are a share of it.
        let some = options.profiles.first().latency(options.max_batch).saturating_mul(8);
        let slo = own.or_else(|| model.slo.map(|slo| scaled(slo, setting.slo_factor))).unwrap_or(some);
        if let Some(policy) = &setting.policy {
            (options.dispatch, options.drop) = (policy.dispatch(slo), policy.drop());
        }
        if let Some(most) = setting.max_batch {
            options.max_batch = options.max_batch.min(most);
        }
        // A model that could run on all devices of the log may run on all devices of the setting.
        if options.max_in_flight >= self.devices {
            options.max_in_flight = u32::MAX;
        }
        Load { options, slo, arrivals: Arrivals::Poisson, rate, pace: Pace::default() }
    }

    /// A lower bound of the devices that answer this share of each model's requests in time under
    /// any policy. They must work all the time from the first arrival to the last deadline, in the
    /// batches that cost the least by the item. Requests without a deadline can be answered later.
    pub(super) fn least_devices(&self, setting: &Setting, share: f64) -> u32 {
        let Ok(simulation) = self.simulation(setting) else { return 1 };
        let arrivals = simulation.recorded.as_deref().unwrap_or_default();
        let timely = || arrivals.iter().filter(|arrival| arrival.deadline < Time::MAX);
        let over = timely().map(|arrival| arrival.deadline).max().unwrap_or(Time::ZERO).since(Time::ZERO);
        let mut sizes: Vec<Vec<u32>> = vec![Vec::new(); self.models.len()];
        timely().for_each(|arrival| sizes[arrival.model.0 as usize].push(arrival.size));
        let work = sizes.into_iter().zip(&simulation.loads).zip(&self.models).map(|((mut sizes, load), model)| {
            // The largest requests are the ones that may stay unanswered.
            sizes.sort_unstable();
            let needed = (share * sizes.len() as f64) as usize;
            let items: u64 = sizes.iter().take(needed).map(|size| u64::from(*size)).sum();
            let profile = load.options.profiles.first();
            let by_item = |batch: u32| profile.latency(batch).as_secs_f64() / f64::from(batch);
            let least = (1..=load.options.max_batch.max(1)).map(by_item).fold(f64::INFINITY, f64::min);
            let executions = &model.executions;
            let mean = executions.iter().sum::<f64>() / executions.len().max(1) as f64;
            items as f64 * least * if executions.is_empty() { 1.0 } else { mean }
        });
        // The drawn executions may be 5% shorter than their mean.
        (0.95 * work.sum::<f64>() / over.as_secs_f64().max(1e-9)).ceil().clamp(1.0, f64::from(u32::MAX)) as u32
    }

    /// Runs the log's requests under this setting.
    ///
    /// # Errors
    /// As [`Recorded::simulation`].
    pub fn run(&self, setting: &Setting) -> Result<Row, BadSetting> {
        let mut simulation = self.simulation(setting)?;
        simulation.window = Duration::from_nanos(simulation.span.as_nanos().div_ceil(PARTS as u64).max(1));
        let report = simulation.run()?;
        Ok(self.row(setting, &report))
    }

    fn row(&self, setting: &Setting, report: &Report) -> Row {
        let samples: Vec<Samples> = (0..self.models.len()).map(|model| Samples::simulated(report, model)).collect();
        let figures = self.models.iter().zip(&samples).enumerate().map(|(index, (model, samples))| ModelFigures {
            model: model.name(),
            figures: Figures::simulated(report, index, samples),
        });
        let models: Vec<ModelFigures> = figures.collect();
        let together = samples.iter().fold(Samples::default(), Samples::with);
        Row {
            source: "simulated".to_owned(),
            policy: setting.policy.as_ref().map_or("as recorded".to_owned(), ToString::to_string),
            devices: setting.devices,
            rate: setting.rate,
            max_batch: setting.max_batch,
            busy: report.mean_busy(),
            all: Figures::sum(models.iter().map(|model| &model.figures)).finished(report.span, &together),
            models,
        }
    }
}
