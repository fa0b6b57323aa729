//! The question and the answer of `GET /v2/what-if`: the last requests of a server, replayed in the
//! simulator under another setting.

use serde::Serialize;

/// The largest factor of the rate and of the SLOs; the smallest is its inverse.
pub const MOST_FACTOR: f64 = 20.0;
/// The most devices of a question.
pub const MOST_DEVICES: u32 = 1_000;

/// The setting of `GET /v2/what-if`.
#[derive(Clone, PartialEq, Debug)]
pub struct WhatIfQuestion {
    /// The factor by which requests come faster, from 0.05 to [`MOST_FACTOR`].
    pub rate: f64,
    /// The factor of all times from arrival to deadline, from 0.05 to [`MOST_FACTOR`].
    pub slo: f64,
    /// The number of devices, at most [`MOST_DEVICES`]; `None`: as many as the server has.
    pub devices: Option<u32>,
    /// The policy of all models, such as `eager+head`; `None`: each model's own.
    pub policy: Option<String>,
}

/// The answer of `GET /v2/what-if`.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct WhatIfReport {
    /// The factor of the rate that was asked for.
    pub rate: f64,
    /// The factor of the SLOs.
    pub slo: f64,
    /// The simulated devices.
    pub devices: u32,
    /// The devices that the server has.
    pub present_devices: u32,
    /// The policy.
    pub policy: String,
    /// The names of policies that may be asked for.
    pub policies: Vec<String>,
    /// The replayed requests.
    pub requests: u64,
    /// The time in which the server got these requests, seconds.
    pub span_s: f64,
    /// The share of the requests of this time that the server answered in time; `None`: unknown.
    pub measured: Option<f64>,
    /// The outcome at several rates, in the order of the rates. The first and the asked rate are always
    /// there; others are left out where the time was too short.
    pub curve: Vec<WhatIfPoint>,
    /// The outcome at the asked rate with one device fewer; `None`: there is one device.
    pub one_device_fewer: Option<WhatIfPoint>,
    /// Whether the curve has all points.
    pub complete: bool,
    /// The time that the simulation took, milliseconds.
    pub took_ms: f64,
    /// Remarks to read beside the curve.
    pub notes: Vec<String>,
}

/// The outcome at a rate.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct WhatIfPoint {
    /// The factor of the rate.
    pub rate: f64,
    /// Requests a second.
    pub offered: f64,
    /// Requests a second that were in time.
    pub goodput: f64,
    /// The share of all requests that were in time.
    pub attainment: f64,
    /// The model with the least share in time.
    pub worst_model: String,
    /// That share.
    pub worst: f64,
    /// Mean of the devices' busy shares.
    pub busy: f64,
}
