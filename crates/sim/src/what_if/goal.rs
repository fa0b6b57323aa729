//! The order of settings, by the wish of the user.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use downbeat_core::UnknownName;
use serde::Serialize;

use super::candidate::Candidate;

/// The wish that orders settings. Settings that hold the target come before all others, and of these
/// the ones whose whole interval is above the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Goal {
    /// The fewest devices; then the most headroom.
    #[default]
    Devices,
    /// The shortest time to the answer, by its 99th percentile over all requests.
    Latency,
    /// The highest rate that still holds the target.
    Headroom,
    /// The lowest price of a million requests in time.
    Price,
}

/// Settings whose figures differ by at most this part are equally good: no change is worth it.
const ALIKE: f64 = 0.02;

impl Goal {
    /// All goals.
    pub const ALL: [Goal; 4] = [Goal::Devices, Goal::Latency, Goal::Headroom, Goal::Price];

    /// The name in flags.
    pub const fn name(self) -> &'static str {
        match self {
            Goal::Devices => "devices",
            Goal::Latency => "latency",
            Goal::Headroom => "headroom",
            Goal::Price => "price",
        }
    }

    /// Whether more devices serve the goal, so that the user's number is taken as it is.
    pub(super) const fn takes_all_devices(self) -> bool {
        matches!(self, Goal::Latency | Goal::Headroom)
    }

    /// The figure that decides between settings that hold the target. Less is better.
    fn figure(self, candidate: &Candidate) -> f64 {
        match self {
            Goal::Devices | Goal::Headroom => -candidate.margin.unwrap_or(0.0),
            Goal::Latency => candidate.all.answer_p99_ms.unwrap_or(f64::INFINITY),
            Goal::Price => candidate.device_hours_per_million,
        }
    }

    /// Compares two settings; the better one is less. `least`: the best figure of any setting.
    fn compare(self, least: f64, a: &Candidate, b: &Candidate) -> Ordering {
        let fewer = if self == Goal::Devices { a.devices.cmp(&b.devices) } else { Ordering::Equal };
        // An advice should hold on other logs, too.
        let sure = b.is_sure.cmp(&a.is_sure);
        let figures = self.step(a, least).total_cmp(&self.step(b, least));
        let margins = b.margin.unwrap_or(0.0).total_cmp(&a.margin.unwrap_or(0.0));
        let holds = b.margin.is_some().cmp(&a.margin.is_some());
        let decide = if a.margin.is_some() { fewer.then(sure).then(figures).then(margins) } else { Ordering::Equal };
        holds.then(decide).then(b.attainment.total_cmp(&a.attainment))
    }

    /// The figure in steps of [`ALIKE`] above the least one. A price or a time within a step is as good,
    /// and then the margin decides.
    fn step(self, candidate: &Candidate, least: f64) -> f64 {
        let figure = self.figure(candidate);
        match self {
            Goal::Devices | Goal::Headroom => figure,
            Goal::Latency | Goal::Price => ((figure / least).ln() / ALIKE.ln_1p()).floor(),
        }
    }

    /// Sorts settings, the best first. The setting of the log stays first if it is as good as the best.
    pub(super) fn sort<T>(self, settings: &mut [(Candidate, T)]) {
        let holding = settings.iter().map(|(candidate, _)| candidate).filter(|candidate| candidate.margin.is_some());
        let least = holding.map(|candidate| self.figure(candidate)).fold(f64::INFINITY, f64::min);
        settings.sort_by(|(a, _), (b, _)| self.compare(least, a, b));
        let Some((best, _)) = settings.first() else { return };
        let is_alike = |other: &Candidate| {
            let (own, best_figure) = (self.figure(other), self.figure(best));
            other.is_recorded
                && other.margin.is_some()
                && other.devices == best.devices
                && other.is_sure >= best.is_sure
                && (own - best_figure).abs() <= ALIKE * best_figure.abs()
        };
        if let Some(place) = settings.iter().position(|(other, _)| is_alike(other)) {
            settings[..=place].rotate_right(1);
        }
    }
}

impl FromStr for Goal {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = Goal::ALL.into_iter().find(|goal| goal.name() == text);
        known.ok_or_else(|| UnknownName::new("goal", text, Goal::ALL.map(Goal::name)))
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::Figures;
    use super::*;

    fn candidate(policy: &str, devices: u32, margin: Option<f64>, p99_ms: f64) -> (Candidate, ()) {
        let all = Figures { answer_p99_ms: Some(p99_ms), ..Figures::default() };
        let candidate = Candidate {
            policy: policy.to_owned(),
            devices,
            margin,
            all,
            is_recorded: policy == "as recorded",
            device_hours_per_million: f64::from(devices),
            ..Candidate::default()
        };
        (candidate, ())
    }

    #[test]
    fn each_goal_has_an_order_of_its_own() {
        let all = [
            candidate("quick", 3, Some(1.2), 10.0),
            candidate("small", 2, Some(1.1), 30.0),
            candidate("strong", 3, Some(1.5), 20.0),
            candidate("weak", 1, None, 5.0),
        ];
        let first = |goal: Goal| {
            let mut sorted = all.clone();
            goal.sort(&mut sorted);
            assert_eq!(sorted.last().unwrap().0.policy, "weak", "{goal}");
            sorted[0].0.policy.clone()
        };
        assert_eq!(Goal::ALL.map(first), ["small", "quick", "strong", "small"]);
    }

    #[test]
    fn a_setting_that_surely_holds_comes_first() {
        let (sure, ()) = candidate("sure", 3, Some(1.1), 30.0);
        let mut both = [candidate("strong", 3, Some(1.5), 10.0), (Candidate { is_sure: true, ..sure }, ())];
        Goal::Headroom.sort(&mut both);
        assert_eq!(both[0].0.policy, "sure");
    }

    #[test]
    fn a_change_must_be_worth_it() {
        let order = |recorded: f64| {
            let mut both = [candidate("other", 2, Some(1.5), 0.0), candidate("as recorded", 2, Some(recorded), 0.0)];
            Goal::Headroom.sort(&mut both);
            both[0].0.policy.clone()
        };
        assert_eq!([order(1.48), order(1.4)], ["as recorded", "other"]);
    }

    #[test]
    fn of_settings_that_cost_alike_the_stronger_one_is_better() {
        let cost = |policy, hours, margin| {
            let (candidate, ()) = candidate(policy, 3, Some(margin), 0.0);
            (Candidate { device_hours_per_million: hours, ..candidate }, ())
        };
        let mut all = [cost("dear", 3.1, 3.0), cost("cheap", 3.0, 1.4), cost("strong", 3.01, 2.0)];
        Goal::Price.sort(&mut all);
        assert_eq!(all.map(|(candidate, ())| candidate.policy), ["strong", "cheap", "dear"]);
    }

    #[test]
    fn goals_are_read_by_name() {
        assert_eq!("price".parse(), Ok(Goal::Price));
        let error = "speed".parse::<Goal>().unwrap_err().to_string();
        assert_eq!(error, "unknown goal 'speed'; expected one of: devices, latency, headroom, price");
    }
}
