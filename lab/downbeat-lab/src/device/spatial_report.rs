//! What came of a model that shares a device.

use downbeat_core::device::spatial::ShareReason;
use downbeat_core::{Duration, Time};

/// A launch of a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ran {
    /// When it ended.
    pub end: Time,
    /// Items.
    pub rows: u32,
    /// What it took.
    pub took: Duration,
}

/// What came of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SharingReport {
    /// Its launches, in order.
    pub ran: Vec<Ran>,
    /// Its shares: since when, compute units.
    pub shares: Vec<(Time, u32)>,
    /// Why lanes were made, when, and on how many units.
    pub asked: Vec<(Time, u32, ShareReason)>,
    /// The most items of its batches: since when.
    pub limits: Vec<(Time, u32)>,
    /// When its requests came, unless it was always busy.
    pub arrived: Vec<Time>,
    /// Those that were answered: when they came, and how long that took.
    pub answered: Vec<(Time, Duration)>,
}

impl SharingReport {
    /// Items a second, and the mean latency of a batch in milliseconds, of what ended within a time; NaN where nothing did.
    pub fn within(&self, from: Time, until: Time) -> (f64, f64) {
        let ran: Vec<&Ran> = self.ran.iter().filter(|ran| ran.end > from && ran.end <= until).collect();
        let rows: u32 = ran.iter().map(|ran| ran.rows).sum();
        let took: f64 = ran.iter().map(|ran| ran.took.as_millis_f64()).sum();
        (f64::from(rows) / until.since(from).as_secs_f64(), took / ran.len() as f64)
    }

    /// The longest time between two answers of which the later came within a time.
    pub fn longest_pause(&self, from: Time, until: Time) -> Duration {
        let pairs = self.ran.windows(2).filter(|pair| pair[1].end > from && pair[1].end <= until);
        pairs.map(|pair| pair[1].end.since(pair[0].end)).max().unwrap_or(Duration::ZERO)
    }

    /// The share of launches within a time that took longer than this.
    pub fn late(&self, from: Time, until: Time, slo: Duration) -> f64 {
        let ran = self.ran.iter().filter(|ran| ran.end > from && ran.end <= until);
        let (all, late) = ran.fold((0.0, 0.0), |(all, late), ran| (all + 1.0, late + f64::from(ran.took > slo)));
        late / all
    }

    /// Of the requests that came within a time the share that was answered within `limit`.
    pub fn attained(&self, from: Time, until: Time, limit: Duration) -> f64 {
        let came = |at: &&Time| from <= **at && **at < until;
        let kept = self.answered.iter().filter(|(at, took)| came(&at) && *took <= limit).count();
        kept as f64 / self.arrived.iter().filter(came).count() as f64
    }
}
