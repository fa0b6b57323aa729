//! Whether a cluster needs more devices or has too many: the autoscale advisor (Symphony §3.5).

use std::collections::VecDeque;
use std::fmt;

use crate::time::{Duration, Time};

/// Samples are kept so far apart: this share of the shorter window, or that of the longer one, whichever is more. It bounds how
/// many there are, and how much longer than asked for a window is.
const APART: (u64, u64) = (10, 1_000);
/// A bad rate above this is counted as this, so that advice is finite where nothing at all is served in time.
const MOST_BAD_RATE: f64 = 0.9;
/// Share by which the offered rate has to fall before a number of devices that was too small is tried again.
const LESS_LOAD: f64 = 0.1;

/// When to advise what.
///
/// With `idle_threshold` and `spare` at 0 the advice is the paper's: `N * r / (1 - r)` more, or `N * f` fewer.
#[derive(Clone, PartialEq, Debug)]
pub struct AutoscaleOptions {
    /// Devices are added where the bad rate is above this. Default: 1%, what a capacity tolerates.
    pub bad_threshold: f64,
    /// Devices are given back only where the idle fraction is above this. Default: 0.25.
    pub idle_threshold: f64,
    /// The idle fraction that giving back leaves. At most `idle_threshold`: the gap between the two is what load may vary by
    /// without new advice. Default: 0.1.
    pub spare: f64,
    /// The time that a bad rate is looked at, and the least that the number of devices stands before more are asked for.
    /// Default: 10 s.
    pub grow_window: Duration,
    /// The same for the idle fraction and fewer: longer, for missing devices cost requests. Default: 60 s.
    pub shrink_window: Duration,
    /// Requests in a window below which its bad rate says nothing. Default: 100.
    pub min_requests: u64,
    /// Fewest devices that are advised, at least 1. Default: 1.
    pub min_devices: u32,
    /// Most devices that are advised. Default: no bound.
    pub max_devices: u32,
}

impl Default for AutoscaleOptions {
    fn default() -> Self {
        AutoscaleOptions {
            bad_threshold: 0.01,
            idle_threshold: 0.25,
            spare: 0.1,
            grow_window: Duration::from_millis(10_000),
            shrink_window: Duration::from_millis(60_000),
            min_requests: 100,
            min_devices: 1,
            max_devices: u32::MAX,
        }
    }
}

/// Why options contradict themselves.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
pub enum BadAutoscaleOptions {
    /// A share outside 0 to 1.
    #[error("{what} is {value}; it must be at least 0 and below 1")]
    Share {
        /// Which.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// Giving back would leave more idle than it is allowed to begin with.
    #[error("spare ({spare}) is above idle_threshold ({idle_threshold}); it must be at most that")]
    Spare {
        /// What is to be left idle.
        spare: f64,
        /// From where on devices are given back.
        idle_threshold: f64,
    },
    /// A window of no time.
    #[error("{what} is 0; a window needs some time")]
    NoWindow {
        /// Which.
        what: &'static str,
    },
    /// Less than the least.
    #[error("max_devices ({most}) is below min_devices ({least})")]
    Devices {
        /// Most devices.
        most: u32,
        /// Fewest.
        least: u32,
    },
}

/// What a cluster has done since some beginning: counters that only grow, and the devices that there are now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AutoscaleSample {
    /// Requests that finished by their deadline.
    pub good: u64,
    /// Requests that did not: rejected, dropped or missed.
    pub bad: u64,
    /// Time in which devices ran batches, all devices together.
    pub busy: Duration,
    /// Devices now.
    pub devices: u32,
}

/// What is wrong with a sample. It is not used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadSample {
    /// It is older than the last. Nothing changes.
    #[error("a sample at {now} comes after one at {last}: time does not go back")]
    TimeWentBack {
        /// Of this sample.
        now: Time,
        /// Of the last.
        last: Time,
    },
    /// A counter is below the last sample's: whoever counts has begun anew. The windows begin anew with this sample.
    #[error("{what} fell: the counting has begun anew, and so do the windows")]
    CountFell {
        /// Which.
        what: &'static str,
    },
}

/// How the number of devices should change.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Advice {
    /// Devices to add, or to give back if negative; 0: stay.
    pub change: i64,
    /// Why.
    pub reason: AdviceReason,
    /// Share of the requests in the last `grow_window` that were bad; `None` while nothing is known.
    pub bad_rate: Option<f64>,
    /// Share of the devices' time in the last `shrink_window` in which they were idle; `None` while nothing is known.
    pub idle_fraction: Option<f64>,
}

/// Why a change is advised, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AdviceReason {
    /// The bad rate is above its threshold: `N * r / (1 - r)` more.
    Overloaded,
    /// There is no device, and there are requests.
    NoDevices,
    /// The idle fraction is above its threshold: fewer, so that `spare` is left.
    Idle,
    /// The number of devices, or the beginning, is too recent for a judgement.
    Settling,
    /// There would be devices to give back, but with so few the same load was bad before.
    TooFewBefore,
    /// Neither too many bad requests nor too much idle time.
    Enough,
    /// More would be advised, but there are as many as are allowed.
    AtMost,
}

impl AdviceReason {
    /// A name for metrics and programs.
    pub const fn name(self) -> &'static str {
        match self {
            AdviceReason::Overloaded => "overloaded",
            AdviceReason::NoDevices => "no_devices",
            AdviceReason::Idle => "idle",
            AdviceReason::Settling => "settling",
            AdviceReason::TooFewBefore => "too_few_before",
            AdviceReason::Enough => "enough",
            AdviceReason::AtMost => "at_most",
        }
    }
}

impl fmt::Display for AdviceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AdviceReason::Overloaded => "too many requests are dropped, rejected or late",
            AdviceReason::NoDevices => "there are requests and no devices",
            AdviceReason::Idle => "devices are idle",
            AdviceReason::Settling => "too little has been seen with this number of devices",
            AdviceReason::TooFewBefore => "devices are idle, but with fewer the same load was too much",
            AdviceReason::Enough => "there are enough devices",
            AdviceReason::AtMost => "too many requests are dropped, rejected or late, and there may be no more devices",
        })
    }
}

/// Watches a cluster's counters and advises how many devices it should have (Symphony §3.5).
///
/// ```text
/// bad rate r above a threshold:  add N * r / (1 - r)
/// idle fraction f:               remove N * f
/// ```
///
/// Both are right where goodput is stable and device use proportional to the load ("flat-top behaviour"), which deferred
/// scheduling has and eager scheduling has not: with it devices are always busy, and are never advised to leave.
///
/// A state machine: [`Autoscale::handle_sample`] takes the time and the counters, at any interval, and gives the advice. It does
/// not change the number of devices; the next sample says whether somebody did. Memory is bounded.
///
/// # No oscillation
///
/// On a constant load the advice comes to rest, whatever the cluster is like:
///
/// - Each judgement looks at a whole window with one number of devices; a change begins the windows anew. So advice is
///   given again only after what it led to has been seen.
/// - Between "too many bad" and "too much idle" lies a gap, and giving back leaves `spare`.
/// - A number of devices that was too small for a load is remembered with that load's rate. As long as the rate is
///   not clearly lower (10%), so few are not advised again. Each time that more are asked for, at least one more number is known to be
///   too small, so that this ends. The price: where requests come at the same rate but have become cheaper to serve (another
///   mixture of models), devices are kept until the rate falls.
#[derive(Clone, Debug)]
pub struct Autoscale {
    options: AutoscaleOptions,
    /// With the present number of devices, oldest first: one at or before the beginning of the longer window, and those in it.
    samples: VecDeque<(Time, AutoscaleSample)>,
    too_few: Option<TooFew>,
    advice: Advice,
    wanted: Option<u32>,
}

/// A number of devices that was too small for a load.
#[derive(Clone, Copy, Debug)]
struct TooFew {
    devices: u32,
    /// Requests per second that were offered.
    rate: f64,
}

/// What happened in a window.
struct Window {
    requests: u64,
    bad: u64,
    busy: Duration,
    length: Duration,
}

impl Autoscale {
    /// An advisor that has seen nothing.
    ///
    /// # Errors
    /// If the options contradict themselves.
    pub fn new(options: AutoscaleOptions) -> Result<Self, BadAutoscaleOptions> {
        let shares = [
            ("bad_threshold", options.bad_threshold),
            ("idle_threshold", options.idle_threshold),
            ("spare", options.spare),
        ];
        if let Some((what, value)) = shares.into_iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
            return Err(BadAutoscaleOptions::Share { what, value });
        }
        let (spare, idle_threshold) = (options.spare, options.idle_threshold);
        if spare > idle_threshold {
            return Err(BadAutoscaleOptions::Spare { spare, idle_threshold });
        }
        let windows = [("grow_window", options.grow_window), ("shrink_window", options.shrink_window)];
        if let Some((what, _)) = windows.into_iter().find(|(_, window)| *window == Duration::ZERO) {
            return Err(BadAutoscaleOptions::NoWindow { what });
        }
        let (most, least) = (options.max_devices, options.min_devices);
        if most < least {
            return Err(BadAutoscaleOptions::Devices { most, least });
        }
        let advice = Advice { change: 0, reason: AdviceReason::Settling, bad_rate: None, idle_fraction: None };
        Ok(Autoscale { options, samples: VecDeque::new(), too_few: None, advice, wanted: None })
    }

    /// The last advice.
    pub fn advice(&self) -> Advice {
        self.advice
    }

    /// How many devices there should be, in all, by the last judgement; `None`: there was none yet. While a number of devices is too recent for a judgement the last one stands, so that whoever scales by it
    /// does not take the way to a number for the number itself.
    pub fn wanted(&self) -> Option<u32> {
        self.wanted
    }

    /// The counters at `now`; gives the advice.
    ///
    /// # Errors
    /// If the sample contradicts the last one; then the advice is what it was, or to stay if the windows begin anew.
    pub fn handle_sample(&mut self, now: Time, sample: AutoscaleSample) -> Result<Advice, BadSample> {
        if let Some((last_at, last)) = self.samples.back().copied() {
            if now < last_at {
                return Err(BadSample::TimeWentBack { now, last: last_at });
            }
            let fell = [
                ("the count of good requests", sample.good < last.good),
                ("the count of bad requests", sample.bad < last.bad),
                ("the devices' busy time", sample.busy < last.busy),
            ];
            if let Some((what, _)) = fell.into_iter().find(|(_, fell)| *fell) {
                self.begin_anew(now, sample);
                return Err(BadSample::CountFell { what });
            }
            if sample.devices != last.devices {
                self.begin_anew(now, sample);
                return Ok(self.advice);
            }
        }
        self.keep(now, sample);
        self.advice = self.judge(now, sample);
        if self.advice.reason != AdviceReason::Settling {
            let wanted = i64::from(sample.devices).saturating_add(self.advice.change);
            self.wanted = Some(u32::try_from(wanted.max(0)).unwrap_or(u32::MAX));
        }
        Ok(self.advice)
    }

    fn begin_anew(&mut self, now: Time, sample: AutoscaleSample) {
        self.samples.clear();
        self.samples.push_back((now, sample));
        self.advice = Advice { change: 0, reason: AdviceReason::Settling, bad_rate: None, idle_fraction: None };
    }

    /// Adds a sample, and lets go of what no window reaches.
    fn keep(&mut self, now: Time, sample: AutoscaleSample) {
        let longest = self.options.grow_window.max(self.options.shrink_window);
        let shortest = self.options.grow_window.min(self.options.shrink_window);
        let apart = Duration::from_nanos((shortest.as_nanos() / APART.0).max(longest.as_nanos() / APART.1));
        let n = self.samples.len();
        // The newest is always kept, the one before only if it is not too close to the one before that.
        if n >= 2 && self.samples[n - 1].0.since(self.samples[n - 2].0) < apart {
            self.samples.pop_back();
        }
        self.samples.push_back((now, sample));
        let begin = now - longest;
        while self.samples.len() >= 2 && self.samples[1].0 <= begin {
            self.samples.pop_front();
        }
    }

    /// What happened in the last `length`, or a little more; `None` if that reaches back before the beginning.
    fn window(&self, now: Time, last: AutoscaleSample, length: Duration) -> Option<Window> {
        let until = self.samples.iter().rev().find(|(at, _)| now.since(*at) >= length)?;
        let (at, first) = *until;
        Some(Window {
            requests: (last.good - first.good) + (last.bad - first.bad),
            bad: last.bad - first.bad,
            busy: last.busy.saturating_sub(first.busy),
            length: now.since(at),
        })
    }

    fn judge(&mut self, now: Time, sample: AutoscaleSample) -> Advice {
        let devices = sample.devices;
        let grow = self.window(now, sample, self.options.grow_window);
        let shrink = self.window(now, sample, self.options.shrink_window);
        let bad_rate = grow.as_ref().filter(|w| w.requests > 0).map(|w| w.bad as f64 / w.requests as f64);
        let idle_fraction = shrink.as_ref().filter(|_| devices > 0).map(|w| {
            // A batch is counted when it ends, so that a window may show a little more than its own time.
            (1.0 - w.busy.as_secs_f64() / (w.length.as_secs_f64() * f64::from(devices))).clamp(0.0, 1.0)
        });
        let advise = |change: i64, reason: AdviceReason| Advice { change, reason, bad_rate, idle_fraction };
        let least = self.options.min_devices.max(1);
        let Some(grow) = grow else { return advise(0, AdviceReason::Settling) };
        if devices == 0 {
            return match grow.requests {
                0 => advise(0, AdviceReason::Enough),
                _ if self.options.max_devices == 0 => advise(0, AdviceReason::AtMost),
                _ => advise(i64::from(least), AdviceReason::NoDevices),
            };
        }
        let rate = |w: &Window| w.requests as f64 / w.length.as_secs_f64();
        // Advice that stands falls only once it is clearly wrong: half the threshold, or the middle of the gap.
        let stands = |reason: AdviceReason| self.advice.reason == reason;
        let too_bad = self.options.bad_threshold * if stands(AdviceReason::Overloaded) { 0.5 } else { 1.0 };
        let too_idle = match self.options.idle_threshold {
            threshold if stands(AdviceReason::Idle) => (threshold + self.options.spare) / 2.0,
            threshold => threshold,
        };
        if let Some(bad) = bad_rate.filter(|bad| *bad > too_bad)
            && grow.requests >= self.options.min_requests
        {
            self.remember(devices, rate(&grow));
            let bad = bad.min(MOST_BAD_RATE);
            let more = (f64::from(devices) * bad / (1.0 - bad) - 1e-9).ceil().max(1.0) as i64;
            let room = i64::from(self.options.max_devices) - i64::from(devices);
            return match more.min(room) {
                some @ 1.. => advise(some, AdviceReason::Overloaded),
                _ => advise(0, AdviceReason::AtMost),
            };
        }
        let (Some(idle), Some(shrink)) = (idle_fraction, shrink) else { return advise(0, AdviceReason::Settling) };
        let bad_lately = shrink.bad as f64 > self.options.bad_threshold * shrink.requests as f64;
        if idle <= too_idle || bad_lately {
            return advise(0, AdviceReason::Enough);
        }
        let busy = f64::from(devices) * (1.0 - idle);
        let wanted = ((busy / (1.0 - self.options.spare) - 1e-9).ceil() as u32).max(least);
        let allowed = match self.too_few {
            Some(known) if rate(&shrink) > known.rate * (1.0 - LESS_LOAD) => {
                wanted.max(known.devices.saturating_add(1))
            }
            _ => wanted,
        };
        match (i64::from(devices) - i64::from(allowed), allowed > wanted) {
            (fewer @ 1.., _) => advise(-fewer, AdviceReason::Idle),
            (_, true) => advise(0, AdviceReason::TooFewBefore),
            (_, false) => advise(0, AdviceReason::Enough),
        }
    }

    /// So few devices were too few for this rate.
    fn remember(&mut self, devices: u32, rate: f64) {
        self.too_few = Some(match self.too_few {
            // More were too few for no more load than this.
            Some(known) if known.devices > devices && rate > known.rate * (1.0 - LESS_LOAD) => known,
            Some(known) if known.devices == devices => TooFew { devices, rate: rate.min(known.rate) },
            _ => TooFew { devices, rate },
        });
    }
}
