//! A setting with its outcome on the requests of a log.

use downbeat_report::Table;
use serde::Serialize;

use super::comparison::Row;
use super::configuration::ModelPolicies;
use super::figures::Figures;
use super::interval::Interval;
use super::recorded::Recorded;
use super::setting::{BadSetting, Setting};

/// A setting that a server can have, with its outcome.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Candidate {
    /// The policy, as `--policy` takes it, or `as recorded`.
    pub policy: String,
    /// Whether the policies are those of the log.
    pub is_recorded: bool,
    /// The option `scheduler`.
    pub scheduler: String,
    /// The option `drop`.
    pub drop: String,
    /// The option `order`.
    pub order: String,
    /// The number of devices.
    pub devices: u32,
    /// The least attainment of any model.
    pub attainment: f64,
    /// How sure this attainment is.
    pub interval: Option<Interval>,
    /// Whether each model's whole interval is above the target.
    pub is_sure: bool,
    /// The setting holds at this multiple of the rate, and not at 1% more; at most 64. `None`: it does
    /// not hold the rate itself.
    pub margin: Option<f64>,
    /// Mean of the devices' busy shares.
    pub busy: f64,
    /// The hours of devices that a million requests in time take. Idle time counts.
    pub device_hours_per_million: f64,
    /// The price of these hours; `None`: the user gave no price.
    pub price_per_million: Option<f64>,
    /// The figures of all models together.
    pub all: Figures,
}

impl Candidate {
    /// The outcome of a setting. `target`: the share of requests that must be in time; `price`: of a
    /// device for an hour.
    pub(super) fn of(
        recorded: &Recorded,
        setting: &Setting,
        (target, price): (f64, Option<f64>),
    ) -> Result<Candidate, BadSetting> {
        let served = ModelPolicies::of(recorded, setting)?;
        let [scheduler, drop, order] = served.words();
        let row = recorded.run(setting)?;
        let (attainment, interval) = (row.worst_attainment(), row.worst().and_then(|worst| worst.figures.interval));
        let Row { policy, devices, busy, all, models, .. } = row;
        let is_sure = models.iter().all(|model| model.figures.interval.is_none_or(|interval| interval.low >= target));
        let hours = f64::from(devices) * recorded.span.as_secs_f64() / setting.rate / 3_600.0;
        let device_hours_per_million = hours / (all.in_time as f64) * 1e6;
        Ok(Candidate {
            policy,
            is_recorded: served == ModelPolicies::of(recorded, &Setting::of(recorded))?,
            scheduler,
            drop,
            order,
            devices,
            attainment,
            interval,
            is_sure,
            margin: None,
            busy,
            device_hours_per_million,
            price_per_million: price.map(|price| price * device_hours_per_million),
            all,
        })
    }

    /// The settings as a table.
    pub(super) fn table<'a>(candidates: impl IntoIterator<Item = &'a Candidate>) -> Table<&'a Candidate> {
        let ms = |ms: Option<f64>| ms.map(|ms| format!("{ms:.2}"));
        Table::of(candidates)
            .text("scheduler", |candidate| candidate.scheduler.clone())
            .text("drop", |candidate| candidate.drop.clone())
            .text("order", |candidate| candidate.order.clone())
            .text("in the log", |candidate| if candidate.is_recorded { "yes" } else { "no" })
            .number("devices", |candidate| candidate.devices)
            .number("worst model in time", |candidate| format!("{:.2}%", 100.0 * candidate.attainment))
            .some("95% sure", |candidate| candidate.interval.map(|interval| interval.percent()))
            .some("holds up to, times the rate", |candidate| candidate.margin.map(|margin| format!("{margin:.2}")))
            .number("busy", |candidate| format!("{:.1}%", 100.0 * candidate.busy))
            .number("goodput r/s", |candidate| format!("{:.1}", candidate.all.goodput))
            .some("answer p50 ms", |candidate| ms(candidate.all.answer_p50_ms))
            .some("p99 ms", |candidate| ms(candidate.all.answer_p99_ms))
            .number("device hours per million", |candidate| figure(candidate.device_hours_per_million))
            .some("price per million", |candidate| candidate.price_per_million.map(figure))
    }
}

/// A positive number with three digits that count.
pub(super) fn figure(number: f64) -> String {
    if !number.is_finite() {
        return "–".to_owned();
    }
    let digits = (2.0 - number.abs().max(1e-9).log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{number:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        let shown = [1234.5, 123.45, 1.2345, 0.012345, f64::INFINITY].map(figure);
        assert_eq!(shown, ["1234", "123", "1.23", "0.0123", "–"]);
    }
}
