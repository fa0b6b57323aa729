//! The latency of each segment of a model, by items and by length.

use serde::{Deserialize, Serialize};

use crate::profile::LatencyProfile;
use crate::time::Duration;

/// Measured latencies of a model's segments, alone on the device. They depend on the segment, the
/// items, and the padded length if requests vary in length.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct SegmentProfile {
    /// The measured lengths, ascending; `[0]` if nothing varies.
    lengths: Vec<u32>,
    /// `rest[s][l][b - 1]`: nanoseconds of the segments from `s` to the last, for `b` items of the
    /// `l`-th length. `rest[segments]` is zeros.
    rest: Vec<Vec<Vec<u64>>>,
    max_rows: u32,
}

/// A [`SegmentProfile`] as it was read, before its numbers are checked.
#[derive(Deserialize)]
struct Unchecked {
    lengths: Vec<u32>,
    rest: Vec<Vec<Vec<u64>>>,
    max_rows: u32,
}

impl TryFrom<Unchecked> for SegmentProfile {
    type Error = BadSegmentProfile;

    fn try_from(Unchecked { lengths, rest, max_rows }: Unchecked) -> Result<Self, BadSegmentProfile> {
        let wrong = |what: String| Err(BadSegmentProfile(what));
        if lengths.is_empty() || rest.len() < 2 || max_rows == 0 {
            return wrong("a profile of segments needs at least one segment and one length".to_owned());
        }
        if rest.len() > usize::from(u16::MAX) {
            return wrong(format!("{} segments are more than a model can have", rest.len() - 1));
        }
        if !lengths.is_sorted_by(|a, b| a < b) {
            return wrong("the lengths of a profile of segments must ascend".to_owned());
        }
        let is_whole = |tables: &Vec<Vec<u64>>| {
            tables.len() == lengths.len() && tables.iter().all(|table| table.len() == max_rows as usize)
        };
        if let Some(segment) = rest.iter().position(|tables| !is_whole(tables)) {
            let (found, expected) = (rest[segment].len(), lengths.len());
            return wrong(format!("segment {segment} has {found} latency profiles for {expected} lengths"));
        }
        Ok(SegmentProfile { lengths, rest, max_rows })
    }
}

/// The reason why numbers form no profile of segments.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadSegmentProfile(String);

impl SegmentProfile {
    /// The profile whose segment `s` takes `segments[s][l].latency(b)` for `b` items of length
    /// `lengths[l]`.
    ///
    /// # Errors
    /// If there is no segment or length, lengths do not ascend, or a segment lacks a profile for
    /// some length.
    pub fn new(lengths: Vec<u32>, segments: &[Vec<LatencyProfile>]) -> Result<Self, BadSegmentProfile> {
        let max_rows = segments.iter().flatten().map(LatencyProfile::max_batch).min().unwrap_or(1);
        let mut rest = vec![vec![vec![0u64; max_rows as usize]; lengths.len()]];
        for profiles in segments.iter().rev() {
            let after = &rest[rest.len() - 1];
            let table = |(length, profile): (usize, &LatencyProfile)| -> Vec<u64> {
                let after = |rows: u32| after.get(length).map_or(0, |table| table[rows as usize - 1]);
                (1..=max_rows).map(|rows| profile.latency(rows).as_nanos().saturating_add(after(rows))).collect()
            };
            rest.push(profiles.iter().enumerate().map(table).collect());
        }
        rest.reverse();
        Unchecked { lengths, rest, max_rows }.try_into()
    }

    /// The profile of a model with one segment whose requests do not vary.
    pub fn whole(profile: &LatencyProfile) -> Self {
        let row = (1..=profile.max_batch()).map(|rows| profile.latency(rows).as_nanos()).collect::<Vec<_>>();
        SegmentProfile {
            lengths: vec![0],
            max_rows: profile.max_batch(),
            rest: vec![vec![row.clone()], vec![vec![0; row.len()]]],
        }
    }

    /// The profile of a model whose segments, at least one, take equal parts of its time, and whose
    /// requests do not vary.
    pub fn even(profile: &LatencyProfile, segments: usize) -> Self {
        let segments = segments.clamp(1, usize::from(u16::MAX) - 1);
        let total = |rows| profile.latency(rows).as_nanos();
        let from = |segment: usize| -> Vec<u64> {
            let share = |rows| u128::from(total(rows)) * (segments - segment) as u128 / segments as u128;
            (1..=profile.max_batch()).map(|rows| share(rows) as u64).collect()
        };
        let rest = (0..=segments).map(|segment| vec![from(segment)]).collect();
        SegmentProfile { lengths: vec![0], rest, max_rows: profile.max_batch() }
    }

    /// The profile of the same model with its neighbouring segments put together, to `stages` stages
    /// of about equal time for one item. `None`: there are fewer segments.
    pub fn merged(&self, stages: u16) -> Option<Self> {
        let segments = self.segments();
        if !(1..=segments).contains(&stages) {
            return None;
        }
        let before = |segment: u16| self.total(1, 0).saturating_sub(self.remaining(segment, 1, 0)).as_nanos();
        let total = self.total(1, 0).as_nanos();
        let mut begins = vec![0];
        for stage in 1..stages {
            let due = u128::from(total) * u128::from(stage) / u128::from(stages);
            let last = begins[begins.len() - 1];
            // Each later stage needs a segment of its own.
            let room = last + 1..=segments - (stages - stage);
            let nearest = room.min_by_key(|segment| u128::from(before(*segment)).abs_diff(due));
            begins.push(nearest.unwrap_or(last + 1));
        }
        let rest = begins.into_iter().chain([segments]).map(|segment| self.rest[usize::from(segment)].clone());
        Some(SegmentProfile { lengths: self.lengths.clone(), rest: rest.collect(), max_rows: self.max_rows })
    }

    /// The number of the model's segments.
    pub fn segments(&self) -> u16 {
        (self.rest.len() - 1) as u16
    }

    /// The most items that were measured. Larger numbers are taken to cost as much for each item.
    pub fn max_rows(&self) -> u32 {
        self.max_rows
    }

    /// The latency of segment `segment` for `rows` items padded to `length`.
    pub fn time(&self, segment: u16, rows: u32, length: u32) -> Duration {
        self.remaining(segment, rows, length).saturating_sub(self.remaining(segment + 1, rows, length))
    }

    /// The latency of the segments from `from` to the last, one after another, for `rows` items
    /// padded to `length`. Zero past the last segment.
    pub fn remaining(&self, from: u16, rows: u32, length: u32) -> Duration {
        let Some(by_length) = self.rest.get(usize::from(from)) else { return Duration::ZERO };
        let after = self.lengths.partition_point(|l| *l < length);
        let at = |index: usize| self.nanos(&by_length[index], rows);
        let last = self.lengths.len() - 1;
        let nanos = if last == 0 || after == 0 {
            at(0)
        } else {
            // Interpolates between two lengths. Beyond the last one it extrapolates from the last
            // two.
            let (low, high) = if after > last { (last - 1, last) } else { (after - 1, after) };
            let (from, to) = (f64::from(self.lengths[low]), f64::from(self.lengths[high]));
            let share = (f64::from(length) - from) / (to - from);
            let (begin, end) = (at(low) as f64, at(high) as f64);
            (begin + (end - begin) * share).max(0.0) as u64
        };
        Duration::from_nanos(nanos)
    }

    /// The latency of the whole model.
    pub fn total(&self, rows: u32, length: u32) -> Duration {
        self.remaining(0, rows, length)
    }

    fn nanos(&self, table: &[u64], rows: u32) -> u64 {
        let rows = rows.max(1);
        match table.get(rows as usize - 1) {
            Some(nanos) => *nanos,
            None => {
                let most = u64::from(self.max_rows);
                table.last().map_or(0, |last| (u128::from(*last) * u128::from(rows) / u128::from(most)) as u64)
            }
        }
    }
}
