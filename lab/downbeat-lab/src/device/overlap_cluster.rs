//! Requests of several models on several devices: Abacus on each of them, and Clockwork.

use downbeat_core::Duration;

use super::failure::DeviceFailure;
use super::overlap_devices::{OverlapDevices, OverlapQueries, SpreadBy};
use super::overlap_report::OverlapReport;
use super::overlap_run::OverlapRun;
use downbeat_sim::{ArrivalStream, Arrivals, Popularity, Shape};

/// Minutes of the trace (Abacus §7.6: two hours).
const MINUTES: u32 = 120;

/// A run on several equal devices. Queries come as Azure's functions are called: each model's rate
/// changes by itself from minute to minute.
#[derive(Clone, PartialEq, Debug)]
pub struct OverlapCluster {
    /// The run on each device; its rate and its queries are for all devices together. A minute of
    /// the trace is shortened to fit the number of queries.
    pub run: OverlapRun,
    /// The number of devices.
    pub devices: usize,
    /// The QoS target of all queries.
    pub target: Duration,
    /// The models' shares of the queries.
    pub popularity: Popularity,
    /// The rule that spreads the queries.
    pub by: SpreadBy,
}

impl OverlapCluster {
    /// Returns a stream of arrivals for each model. The rates add up to the run's rate, and each
    /// changes over the trace around its mean.
    fn arrivals(&self) -> Result<Vec<ArrivalStream>, DeviceFailure> {
        let OverlapRun { models, rate, queries, seed, .. } = &self.run;
        let seconds = f64::from(*queries) / rate;
        let minute = Duration::from_secs_f64(seconds / f64::from(MINUTES));
        let of_model = |(share, stream): (f64, u64)| {
            let pace = Shape::Maf(minute).pace(*seed, stream, seconds);
            let pace = pace.map_err(|bad| DeviceFailure(bad.to_string()))?;
            Ok(Arrivals::Poisson.stream(rate * share, *seed, stream)?.paced(&pace))
        };
        self.popularity.shares(models.len()).into_iter().zip(10..).map(of_model).collect()
    }

    /// Plays the run until all queries are answered or dropped.
    ///
    /// # Errors
    /// As [`OverlapRun::play`], or if there is no device.
    pub fn play(&self) -> Result<OverlapReport, DeviceFailure> {
        let run = &self.run;
        if run.models.is_empty() || self.devices == 0 {
            return Err(DeviceFailure("queries of no model, or for no device".to_owned()));
        }
        let queries = OverlapQueries::new(run, self.arrivals()?, vec![self.target; run.models.len()], false);
        Ok(OverlapDevices::new(queries, self.devices, self.by)?.play())
    }
}
