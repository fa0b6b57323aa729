//! What a server said in the last minute, and what follows from that.

use std::collections::{BTreeMap, VecDeque};

use downbeat_service::report::live::{LiveModel, LiveReport};

/// Seconds that are looked back for rates and latencies.
pub(super) const LATELY_S: f64 = 10.0;
/// Samples that are kept at most: one a second for two minutes.
const MOST: usize = 120;
/// The longer spans of attainment that are shown, seconds.
pub(super) const SPANS_S: [f64; 2] = [300.0, 3600.0];

/// The answers of a server, oldest first.
#[derive(Default)]
pub(super) struct Samples {
    all: VecDeque<LiveReport>,
    /// By version: the last hour, as the server knew it at the first answer.
    history: BTreeMap<[String; 2], Vec<(f64, u64, u64)>>,
}

/// Offered requests, and those in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Share {
    pub offered: u64,
    pub in_time: u64,
}

impl Share {
    /// The part of the requests that was in time; `None` without requests.
    pub fn value(self) -> Option<f64> {
        (self.offered > 0).then(|| self.in_time as f64 / self.offered as f64)
    }

    fn plus(self, offered: u64, in_time: u64) -> Share {
        Share { offered: self.offered + offered, in_time: self.in_time + in_time }
    }
}

/// What a version of a model did lately.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Row {
    pub model: LiveModel,
    /// Offered requests a second.
    pub rate: f64,
    pub share: Share,
    /// The median and the 99th percentile of the time from arrival to result, milliseconds.
    pub latency_ms: Option<[f64; 2]>,
    /// Mean items of a batch.
    pub batch: Option<f64>,
    /// The most frequent reason of requests that were not in time, with their number.
    pub reason: Option<(String, u64)>,
}

fn key(model: &LiveModel) -> [String; 2] {
    [model.model.clone(), model.version.clone()]
}

/// The devices of a report, with their busy seconds: by number, or by backend and number in a cluster.
fn devices(report: &LiveReport) -> impl Iterator<Item = (String, f64)> {
    report.device_busy_s.iter().enumerate().map(|(place, busy)| match report.device_names.get(place) {
        Some(name) => (format!("{} {}", name.backend, name.device), *busy),
        None => (place.to_string(), *busy),
    })
}

fn less(now: u64, before: u64) -> u64 {
    now.saturating_sub(before)
}

impl Samples {
    /// Takes an answer.
    pub fn push(&mut self, report: LiveReport) {
        if self.all.back().is_some_and(|last| report.now_ns < last.now_ns) {
            // The server was started anew: its counts begin again.
            self.all.clear();
        }
        if self.all.is_empty() {
            self.history = report.models.iter().map(|model| (key(model), model.history.clone())).collect();
        }
        self.all.push_back(report);
        if self.all.len() > MOST {
            // The first sample stays, since the history ends there.
            self.all.remove(1);
        }
    }

    /// Whether the next question should ask for the history.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The last answer.
    pub fn last(&self) -> Option<&LiveReport> {
        self.all.back()
    }

    /// The newest answer that is at least so old, or else the oldest one.
    fn before(&self, seconds: f64) -> Option<&LiveReport> {
        let now = self.last()?.now_ns;
        let old = |report: &&LiveReport| less(now, report.now_ns) as f64 / 1e9 >= seconds;
        self.all.iter().rev().skip(1).find(old).or(self.all.front())
    }

    /// Requests of a version since the newest answer that is at least so old.
    fn since(&self, model: &LiveModel, seconds: f64) -> Share {
        let Some(then) = self.before(seconds) else { return Share::default() };
        let earlier = then.models.iter().find(|its| key(its) == key(model));
        let (in_time, bad) = earlier.map_or((0, 0), |its| (its.in_time, its.missed()));
        let good = less(model.in_time, in_time);
        Share::default().plus(good + less(model.missed(), bad), good)
    }

    /// Requests of a version in the last seconds, the server's history included.
    fn share_of(&self, model: &LiveModel, seconds: f64) -> Share {
        let (Some(first), Some(now)) = (self.all.front(), self.last()) else { return Share::default() };
        let since_first = less(now.now_ns, first.now_ns) as f64 / 1e9;
        let share = self.since(model, seconds);
        let past = self.history.get(&key(model)).into_iter().flatten();
        let reached = past.filter(|(ago, ..)| ago + since_first <= seconds);
        reached.fold(share, |share, (_, offered, in_time)| share.plus(*offered, *in_time))
    }

    /// Requests of all models in the last seconds. Ensembles count, and so do the models of their steps.
    pub fn share(&self, seconds: f64) -> Share {
        let models = self.last().map_or(&[][..], |report| &report.models);
        let shares = models.iter().map(|model| self.share_of(model, seconds));
        shares.fold(Share::default(), |all, its| all.plus(its.offered, its.in_time))
    }

    /// Requests of all models lately, and the seconds in which they came.
    pub fn lately(&self) -> (Share, f64) {
        let models = self.last().map_or(&[][..], |report| &report.models);
        let shares = models.iter().map(|model| self.since(model, LATELY_S));
        (shares.fold(Share::default(), |all, its| all.plus(its.offered, its.in_time)), self.lately_s())
    }

    /// Seconds between the answers that rates are taken from.
    fn lately_s(&self) -> f64 {
        let (Some(then), Some(now)) = (self.before(LATELY_S), self.last()) else { return 0.0 };
        less(now.now_ns, then.now_ns) as f64 / 1e9
    }

    /// By device, its name and the share of the time in which it was busy lately. A device that was not
    /// there before was idle.
    pub fn busy(&self) -> Vec<(String, f64)> {
        let (Some(then), Some(now)) = (self.before(LATELY_S), self.last()) else { return Vec::new() };
        let seconds = self.lately_s();
        let before: BTreeMap<String, f64> = devices(then).collect();
        let share = |(name, now): (String, f64)| {
            let busy = now - before.get(&name).copied().unwrap_or(now);
            (name, if seconds > 0.0 { (busy / seconds).clamp(0.0, 1.0) } else { 0.0 })
        };
        devices(now).map(share).collect()
    }

    /// All versions: first those with the most requests that were not in time.
    pub fn rows(&self) -> Vec<Row> {
        let Some((now, then)) = self.last().zip(self.before(LATELY_S)) else { return Vec::new() };
        let mut rows: Vec<Row> = now.models.iter().map(|model| self.row(now, then, model)).collect();
        let bad = |row: &Row| row.share.offered - row.share.in_time;
        rows.sort_by(|a, b| {
            let by_rate = b.rate.total_cmp(&a.rate);
            bad(b).cmp(&bad(a)).then(by_rate).then_with(|| key(&a.model).cmp(&key(&b.model)))
        });
        rows
    }

    fn row(&self, now: &LiveReport, then: &LiveReport, model: &LiveModel) -> Row {
        let earlier = then.models.iter().find(|its| key(its) == key(model));
        let parts = |of: fn(&LiveModel) -> &Vec<u64>| -> Vec<u64> {
            let before = earlier.map(of).into_iter().flatten().copied().chain(std::iter::repeat(0));
            of(model).iter().zip(before).map(|(now, before)| less(*now, before)).collect()
        };
        let latency = parts(|its| &its.latency);
        let quantiles = [0.5, 0.99].map(|share| quantile(&latency, &now.latency_bounds_ms, share));
        let launches: u64 = parts(|its| &its.batches).iter().sum();
        let items = less(model.items, earlier.map_or(0, |its| its.items));
        let late = less(model.late, earlier.map_or(0, |its| its.late));
        let others = model.unanswered.iter().map(|(why, count)| {
            let before = earlier.and_then(|its| its.unanswered.get(why)).copied().unwrap_or(0);
            (why.to_string(), less(*count, before))
        });
        let reasons = others.chain([("late".to_owned(), late)]).filter(|(_, count)| *count > 0);
        let share = self.since(model, LATELY_S);
        let seconds = self.lately_s();
        Row {
            model: model.clone(),
            rate: if seconds > 0.0 { share.offered as f64 / seconds } else { 0.0 },
            share,
            latency_ms: match quantiles {
                [Some(half), Some(most)] => Some([half, most]),
                _ => None,
            },
            batch: (launches > 0).then(|| items as f64 / launches as f64),
            reason: reasons.max_by_key(|(_, count)| *count),
        }
    }

    /// By second, the share of all requests in time; `None` without requests.
    pub fn seconds(&self) -> Vec<Option<f64>> {
        let sums: Vec<(u64, u64)> = self
            .all
            .iter()
            .map(|report| {
                report.models.iter().fold((0, 0), |(good, bad), its| (good + its.in_time, bad + its.missed()))
            })
            .collect();
        let share = |pair: &[(u64, u64)]| {
            let (good, bad) = (less(pair[1].0, pair[0].0), less(pair[1].1, pair[0].1));
            Share { offered: good + bad, in_time: good }.value()
        };
        sums.windows(2).map(share).collect()
    }
}

/// The value below which a share of a histogram lies, between the bounds of its part; `None` without
/// values.
fn quantile(parts: &[u64], bounds: &[f64], share: f64) -> Option<f64> {
    let mut left = share * parts.iter().sum::<u64>() as f64;
    let last = *bounds.last()?;
    for (place, count) in parts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let count = *count as f64;
        if left <= count {
            let low = if place == 0 { 0.0 } else { bounds.get(place - 1).copied().unwrap_or(last) };
            let high = bounds.get(place).copied().unwrap_or(low);
            return Some(low + (high - low) * left / count);
        }
        left -= count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(second: u64, in_time: u64, late: u64) -> LiveReport {
        let model = LiveModel {
            model: "m".into(),
            version: "1".into(),
            in_time,
            late,
            items: in_time + late,
            latency: vec![in_time, late, 0],
            batches: vec![0, (in_time + late) / 2],
            history: vec![(5.0, 100, 50), (400.0, 100, 0)],
            ..LiveModel::default()
        };
        serde_json::from_value(serde_json::json!({
            "server": "downbeat", "version": "0", "wall_ms": 1000 * second, "now_ns": 1_000_000_000 * second,
            "latency_bounds_ms": [10.0, 20.0], "batch_bounds": [1.0], "models": [serde_json::to_value(model).unwrap()],
            "device_busy_s": [second as f64 / 4.0], "history_part_s": 10.0, "in_cluster": false,
        }))
        .unwrap()
    }

    #[test]
    fn rates_and_latencies_are_those_of_the_last_seconds() {
        let mut samples = Samples::default();
        for second in 0..=30 {
            // From second 20 on, a fifth of the requests is late.
            let late = 2 * u64::saturating_sub(second, 20);
            samples.push(report(100 + second, 10 * second - late, late));
        }
        let [row] = &samples.rows()[..] else { panic!("one model") };
        assert_eq!((row.rate, row.share, row.batch), (10.0, Share { offered: 100, in_time: 80 }, Some(2.0)));
        assert_eq!(row.reason, Some(("late".to_owned(), 20)));
        assert_eq!(row.latency_ms, Some([6.25, 19.5]));
        assert_eq!(samples.busy(), [("0".to_owned(), 0.25)]);
        assert_eq!(samples.seconds().last(), Some(&Some(0.8)));
    }

    /// A backend that joins moves the places of the others' devices.
    #[test]
    fn devices_of_a_cluster_are_known_by_their_names() {
        let of = |second: u64, devices: &[(&str, f64)]| {
            let name = |name: &str| serde_json::json!({"backend": name, "device": 0});
            let names: Vec<_> = devices.iter().map(|(backend, _)| name(backend)).collect();
            LiveReport {
                device_names: serde_json::from_value(names.into()).unwrap(),
                device_busy_s: devices.iter().map(|(_, busy)| *busy).collect(),
                ..report(second, 0, 0)
            }
        };
        let mut samples = Samples::default();
        samples.push(of(100, &[("b", 7.0)]));
        samples.push(of(110, &[("a", 90.0), ("b", 12.0)]));
        assert_eq!(samples.busy(), [("a 0".to_owned(), 0.0), ("b 0".to_owned(), 0.5)]);
    }

    /// The server's history ends where the first answer begins.
    #[test]
    fn long_spans_have_the_servers_history_too() {
        let mut samples = Samples::default();
        assert_eq!(samples.share(3600.0), Share::default());
        samples.push(report(100, 1000, 0));
        assert_eq!(samples.share(300.0), Share { offered: 100, in_time: 50 });
        samples.push(report(110, 1100, 0));
        assert_eq!(samples.share(10.0), Share { offered: 100, in_time: 100 });
        assert_eq!(samples.share(300.0), Share { offered: 200, in_time: 150 });
        assert_eq!(samples.share(3600.0), Share { offered: 300, in_time: 150 });
        // The server was started anew.
        samples.push(report(3, 5, 0));
        assert_eq!(samples.share(10.0), Share { offered: 100, in_time: 50 }, "its history");
    }
}
