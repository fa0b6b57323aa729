//! The outcome of pipelines' requests, in the log or in a replay.

use std::collections::BTreeMap;

use downbeat_core::{Duration, quantiles};
use serde::Serialize;

/// The outcome under one setting.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PipelineRow {
    /// `log` or `simulated`.
    pub source: String,
    /// The changes, in words.
    pub setting: String,
    /// Each pipeline, and each model with requests of its own.
    pub flows: Vec<FlowFigures>,
    /// The devices.
    pub pools: Vec<PoolFigures>,
}

/// The outcome of one pipeline's requests.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct FlowFigures {
    /// The name.
    pub pipeline: String,
    /// All requests.
    pub requests: u64,
    /// Requests that were answered in time.
    pub in_time: u64,
    /// Requests that were answered late.
    pub late: u64,
    /// Requests that were given up or dropped, by step.
    pub lost: BTreeMap<String, u64>,
    /// Requests whose client left, or that had not ended. They do not count in the attainment.
    pub unknown: u64,
    /// The share of requests in time.
    pub attainment: f64,
    /// The median time to the answer, milliseconds.
    pub p50_ms: Option<f64>,
    /// The 99th percentile.
    pub p99_ms: Option<f64>,
}

/// Devices that the same models use.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PoolFigures {
    /// The names of the models.
    pub models: Vec<String>,
    /// The number of devices.
    pub devices: u32,
    /// The busy share.
    pub busy: f64,
    /// The mean time that requests waited for their batch there, milliseconds; `None`: unknown.
    pub waits_ms: Option<f64>,
}

impl FlowFigures {
    /// Completes the figures that follow from the counts and from the times of answered requests.
    pub(super) fn finished(self, name: &str, totals: &[Duration]) -> FlowFigures {
        let quantiles = quantiles(totals.iter().map(|total| total.as_nanos()), [0.5, 0.99]);
        let [p50_ms, p99_ms] =
            quantiles.map_or([None; 2], |both| both.map(|ns| Some(Duration::from_nanos(ns).as_millis_f64())));
        let known = self.requests.saturating_sub(self.unknown);
        let attainment = if known == 0 { 1.0 } else { self.in_time as f64 / known as f64 };
        FlowFigures { pipeline: name.to_owned(), attainment, p50_ms, p99_ms, ..self }
    }
}

impl PoolFigures {
    pub(super) fn new(models: &[String], devices: u32, busy: f64) -> PoolFigures {
        PoolFigures { models: models.to_vec(), devices, busy, waits_ms: None }
    }
}

impl PipelineRow {
    /// The least attainment of any pipeline.
    pub(super) fn worst(&self) -> f64 {
        self.flows.iter().map(|flow| flow.attainment).fold(1.0, f64::min)
    }

    /// All requests in time.
    pub(super) fn in_time(&self) -> u64 {
        self.flows.iter().map(|flow| flow.in_time).sum()
    }
}
