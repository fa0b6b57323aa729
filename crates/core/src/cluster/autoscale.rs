//! The autoscale advisor: says whether a cluster needs more devices or has too many (Symphony
//! §3.5).

use std::collections::VecDeque;
use std::fmt;

use crate::time::{Duration, Time};

/// Minimum distance between kept samples: this share of the shorter or of the longer window, and of
/// both the longer distance. It bounds the number of samples, and how far a window exceeds its
/// length.
const APART: (u64, u64) = (10, 1_000);
/// A bad rate above this value counts as this value, so that advice stays finite where no request
/// at all is served in time.
const MOST_BAD_RATE: f64 = 0.9;
/// The offered rate must fall by this share before the advisor again tries a number of devices that
/// was too small.
const LESS_LOAD: f64 = 0.25;
/// More devices have helped if the bad rate is below this part of the rate before.
const HELPED: f64 = 0.95;
/// The unavoidable bad rate falls once a longer window has less than this part of the rate.
const CLEARLY_LESS: f64 = 0.5;

/// The thresholds and windows of the autoscale advisor.
///
/// With `idle_threshold` and `spare` at 0 the advice is the paper's: `N * r / (1 - r)` more, or
/// `N * f` fewer.
#[derive(Clone, PartialEq, Debug)]
pub struct AutoscaleOptions {
    /// Devices are added if the bad rate is above this share. Default: 1%, the share that a
    /// capacity tolerates.
    pub bad_threshold: f64,
    /// Devices are given back only if the idle fraction is above this share. Default: 0.25.
    pub idle_threshold: f64,
    /// The idle fraction that remains after devices are given back. At most `idle_threshold`: load
    /// may vary by the gap between the two without new advice. Default: 0.1.
    pub spare: f64,
    /// The time over which the bad rate is measured. The number of devices must also stand this
    /// long before more are advised. Default: 10 s.
    pub grow_window: Duration,
    /// The same for the idle fraction and for fewer devices. This window is longer, as missing
    /// devices cost requests. Default: 60 s.
    pub shrink_window: Duration,
    /// With fewer requests in a window, its bad rate leads to no advice. Default: 100.
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
        /// The name of the option.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// After devices are given back, more would be idle than `idle_threshold` allows.
    #[error("spare ({spare}) is above idle_threshold ({idle_threshold}); it must be at most that")]
    Spare {
        /// The idle fraction that remains after devices are given back.
        spare: f64,
        /// Above this idle fraction, devices are given back.
        idle_threshold: f64,
    },
    /// A window of length zero.
    #[error("{what} is 0; a window needs some time")]
    NoWindow {
        /// The name of the option.
        what: &'static str,
    },
    /// The largest number of devices is below the smallest.
    #[error("max_devices ({most}) is below min_devices ({least})")]
    Devices {
        /// Most devices.
        most: u32,
        /// Fewest devices.
        least: u32,
    },
}

/// A cluster's counters since some beginning, which only grow, and its present number of devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AutoscaleSample {
    /// Requests that finished by their deadline.
    pub good: u64,
    /// Requests that were rejected, dropped or missed.
    pub bad: u64,
    /// Time that the devices needed for the batches that ran, all devices together. A batch that left
    /// early and small on idle devices counts for less than it took
    /// ([`ItemCost::needed_part`](super::ItemCost::needed_part)).
    pub busy: Duration,
    /// Devices now.
    pub devices: u32,
}

/// Why a sample is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadSample {
    /// The sample is older than its predecessor. Nothing changes.
    #[error("a sample at {now} comes after one at {last}: time does not go back")]
    TimeWentBack {
        /// Time of this sample.
        now: Time,
        /// Time of the last sample.
        last: Time,
    },
    /// A counter is below the last sample's, because the counting has begun anew. The windows begin
    /// anew with this sample.
    #[error("{what} fell: the counting has begun anew, and so do the windows")]
    CountFell {
        /// The counter.
        what: &'static str,
    },
}

/// How the number of devices should change.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Advice {
    /// Devices to add, or to give back if negative; 0: no change.
    pub change: i64,
    /// Why this change is advised.
    pub reason: AdviceReason,
    /// Share of bad requests in the last `grow_window`; `None` while it is unknown.
    pub bad_rate: Option<f64>,
    /// Idle share of the devices' time in the last `shrink_window`; `None` while it is unknown.
    pub idle_fraction: Option<f64>,
}

/// Why the advisor advises a change, or advises none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AdviceReason {
    /// The bad rate is above its threshold: `N * r / (1 - r)` more.
    Overloaded,
    /// There is no device, and there are requests.
    NoDevices,
    /// The idle fraction is above its threshold: devices may leave until `spare` remains idle.
    Idle,
    /// The counting began, or the number of devices changed, too recently for a judgement.
    Settling,
    /// Devices could be given back, but with so few devices the same load was bad before.
    TooFewBefore,
    /// Neither too many bad requests nor too much idle time.
    Enough,
    /// The bad rate is above its threshold, but `max_devices` is reached.
    AtMost,
    /// The bad rate is above its threshold for another reason than a lack of devices. The rate was as
    /// high with fewer devices, and devices are idle.
    MoreDoNotHelp,
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
            AdviceReason::MoreDoNotHelp => "more_do_not_help",
        }
    }
}

impl fmt::Display for AdviceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AdviceReason::Overloaded => "too many requests are dropped, rejected or late",
            AdviceReason::NoDevices => "requests wait, and there is no device",
            AdviceReason::Idle => "devices are idle",
            AdviceReason::Settling => "this number of devices has been observed for too short a time",
            AdviceReason::TooFewBefore => "devices are idle, but fewer devices could not serve the same load",
            AdviceReason::Enough => "there are enough devices",
            AdviceReason::AtMost => {
                "too many requests are dropped, rejected or late, and max_devices allows no more devices"
            }
            AdviceReason::MoreDoNotHelp => {
                "too many requests are dropped, rejected or late, and more devices did not change that: look at the SLO, \
                 the largest batch, and the reasons of the metric downbeat_requests_not_answered_total"
            }
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
/// Both formulas are right if goodput is stable and device use is proportional to the load
/// ("flat-top behaviour"). Deferred scheduling has this behaviour; eager scheduling has not: it
/// keeps devices always busy, so that none is ever advised to leave.
///
/// A state machine: [`Autoscale::handle_sample`] takes the time and the counters, at any interval,
/// and gives the advice. It does not change the number of devices; the next sample tells whether
/// the number has changed. Memory is bounded.
///
/// # No oscillation
///
/// On a constant load the advice comes to rest, for any cluster:
///
/// - Each judgement looks at a whole window with one number of devices, because a change begins the
///   windows anew. So the advisor sees the effect of its last advice before it advises again.
/// - A gap lies between "too many bad" and "too much idle", and giving back leaves `spare`.
/// - A number of devices that was too small for a load is remembered with that load's rate. So
///   small a number is not advised again until the rate is clearly lower (25%). Each time that more
///   devices are advised, at least one more number is known to be too small, so that the search
///   ends. The price: if requests of another mixture of models are cheaper to serve at the same
///   rate, devices are kept until the rate falls.
///
/// # What devices cannot help
///
/// Requests may be bad for another reason than a lack of devices. Example: the SLO is 10 ms, and 3%
/// of the batches take longer than that. Each further device would change nothing, and the paper's
/// formula would ask for one more for ever. If more devices did not lower the bad rate while devices
/// are idle, the advisor takes that rate as *unavoidable*. Only bad requests beyond the rate count
/// from then on. The unavoidable rate falls when a longer window has clearly fewer bad requests.
#[derive(Clone, Debug)]
pub struct Autoscale {
    options: AutoscaleOptions,
    /// Samples with the present number of devices, oldest first: one at or before the beginning of
    /// the longer window, and all within the window.
    samples: VecDeque<(Time, AutoscaleSample)>,
    too_few: Option<TooFew>,
    /// Was taken for too few, until more devices did not help. Counts again once the unavoidable
    /// rate falls.
    in_doubt: Option<TooFew>,
    /// The last number of devices for which more were advised, with its bad rate.
    short: Option<(u32, f64)>,
    /// The bad rate that more devices do not lower.
    unavoidable: f64,
    advice: Advice,
    wanted: Option<u32>,
}

/// A number of devices that was too small for a load.
#[derive(Clone, Copy, Debug)]
struct TooFew {
    devices: u32,
    /// The offered requests a second.
    rate: f64,
}

/// The counts of one window.
struct Window {
    requests: u64,
    bad: u64,
    busy: Duration,
    length: Duration,
}

impl Window {
    /// Offered requests a second.
    fn rate(&self) -> f64 {
        self.requests as f64 / self.length.as_secs_f64()
    }

    /// Share of bad requests; `None` without requests.
    fn bad_rate(&self) -> Option<f64> {
        (self.requests > 0).then(|| self.bad as f64 / self.requests as f64)
    }

    /// Idle share of the time of so many devices; `None` without devices.
    fn idle(&self, devices: u32) -> Option<f64> {
        // A batch is counted when it ends, so that a window may show a little more than its own time.
        let all = self.length.as_secs_f64() * f64::from(devices);
        (devices > 0).then(|| (1.0 - self.busy.as_secs_f64() / all).clamp(0.0, 1.0))
    }

    /// The share of bad requests beyond an unavoidable share; 0 if chance alone explains the
    /// difference (two standard deviations of the unavoidable count).
    fn excess(&self, unavoidable: f64) -> f64 {
        let (requests, bad) = (self.requests as f64, self.bad as f64);
        let known = unavoidable * requests;
        if requests == 0.0 || (unavoidable > 0.0 && bad <= known + 2.0 * known.sqrt()) {
            return 0.0;
        }
        (bad - known) / (requests - known)
    }
}

impl Autoscale {
    /// An advisor without samples.
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
        Ok(Autoscale {
            options,
            samples: VecDeque::new(),
            too_few: None,
            in_doubt: None,
            short: None,
            unavoidable: 0.0,
            advice,
            wanted: None,
        })
    }

    /// The last advice.
    pub fn advice(&self) -> Advice {
        self.advice
    }

    /// The advised total number of devices, by the last judgement; `None`: there was no judgement
    /// yet. While a number of devices is too recent for a judgement the last judgement stands. This
    /// keeps a caller that scales in steps from mistaking a step for the goal.
    pub fn wanted(&self) -> Option<u32> {
        self.wanted
    }

    /// Takes the counters at `now` and gives the advice.
    ///
    /// # Errors
    /// If the sample contradicts its predecessor. If the windows begin anew, the advice becomes "no
    /// change"; otherwise it stays as it was.
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

    /// Adds a sample, and removes the samples that no window reaches.
    fn keep(&mut self, now: Time, sample: AutoscaleSample) {
        let longest = self.options.grow_window.max(self.options.shrink_window);
        let shortest = self.options.grow_window.min(self.options.shrink_window);
        let apart = Duration::from_nanos((shortest.as_nanos() / APART.0).max(longest.as_nanos() / APART.1));
        let n = self.samples.len();
        // The newest sample is always kept. The one before it is kept only if it is far enough from
        // its predecessor.
        if n >= 2 && self.samples[n - 1].0.since(self.samples[n - 2].0) < apart {
            self.samples.pop_back();
        }
        self.samples.push_back((now, sample));
        let begin = now - longest;
        while self.samples.len() >= 2 && self.samples[1].0 <= begin {
            self.samples.pop_front();
        }
    }

    /// The counts of the last `length`, or of a little more; `None` if the samples do not reach
    /// back so far.
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
        let bad_rate = grow.as_ref().and_then(Window::bad_rate);
        let idle_fraction = shrink.as_ref().and_then(|window| window.idle(devices));
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
        self.learn_unavoidable(devices, &grow, shrink.as_ref());
        // Standing advice falls only once it is clearly wrong: at half the threshold, or in the
        // middle of the gap.
        let stands = |reason: AdviceReason| self.advice.reason == reason;
        let too_bad = self.options.bad_threshold * if stands(AdviceReason::Overloaded) { 0.5 } else { 1.0 };
        let too_idle = match self.options.idle_threshold {
            threshold if stands(AdviceReason::Idle) => (threshold + self.options.spare) / 2.0,
            threshold => threshold,
        };
        let excess = grow.excess(self.unavoidable);
        if excess > too_bad && grow.requests >= self.options.min_requests {
            // The shorter window may have a peak that comes again and again. The longer one may have
            // seen little of a load that grew just now.
            let longer = shrink.as_ref().map_or(grow.rate(), Window::rate);
            self.remember(TooFew { devices, rate: (grow.rate() + longer) / 2.0 });
            self.short = Some((devices, bad_rate.unwrap_or(excess)));
            let bad = excess.min(MOST_BAD_RATE);
            let more = (f64::from(devices) * bad / (1.0 - bad) - 1e-9).ceil().max(1.0) as i64;
            let room = i64::from(self.options.max_devices) - i64::from(devices);
            return match more.min(room) {
                some @ 1.. => advise(some, AdviceReason::Overloaded),
                _ => advise(0, AdviceReason::AtMost),
            };
        }
        let is_bad = bad_rate.is_some_and(|bad| bad > self.options.bad_threshold) && self.unavoidable > 0.0;
        let enough = if is_bad { AdviceReason::MoreDoNotHelp } else { AdviceReason::Enough };
        let (Some(idle), Some(shrink)) = (idle_fraction, shrink) else { return advise(0, AdviceReason::Settling) };
        if idle <= too_idle || shrink.excess(self.unavoidable) > self.options.bad_threshold {
            return advise(0, enough);
        }
        let busy = f64::from(devices) * (1.0 - idle);
        let wanted = ((busy / (1.0 - self.options.spare) - 1e-9).ceil() as u32).max(least);
        let allowed = match self.too_few {
            Some(known) if shrink.rate() > known.rate * (1.0 - LESS_LOAD) => {
                wanted.max(known.devices.saturating_add(1))
            }
            _ => wanted,
        };
        match (i64::from(devices) - i64::from(allowed), allowed > wanted) {
            (fewer @ 1.., _) => advise(-fewer, AdviceReason::Idle),
            (_, true) => advise(0, AdviceReason::TooFewBefore),
            (_, false) => advise(0, enough),
        }
    }

    /// Learns from the first window after more devices came. If the bad rate is as it was and devices
    /// are idle, more devices do not lower the rate. A longer window with clearly fewer bad requests shows
    /// that the reason is gone.
    fn learn_unavoidable(&mut self, devices: u32, grow: &Window, shrink: Option<&Window>) {
        if grow.requests < self.options.min_requests {
            return;
        }
        if let Some(lately) = shrink.and_then(Window::bad_rate)
            && lately < CLEARLY_LESS * self.unavoidable
        {
            self.unavoidable = lately;
            if let Some(doubted) = self.in_doubt.take() {
                self.remember(doubted);
            }
        }
        let Some((fewer, before)) = self.short.take_if(|(number, _)| *number != devices) else { return };
        let (Some(bad), Some(idle)) = (grow.bad_rate(), grow.idle(devices)) else { return };
        let is_short = grow.excess(self.unavoidable) > self.options.bad_threshold;
        if devices > fewer && is_short && bad >= HELPED * before && idle >= self.options.idle_threshold {
            self.unavoidable = bad;
            self.in_doubt = self.too_few.take();
        }
    }

    /// Remembers that this number of devices was too small for this rate.
    fn remember(&mut self, now: TooFew) {
        self.too_few = Some(match self.too_few {
            // A larger number was too small for a load that was no higher.
            Some(known) if known.devices > now.devices && now.rate > known.rate * (1.0 - LESS_LOAD) => known,
            Some(known) if known.devices == now.devices => TooFew { rate: now.rate.min(known.rate), ..now },
            _ => now,
        });
    }
}
