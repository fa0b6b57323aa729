//! Answers what-ifs: replays the last requests in the simulator under another setting.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_core::cluster::PastArrival;
use downbeat_core::{Duration, Time};
use downbeat_host::scheduler::{Remembered, RememberedQueue, WAKE_MARGIN};
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::report::what_if::{WhatIfPoint, WhatIfQuestion, WhatIfReport};
use downbeat_sim::policy::SERVED;
use downbeat_sim::what_if::{BadSetting, Found, Recorded, Row, Served, ServedQueue, Setting};

use super::outcome_marks::OutcomeMark;
use super::{LOWEST_PRIORITY, Registry};

/// The time of an answer. A run that has begun goes on to its end.
const TIME: Duration = Duration::from_millis(700);
/// Requests of the first run, which finds how fast the simulator is.
const FIRST: usize = 500;
/// The most requests that a run replays: some MiB.
const MOST_REQUESTS: usize = 20_000;
/// Fewer requests tell nothing.
const FEWEST: usize = 20;
/// The rates of the curve, as multiples of the present rate, beside the asked one. The first ones
/// span the curve, should the time be too short for all.
const RATES: [f64; 10] = [2.0, 0.5, 4.0, 1.5, 0.25, 3.0, 1.25, 0.75, 6.0, 2.5];

/// The arrivals to replay, and the outcome of the requests of the same time.
struct Window<'a> {
    arrivals: &'a [PastArrival],
    /// The share of the requests in time; `None`: unknown.
    measured: Option<f64>,
}

/// The right to answer a what-if. One at a time has it.
struct Turn(Arc<AtomicBool>);

impl Turn {
    fn take(is_taken: &Arc<AtomicBool>) -> Result<Turn, ServiceError> {
        if is_taken.swap(true, Ordering::Acquire) {
            return Err(ServiceError::TooMany {
                message: "the server answers another what-if, and answers one at a time; ask again in a second"
                    .to_owned(),
                retry_after: Duration::from_millis(1_000),
            });
        }
        Ok(Turn(is_taken.clone()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Registry {
    /// Replays the last requests under another setting, on a thread of the lowest priority.
    ///
    /// # Errors
    /// `TooMany` while another is answered; `InvalidArgument` for a setting that cannot be, or if there
    /// are too few requests for an answer.
    pub(super) async fn answer_what_if(&self, question: WhatIfQuestion) -> Result<WhatIfReport, ServiceError> {
        let turn = Turn::take(&self.what_if)?;
        let (driver, clock) = (self.driver.clone(), self.driver.clock());
        self.note_history();
        let marks = self.marks.lock().all();
        let (told, answer) = tokio::sync::oneshot::channel();
        let work = move || {
            // Without the right to it, at normal priority.
            let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), LOWEST_PRIORITY);
            let remembered = driver.remembered();
            // A server that ends does not wait for this thread.
            drop(driver);
            let replayed =
                remembered.ok_or_else(rehearsal_is_off).and_then(|past| replay(past, &marks, &question, clock));
            // A client that has its answer may ask again at once.
            drop(turn);
            // The client may have gone.
            let _ = told.send(replayed);
        };
        std::thread::Builder::new()
            .name("what-if".to_owned())
            .spawn(work)
            .map_err(|error| ServiceError::Internal(format!("the system has no thread for a what-if: {error}")))?;
        answer
            .await
            .unwrap_or_else(|_| Err(ServiceError::Internal("the what-if panicked: this is a defect".to_owned())))
    }
}

/// Replays the last requests that were remembered. `marks` has the outcomes of the last requests.
fn replay(
    mut remembered: Remembered,
    marks: &[OutcomeMark],
    question: &WhatIfQuestion,
    clock: Clock,
) -> Result<WhatIfReport, ServiceError> {
    let begin = clock.now();
    let queues = std::mem::take(&mut remembered.queues);
    let behaviours = queues.iter().filter_map(|(id, queue)| Some((*id, queue.behaviour?))).collect();
    let found = Found { behaviours, order: remembered.found_order };
    let queue = |RememberedQueue { model, options, runs, .. }| ServedQueue { model, options, runs: runs.into() };
    let queues: BTreeMap<_, _> = queues.into_iter().map(|(id, its)| (id, queue(its))).collect();
    let (devices, order) = (remembered.devices.clone(), remembered.order);
    let served = Served { queues, devices, order, wake_margin: WAKE_MARGIN };
    let arrivals: &[PastArrival] = remembered.arrivals.make_contiguous();
    let all = arrivals.len();
    let Some(last) = arrivals.last().filter(|_| all >= FEWEST) else { return Err(too_few(all)) };
    let idle = begin.since(last.at + remembered.skipped);
    let recorded = |arrivals: &[PastArrival]| {
        served.recorded(arrivals).map_err(|error| ServiceError::InvalidArgument(error.to_string()))
    };
    let probe = recorded(&arrivals[all - all.min(FIRST)..])?;
    let setting = setting(&probe, question, found)?;
    probe.run(&Setting { rate: question.rate.max(1.0), ..setting.clone() }).map_err(invalid)?;
    // The curve has the better of two runs where a rehearsal has found something.
    let runs = (RATES.len() + 3) * if setting.found == Found::default() { 1 } else { 2 };
    let fits = requests_that_fit(clock.now().since(begin), probe.arrivals.len(), runs);
    let Window { arrivals, measured } = window(&remembered, marks, fits);
    let recorded = recorded(arrivals)?;
    let rates = rates(question.rate);
    let fewer = Setting { devices: setting.devices - 1, ..setting.clone() };
    let fewer = if fewer.devices > 0 { recorded.curve(&fewer, &[question.rate], || true) } else { Ok(Vec::new()) };
    let goes_on = || clock.now().since(begin) < TIME;
    let mut rows = recorded.curve(&setting, &rates, goes_on).map_err(invalid)?;
    let complete = rows.len() == rates.len();
    rows.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    Ok(WhatIfReport {
        rate: question.rate,
        slo: question.slo,
        devices: setting.devices,
        present_devices: recorded.devices,
        policy: question.policy.clone().unwrap_or_else(|| "as served".to_owned()),
        policies: SERVED.all(&[]).iter().map(ToString::to_string).collect(),
        requests: recorded.arrivals.len() as u64,
        span_s: recorded.span.as_secs_f64(),
        measured,
        curve: rows.iter().map(|row| point(row, &recorded)).collect(),
        one_device_fewer: fewer.map_err(invalid)?.first().map(|row| point(row, &recorded)),
        complete,
        took_ms: clock.now().since(begin).as_secs_f64() * 1e3,
        notes: notes(&recorded, all, idle),
    })
}

/// The last requests, at most `most`. Where it can, the window begins and ends at marks. Then the
/// measured share is of the same requests, but for the requests in flight at a mark.
fn window<'a>(past: &'a Remembered, marks: &[OutcomeMark], most: usize) -> Window<'a> {
    let arrivals = past.arrivals.as_slices().0;
    let before = |at: Time| arrivals.partition_point(|arrival| arrival.at + past.skipped <= at);
    let last = |end: usize| &arrivals[end - end.min(most)..end];
    let first = arrivals.first().map_or(Time::ZERO, |first| first.at + past.skipped).max(past.whole_since);
    let marks = &marks[..marks.partition_point(|mark| mark.at <= past.heard_until)];
    // The mark before the first request counts all requests here.
    let marks = &marks[marks.partition_point(|mark| mark.at <= first).saturating_sub(1)..];
    let [from @ .., until] = marks else { return Window { arrivals: last(arrivals.len()), measured: None } };
    let end = before(until.at);
    let fits = |mark: &&OutcomeMark| mark.at >= past.whole_since && end - before(mark.at) <= most;
    let Some(from) = from.iter().find(fits).or(from.last()).filter(|from| end - before(from.at) >= FEWEST) else {
        return Window { arrivals: last(arrivals.len()), measured: None };
    };
    let requests = until.requests - from.requests;
    let measured = (requests > 0).then(|| (until.in_time - from.in_time) as f64 / requests as f64);
    Window { arrivals: &arrivals[before(from.at).max(end - end.min(most))..end], measured }
}

/// How many requests each of so many `runs` may replay, if `first` of them took so long.
fn requests_that_fit(took: Duration, first: usize, runs: usize) -> usize {
    let each = took.as_secs_f64().max(1e-6) / first.max(1) as f64;
    let left = TIME.as_secs_f64() / runs as f64;
    ((left / each) as usize).clamp(FIRST, MOST_REQUESTS)
}

/// The asked rate first, and the present one: these are always run.
fn rates(asked: f64) -> Vec<f64> {
    let mut rates = vec![asked, 1.0];
    rates.extend(RATES);
    let mut seen: Vec<f64> = Vec::new();
    rates.retain(|rate| {
        let is_new = !seen.contains(rate);
        seen.extend(is_new.then_some(*rate));
        is_new
    });
    rates
}

fn setting(recorded: &Recorded, question: &WhatIfQuestion, found: Found) -> Result<Setting, ServiceError> {
    let policy = question.policy.as_deref().map(|name| SERVED.parse(name)).transpose();
    let policy = policy.map_err(|error| ServiceError::InvalidArgument(format!("policy: {error}")))?;
    Ok(Setting {
        policy,
        devices: question.devices.unwrap_or(recorded.devices),
        slo_factor: question.slo,
        // A rehearsal in the simulator takes longer than a person waits.
        rehearse: false,
        found,
        ..Setting::of(recorded)
    })
}

fn rehearsal_is_off() -> ServiceError {
    let message = "a what-if replays the requests that the rehearsal remembers, and the rehearsal is off; start the server with \
                   --rehearsal-cpu above 0";
    ServiceError::InvalidArgument(message.to_owned())
}

fn invalid(error: BadSetting) -> ServiceError {
    ServiceError::InvalidArgument(error.to_string())
}

fn too_few(requests: usize) -> ServiceError {
    ServiceError::InvalidArgument(format!(
        "the server remembers {requests} requests of the last five minutes, and a what-if needs {FEWEST}; ask again once \
         more have come. Requests are remembered while some model has the scheduler `adaptive`, as by default"
    ))
}

fn point(row: &Row, recorded: &Recorded) -> WhatIfPoint {
    let worst = row.worst();
    let span = recorded.span.as_secs_f64() / row.rate;
    WhatIfPoint {
        rate: row.rate,
        offered: row.all.requests as f64 / span,
        goodput: row.all.goodput,
        attainment: row.all.attainment,
        worst_model: worst.map_or_else(String::new, |model| model.model.clone()),
        worst: worst.map_or(row.all.attainment, |model| model.figures.attainment),
        busy: row.busy,
    }
}

fn notes(recorded: &Recorded, remembered: usize, idle: Duration) -> Vec<String> {
    let mut notes = vec![
        "Adaptive models have the settings that the rehearsal has found, or follow the load of the moment. Clients that \
         wait for their answers send as often as they did."
            .to_owned(),
    ];
    let replayed = recorded.arrivals.len();
    if replayed < remembered {
        notes.push(format!("The last {replayed} of {remembered} remembered requests were replayed."));
    }
    if idle > Duration::from_millis(10_000) {
        notes.push(format!("The last request came {:.0} s ago.", idle.as_secs_f64()));
    }
    if recorded.models.iter().any(|model| model.slo.is_none()) {
        notes.push("Requests without a deadline count as in time once they are answered.".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests {
    use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
    use downbeat_core::{LatencyProfile, ModelId};

    use super::*;

    /// A model of 10 ms on one device, with 50 requests/s that have 30 ms each.
    fn remembered(requests: u64) -> Remembered {
        let options = ModelOptions::new(
            LatencyProfile::linear_ms(1.0, 9.0, 8).unwrap(),
            DispatchPolicy::Eager,
            DropPolicy::HeadDrop,
        );
        let queue = RememberedQueue { model: "resnet".to_owned(), options, runs: Default::default(), behaviour: None };
        let arrival = |number: u64| PastArrival {
            at: Time::ZERO + Duration::from_millis(20 * number),
            budget: Duration::from_millis(30),
            model: ModelId(0),
            size: 1,
            level: 0,
        };
        Remembered {
            arrivals: (0..requests).map(arrival).collect(),
            queues: [(ModelId(0), queue)].into(),
            devices: vec![1],
            ..Remembered::default()
        }
    }

    fn question() -> WhatIfQuestion {
        WhatIfQuestion { rate: 1.0, slo: 1.0, devices: None, policy: None }
    }

    fn ask(question: &WhatIfQuestion) -> Result<WhatIfReport, ServiceError> {
        replay(remembered(400), &[], question, Clock::start())
    }

    #[test]
    fn a_curve_falls_with_the_rate_and_has_the_present_point() {
        let report = ask(&question()).unwrap();
        assert!((report.span_s - 7.98).abs() < 1e-9 && report.requests == 400, "{report:?}");
        let here = report.curve.iter().find(|point| point.rate == 1.0).unwrap();
        assert_eq!((here.attainment, here.worst_model.as_str()), (1.0, "resnet"));
        assert!((here.offered - 50.0).abs() < 1.0, "{here:?}");
        assert!(report.curve.is_sorted_by(|a, b| a.rate < b.rate), "{report:?}");
        assert_eq!(report.one_device_fewer, None, "there is one");
        let more = ask(&WhatIfQuestion { devices: Some(2), ..question() }).unwrap();
        assert_eq!(more.one_device_fewer.as_ref(), Some(here));
    }

    #[test]
    fn the_asked_setting_is_simulated() {
        let at = |question: WhatIfQuestion| {
            let report = ask(&question).unwrap();
            report.curve.into_iter().find(|point| point.rate == question.rate).unwrap().attainment
        };
        let fast = WhatIfQuestion { rate: 20.0, ..question() };
        assert!(at(fast.clone()) < 0.9);
        assert!(at(WhatIfQuestion { devices: Some(20), ..fast.clone() }) > at(fast.clone()));
        assert!(at(WhatIfQuestion { slo: 0.1, ..question() }) == 0.0, "10 ms do not fit into 3 ms");
        assert_eq!(at(WhatIfQuestion { policy: Some("deferred".to_owned()), ..question() }), 1.0);
    }

    #[test]
    fn a_wrong_setting_names_what_is_expected() {
        let error = ask(&WhatIfQuestion { policy: Some("hurry".to_owned()), ..question() }).unwrap_err();
        assert!(matches!(error, ServiceError::InvalidArgument(_)), "{error:?}");
        assert!(error.to_string().contains("unknown policy 'hurry'; expected one of: "), "{error}");
        let error = replay(remembered(19), &[], &question(), Clock::start()).unwrap_err();
        assert!(error.to_string().contains("remembers 19 requests"), "{error}");
    }

    /// A mark after each second, with four of five requests in time until then.
    fn marks(seconds: u64) -> Vec<OutcomeMark> {
        let mark = |second: u64| OutcomeMark {
            at: Time::ZERO + Duration::from_millis(1_000 * second),
            requests: 50 * second,
            in_time: 40 * second,
        };
        (0..=seconds).map(mark).collect()
    }

    fn heard(requests: u64) -> Remembered {
        Remembered { heard_until: Time::ZERO + Duration::from_millis(20 * requests), ..remembered(requests) }
    }

    #[test]
    fn the_replayed_requests_are_those_of_the_measured_share() {
        let past = heard(420);
        let of = |past: &Remembered, most| {
            let Window { arrivals, measured } = window(past, &marks(20), most);
            (arrivals.len(), arrivals.first().map(|first| first.at.as_nanos() / 1_000_000), measured)
        };
        // From the second after the mark to the last mark that was heard of, at 8 s.
        assert_eq!(of(&past, 1_000), (400, Some(20), Some(0.8)));
        assert_eq!(of(&past, 120), (100, Some(6_020), Some(0.8)));
        // Less than a second fits: the share is of the whole second.
        assert_eq!(of(&past, 30), (30, Some(7_420), Some(0.8)));
        let skipped = Remembered { whole_since: Time::ZERO + Duration::from_millis(5_500), ..past };
        assert_eq!(of(&skipped, 1_000), (100, Some(6_020), Some(0.8)));
    }

    #[test]
    fn requests_that_no_mark_counts_are_replayed_without_a_measured_share() {
        let past = heard(40);
        for marks in [&marks(0)[..], &[]] {
            let Window { arrivals, measured } = window(&past, marks, 30);
            assert_eq!((arrivals.len(), measured), (30, None));
        }
    }

    #[test]
    fn a_rehearsals_settings_are_replayed_at_the_present_load() {
        let mut past = remembered(400);
        let queue = past.queues.get_mut(&ModelId(0)).unwrap();
        queue.options.dispatch = DispatchPolicy::Adaptive { consolidate: false };
        queue.options.drop = DropPolicy::Adaptive;
        // No request is worth a run that is planned 3.5 times as long: 35 ms do not fit into 30.
        queue.behaviour = Some(downbeat_core::cluster::Behaviour { margin: 250, ..Default::default() });
        let here = |past: Remembered| {
            let report = replay(past, &[], &question(), Clock::start()).unwrap();
            report.curve.into_iter().find(|point| point.rate == 1.0).unwrap().attainment
        };
        assert_eq!(here(remembered(400)), 1.0);
        assert!(here(past) < 0.5);
    }

    #[test]
    fn one_what_if_at_a_time_is_answered() {
        let is_taken = Arc::default();
        let turn = Turn::take(&is_taken).unwrap();
        assert!(matches!(Turn::take(&is_taken), Err(ServiceError::TooMany { .. })));
        drop(turn);
        assert!(Turn::take(&is_taken).is_ok());
    }

    #[test]
    fn the_time_of_the_first_run_bounds_the_requests_of_the_others() {
        assert_eq!(requests_that_fit(Duration::from_micros(1), 500, 13), MOST_REQUESTS);
        assert_eq!(requests_that_fit(Duration::from_millis(60_000), 500, 13), FIRST);
    }

    #[test]
    fn the_asked_rate_and_the_present_one_come_first() {
        assert_eq!(rates(3.3)[..2], [3.3, 1.0]);
        assert_eq!(rates(1.0)[..3], [1.0, 2.0, 0.5]);
        assert_eq!(rates(2.0).iter().filter(|rate| **rate == 2.0).count(), 1);
    }
}
