//! The outcome of pipelines' requests, in the log or in a replay.

use std::collections::BTreeMap;

use downbeat_core::{Duration, quantiles};
use serde::Serialize;

use super::super::interval::{Interval, Spread};

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
    /// The hours of devices that a million requests in time take. Idle time counts.
    pub device_hours_per_million: f64,
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
    /// How sure the share is; `None`: there were no requests.
    pub interval: Option<Interval>,
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

/// The requests of one pipeline with a known outcome, while they are gathered.
#[derive(Clone, Debug, Default)]
pub(super) struct FlowSamples {
    /// The times to the answers.
    totals: Vec<Duration>,
    /// The requests of each part of the log's time.
    parts: Spread,
}

impl FlowSamples {
    /// Adds a request that came `after` the begin of a log of this `span`, and was answered after
    /// `total`; `None`: it was lost.
    pub fn add(&mut self, (after, span): (Duration, Duration), total: Option<Duration>, is_in_time: bool) {
        self.totals.extend(total);
        self.parts.add(after, span, (1, u64::from(is_in_time)));
    }
}

impl FlowFigures {
    /// Completes the figures that follow from the counts and from the requests with a known outcome.
    pub(super) fn finished(self, name: &str, samples: &FlowSamples) -> FlowFigures {
        let quantiles = quantiles(samples.totals.iter().map(|total| total.as_nanos()), [0.5, 0.99]);
        let [p50_ms, p99_ms] =
            quantiles.map_or([None; 2], |both| both.map(|ns| Some(Duration::from_nanos(ns).as_millis_f64())));
        let known = self.requests.saturating_sub(self.unknown);
        let attainment = if known == 0 { 1.0 } else { self.in_time as f64 / known as f64 };
        let interval = samples.parts.interval();
        FlowFigures { pipeline: name.to_owned(), attainment, interval, p50_ms, p99_ms, ..self }
    }
}

impl PoolFigures {
    pub(super) fn new(models: &[String], devices: u32, busy: f64) -> PoolFigures {
        PoolFigures { models: models.to_vec(), devices, busy, waits_ms: None }
    }
}

impl PipelineRow {
    /// The outcome of requests that came within `span`.
    pub(super) fn new(
        (source, setting): (&str, String),
        flows: Vec<FlowFigures>,
        pools: Vec<PoolFigures>,
        span: Duration,
    ) -> PipelineRow {
        let mut row =
            PipelineRow { source: source.to_owned(), setting, flows, pools, device_hours_per_million: f64::INFINITY };
        let hours = f64::from(row.devices()) * span.as_secs_f64() / 3_600.0;
        row.device_hours_per_million = hours / row.in_time() as f64 * 1e6;
        row
    }

    /// The number of all devices.
    pub(super) fn devices(&self) -> u32 {
        self.pools.iter().map(|pool| pool.devices).sum()
    }

    /// The least attainment of any pipeline.
    pub(super) fn worst(&self) -> f64 {
        self.flows.iter().map(|flow| flow.attainment).fold(1.0, f64::min)
    }

    /// All requests in time.
    pub(super) fn in_time(&self) -> u64 {
        self.flows.iter().map(|flow| flow.in_time).sum()
    }
}
