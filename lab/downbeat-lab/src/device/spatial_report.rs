//! The outcome for a model that shares a device.

use downbeat_core::device::spatial::ShareReason;
use downbeat_core::{Duration, Time};

/// A launch of a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ran {
    /// The instant of its end.
    pub end: Time,
    /// Items.
    pub rows: u32,
    /// The time of the launch.
    pub took: Duration,
}

/// The outcome for a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SharingReport {
    /// The model's launches, in order.
    pub ran: Vec<Ran>,
    /// The model's shares: the instant of each change, and the compute units.
    pub shares: Vec<(Time, u32)>,
    /// The new lanes: the instant, the units and the reason.
    pub asked: Vec<(Time, u32, ShareReason)>,
    /// The limits of the model's batches: the instant of each change, and the most items.
    pub limits: Vec<(Time, u32)>,
    /// The arrivals of its requests, unless the model was always busy.
    pub arrived: Vec<Time>,
    /// The answered requests: arrival, and time to the answer.
    pub answered: Vec<(Time, Duration)>,
}

impl SharingReport {
    /// Returns items a second, and the mean latency of a batch in milliseconds, of launches that
    /// ended in the interval; NaN where none did.
    pub fn within(&self, from: Time, until: Time) -> (f64, f64) {
        let ran: Vec<&Ran> = self.ran.iter().filter(|ran| ran.end > from && ran.end <= until).collect();
        let rows: u32 = ran.iter().map(|ran| ran.rows).sum();
        let took: f64 = ran.iter().map(|ran| ran.took.as_millis_f64()).sum();
        (f64::from(rows) / until.since(from).as_secs_f64(), took / ran.len() as f64)
    }

    /// Returns the longest time between two answers of which the later came in the interval.
    pub fn longest_pause(&self, from: Time, until: Time) -> Duration {
        let pairs = self.ran.windows(2).filter(|pair| pair[1].end > from && pair[1].end <= until);
        pairs.map(|pair| pair[1].end.since(pair[0].end)).max().unwrap_or(Duration::ZERO)
    }

    /// Returns the share of launches in the interval that took longer than `slo`.
    pub fn late(&self, from: Time, until: Time, slo: Duration) -> f64 {
        let ran = self.ran.iter().filter(|ran| ran.end > from && ran.end <= until);
        let (all, late) = ran.fold((0.0, 0.0), |(all, late), ran| (all + 1.0, late + f64::from(ran.took > slo)));
        late / all
    }

    /// Returns the share of the requests that came in the interval and were answered within
    /// `limit`.
    pub fn attained(&self, from: Time, until: Time, limit: Duration) -> f64 {
        let came = |at: &&Time| from <= **at && **at < until;
        let kept = self.answered.iter().filter(|(at, took)| came(&at) && *took <= limit).count();
        kept as f64 / self.arrived.iter().filter(came).count() as f64
    }
}
