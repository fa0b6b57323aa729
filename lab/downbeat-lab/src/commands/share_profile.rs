//! Latencies of a model's batches on shares of a device, in steps.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use downbeat::profile::share_report::ShareReport;
use downbeat_core::{Duration, LatencyProfile, ProfilePoint};

/// Latencies of a model by share.
#[derive(Clone, Debug)]
pub struct ShareProfile {
    /// The engine of the measurement.
    pub engine: String,
    /// Compute units of the smallest share: a step.
    pub step: u32,
    /// All compute units of the device.
    pub units: u32,
    /// By compute units.
    by_units: BTreeMap<u32, LatencyProfile>,
}

impl ShareProfile {
    /// Makes a profile from measurements by the host's clock. That is the time for which a
    /// partition is busy, copies and the host's part included.
    ///
    /// # Errors
    /// If the model was measured on fewer than two shares.
    pub fn new(report: &ShareReport) -> anyhow::Result<Self> {
        let mut points: BTreeMap<u32, Vec<ProfilePoint>> = BTreeMap::new();
        for measurement in &report.measurements {
            let units = measurement.units.filter(|units| *units > 0).context("measured on a device without units")?;
            let took = Duration::from_nanos(measurement.host_ns.max(measurement.median_ns).max(1));
            let point = ProfilePoint { batch: measurement.batch, latency: took, runs: measurement.runs };
            points.entry(units).or_default().push(point);
        }
        ensure!(points.len() > 1, "it was measured on the whole device only; measure it with --shares 10");
        let profiles = points.into_iter().map(|(units, points)| Ok((units, LatencyProfile::fit(points)?)));
        let by_units: BTreeMap<u32, LatencyProfile> = profiles.collect::<anyhow::Result<_>>()?;
        let (step, units) =
            by_units.keys().next().copied().zip(by_units.keys().next_back().copied()).unwrap_or_default();
        Ok(ShareProfile { engine: report.on.engine.clone(), step, units, by_units })
    }

    /// Returns the latencies on the whole device.
    pub fn whole(&self) -> &LatencyProfile {
        &self.by_units[&self.units]
    }

    /// Returns the latencies on 1, 2, ... steps, the last of which is the whole device. A share
    /// without a measurement has the latencies of the next smaller measured share.
    pub fn by_steps(&self) -> Vec<LatencyProfile> {
        let steps = self.units / self.step;
        let of = |units: u32| self.by_units.range(..=units).next_back().map(|(_, profile)| profile.clone());
        (1..=steps).filter_map(|step| of(if step == steps { self.units } else { step * self.step })).collect()
    }
}

#[cfg(test)]
mod tests {
    use downbeat::profile::share_report::MeasuredOn;
    use downbeat_models::measure::share_profiler::ShareMeasurement;

    use super::*;

    fn stored(of: &[(u32, u64)]) -> ShareReport {
        let measurement = |(units, ms): &(u32, u64)| ShareMeasurement {
            units: Some(*units),
            batch: 1,
            runs: 3,
            median_ns: ms * 1_000_000,
            p95_ns: ms * 1_000_000,
            segments_ns: Vec::new(),
            host_ns: ms * 1_000_000,
            by_device: false,
        };
        let measurements = of.iter().map(measurement).collect();
        ShareReport {
            model: "m".to_owned(),
            version: 1,
            on: MeasuredOn { engine: "cuda".to_owned(), device: "gpu".to_owned(), threads: 1 },
            item_bytes: [4, 4],
            conditions: String::new(),
            device: None,
            segments: Vec::new(),
            knees: Vec::new(),
            measurements,
        }
    }

    #[test]
    fn what_was_not_measured_is_as_on_the_next_smaller_share() {
        let profile = ShareProfile::new(&stored(&[(8, 9), (16, 5), (36, 2)])).unwrap();
        let ms: Vec<u64> = profile.by_steps().iter().map(|profile| profile.latency(1).as_nanos() / 1_000_000).collect();
        assert_eq!((profile.step, profile.units, ms), (8, 36, vec![9, 5, 5, 2]));
        assert!(ShareProfile::new(&stored(&[(36, 2)])).is_err());
    }
}
