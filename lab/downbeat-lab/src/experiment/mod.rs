//! Experiments: workloads and schedulers in a file, what is varied, and what is measured.

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
pub use run::{Case, Results, RunFailure};

/// Workloads and schedulers, what is varied, and what is measured. Read from a file by [`Experiment::read`].
#[derive(Clone, Debug)]
pub struct Experiment {
    /// What it shows.
    pub title: String,
    /// What it repeats, such as `Symphony table 2`.
    pub source: String,
    /// What a reader should know.
    pub note: String,
    /// What is measured.
    pub measure: Measure,
    /// What is drawn.
    pub plots: Vec<Plot>,
    /// The setting along the horizontal axis.
    pub x: Option<String>,
    /// The policy that others are compared with.
    pub relative_to: Option<String>,
    /// Seeds: each case is run with all of them.
    pub seeds: Vec<u64>,
    /// How capacities are searched.
    pub search: Search,
    /// Part of a timeline that is drawn, in milliseconds.
    pub shown_ms: Option<(f64, f64)>,
    /// Length of a window of time.
    pub window: Duration,
    /// Most devices that are tried.
    pub most_devices: u32,
    /// From this time on the dispatch policy is that of another name.
    pub switch: Option<(Duration, Policy)>,
    /// What is run.
    pub cases: Vec<Planned>,
    /// Cases that are left out of the run, because a sample was asked for.
    pub left_out: usize,
}

/// A case to be run.
#[derive(Clone, PartialEq, Debug)]
pub struct Planned {
    /// The workload's name.
    pub workload: String,
    /// What was varied, with its values here.
    pub point: Vec<(String, Value)>,
    /// The scheduler.
    pub policy: Policy,
    /// What it serves and with what.
    pub scenario: Scenario,
    /// The published figure, if there is one.
    pub paper: Option<f64>,
}

/// A value of what is varied.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// A number.
    Number(f64),
    /// Anything else.
    Text(String),
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Measure {
    /// The highest rate that is held.
    Capacity,
    /// The fewest devices that hold the rate.
    Devices,
    /// What is served in time of the rate.
    Goodput,
    /// Which batch runs where and when.
    Timeline,
    /// What happens over time.
    Windows,
}

/// What is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Plot {
    /// What is measured.
    Value,
    /// As a share of [`Experiment::relative_to`]'s.
    Relative,
    /// The relative values of all cases, sorted.
    Spread,
    /// The devices' busy share.
    Busy,
    /// The share of requests that was dropped or late.
    Bad,
    /// Batches by size.
    Batch,
    /// Time in the queue.
    Delay,
    /// Devices, batches, requests.
    Timeline,
    /// Rates, devices and bad share over time.
    Windows,
}

/// What an experiment is run with instead of what its file says.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Seeds.
    pub seeds: Option<Vec<u64>>,
    /// Seconds in which arrivals count.
    pub span_s: Option<f64>,
    /// Requests of the least popular model.
    pub requests_per_model: Option<f64>,
    /// All cases, though the file asks for a sample.
    pub all: bool,
    /// Policies.
    pub policies: Option<Vec<String>>,
    /// For tests: ends of each sweep only, one seed, a fraction of a second, a coarse search.
    pub tiny: bool,
}

/// Why an experiment cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum BadExperiment {
    /// It cannot be read.
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// It is not the text of an experiment.
    #[error("{}: {error}", file.display())]
    Text {
        /// The file.
        file: PathBuf,
        /// What is wrong, and where.
        error: Box<toml::de::Error>,
    },
    /// It says something that cannot be.
    #[error("{}: {message}", file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// What is wrong, and what was expected.
        message: String,
    },
}

impl Experiment {
    /// Reads an experiment file.
    ///
    /// # Errors
    /// If it cannot be read, is no experiment, or says something that cannot be.
    pub fn read(file: &Path, overrides: &Overrides) -> Result<Experiment, BadExperiment> {
        let text = std::fs::read_to_string(file).map_err(|error| BadExperiment::Read(file.to_owned(), error))?;
        let folder = file.parent().unwrap_or(Path::new(""));
        Experiment::parse(&text, folder, file, overrides)
    }

    /// As [`Experiment::read`], of what is in `file`, with the files that it names in `folder`.
    ///
    /// # Errors
    /// As [`Experiment::read`].
    pub fn parse(text: &str, folder: &Path, file: &Path, overrides: &Overrides) -> Result<Experiment, BadExperiment> {
        let of_toml = |error| BadExperiment::Text { file: file.to_owned(), error: Box::new(error) };
        // Once by type, for errors with their place; once as tables, to lay the settings over each other.
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
