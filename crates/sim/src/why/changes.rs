//! The figures of each model before and after an instant of a log, and their changes in words.

use std::collections::BTreeMap;
use std::fmt;

use downbeat_core::{Duration, Time};
use serde::Serialize;

use super::folder::{BadFolder, LogFolder, Span};
use super::outcome::Outcome;
use super::window::Window;

/// A rate that is this many times another one has changed.
const RATE: f64 = 1.2;
/// Batches that take this many times their former time have changed.
const SPEED: f64 = 1.1;
/// A share that differs by this much has changed.
const SHARE: f64 = 0.01;

/// The figures of each model before and after an instant.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Changes {
    /// Seconds of the log before the instant that count.
    pub before_s: f64,
    /// Seconds of the log from the instant on that count.
    pub after_s: f64,
    /// The models, the one whose device time changed most first.
    pub models: Vec<ModelChange>,
}

/// A model before and after the instant.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct ModelChange {
    /// The model's name.
    pub model: String,
    /// The model's figures before the instant.
    pub before: Figures,
    /// The model's figures from the instant on.
    pub after: Figures,
}

/// The figures of a model in a part of a log.
#[derive(Clone, PartialEq, Default, Serialize, Debug)]
pub struct Figures {
    /// Requests that came in a second, without those that their clients took back.
    pub offered_per_s: f64,
    /// The share of these requests that were answered by their deadline; `None`: none came.
    pub in_time: Option<f64>,
    /// Requests without an answer in time, by reason.
    pub missed: BTreeMap<String, u64>,
    /// Items of a batch, on average; `None`: no batch ran.
    pub batch: Option<f64>,
    /// The part of a device that the model's batches kept busy; above 1: more than one device.
    pub devices: f64,
    /// The time of the batches over the time that the profile expected; `None`: no batch ran, or the
    /// log has no expectations.
    pub to_profile: Option<f64>,
}

/// Sums of a model in a part of a log.
#[derive(Default)]
struct Sums {
    offered: u64,
    in_time: u64,
    missed: BTreeMap<String, u64>,
    batches: u64,
    items: u64,
    ran: Duration,
    /// The time of the batches with an expectation, and the expectations.
    judged: [Duration; 2],
}

impl Sums {
    fn figures(self, seconds: f64) -> Figures {
        let part = |part: u64, of: u64| (of > 0).then(|| part as f64 / of as f64);
        let [took, expected] = self.judged.map(Duration::as_secs_f64);
        Figures {
            offered_per_s: self.offered as f64 / seconds,
            in_time: part(self.in_time, self.offered),
            batch: part(self.items, self.batches),
            devices: self.ran.as_secs_f64() / seconds,
            to_profile: (expected > 0.0).then(|| took / expected),
            missed: self.missed,
        }
    }
}

impl Figures {
    /// The most frequent reason of requests without an answer in time.
    pub fn most_missed(&self) -> Option<&str> {
        let most = self.missed.iter().max_by_key(|(_, count)| **count);
        most.map(|(reason, _)| reason.as_str())
    }
}

impl LogFolder {
    /// The figures of each model in the `length` before and after an instant, as far as the log goes.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged.
    pub fn changes(&self, at: Time, length: Duration) -> Result<Changes, BadFolder> {
        let whole = self.span()?;
        let before = Span { from: (at - length).max(whole.from), until: at };
        let after = Span { from: at, until: (at + length).min(whole.until) };
        let seconds = |span: Span| span.until.since(span.from).as_secs_f64();
        let (before_s, after_s) = (seconds(before), seconds(after));
        let (mut was, mut is) = (self.sums(before)?, self.sums(after)?);
        let names: Vec<String> = was.keys().chain(is.keys().filter(|name| !was.contains_key(*name))).cloned().collect();
        let figures = |sums: &mut BTreeMap<String, Sums>, name: &str, seconds: f64| {
            sums.remove(name).unwrap_or_default().figures(seconds.max(1e-9))
        };
        let change = |model: String| {
            let (before, after) = (figures(&mut was, &model, before_s), figures(&mut is, &model, after_s));
            ModelChange { model, before, after }
        };
        let mut models: Vec<ModelChange> = names.into_iter().map(change).collect();
        models.sort_by(|one, other| other.device_change().abs().total_cmp(&one.device_change().abs()));
        Ok(Changes { before_s, after_s, models })
    }

    /// The sums of each model over the requests that came, and the batches that left, in this part.
    fn sums(&self, span: Span) -> Result<BTreeMap<String, Sums>, BadFolder> {
        let mut models: BTreeMap<String, Sums> = BTreeMap::new();
        for piece in Window::pieces(self, span) {
            let (piece, window) = piece?;
            for request in window.requests.iter().filter(|request| piece.has(request.at)) {
                let outcome = window.outcome_of(request);
                if !matches!(outcome, Outcome::InTime) && !outcome.is_bad() {
                    continue;
                }
                let sums = models.entry(request.model.clone()).or_default();
                sums.offered += 1;
                if outcome.is_bad() {
                    *sums.missed.entry(outcome.to_string()).or_default() += 1;
                } else {
                    sums.in_time += 1;
                }
            }
            for batch in window.batches.iter().filter(|batch| piece.has(batch.left)) {
                let first = batch.members.first().and_then(|member| window.get(*member));
                let Some((first, end)) = first.zip(batch.end) else { continue };
                let sums = models.entry(first.model.clone()).or_default();
                let took = end.since(batch.start);
                (sums.batches, sums.items) = (sums.batches + 1, sums.items + u64::from(batch.size));
                sums.ran += took;
                if let Some(expected) = batch.expected {
                    let [all, expectations] = &mut sums.judged;
                    (*all, *expectations) = (*all + took, *expectations + expected);
                }
            }
        }
        Ok(models)
    }
}

impl ModelChange {
    /// How many devices more the model's batches keep busy.
    fn device_change(&self) -> f64 {
        self.after.devices - self.before.devices
    }

    /// The changes of the model's figures, in sentences.
    fn findings(&self) -> Vec<String> {
        let (model, before, after) = (&self.model, &self.before, &self.after);
        let mut findings = Vec::new();
        match (before.offered_per_s, after.offered_per_s) {
            (0.0, now) if now > 0.0 => findings.push(format!("Requests for {model} began to come: {now:.1}/s.")),
            (was, 0.0) if was > 0.0 => findings.push(format!("Requests for {model} ended; {was:.1}/s came before.")),
            (was, now) if was > 0.0 && (now / was >= RATE || was / now >= RATE) => findings
                .push(format!("{model} got {:.2} times as many requests: {now:.1}/s after {was:.1}/s.", now / was)),
            _ => {}
        }
        if let (Some(was), Some(now)) = (before.to_profile, after.to_profile)
            && (now / was >= SPEED || was / now >= SPEED)
        {
            findings.push(format!(
                "Batches of {model} took {:.2} times as long for their size: {now:.2} times their profile after {was:.2}.",
                now / was
            ));
        }
        if let (Some(was), Some(now)) = (before.in_time, after.in_time)
            && (now - was).abs() >= SHARE
        {
            let reason = after.most_missed().map(|reason| format!(", most of the others {reason}"));
            let (was, now) = (100.0 * was, 100.0 * now);
            findings.push(format!(
                "{model} has {now:.1}% in time after {was:.1}%{}.",
                reason.filter(|_| now < was).unwrap_or_default()
            ));
        }
        if self.device_change().abs() >= 5.0 * SHARE {
            findings.push(format!("{model} keeps {:.2} devices busy after {:.2}.", after.devices, before.devices));
        }
        findings
    }
}

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let findings: Vec<String> = self.models.iter().flat_map(ModelChange::findings).collect();
        if findings.is_empty() {
            return write!(
                f,
                "Nothing changed: rates by less than {:.0}%, the times of batches by less than {:.0}%, and shares in time by less than one point.",
                100.0 * (RATE - 1.0),
                100.0 * (SPEED - 1.0)
            );
        }
        f.write_str(&findings.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(offered_per_s: f64, in_time: f64, devices: f64, to_profile: f64) -> Figures {
        Figures {
            offered_per_s,
            in_time: Some(in_time),
            devices,
            to_profile: Some(to_profile),
            missed: [("late".to_owned(), 2), ("window_drop".to_owned(), 7)].into(),
            ..Figures::default()
        }
    }

    fn told(before: Figures, after: Figures) -> String {
        let models = vec![ModelChange { model: "m".to_owned(), before, after }];
        Changes { before_s: 60.0, after_s: 60.0, models }.to_string()
    }

    #[test]
    fn changes_of_rate_speed_and_share_are_told() {
        let story = told(figures(50.0, 1.0, 0.4, 1.0), figures(150.0, 0.6, 0.9, 1.3));
        let lines: Vec<&str> = story.lines().collect();
        assert_eq!(
            lines,
            [
                "m got 3.00 times as many requests: 150.0/s after 50.0/s.",
                "Batches of m took 1.30 times as long for their size: 1.30 times their profile after 1.00.",
                "m has 60.0% in time after 100.0%, most of the others window_drop.",
                "m keeps 0.90 devices busy after 0.40.",
            ]
        );
        assert!(told(figures(50.0, 1.0, 0.4, 1.0), figures(52.0, 0.995, 0.42, 1.05)).starts_with("Nothing changed"));
        assert_eq!(
            told(Figures::default(), Figures { offered_per_s: 3.0, ..Figures::default() }),
            "Requests for m began to come: 3.0/s."
        );
        assert_eq!(
            told(Figures { offered_per_s: 3.0, ..Figures::default() }, Figures::default()),
            "Requests for m ended; 3.0/s came before."
        );
    }
}
