//! The recent request rate of each model.

use std::collections::BTreeMap;

use downbeat_core::ids::ModelId;
use downbeat_core::time::{Duration, Time};

/// The time constant of the rates: a request counts about 1/e after this time.
const REMEMBERS: Duration = Duration::from_millis(60_000);

/// The recent request rate of each model.
#[derive(Debug)]
pub(super) struct ModelRates {
    /// By queue: requests since the last measurement.
    arrived: Vec<u64>,
    measured: Time,
    /// By model name: requests, older ones with less weight.
    requests: BTreeMap<String, f64>,
    /// Seconds, older ones with less weight.
    seconds: f64,
}

impl ModelRates {
    /// Rates of requests that come from now on.
    pub fn new(now: Time) -> Self {
        ModelRates { arrived: Vec::new(), measured: now, requests: BTreeMap::new(), seconds: 0.0 }
    }

    /// Counts a request that came to a queue.
    pub fn arrived(&mut self, model: ModelId) {
        let number = model.0 as usize;
        if self.arrived.len() <= number {
            self.arrived.resize(number + 1, 0);
        }
        self.arrived[number] += 1;
    }

    /// Adds the requests since the last measurement to the rates. `name` gives the name of a
    /// queue's model.
    pub fn measure<'a>(&mut self, now: Time, name: impl Fn(ModelId) -> Option<&'a str>) {
        let passed = now.since(std::mem::replace(&mut self.measured, now)).as_secs_f64();
        let left = (1.0 - passed / REMEMBERS.as_secs_f64()).max(0.0);
        self.seconds = self.seconds * left + passed;
        self.requests.values_mut().for_each(|requests| *requests *= left);
        for (number, arrived) in (0..).zip(&mut self.arrived) {
            let arrived = std::mem::take(arrived);
            if arrived > 0
                && let Some(name) = name(ModelId(number))
            {
                *self.requests.entry(name.to_owned()).or_default() += arrived as f64;
            }
        }
    }

    /// Requests of a model per second.
    pub fn of(&self, model: &str) -> f64 {
        let requests = self.requests.get(model).copied().unwrap_or(0.0);
        if self.seconds > 0.0 { requests / self.seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_what_came_lately() {
        let mut rates = ModelRates::new(Time::ZERO);
        let mut now = Time::ZERO;
        let mut pass = |rates: &mut ModelRates, seconds: u64, each: u64| {
            for _ in 0..seconds * 10 {
                now += Duration::from_millis(100);
                (0..each / 10).for_each(|_| rates.arrived(ModelId(3)));
                rates.measure(now, |model| (model == ModelId(3)).then_some("m"));
            }
            rates.of("m")
        };
        let first = pass(&mut rates, 5, 100);
        assert!((99.0..=101.0).contains(&first), "{first}: a rate is known from the first seconds on");
        let later = pass(&mut rates, 300, 20);
        assert!((19.0..=22.0).contains(&later), "{later}: what was before is forgotten");
        assert_eq!(rates.of("n"), 0.0);
    }
}
