//! An advice in sentences.

use std::fmt;

use super::advice::{Advice, Checked};
use super::candidate::{Candidate, figure};
use super::configuration::{PASTE, indented};
use super::interval::PARTS;
use super::search::MOST_MARGIN;

/// A number of devices in words.
pub(super) fn devices(count: u32) -> String {
    format!("{count} device{}", if count == 1 { "" } else { "s" })
}

fn percent(share: f64) -> String {
    format!("{:.2}%", 100.0 * share)
}

/// A replay of the log's own setting further from the log than this tells little.
const UNFAITHFUL: f64 = 0.02;

impl Advice {
    /// The advice in sentences.
    pub(super) fn sentences(&self) -> Vec<String> {
        let Some(best) = self.candidates.first() else { return Vec::new() };
        let mut sentences = match self.devices {
            None => vec![self.nothing_holds(best)],
            Some(fewest) => self.holds(best, fewest),
        };
        let [log, replay] = self.faithful;
        if (log - replay).abs() > UNFAITHFUL {
            sentences.push(format!(
                "The replay of the log's own settings has {} in time, and the log has {} (the model that fares worst). So the replay \
                 does not know all that mattered: measure before you rely on its figures.",
                percent(replay),
                percent(log)
            ));
        }
        sentences
    }

    fn nothing_holds(&self, best: &Candidate) -> String {
        let most = match self.most_devices {
            1 => "1 device".to_owned(),
            most => format!("{most} devices or fewer"),
        };
        let slos = match self.slo_factor {
            Some(factor) => format!(" SLOs of {factor:.2} times their length would be held by '{}'.", best.policy),
            None => String::new(),
        };
        format!(
            "No setting answers {}% of each model's requests in time on {most}. '{}' comes nearest, with {} of the model that fares \
             worst.{slos} --max-devices tries more devices, and --target another share.",
            100.0 * self.target,
            best.policy,
            percent(best.attainment)
        )
    }

    fn holds(&self, best: &Candidate, fewest: u32) -> Vec<String> {
        let fewer = if fewest > 1 && best.devices == fewest { " With one device fewer no setting does." } else { "" };
        let mut sentences = vec![format!(
            "{} (the log has {}) {} {}% of each model's requests in time with {}.{fewer}",
            devices(best.devices),
            self.recorded_devices,
            if best.devices == 1 { "answers" } else { "answer" },
            100.0 * self.target,
            best.settings()
        )];
        sentences.push(self.how_sure(best));
        sentences.extend(self.checked.as_ref().map(|checked| self.check(checked)));
        let margin = best.margin.unwrap_or(1.0);
        let more = if margin >= MOST_MARGIN { " and more" } else { "" };
        sentences.push(format!("The setting holds {margin:.2} times the rate{more}."));
        if let Some(price) = best.price_per_million {
            let hours = figure(best.device_hours_per_million);
            sentences.push(format!("A million requests in time cost {}: {hours} hours of a device.", figure(price)));
        }
        if let Some(size) = self.max_batch {
            sentences.push(format!("Batches of at most {size} hold the target, too (max_batch_size in config.pbtxt)."));
        }
        if let Some(factor) = self.slo_factor {
            sentences.push(format!("SLOs could shrink to {factor:.2} times their length."));
        }
        if best.devices != self.recorded_devices {
            sentences.push(
                "The replay takes a batch to be as quick on other numbers of devices. Devices of one CPU share its cores: measure there."
                    .to_owned(),
            );
        }
        sentences
    }

    /// The outcome on more of the log than the search replayed.
    fn check(&self, checked: &Checked) -> String {
        let interval = checked.interval.map(|interval| format!(" ({})", interval.percent())).unwrap_or_default();
        let held = match checked.attainment + 1e-12 >= self.target {
            true => "So the target holds there, too.",
            false => "There the target does not hold: take a device more, and measure.",
        };
        format!(
            "The log is long: each run of the search replayed {} requests, a window from each of {PARTS} parts. A check with \
             {} requests has {} in time{interval}. {held}",
            checked.searched,
            checked.requests,
            percent(checked.attainment)
        )
    }

    fn how_sure(&self, best: &Candidate) -> String {
        let interval = best.interval.map_or_else(|| "unknown".to_owned(), |interval| interval.percent());
        let log = match &self.checked {
            Some(checked) => format!("{} of its {} requests", checked.searched, self.log_requests),
            None => format!("{} requests in {:.1} s", self.log_requests, self.log_s),
        };
        let sure = match (best.is_sure, self.sure_devices) {
            (true, _) => "The whole interval is above the target.".to_owned(),
            (false, Some(surely)) => {
                format!("Its lower end is below the target: {} would be sure to hold it.", devices(surely))
            }
            (false, None) => "Its lower end is below the target: a longer log tells more.".to_owned(),
        };
        format!(
            "The model that fares worst has {} in time; 95 of 100 logs like this one ({log}) would have {interval}. {sure}",
            percent(best.attainment)
        )
    }
}

impl Candidate {
    /// The policies within a sentence.
    fn settings(&self) -> String {
        let Candidate { scheduler, drop, order, .. } = self;
        let own = if self.is_recorded { " (the log's own)" } else { "" };
        format!("scheduler {scheduler}, drop {drop} and order {order}{own}")
    }

    /// The setting in a legend.
    pub(super) fn words(&self) -> String {
        let Candidate { scheduler, drop, .. } = self;
        format!("scheduler {scheduler}, drop {drop}, {}", devices(self.devices))
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Candidate::table(&self.candidates).fmt(f)?;
        writeln!(f)?;
        self.sentences().iter().try_for_each(|sentence| writeln!(f, "{sentence}"))?;
        if let Some(config) = &self.config {
            match config.is_empty() {
                true => writeln!(f, "\nNothing has to change in downbeat.toml.")?,
                false => write!(f, "\n{PASTE}\n\n{}", indented(config))?,
            }
        }
        self.notes.iter().try_for_each(|note| write!(f, "\n{note}\n"))
    }
}
