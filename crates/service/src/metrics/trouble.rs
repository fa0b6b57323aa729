//! Names the models in trouble: too few of their requests are answered in time. Suggests a change
//! that would help.

use std::collections::BTreeMap;
use std::fmt::Write;

use downbeat_core::cluster::staggered_batch;
use downbeat_core::{Duration, LatencyProfile, Time};

use crate::unanswered::Unanswered;

/// How often the counters are read while the server is awake, and at most so often the log has a
/// line of one model.
pub const EVERY: std::time::Duration = std::time::Duration::from_secs(60);
/// The share of requests that may be dropped, late or failed before a model is in trouble. Capacity
/// is defined by the same share.
const TOLERATED: f64 = 0.01;
/// Fewer such requests are no trouble: one failure of ten predicts nothing for the next minute.
const FEWEST: u64 = 10;
/// Larger batches are worth a word if an item takes at most this share of its time in a batch of
/// twice the size.
const LARGER_BATCH_PAYS: f64 = 0.9;

/// The outcomes of a model's requests since its first load.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Requests that got their result, including late results.
    pub answered: u64,
    /// The late requests among them.
    pub late: u64,
    /// Items of the requests that got their result.
    pub items: u64,
    /// Launches of batches with these items.
    pub launches: u64,
    /// The others, by reason.
    pub unanswered: [u64; Unanswered::COUNT],
}

impl Counts {
    fn since(&self, before: &Counts) -> Counts {
        let mut unanswered = self.unanswered;
        for (now, before) in unanswered.iter_mut().zip(before.unanswered) {
            *now = now.saturating_sub(before);
        }
        Counts {
            answered: self.answered.saturating_sub(before.answered),
            late: self.late.saturating_sub(before.late),
            items: self.items.saturating_sub(before.items),
            launches: self.launches.saturating_sub(before.launches),
            unanswered,
        }
    }

    fn of(&self, reason: Unanswered) -> u64 {
        self.unanswered[reason as usize]
    }

    /// Requests that were answered by their deadline.
    pub fn in_time(&self) -> u64 {
        self.answered.saturating_sub(self.late)
    }

    /// Requests that were answered late, rejected or dropped, as [`Totals`](super::Totals) counts
    /// them.
    pub fn missed(&self) -> u64 {
        let labels = Unanswered::labels().into_iter().zip(self.unanswered);
        self.late + labels.filter(|(label, _)| Unanswered::is_bad(label)).map(|(_, count)| count).sum::<u64>()
    }

    /// All requests but the ones that their clients cancelled.
    fn offered(&self) -> u64 {
        self.answered + self.unanswered.iter().sum::<u64>() - self.taken_back()
    }

    fn taken_back(&self) -> u64 {
        self.of(Unanswered::Cancelled) + self.of(Unanswered::Unloaded)
    }

    /// The requests without an answer in time.
    fn bad(&self) -> u64 {
        self.offered() - self.answered.saturating_sub(self.late)
    }

    fn is_trouble(&self) -> bool {
        self.bad() >= FEWEST && self.bad() as f64 > TOLERATED * self.offered() as f64
    }

    /// "12 queue_full, 3 late".
    fn reasons(&self) -> String {
        let reasons = Unanswered::labels().into_iter().zip(self.unanswered).chain([("late", self.late)]);
        let some = reasons.filter(|(_, count)| *count > 0).map(|(reason, count)| format!("{count} {reason}"));
        some.collect::<Vec<_>>().join(", ")
    }
}

/// The figures about a model's speed.
#[derive(Clone, Debug)]
pub struct Means {
    /// The latencies of the model's batches.
    pub profile: LatencyProfile,
    /// How long a request may take; `None`: any time.
    pub slo: Option<Duration>,
    /// The most items of a batch.
    pub max_batch: u32,
    /// Batches that run at once, each on a device or with an executor of its own.
    pub at_once: u32,
}

impl Means {
    /// The batch that the profile allows under an SLO, and the items a second that such batches
    /// come to. `None`: not even one item is in time.
    fn allows(&self, slo: Option<Duration>) -> Option<(u32, f64)> {
        let batch = match slo {
            Some(slo) if self.profile.latency(1) > slo => return None,
            Some(slo) => staggered_batch(&self.profile, self.max_batch, slo, None, self.at_once),
            None => self.max_batch.max(1),
        };
        Some((batch, self.items_per_second(batch)))
    }

    fn items_per_second(&self, batch: u32) -> f64 {
        f64::from(batch) * f64::from(self.at_once) / self.profile.latency(batch).as_secs_f64()
    }

    /// The SLO under which batches of this size may wait for the next device.
    fn slo_of(&self, batch: u32) -> Duration {
        let latency = self.profile.latency(batch);
        latency + Duration::from_nanos(latency.as_nanos() / u64::from(self.at_once.max(1)))
    }

    /// The shortest SLO that allows `items` items a second; `None`: no SLO does.
    fn slo_for(&self, items: f64) -> Option<Duration> {
        (1..=self.max_batch).find(|batch| self.items_per_second(*batch) >= items).map(|batch| self.slo_of(batch))
    }
}

/// A model version, as the counters have it now.
pub struct Sample {
    /// The model's name.
    pub model: String,
    /// The version's number.
    pub version: String,
    /// The counts since the server started.
    pub counts: Counts,
    /// `None`: it runs elsewhere.
    pub means: Option<Means>,
}

#[derive(Default)]
struct Watched {
    before: Counts,
    since: Time,
    told: Option<Time>,
    is_in_trouble: bool,
}

/// Compares the counters of models with their values a minute ago.
#[derive(Default)]
pub struct TroubleWatch {
    /// Models keep their place when they leave, as their counters continue when they come back.
    models: BTreeMap<(String, String), Watched>,
    looked: Time,
}

impl TroubleWatch {
    /// Reads the counters, and logs models whose trouble begins, goes on or is over. `is_resting`:
    /// no request comes any more.
    pub fn look(&mut self, now: Time, samples: &[Sample], is_resting: bool) {
        for sample in samples {
            let Sample { model, version, counts, .. } = sample;
            let fresh = || Watched { since: self.looked, ..Watched::default() };
            let watched = self.models.entry((model.clone(), version.clone())).or_insert_with(fresh);
            let lately = counts.since(&watched.before);
            let is_trouble = lately.is_trouble();
            if is_trouble && watched.told.is_none_or(|told| now.since(told) >= EVERY.into()) {
                say(sample, &lately, now.since(watched.since));
                (watched.told, watched.is_in_trouble) = (Some(now), true);
            } else if is_trouble && !is_resting {
                // Told of a moment ago: these count for the next line.
                continue;
            }
            if watched.is_in_trouble && (is_resting || !is_trouble) {
                let (offered, answered) = (lately.offered(), lately.answered);
                let why = if is_resting { ": no requests come any more" } else { "" };
                tracing::info!(%model, %version, offered, answered, "the model is out of trouble{why}");
                watched.is_in_trouble = false;
            }
            (watched.before, watched.since) = (*counts, now);
        }
        self.looked = now;
    }
}

/// Tells the log of a model in trouble.
fn say(sample: &Sample, lately: &Counts, took: Duration) {
    let Sample { model, version, means, .. } = sample;
    let seconds = took.as_secs_f64().max(1e-3);
    let (offered, answered) = (lately.offered(), lately.answered);
    let offered_per_s = offered as f64 / seconds;
    let rows = if answered > 0 { (lately.items as f64 / answered as f64).max(1.0) } else { 1.0 };
    let allowed = means.as_ref().map(|means| means.allows(means.slo).map_or(0.0, |(_, items)| items / rows));
    let advice = match means {
        Some(means) => advice(lately, offered_per_s, rows, means),
        None => "a frontend does not know the reason; GET /v2/autoscale of the leading scheduler advises the number of devices"
            .to_owned(),
    };
    let tenths = |number: f64| (number * 10.0).round() / 10.0;
    let (unanswered, seconds) = (lately.reasons(), tenths(seconds));
    let (offered_per_s, allowed_per_s) = (tenths(offered_per_s), allowed.map(tenths));
    tracing::warn!(
        %model, %version, seconds, offered, answered, unanswered, offered_per_s, allowed_per_s,
        "the model is in trouble: {advice}"
    );
}

/// The change with which the model would answer `rate` requests a second of `rows` items each.
fn advice(lately: &Counts, rate: f64, rows: f64, means: &Means) -> String {
    let Means { profile, slo, max_batch, at_once } = means;
    let failed = lately.of(Unanswered::Engine) + lately.of(Unanswered::RunEnded) + lately.of(Unanswered::Lost);
    if 2 * failed > lately.bad() {
        return "the model's runs fail; the lines 'batch failed' and 'executor process' of this model give the reason"
            .to_owned();
    }
    let Some((batch, items)) = means.allows(*slo) else {
        let (alone, slo) = (in_ms(profile.latency(1)), in_ms(slo.unwrap_or_default()));
        let enough = in_ms(means.slo_of(1));
        return format!(
            "a request alone takes {alone} ms, but its SLO is {slo} ms; set slo_ms to {enough} or more, or use faster \
             devices or another engine"
        );
    };
    if rate * rows <= items {
        return match lately.of(Unanswered::QueueFull) > lately.bad() / 2 {
            true => "the model's profile allows this rate, but requests come in bursts that the queue does not hold; raise max_queue_size, or spread the requests"
                .to_owned(),
            false => "the model's profile allows this rate, but other models or processes take its devices' time, or requests come in bursts; give the model more devices (--devices) or a longer slo_ms, or move other models"
                .to_owned(),
        };
    }
    let lacking = (f64::from(*at_once) * rate * rows / items).ceil();
    let mut advice = format!(
        "more requests come than the model's profile allows; serve the model on {lacking:.0} devices or instances \
         instead of {at_once}"
    );
    if slo.is_some()
        && let Some(enough) = means.slo_for(rate * rows)
    {
        // A string takes everything.
        let _ = write!(advice, ", or set slo_ms to {} or more for larger batches", in_ms(enough));
    }
    let per_item = |batch: u32| profile.latency(batch).as_secs_f64() / f64::from(batch);
    if batch == *max_batch && per_item(max_batch.saturating_mul(2)) < LARGER_BATCH_PAYS * per_item(*max_batch) {
        let _ = write!(advice, ", or raise max_batch_size above {max_batch}");
    }
    advice
}

/// Milliseconds, rounded up to a thousandth.
fn in_ms(duration: Duration) -> f64 {
    duration.as_nanos().div_ceil(1_000) as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A batch of n takes 10 + n ms.
    fn means(slo: Option<u64>, max_batch: u32) -> Means {
        let profile = LatencyProfile::linear(ms(1), ms(10), max_batch).unwrap();
        Means { profile, slo: slo.map(ms), max_batch, at_once: 1 }
    }

    fn counts(answered: u64, reason: Unanswered, others: u64) -> Counts {
        let mut counts = Counts { answered, items: answered, ..Counts::default() };
        counts.unanswered[reason as usize] = others;
        counts
    }

    #[test]
    fn one_of_a_hundred_is_tolerated_and_what_clients_take_back_is_no_trouble() {
        assert!(!counts(9_900, Unanswered::Hopeless, 100).is_trouble());
        assert!(counts(9_900, Unanswered::Hopeless, 101).is_trouble());
        assert!(!counts(10, Unanswered::Hopeless, 9).is_trouble(), "too few to say");
        assert!(!counts(10, Unanswered::Cancelled, 500).is_trouble());
        assert!(Counts { late: 50, ..counts(100, Unanswered::Engine, 0) }.is_trouble());
    }

    #[test]
    fn the_advice_is_what_the_profile_says() {
        let lately = counts(100, Unanswered::Hopeless, 900);
        let advice = |rate, slo, max_batch| advice(&lately, rate, 1.0, &means(slo, max_batch));
        // 2 l(b) <= 40 ms: b = 10, 500 a second. Batches of 40 come to 800 a second: 2 l(40) = 100
        // ms.
        assert_eq!(
            advice(800.0, Some(40), 64),
            "more requests come than the model's profile allows; serve the model on 2 devices or instances instead of 1, or set slo_ms to 100 or more for larger batches"
        );
        let one = advice(800.0, Some(40), 2);
        assert!(one.ends_with("on 5 devices or instances instead of 1, or raise max_batch_size above 2"), "{one}");
        assert!(
            advice(800.0, Some(5), 64)
                .starts_with("a request alone takes 11 ms, but its SLO is 5 ms; set slo_ms to 22 or")
        );
        assert!(advice(100.0, Some(40), 64).starts_with("the model's profile allows this rate, but other models"));
        assert!(advice(9_000.0, None, 64).ends_with("on 11 devices or instances instead of 1"));
    }

    #[test]
    fn a_model_is_told_of_once_a_minute_and_when_its_trouble_is_over() {
        let at = |seconds: u64| Time::from_nanos(seconds * 1_000_000_000);
        let mut watch = TroubleWatch::default();
        let mut look = |seconds, others, is_resting| {
            let counts = counts(1_000, Unanswered::QueueFull, others);
            let sample = Sample { model: "m".into(), version: "1".into(), counts, means: None };
            watch.look(at(seconds), &[sample], is_resting);
            let watched = watch.models.values().next().unwrap();
            (watched.told, watched.is_in_trouble)
        };
        assert_eq!(look(60, 5, false), (None, false));
        assert_eq!(look(120, 105, false), (Some(at(120)), true));
        assert_eq!(look(130, 205, false), (Some(at(120)), true), "a line a minute");
        assert_eq!(look(180, 205, false), (Some(at(180)), true), "what came meanwhile counts");
        assert_eq!(look(240, 205, false), (Some(at(180)), false));
        assert_eq!(look(300, 305, true), (Some(at(300)), false), "told, and over");
    }
}
