//! The settings of a workload of an experiment.

use std::path::{Path, PathBuf};

use downbeat_core::Duration;
use downbeat_core::cluster::NetworkBudget;
use serde::Deserialize;

use downbeat_sim::Arrivals;
use downbeat_sim::Pace;
use downbeat_sim::{ModelProfile, profiles};
use downbeat_sim::{Network, UnknownDelay};
use downbeat_sim::{Popularity, Scenario, Shape};

/// The settings of a workload, which a sweep can vary.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Settings {
    /// The name in tables and plots.
    pub name: Option<String>,
    /// The models, in full.
    pub models: Vec<ModelProfile>,
    /// A csv file of models, from the folder of the experiment.
    pub profiles: Option<PathBuf>,
    /// Picks the models of these names, in this order.
    pub pick: Option<Names>,
    /// Then takes this many models from the front. If there are fewer, it starts again from the
    /// first, as copies.
    pub count: Option<u32>,
    /// Then keeps the models with a strong (`beta / alpha > 2`) or weak batching effect (Symphony
    /// §5.1).
    pub effect: Option<Effect>,
    /// Then takes each model this many times.
    pub copies: Option<u32>,
    /// Replaces each model's own `alpha`.
    pub alpha_ms: Option<f64>,
    /// Replaces each model's own `beta`.
    pub beta_ms: Option<f64>,
    /// Replaces each model's own SLO.
    pub slo_ms: Option<f64>,
    /// Replaces each model's own SLO by `2 l(b)` of this batch size.
    pub slo_batch: Option<u32>,
    /// `poisson` (the default), `constant` or `gamma:K`.
    pub arrivals: Option<String>,
    /// `equal` (the default), `zipf:S` or `maf`.
    pub popularity: Option<String>,
    /// Requests per second of all models together. A search of a capacity chooses its own.
    pub rate: Option<f64>,
    /// `steady` (the default), `twitter`, `maf:SECONDS`, `wandering:SECONDS`,
    /// `rising:FROM,TO,REQUESTS,STEPS`.
    pub shape: Option<String>,
    /// A change of the rate as `[milliseconds, factor]`, one after another.
    pub stretches: Option<Vec<(f64, f64)>>,
    /// Devices.
    pub devices: Option<u32>,
    /// The number of devices for each model, rounded up.
    pub devices_per_model: Option<f64>,
    /// The largest batch; by default the largest that the SLO allows.
    pub max_batch: Option<u32>,
    /// Standard deviation of an execution time, as a share of it.
    pub noise: Option<f64>,
    /// `d_ctrl`: the budget of a message to a device, in microseconds.
    pub control_us: Option<f64>,
    /// `d_data`: the budget of fetching an item's inputs, in microseconds.
    pub data_us: Option<f64>,
    /// The time from the end of a batch to the client's answer, in microseconds.
    pub reply_us: Option<f64>,
    /// The actual delays: `budget` (the default: always all of it), or `lognormal:RATIO`.
    pub delay: Option<String>,
    /// The value of `{timeout}` in the names of policies.
    pub timeout: Option<f64>,
}

/// One name or several.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Names {
    /// A single name.
    One(String),
    /// A list of names.
    Many(Vec<String>),
}

/// The strength of a model's batching effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Effect {
    /// `beta / alpha > 2`.
    Strong,
    /// `beta / alpha` of at most 2.
    Weak,
}

/// `beta / alpha` above which a batching effect is strong (Symphony §5.1).
const STRONG: f64 = 2.0;
/// The longest delay of a message: an hour.
const MAX_DELAY_US: f64 = 3.6e9;
/// The largest number of models and copies: the feed of arrivals has no room for more.
const MAX_MODELS: usize = 1 << 20;

impl Settings {
    /// Returns the scenario that the settings describe. Relative paths start in `folder`.
    ///
    /// # Errors
    /// A message in words, if a setting is wrong or missing.
    pub fn scenario(&self, folder: &Path, warm_up: Duration, span: Duration) -> Result<Scenario, String> {
        let models = self.models(folder)?;
        let devices = match (self.devices, self.devices_per_model) {
            (Some(devices), None) => devices,
            (None, Some(each)) if (0.0..=1e6).contains(&each) => (each * models.len() as f64).ceil() as u32,
            (None, Some(each)) => return Err(format!("devices_per_model is {each}; it has to be from 0 to 1000000")),
            (None, None) => return Err("devices or devices_per_model is missing".to_owned()),
            (Some(_), Some(_)) => return Err("devices and devices_per_model exclude each other".to_owned()),
        };
        let text = |text: &Option<String>, default: &str| text.clone().unwrap_or_else(|| default.to_owned());
        let arrivals: Arrivals =
            text(&self.arrivals, "poisson").parse().map_err(|e: downbeat_sim::UnknownArrivals| e.to_string())?;
        let popularity: Popularity =
            text(&self.popularity, "equal").parse().map_err(|e: downbeat_sim::UnknownPopularity| e.to_string())?;
        let mut scenario = Scenario {
            models,
            rate: 1.0,
            arrivals,
            popularity,
            shape: self.shape()?,
            devices,
            max_batch: self.max_batch.unwrap_or(0),
            noise: self.noise.unwrap_or(0.0),
            network: self.network()?,
            warm_up,
            span,
        };
        scenario.rate = self.rate.unwrap_or_else(|| scenario.unreachable_rate());
        Ok(scenario)
    }

    fn network(&self) -> Result<Network, String> {
        let us = |name: &str, value: Option<f64>| match value.unwrap_or(0.0) {
            value if (0.0..=MAX_DELAY_US).contains(&value) => Ok(Duration::from_secs_f64(value * 1e-6)),
            value => Err(format!("{name} is {value}; it has to be from 0 to {MAX_DELAY_US} microseconds (an hour)")),
        };
        let delay = self.delay.as_deref().unwrap_or("budget").parse();
        Ok(Network {
            budget: NetworkBudget {
                control: us("control_us", self.control_us)?,
                data: us("data_us", self.data_us)?,
                reply: us("reply_us", self.reply_us)?,
            },
            delay: delay.map_err(|error: UnknownDelay| error.to_string())?,
        })
    }

    fn models(&self, folder: &Path) -> Result<Vec<ModelProfile>, String> {
        let mut models = self.models.clone();
        if let Some(file) = &self.profiles {
            models.extend(profiles::read(&folder.join(file)).map_err(|error| error.to_string())?);
        }
        if let Some(pick) = &self.pick {
            let names = match pick {
                Names::One(name) => std::slice::from_ref(name),
                Names::Many(names) => names,
            };
            let find = |name: &String| {
                let found = models.iter().find(|model| model.name == *name).cloned();
                found.ok_or_else(|| format!("there is no model '{name}' to be picked"))
            };
            models = names.iter().map(find).collect::<Result<_, _>>()?;
        }
        if let Some(effect) = self.effect {
            models.retain(|model| (model.batching_effect() > STRONG) == (effect == Effect::Strong));
        }
        if models.is_empty() {
            return Err("there is no model; give models or profiles".to_owned());
        }
        for model in &mut models {
            model.alpha_ms = self.alpha_ms.unwrap_or(model.alpha_ms);
            model.beta_ms = self.beta_ms.unwrap_or(model.beta_ms);
            model.slo_ms = self.slo_ms.unwrap_or(model.slo_ms);
            if let Some(batch) = self.slo_batch {
                model.slo_ms = 2.0 * (model.alpha_ms * f64::from(batch) + model.beta_ms);
            }
            model.check().map_err(|(_, message)| message)?;
        }
        let count = self.count.unwrap_or(models.len() as u32) as usize;
        let copies = self.copies.unwrap_or(1) as usize;
        if count.saturating_mul(copies) > MAX_MODELS {
            return Err(format!("{count} models, {copies} times, are more than {MAX_MODELS}"));
        }
        let chosen: Vec<ModelProfile> = models.iter().cycle().take(count).cloned().collect();
        let mut all = Vec::with_capacity(chosen.len() * copies);
        for (index, model) in chosen.iter().enumerate() {
            for copy in 0..copies {
                let round = index / models.len() * copies + copy;
                let name = if round == 0 { model.name.clone() } else { format!("{}#{}", model.name, round + 1) };
                all.push(ModelProfile { name, ..model.clone() });
            }
        }
        profiles::check_names(&all)?;
        Ok(all)
    }

    fn shape(&self) -> Result<Shape, String> {
        if let Some(stretches) = &self.stretches {
            let stretches = stretches.iter().map(|(ms, factor)| (Duration::from_millis_f64(*ms), *factor)).collect();
            return Ok(Shape::Given(Pace::new(stretches).map_err(|error| error.to_string())?));
        }
        let text = self.shape.as_deref().unwrap_or("steady");
        let (name, argument) = text.split_once(':').unwrap_or((text, ""));
        let numbers: Vec<f64> = argument.split(',').filter_map(|number| number.trim().parse().ok()).collect();
        let unknown = || {
            let expected = "steady, twitter, maf:SECONDS, wandering:SECONDS, or rising:FROM,TO,REQUESTS,STEPS";
            format!("'{text}' is no shape of a load; expected {expected}")
        };
        let seconds = |least: f64| {
            let [seconds] = numbers[..] else { return Err(unknown()) };
            if (least..=1e6).contains(&seconds) { Ok(Duration::from_secs_f64(seconds)) } else { Err(unknown()) }
        };
        match name {
            "steady" if argument.is_empty() => Ok(Shape::Steady),
            "twitter" if argument.is_empty() => Ok(Shape::Twitter),
            "maf" => Ok(Shape::Maf(seconds(1e-3)?)),
            "wandering" => Ok(Shape::Wandering(seconds(1e-3)?)),
            "rising" => {
                let [from, to, requests, steps] = numbers[..] else { return Err(unknown()) };
                if !(from > 0.0 && to > 0.0 && requests > 0.0 && (1.0..=1e6).contains(&steps)) {
                    return Err(unknown());
                }
                let pace = Pace::rising(from, to, requests, steps as u32).map_err(|error| error.to_string())?;
                Ok(Shape::Given(pace))
            }
            _ => Err(unknown()),
        }
    }
}
