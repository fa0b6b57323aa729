//! The file of an experiment: its text form and its parser.

use std::path::Path;

use downbeat_core::Duration;
use rand_distr::{Distribution, StandardUniform};
use serde::Deserialize;

use super::settings::Settings;
use super::{Experiment, Measure, Overrides, Planned, Plot, Value};
use crate::policy::POLICIES;
use downbeat_sim::check_seeds;
use downbeat_sim::random;
use downbeat_sim::{Search, TOLERATED};

/// An experiment as written in its file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    title: String,
    #[serde(default)]
    source: String,
    #[serde(default)]
    note: String,
    measure: Measure,
    #[serde(default)]
    plots: Vec<Plot>,
    x: Option<String>,
    relative_to: Option<String>,
    policies: Vec<String>,
    #[serde(default = "one_seed")]
    seeds: Vec<u64>,
    #[serde(default = "default_warm_up")]
    warm_up_s: f64,
    #[serde(default = "default_span")]
    span_s: f64,
    #[serde(default)]
    requests_per_model: f64,
    #[serde(default = "default_tolerated")]
    tolerated: f64,
    #[serde(default = "default_precision")]
    precision: f64,
    /// Runs only this many points of the sweep, chosen at random.
    sample: Option<usize>,
    shown_ms: Option<(f64, f64)>,
    #[serde(default = "default_window")]
    window_s: f64,
    #[serde(default = "default_most_devices")]
    most_devices: u32,
    switch: Option<Switch>,
    /// Parsed only for its errors; the values are laid under each workload's own settings.
    #[serde(default, rename = "defaults")]
    _defaults: Settings,
    workload: Vec<Settings>,
    #[serde(default)]
    sweep: toml::Table,
    #[serde(default)]
    paper: Vec<Published>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Switch {
    at_ms: f64,
    policy: String,
}

/// A figure of the paper.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Published {
    workload: Option<String>,
    policy: String,
    /// Settings of the sweep that the figure belongs to; an omitted one matches any value.
    #[serde(default)]
    at: toml::Table,
    value: f64,
}

fn one_seed() -> Vec<u64> {
    vec![1]
}
fn default_warm_up() -> f64 {
    1.5
}
fn default_span() -> f64 {
    10.0
}
fn default_tolerated() -> f64 {
    TOLERATED
}
fn default_precision() -> f64 {
    Search::default().precision
}
fn default_window() -> f64 {
    1.0
}
fn default_most_devices() -> u32 {
    1024
}
/// Chooses the points of a sample.
const SAMPLE_SEED: u64 = 7;
/// Longest span: a week.
const MAX_SECONDS: f64 = 604_800.0;

impl Overrides {
    pub(super) fn apply(&self, file: &mut File) {
        if let Some(seeds) = &self.seeds {
            file.seeds.clone_from(seeds);
        }
        if let Some(policies) = &self.policies {
            file.policies.clone_from(policies);
        }
        file.span_s = self.span_s.unwrap_or(file.span_s);
        file.requests_per_model = self.requests_per_model.unwrap_or(file.requests_per_model);
        if self.all {
            file.sample = None;
        }
        if self.tiny {
            file.seeds.truncate(1);
            file.sample = file.sample.map(|sample| sample.min(2));
            file.warm_up_s = 0.05;
            file.span_s = file.span_s.min(0.1);
            file.requests_per_model = 0.0;
            file.precision = 0.3;
            for (_, values) in &mut file.sweep {
                if let Some(values) = values.as_array_mut().filter(|values| values.len() > 2) {
                    values.drain(1..values.len() - 1);
                }
            }
        }
    }
}

impl File {
    pub fn resolve(self, tables: &toml::Table, folder: &Path, overrides: &Overrides) -> Result<Experiment, String> {
        let seconds = |name: &str, value: f64, least: f64| {
            if (least..=MAX_SECONDS).contains(&value) {
                Ok(Duration::from_secs_f64(value))
            } else {
                Err(format!("{name} is {value}; it has to be from {least} to {MAX_SECONDS}"))
            }
        };
        let (warm_up, span) = (seconds("warm_up_s", self.warm_up_s, 0.0)?, seconds("span_s", self.span_s, 1e-3)?);
        let window = seconds("window_s", self.window_s, 1e-3)?;
        let share = |name: &str, value: f64| {
            if (1e-6..1.0).contains(&value) {
                Ok(value)
            } else {
                Err(format!("{name} is {value}; it has to be a share"))
            }
        };
        let search = Search {
            tolerated: share("tolerated", self.tolerated)?,
            precision: share("precision", self.precision)?,
            requests_per_model: self.requests_per_model,
            ..Search::default()
        };
        search.check()?;
        if self.seeds.is_empty() || self.policies.is_empty() || self.workload.is_empty() {
            return Err("seeds, policies and workload need at least one entry each".to_owned());
        }
        check_seeds(&self.seeds)?;
        let axes = self.axes()?;
        if let Some(x) = self.x.as_ref().filter(|x| axes.iter().all(|(name, _)| name != *x)) {
            return Err(format!("x is '{x}', which is not in the sweep"));
        }
        let empty = toml::Table::new();
        let defaults = tables.get("defaults").and_then(toml::Value::as_table).unwrap_or(&empty);
        let workloads = tables.get("workload").and_then(toml::Value::as_array).cloned().unwrap_or_default();
        let mut points = Vec::new();
        for (typed, workload) in self.workload.iter().zip(&workloads) {
            let name = typed.name.clone().unwrap_or_default();
            points.extend(combinations(&axes).into_iter().map(|point| (name.clone(), workload, point)));
        }
        let all = points.len();
        if let Some(sample) = self.sample {
            points = choose(points, sample);
        }
        let left_out = (all - points.len()) * self.policies.len();
        let mut cases = Vec::new();
        for (name, workload, point) in points {
            let mut merged = defaults.clone();
            merged.extend(workload.as_table().unwrap_or(&empty).clone());
            // A setting of a sweep replaces other settings of the same quantity.
            for (setting, value) in &point {
                for other in excludes(setting) {
                    merged.remove(*other);
                }
                merged.insert(setting.clone(), value.clone());
            }
            let settings: Settings = merged.try_into().map_err(|error: toml::de::Error| error.message().to_owned())?;
            let place = |message: String| {
                let point: Vec<String> = point.iter().map(|(name, value)| format!("{name} = {value}")).collect();
                format!("workload '{name}' {}: {message}", point.join(", "))
            };
            let mut scenario = settings.scenario(folder, warm_up, span).map_err(place)?;
            if overrides.tiny {
                scenario.rate = scenario.rate.min(50_000.0);
            }
            for text in &self.policies {
                let text =
                    text.replace("{timeout}", &settings.timeout.map_or(String::new(), |value| value.to_string()));
                let policy = POLICIES.parse(&text).map_err(|error| error.to_string())?;
                scenario.simulation(&policy, 0).map_err(|error| place(error.to_string()))?;
                cases.push(Planned {
                    paper: self.published(&name, &text, &point),
                    workload: name.clone(),
                    point: point.iter().map(|(name, value)| (name.clone(), Value::from(value))).collect(),
                    policy,
                    scenario: scenario.clone(),
                });
            }
        }
        let switch = match &self.switch {
            None => None,
            Some(Switch { at_ms, policy }) => {
                let policy = POLICIES.parse(policy).map_err(|error| error.to_string())?;
                Some((Duration::from_millis_f64(*at_ms), policy))
            }
        };
        Ok(Experiment {
            title: self.title,
            source: self.source,
            note: self.note,
            measure: self.measure,
            plots: self.plots,
            x: self.x,
            relative_to: self.relative_to,
            seeds: self.seeds,
            search,
            shown_ms: self.shown_ms,
            window,
            most_devices: self.most_devices.clamp(1, downbeat_sim::MOST_DEVICES),
            switch,
            cases,
            left_out,
        })
    }

    /// Returns the varied settings, each with its values.
    fn axes(&self) -> Result<Vec<(String, Vec<toml::Value>)>, String> {
        let axis = |(name, values): (&String, &toml::Value)| match values.as_array() {
            Some(values) if !values.is_empty() => Ok((name.clone(), values.clone())),
            _ => Err(format!("sweep.{name} has to be a list of values")),
        };
        self.sweep.iter().map(axis).collect()
    }

    fn published(&self, workload: &str, policy: &str, point: &[(String, toml::Value)]) -> Option<f64> {
        let fits = |published: &&Published| {
            published.policy == policy
                && published.workload.as_deref().is_none_or(|name| name == workload)
                && published.at.iter().all(|(name, value)| point.iter().any(|(n, v)| n == name && same(v, value)))
        };
        self.paper.iter().find(fits).map(|published| published.value)
    }
}

/// Returns the settings that set the same quantity as `setting` in another way.
fn excludes(setting: &str) -> &'static [&'static str] {
    match setting {
        "devices" => &["devices_per_model"],
        "devices_per_model" => &["devices"],
        "slo_ms" => &["slo_batch"],
        "slo_batch" => &["slo_ms"],
        "shape" => &["stretches"],
        "stretches" => &["shape"],
        _ => &[],
    }
}

/// Returns true if two values are equal; 5 and 5.0 are.
fn same(a: &toml::Value, b: &toml::Value) -> bool {
    Value::from(a) == Value::from(b)
}

/// Every choice of a value for each axis; the last axis changes fastest.
fn combinations(axes: &[(String, Vec<toml::Value>)]) -> Vec<Vec<(String, toml::Value)>> {
    axes.iter().fold(vec![Vec::new()], |points, (name, values)| {
        let with = |point: &Vec<(String, toml::Value)>, value: &toml::Value| {
            let mut point = point.clone();
            point.push((name.clone(), value.clone()));
            point
        };
        points.iter().flat_map(|point| values.iter().map(move |value| with(point, value))).collect()
    })
}

/// Chooses `sample` of `points` at random, in their order. The choice is always the same.
fn choose<T>(points: Vec<T>, sample: usize) -> Vec<T> {
    let mut rng = random(SAMPLE_SEED, points.len() as u64);
    let mut keyed: Vec<(f64, usize)> =
        (0..points.len()).map(|index| (StandardUniform.sample(&mut rng), index)).collect();
    keyed.sort_by(|a, b| a.0.total_cmp(&b.0));
    keyed.truncate(sample);
    let chosen: Vec<usize> = keyed.into_iter().map(|(_, index)| index).collect();
    points.into_iter().enumerate().filter(|(index, _)| chosen.contains(index)).map(|(_, point)| point).collect()
}
