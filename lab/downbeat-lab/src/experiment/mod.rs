//! Experiments: workloads and schedulers in a file, a sweep of settings, and a measured quantity.

mod file;
mod page;
mod run;
mod settings;
mod table;

use std::path::{Path, PathBuf};

use downbeat_core::Duration;
use serde::{Deserialize, Serialize};

use downbeat_sim::Scenario;
use downbeat_sim::Search;
use downbeat_sim::policy::Policy;

use file::File;
pub use run::{Case, Results};

/// Workloads and schedulers, a sweep of settings, and a measured quantity. [`Experiment::read`]
/// reads one from a file.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// The title of tables and plots.
    pub title: String,
    /// The published source, such as `Symphony table 2`.
    pub source: String,
    /// A note for readers.
    pub note: String,
    /// The measured quantity.
    pub measure: Measure,
    /// The plots.
    pub plots: Vec<Plot>,
    /// The setting along the horizontal axis.
    pub x: Option<String>,
    /// The policy that others are compared with.
    pub relative_to: Option<String>,
    /// Seeds: each case is run with all of them.
    pub seeds: Vec<u64>,
    /// The search of capacities.
    pub search: Search,
    /// The part of a timeline that is drawn, in milliseconds.
    pub shown_ms: Option<(f64, f64)>,
    /// Length of a window of time.
    pub window: Duration,
    /// The most devices that are tried.
    pub most_devices: u32,
    /// From this time on the dispatch policy is the one of this other policy.
    pub switch: Option<(Duration, Policy)>,
    /// The cases to run.
    pub cases: Vec<Planned>,
    /// The number of cases left out of the run, if the file asks for a sample.
    pub left_out: usize,
}

/// A case to run.
#[derive(Clone, PartialEq, Debug)]
pub struct Planned {
    /// The workload's name.
    pub workload: String,
    /// The varied settings, with their values in this case.
    pub point: Vec<(String, Value)>,
    /// The scheduler.
    pub policy: Policy,
    /// The simulated scenario.
    pub scenario: Scenario,
    /// The published figure, if any.
    pub paper: Option<f64>,
}

/// A value of a varied setting.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// A number.
    Number(f64),
    /// Any other value, as text.
    Text(String),
}

/// The measured quantity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Measure {
    /// The highest rate that the devices hold.
    Capacity,
    /// The fewest devices that hold the rate.
    Devices,
    /// The rate of requests served in time.
    Goodput,
    /// Each batch with its device and time.
    Timeline,
    /// Rates and shares in windows of time.
    Windows,
}

/// The plotted quantity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Plot {
    /// The measured quantity.
    Value,
    /// The measured quantity as a share of [`Experiment::relative_to`]'s.
    Relative,
    /// The relative values of all cases, sorted.
    Spread,
    /// The busy share of the devices.
    Busy,
    /// The share of requests that were dropped or late.
    Bad,
    /// The distribution of batch sizes.
    Batch,
    /// The time in the queue.
    Delay,
    /// Devices, batches, requests.
    Timeline,
    /// Rates, devices and bad share over time.
    Windows,
}

/// Settings that replace an experiment file's own.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Seeds.
    pub seeds: Option<Vec<u64>>,
    /// Seconds in which arrivals count.
    pub span_s: Option<f64>,
    /// The number of requests of the least popular model.
    pub requests_per_model: Option<f64>,
    /// If true, all cases run, even if the file asks for a sample.
    pub all: bool,
    /// Policies.
    pub policies: Option<Vec<String>>,
    /// For tests: only the ends of each sweep, one seed, a fraction of a second, a coarse search.
    pub tiny: bool,
}

/// The reason why an experiment cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum BadExperiment {
    /// The file cannot be read.
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// The file is not the text of an experiment.
    #[error("{}: {error}", file.display())]
    Text {
        /// The file.
        file: PathBuf,
        /// The error, with its place.
        error: Box<toml::de::Error>,
    },
    /// The file contains an impossible setting.
    #[error("{}: {message}", file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// The wrong part, and the expected form.
        message: String,
    },
}

impl Experiment {
    /// Reads an experiment file.
    ///
    /// # Errors
    /// If the file cannot be read, is no experiment, or contains an impossible setting.
    pub fn read(file: &Path, overrides: &Overrides) -> Result<Experiment, BadExperiment> {
        let text = std::fs::read_to_string(file).map_err(|error| BadExperiment::Read(file.to_owned(), error))?;
        let folder = file.parent().unwrap_or(Path::new(""));
        Experiment::parse(&text, folder, file, overrides)
    }

    /// Parses `text`, the contents of `file`, as [`Experiment::read`] does. Files that it names are
    /// in `folder`.
    ///
    /// # Errors
    /// As [`Experiment::read`].
    pub fn parse(text: &str, folder: &Path, file: &Path, overrides: &Overrides) -> Result<Experiment, BadExperiment> {
        let of_toml = |error| BadExperiment::Text { file: file.to_owned(), error: Box::new(error) };
        // Parsed once by type, for errors with their place, and once as tables, to lay settings
        // over each other.
        let mut typed: File = toml::from_str(text).map_err(of_toml)?;
        let tables: toml::Table = toml::from_str(text).map_err(of_toml)?;
        overrides.apply(&mut typed);
        typed
            .resolve(&tables, folder, overrides)
            .map_err(|message| BadExperiment::Content { file: file.to_owned(), message })
    }
}

impl From<&toml::Value> for Value {
    fn from(value: &toml::Value) -> Self {
        match value {
            toml::Value::Integer(number) => Value::Number(*number as f64),
            toml::Value::Float(number) => Value::Number(*number),
            toml::Value::String(text) => Value::Text(text.clone()),
            other => Value::Text(other.to_string()),
        }
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Number(number) => write!(f, "{number}"),
            Value::Text(text) => f.write_str(text),
        }
    }
}
