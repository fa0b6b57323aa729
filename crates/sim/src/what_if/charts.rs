//! The pages of an advice and of a comparison.

use std::collections::BTreeMap;

use downbeat_report::{Axis, Line, Mark, Page, Scale, bars, lines as lines_of, marked};

use super::advice::{Advice, RateLine};
use super::candidate::Candidate;
use super::comparison::{Comparison, Row};
use super::configuration::PASTE;
use super::sentences::devices;

/// The vertical axis of attainment.
const IN_TIME: Axis<'_> = Axis { label: "requests in time, %", scale: Scale::Near };

impl Advice {
    /// The advice as one HTML page without external files.
    pub fn page(&self) -> String {
        let page = self.sentences().iter().fold(Page::new("Advice"), |page, sentence| page.note(sentence));
        let page = match &self.config {
            Some(config) if !config.is_empty() => page.note(PASTE).code(config),
            Some(_) => page.note("Nothing has to change in downbeat.toml."),
            None => page,
        };
        let plots: Vec<String> = [self.over_rate(), self.over_devices(), self.costs()].into_iter().flatten().collect();
        let page = page.plots(&plots);
        let page = page.table("Settings, the best first", &Candidate::table(&self.candidates));
        let page = page.table("The best setting on other numbers of devices", &Candidate::table(&self.by_devices));
        self.notes.iter().fold(page, |page, note| page.note(note)).html()
    }

    /// Requests a second of the log itself.
    fn log_rate(&self) -> f64 {
        self.log_requests as f64 / self.log_s.max(1e-9)
    }

    fn over_rate(&self) -> Option<String> {
        let rate = self.log_rate();
        let line = |line: &RateLine| {
            let points = line.points.iter().map(|(times, share)| (times * rate, 100.0 * share));
            (line.name.clone(), points.collect::<Vec<_>>())
        };
        let all: Vec<_> = self.by_rate.iter().map(line).collect();
        let lines: Vec<Line<'_>> =
            all.iter().map(|(name, points)| Line { name, points: points.clone(), stepped: false }).collect();
        let knee = self.by_rate.first()?.knee.map(|times| times * rate);
        let mut marks = vec![Mark::Across { at: 100.0 * self.target, label: "target".to_owned() }];
        marks.extend(knee.map(|at| Mark::Down { at, label: format!("knee {at:.0}/s") }));
        let here = rate * self.rate;
        if knee.is_none_or(|knee| (knee - here).abs() > 0.05 * knee) {
            marks.push(Mark::Down { at: here, label: format!("load {here:.0}/s") });
        }
        let x = Axis { label: "rate, requests/s", scale: Scale::Linear };
        let what = "The share of the requests of the model that fares worst. Up to the knee the target holds.";
        Some(marked("In time, by rate", what, (&x, &IN_TIME), &lines, &marks))
    }

    fn over_devices(&self) -> Option<String> {
        let of = |share: fn(&Candidate) -> Option<f64>| -> Vec<(f64, f64)> {
            let point = |one: &Candidate| Some((f64::from(one.devices), 100.0 * share(one)?));
            self.by_devices.iter().filter_map(point).collect()
        };
        let line = |name, points| Line { name, points, stepped: false };
        let lines = [
            line("predicted", of(|one| Some(one.attainment))),
            line("lower end of the 95% interval", of(|one| one.interval.map(|interval| interval.low))),
            line("upper end", of(|one| one.interval.map(|interval| interval.high))),
        ];
        let marks = [Mark::Across { at: 100.0 * self.target, label: "target".to_owned() }];
        let x = Axis { label: "devices", scale: Scale::Near };
        let what = "The model that fares worst, under the best setting.";
        (self.by_devices.len() > 1).then(|| marked("In time, by devices", what, (&x, &IN_TIME), &lines, &marks))
    }

    fn costs(&self) -> Option<String> {
        let label = match self.by_devices.first()?.price_per_million {
            Some(_) => "price per million in time",
            None => "device hours per million in time",
        };
        let cost = |one: &Candidate| match one.attainment < self.target {
            true => f64::NAN,
            false => one.price_per_million.unwrap_or(one.device_hours_per_million),
        };
        let groups: Vec<(String, Vec<f64>)> =
            self.by_devices.iter().map(|one| (one.devices.to_string(), vec![cost(one)])).collect();
        let (title, what) = ("Cost, by devices (–: below the target)", "Idle time of devices counts.");
        Some(bars(title, what, "devices", label, &["cost".to_owned()], &groups))
    }
}

impl Comparison {
    /// The comparison as one HTML page without external files.
    pub fn page(&self) -> String {
        let page = Page::new("What if").plots(&self.plots()).table("The log beside other settings", &self.table());
        self.notes.iter().fold(page, |page, note| page.note(note)).html()
    }

    /// A chart by rate and a chart by devices, each if there is more than one value.
    fn plots(&self) -> Vec<String> {
        let by_rate = self.lines(|row| row.rate, |row| format!("{}, {}", row.policy, devices(row.devices)));
        let by_devices = self.lines(
            |row| f64::from(row.devices),
            |row| if row.rate == 1.0 { row.policy.clone() } else { format!("{}, rate {}", row.policy, row.rate) },
        );
        let plot = |title: &str, x: &str, all: Vec<(String, Vec<(f64, f64)>)>| {
            let lines: Vec<Line<'_>> =
                all.iter().map(|(name, points)| Line { name, points: points.clone(), stepped: false }).collect();
            let x = Axis { label: x, scale: Scale::Near };
            let what = "The model that fares worst.";
            (!lines.is_empty()).then(|| lines_of(title, what, &x, &IN_TIME, &lines))
        };
        let rate = plot("In time, by rate", "rate, as a multiple of the log's", by_rate);
        rate.into_iter().chain(plot("In time, by devices", "devices", by_devices)).collect()
    }

    /// The attainment of simulated rows by one of their numbers, with a line for all rows that have the
    /// same name. Lines of one point are left out.
    fn lines(&self, x: fn(&Row) -> f64, name: fn(&Row) -> String) -> Vec<(String, Vec<(f64, f64)>)> {
        let mut lines: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for row in self.rows.iter().filter(|row| row.source == "simulated") {
            lines.entry(name(row)).or_default().push((x(row), 100.0 * row.worst_attainment()));
        }
        let sorted = lines.into_iter().map(|(name, mut points)| {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            (name, points)
        });
        sorted.filter(|(_, points)| points.windows(2).any(|pair| pair[0].0 < pair[1].0)).collect()
    }
}
