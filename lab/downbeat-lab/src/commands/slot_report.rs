//! The output of `downbeat-lab slots`: the tried layouts, the best one, and its tables for
//! downbeat.toml.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::ensure;
use downbeat_core::Duration;
use downbeat_plan::words::number;
use downbeat_report::Table;
use downbeat_service::options::EngineChoice;
use downbeat_sim::Policy;
use serde::Serialize;

use super::share_profile::ShareProfile;
use crate::slots::{Found, SlotLayout, SlotProblem, Tried};

/// A division must hold this many times the load of whole devices. A smaller gain may be chance.
const WORTH: f64 = 1.03;

/// The demand on a model.
#[derive(Clone, Debug)]
pub struct Asked {
    pub name: String,
    pub slo: Duration,
    /// Requests a second.
    pub rate: f64,
}

/// The devices and their possible divisions.
#[derive(Clone, Debug, Serialize)]
pub struct Device {
    /// Compute units.
    pub units: u32,
    /// The step in which partitions are planned, compute units.
    pub step: u32,
    /// Whether partitions are named as shares of the device.
    #[serde(skip)]
    in_percent: bool,
}

impl Device {
    /// Returns the device on which all models were measured.
    ///
    /// # Errors
    /// If the models were not measured on the same shares of the same device.
    pub fn of(profiles: &[ShareProfile], names: &[String]) -> anyhow::Result<Device> {
        let of = |profile: &ShareProfile| (profile.engine.clone(), profile.units, profile.step);
        let mut all = profiles.iter().map(of).zip(names);
        let Some((first, name)) = all.next() else { anyhow::bail!("no model is given") };
        for (other, other_name) in all {
            ensure!(
                first == other,
                "'{name}' was measured with {} on {} units in steps of {}, '{other_name}' with {} on {} in steps of {}; measure both with the same --shares N",
                first.0,
                first.1,
                first.2,
                other.0,
                other.1,
                other.2
            );
        }
        let (engine, units, step) = first;
        Ok(Device { units, step, in_percent: engine == EngineChoice::Emulated.name() })
    }

    /// Returns the number of steps into which the device can be divided.
    pub fn steps(&self) -> u32 {
        self.units / self.step
    }

    /// Returns a partition of `steps` steps, as `[device] partitions` takes it.
    fn partition(&self, steps: u32) -> String {
        let units = steps * self.step;
        if self.in_percent { format!("{units}%") } else { units.to_string() }
    }

    /// Returns the partitions of each device, such as `50% + 50%`.
    fn layout(&self, layout: &SlotLayout) -> String {
        match layout.0.first().map_or(&[][..], Vec::as_slice) {
            [] | [_] => "whole".to_owned(),
            slots => slots.iter().map(|steps| self.partition(*steps)).collect::<Vec<_>>().join(" + "),
        }
    }
}

/// A layout in a trial.
#[derive(Clone, Debug, Serialize)]
struct Trial {
    /// The partitions of each device.
    layout: String,
    /// Whether models are kept from partitions that cost them too much.
    kept_off: bool,
    /// The predicted requests a second of all models, if requests came evenly.
    predicted: Option<f64>,
    /// Requests a second at which at most 1% of each model's requests are dropped or late.
    held: f64,
}

/// The plan for a model.
#[derive(Clone, Debug, Serialize)]
struct Planned {
    name: String,
    slo_ms: f64,
    rate: f64,
    /// The partitions that the model runs on; empty if devices stay whole.
    partition: Vec<usize>,
}

/// A plan for people and, as JSON, for programs.
#[derive(Clone, Debug, Serialize)]
pub struct SlotReport {
    devices: u32,
    device: Device,
    policy: String,
    models: Vec<Planned>,
    /// The requests a second of all models that were asked for.
    rate: f64,
    /// The requests a second that whole devices hold.
    whole: f64,
    /// The requests a second that partitions hold; `None` if no division was better in the trials.
    divided: Option<f64>,
    /// The partitions of each device; empty if devices stay whole.
    partitions: Vec<String>,
    trials: Vec<Trial>,
}

/// The tables of downbeat.toml.
#[derive(Serialize)]
struct Tables<'a> {
    device: DeviceTable<'a>,
    models: BTreeMap<&'a str, ModelTable<'a>>,
}

#[derive(Serialize)]
struct DeviceTable<'a> {
    partitions: &'a [String],
}

#[derive(Serialize)]
struct ModelTable<'a> {
    partition: &'a [usize],
}

impl SlotReport {
    /// Makes the report from the results of whole devices and of slots.
    pub fn new(
        device: &Device,
        problem: &SlotProblem,
        asked: Vec<Asked>,
        (whole, slots): (Found, Found),
        policy: &Policy,
    ) -> Self {
        let cut = slots.layout.0.first().filter(|cut| cut.len() > 1);
        let chosen = cut.filter(|_| slots.capacity > whole.capacity * WORTH).map_or(&[][..], Vec::as_slice);
        let runs_on = |model: usize| -> Vec<usize> {
            let of = &problem.models[model];
            let runs = |steps: u32| {
                slots.runs[model][steps as usize - 1] && of.profiles[steps as usize - 1].latency(1) <= of.slo
            };
            chosen.iter().enumerate().filter(|(_, steps)| runs(**steps)).map(|(index, _)| index).collect()
        };
        let trial = |Tried { layout, predicted, kept_off, capacity }: &Tried| Trial {
            layout: device.layout(layout),
            kept_off: *kept_off,
            predicted: *predicted,
            held: *capacity,
        };
        SlotReport {
            devices: problem.devices,
            device: device.clone(),
            policy: policy.to_string(),
            rate: asked.iter().map(|asked| asked.rate).sum(),
            whole: whole.capacity,
            divided: cut.map(|_| slots.capacity),
            partitions: chosen.iter().map(|steps| device.partition(*steps)).collect(),
            trials: slots.tried.iter().map(trial).collect(),
            models: asked
                .into_iter()
                .enumerate()
                .map(|(index, Asked { name, slo, rate })| Planned {
                    name,
                    slo_ms: slo.as_millis_f64(),
                    rate,
                    partition: runs_on(index),
                })
                .collect(),
        }
    }

    /// Returns the tables for downbeat.toml; `None` if devices stay whole.
    pub fn tables(&self) -> Option<String> {
        if self.partitions.is_empty() {
            return None;
        }
        let of = self.models.iter().map(|model| (&*model.name, ModelTable { partition: &model.partition }));
        toml::to_string(&Tables { device: DeviceTable { partitions: &self.partitions }, models: of.collect() }).ok()
    }

    /// Returns the advice in a sentence or two.
    fn verdict(&self) -> String {
        let held = |rate: f64| match rate {
            0.0 => "no load".to_owned(),
            rate => format!("{} requests/s", number(rate)),
        };
        let enough = |rate: f64| if rate >= self.rate { "enough" } else { "too little" };
        let asked = |rate: f64| format!("; asked for are {}: {}", number(self.rate), enough(rate));
        let whole = format!("Whole devices hold {}", held(self.whole));
        match (self.divided, self.partitions.is_empty()) {
            (Some(divided), false) => {
                let times =
                    if self.whole > 0.0 { format!(", {:.2} times that", divided / self.whole) } else { String::new() };
                format!("{whole}, divided they hold {}{times}{}.", held(divided), asked(divided))
            }
            (Some(divided), true) => format!(
                "{whole}, and the best division in the trials holds {} where it counts, which is not clearly more. Leave the devices whole: name no partitions{}.",
                held(divided),
                asked(self.whole)
            ),
            (None, _) => {
                format!(
                    "{whole}, and no division held more. Leave the devices whole: name no partitions{}.",
                    asked(self.whole)
                )
            }
        }
    }
}

impl fmt::Display for SlotReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = if self.devices == 1 { "1 device".to_owned() } else { format!("{} devices", self.devices) };
        let Device { units, step, .. } = self.device;
        writeln!(f, "{devices} of {units} compute units in steps of {step}, scheduler {}\n", self.policy)?;
        Table::of(&self.models)
            .text("model", |m| &m.name)
            .number("SLO ms", |m| number(m.slo_ms))
            .number("requests/s", |m| number(m.rate))
            .fmt(f)?;
        writeln!(
            f,
            "\nTrials: requests a second of all models, in these proportions, at which at most 1% of each model's are dropped or late\n"
        )?;
        Table::of(&self.trials)
            .text("each device", |t| &t.layout)
            .text("models", |t| if t.kept_off { "where they cost little" } else { "anywhere" })
            .some("if even", |t| t.predicted.map(number))
            .number("held", |t| number(t.held))
            .fmt(f)?;
        writeln!(f, "\n{}", self.verdict())?;
        self.tables().map_or(Ok(()), |tables| write!(f, "\n{tables}"))
    }
}
