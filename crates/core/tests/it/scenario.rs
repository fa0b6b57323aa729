//! Scenario files: events in, decisions out, readable without Rust.
//!
//! A file has a script, a line of dashes, and the scheduler's timeline. `UPDATE_SCENARIOS=1 cargo
//! test -p downbeat-core` writes the timelines anew: read the difference before you commit it. The
//! script (times in milliseconds):
//!
//! ```text
//! # a comment
//! devices 3
//! devices 2 kind=1
//! wake-margin 0.5
//! network control=0.1 data=0.05 reply=2          (messages take exactly what is planned)
//! model m0 alpha=1 beta=5 slo=12 (or k0=1,5 k1=2,9: alpha,beta on devices of kind 0 and of kind 1)
//!       max_batch=32 drop=head|window|adaptive|none
//!       dispatch=deferred|latest|eager|adaptive|consolidating|timeout:5|timeout:5:2,4
//!       [in_flight=1] [levels=10,20:delay]        (bounds by level; "-" for none; with the timeout action)
//!       [shares=m0] [max_wait=50]                 (the limit of m0; without a deadline)
//! arrivals m0 every=0.75 count=40 [except=13,14,15]      requests r1, r2, ... from time 0; or [first=101] [from=500]
//! at 3 request r50 m0 [slo=12] [size=1] [level=0] [expiry=5]     (slo=none: no deadline; expiry: after so many ms)
//! at 3 cancel r50 m0
//! at 3 add-device [kind=1]  at 3 remove-device d1        at 3 remove-model m0
//! at 3 profile m0 alpha=1 beta=5                        at 3 dispatch m0 eager
//! at 3 flush m0
//! at 3 complete d0 b0      (beside the batch's own completion)
//! at 3 wake                (a timeout nobody asked for)
//! slow b2 4                (that batch takes 4 ms longer than its profile says; negative: shorter)
//! ```
//!
//! At one instant: the script's events in order, then completions in order of batches, then timers.

use std::collections::BTreeMap;
use std::fmt::Write;

use downbeat_core::cluster::*;
use downbeat_core::{
    BatchId, DeviceId, DeviceKind, DeviceProfiles, Duration, LatencyProfile, ModelId, RequestId, Time,
};

use crate::scenario_file::check;

struct Sent {
    arrives: Time,
    expected: Duration,
    members: Vec<RequestId>,
}

struct World {
    scheduler: Scheduler,
    slos: Vec<Option<Duration>>,
    /// Events of the script, by time and line.
    events: BTreeMap<(Time, usize), Vec<String>>,
    network: NetworkBudget,
    /// What runs.
    completions: BTreeMap<(Time, BatchId), (DeviceId, Vec<RequestId>)>,
    /// Batches sent to a device that still runs another batch, in order.
    sent: BTreeMap<(DeviceId, BatchId), Sent>,
    /// Milliseconds that a batch takes longer than its profile says.
    slow: BTreeMap<BatchId, f64>,
    deadlines: BTreeMap<RequestId, Time>,
    /// The ticket of every accepted request.
    tickets: BTreeMap<RequestId, Ticket>,
    timeline: String,
}

fn run(script: &str) -> String {
    let mut world = World {
        scheduler: Scheduler::new(),
        slos: Vec::new(),
        events: BTreeMap::new(),
        network: NetworkBudget::default(),
        completions: BTreeMap::new(),
        sent: BTreeMap::new(),
        slow: BTreeMap::new(),
        deadlines: BTreeMap::new(),
        tickets: BTreeMap::new(),
        timeline: String::new(),
    };
    for (number, line) in script.lines().enumerate() {
        let words: Vec<String> = line.split('#').next().unwrap_or("").split_whitespace().map(str::to_owned).collect();
        if !words.is_empty() {
            world.prepare(number, &words);
        }
    }
    world.play();
    world.timeline
}

impl World {
    fn prepare(&mut self, line: usize, words: &[String]) {
        match words[0].as_str() {
            "devices" => {
                for _ in 0..words[1].parse().unwrap() {
                    self.scheduler.add_device(Time::ZERO, kind(words));
                }
            }
            "network" => {
                let [control, data, reply] =
                    ["control", "data", "reply"].map(|name| option(words, name).map_or(Duration::ZERO, millis));
                self.network = NetworkBudget { control, data, reply };
                self.scheduler.set_network(Time::ZERO, self.network);
            }
            "wake-margin" => self.scheduler.set_wake_margin(Time::ZERO, millis(&words[1])),
            "model" => {
                let option = |name| option(words, name);
                let options = ModelOptions {
                    profiles: profiles(words),
                    max_batch: option("max_batch").map_or(32, |v| v.parse().unwrap()),
                    drop: match option("drop").unwrap_or("head") {
                        "head" => DropPolicy::HeadDrop,
                        "window" => DropPolicy::WindowDrop,
                        "adaptive" => DropPolicy::Adaptive,
                        "none" => DropPolicy::None,
                        other => panic!("drop={other}"),
                    },
                    dispatch: dispatch(option("dispatch").unwrap_or("deferred")),
                    max_in_flight: option("in_flight").map_or(u32::MAX, |v| v.parse().unwrap()),
                    shares_limit: option("shares").map(|other| ModelId(id(other) as u32)),
                    max_wait: option("max_wait").map_or(Duration::MAX, millis),
                    levels: option("levels").map_or(Vec::new(), |v| v.split(',').map(level).collect()),
                };
                let id = self.scheduler.add_model(Time::ZERO, options);
                assert_eq!(words[1], format!("m{}", id.0), "models are named in order");
                self.slos.push(option("slo").map(millis));
            }
            "arrivals" => {
                let from = option(words, "from").map_or(Duration::ZERO, millis);
                let first: u32 = option(words, "first").map_or(0, |v| v.parse::<u32>().unwrap() - 1);
                let every: f64 = option(words, "every").unwrap().parse().unwrap();
                let except: Vec<u32> =
                    option(words, "except").map_or(Vec::new(), |v| v.split(',').map(|n| n.parse().unwrap()).collect());
                for n in 1..=option(words, "count").unwrap().parse().unwrap() {
                    if !except.contains(&n) {
                        let at = Time::ZERO + from + Duration::from_millis_f64(every * f64::from(n - 1));
                        let event = ["request".to_owned(), format!("r{}", first + n), words[1].clone()];
                        self.events.insert((at, line * 1_000_000 + n as usize), event.to_vec());
                    }
                }
            }
            "slow" => {
                self.slow.insert(BatchId(id(&words[1])), words[2].parse().unwrap());
            }
            "at" => {
                self.events.insert((Time::ZERO + millis(&words[1]), line * 1_000_000), words[2..].to_vec());
            }
            other => panic!("line {}: what is '{other}'?", line + 1),
        }
    }

    fn play(&mut self) {
        loop {
            let event = self.events.keys().next().map_or(Time::MAX, |(at, _)| *at);
            let completion = self.completions.keys().next().map_or(Time::MAX, |(at, _)| *at);
            let timeout = self.scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
            let now = event.min(completion).min(timeout);
            if now == Time::MAX {
                break;
            }
            if event == now {
                let (_, words) = self.events.pop_first().unwrap();
                self.event(now, &words);
            } else if completion == now {
                let ((_, batch), (device, members)) = self.completions.pop_first().unwrap();
                for member in &members {
                    if self.deadlines[member] < now + self.network.reply {
                        self.say(now, format_args!("{member} is late"));
                    }
                }
                self.scheduler.recycle(members);
                self.scheduler.handle_completion(now, device, batch);
                let next =
                    self.sent.range((device, BatchId(0))..(device, BatchId(u64::MAX))).next().map(|(key, _)| *key);
                if let Some(next) = next {
                    let sent = self.sent.remove(&next).unwrap();
                    self.begin(now, device, next.1, sent);
                }
            } else {
                self.scheduler.handle_timeout(now);
            }
            self.outputs(now);
        }
    }

    fn event(&mut self, now: Time, words: &[String]) {
        let s = &mut self.scheduler;
        let model = |at: usize| ModelId(id(&words[at]) as u32);
        match words[0].as_str() {
            "request" => {
                let after = |span: Option<Duration>| span.map_or(Time::MAX, |span| now + span);
                let slo = match option(words, "slo") {
                    None => self.slos.get(model(2).0 as usize).copied().flatten(),
                    Some("none") => None,
                    Some(slo) => Some(millis(slo)),
                };
                let request = Request {
                    id: RequestId(id(&words[1])),
                    model: model(2),
                    deadline: after(slo),
                    queue_expiry: after(option(words, "expiry").map(millis)),
                    level: option(words, "level").map_or(0, |v| v.parse().unwrap()),
                    size: option(words, "size").map_or(1, |v| v.parse().unwrap()),
                };
                self.deadlines.insert(request.id, request.deadline);
                match s.handle_request(now, request) {
                    Ok(ticket) => {
                        self.tickets.insert(request.id, ticket);
                    }
                    Err(reject) => self.say(now, format_args!("{} rejected: {reject}", request.id)),
                }
            }
            "cancel" => {
                let ticket = self.tickets.get(&RequestId(id(&words[1])));
                let left = ticket.is_some_and(|ticket| s.handle_cancel(now, model(2), *ticket));
                self.say(now, format_args!("{} cancelled: {left}", words[1]));
            }
            "add-device" => {
                let device = s.add_device(now, kind(words));
                self.say(now, format_args!("{device} joins"));
            }
            "remove-device" => {
                s.remove_device(now, DeviceId(id(&words[1]) as u32));
                self.say(now, format_args!("{} leaves", words[1]));
            }
            "remove-model" => {
                s.remove_model(now, model(1));
                self.say(now, format_args!("{} leaves", words[1]));
            }
            "profile" => s.set_profile(now, model(1), profiles(words)),
            "dispatch" => s.set_dispatch(now, model(1), dispatch(&words[2])),
            "complete" => {
                let before = s.stats().stray_completions;
                s.handle_completion(now, DeviceId(id(&words[1]) as u32), BatchId(id(&words[2])));
                if s.stats().stray_completions > before {
                    self.say(now, format_args!("completion of {} on {} ignored", words[2], words[1]));
                }
            }
            "flush" => s.flush(now, model(1)),
            "wake" => s.handle_timeout(now),
            other => panic!("what is '{other}'?"),
        }
    }

    fn outputs(&mut self, now: Time) {
        while let Some(output) = self.scheduler.poll_output() {
            match output {
                Output::Drop { request, reason, .. } => self.say(now, format_args!("{request} dropped: {reason:?}")),
                Output::Dispatch { batch, device, model, members, size, start, expected, .. } => {
                    let sent = Sent { arrives: now + self.network.delay(size), expected, members: members.clone() };
                    let names: Vec<String> = members.iter().map(RequestId::to_string).collect();
                    let items = if size as usize == members.len() { String::new() } else { format!(" ({size} items)") };
                    let names = names.join(" ");
                    if self.network.is_remote() {
                        let start = number(start);
                        self.say(now, format_args!("{device} is sent {batch} of {model} for {start}: {names}{items}"));
                    } else {
                        let until = number(self.until(now, batch, expected));
                        self.say(now, format_args!("{device} runs {batch} of {model} until {until}: {names}{items}"));
                    }
                    if self.completions.values().any(|(d, _)| *d == device) {
                        self.sent.insert((device, batch), sent);
                    } else {
                        self.begin(now, device, batch, sent);
                    }
                }
            }
        }
    }

    fn until(&self, start: Time, batch: BatchId, expected: Duration) -> Time {
        let longer = self.slow.get(&batch).copied().unwrap_or(0.0);
        Time::ZERO + Duration::from_millis_f64(number(start + expected) + longer)
    }

    /// A device turns to a batch whose message may still be on its way.
    fn begin(&mut self, now: Time, device: DeviceId, batch: BatchId, sent: Sent) {
        let start = sent.arrives.max(now);
        let until = self.until(start, batch, sent.expected);
        if self.network.is_remote() {
            self.say(start, format_args!("{device} runs {batch} until {}", number(until)));
        }
        self.completions.insert((until, batch), (device, sent.members));
    }

    fn say(&mut self, now: Time, what: std::fmt::Arguments<'_>) {
        writeln!(self.timeline, "{:>8}  {what}", number(now)).unwrap();
    }
}

/// Milliseconds.
fn number(at: Time) -> f64 {
    at.since(Time::ZERO).as_millis_f64()
}

fn millis(word: &str) -> Duration {
    Duration::from_millis_f64(word.parse().unwrap_or_else(|e| panic!("'{word}': {e}")))
}

/// The number in `r12`, `d0`, `b3`, `m1`.
fn id(word: &str) -> u64 {
    word[1..].parse().unwrap_or_else(|e| panic!("'{word}': {e}"))
}

fn option<'a>(words: &'a [String], name: &str) -> Option<&'a str> {
    words.iter().find_map(|w| w.strip_prefix(name)?.strip_prefix('='))
}

/// `alpha=1 beta=5` for all kinds, or `k0=1,5 k1=2,9`: alpha and beta of each kind.
fn profiles(words: &[String]) -> DeviceProfiles {
    let by_kind: Vec<(DeviceKind, LatencyProfile)> = (0..9)
        .filter_map(|kind| {
            let (alpha, beta) = option(words, &format!("k{kind}"))?.split_once(',').unwrap();
            Some((DeviceKind(kind), profile(alpha, beta)))
        })
        .collect();
    if by_kind.is_empty() {
        profile(option(words, "alpha").unwrap(), option(words, "beta").unwrap()).into()
    } else {
        DeviceProfiles::by_kind(by_kind).unwrap()
    }
}

fn profile(alpha: &str, beta: &str) -> LatencyProfile {
    LatencyProfile::linear_ms(alpha.parse().unwrap(), beta.parse().unwrap(), 64).unwrap()
}

fn kind(words: &[String]) -> DeviceKind {
    DeviceKind(option(words, "kind").map_or(0, |v| v.parse().unwrap()))
}

fn dispatch(word: &str) -> DispatchPolicy {
    let mut parts = word.split(':');
    match parts.next().unwrap() {
        "deferred" => DispatchPolicy::Deferred,
        "latest" => DispatchPolicy::Latest,
        "eager" => DispatchPolicy::Eager,
        "consolidating" => DispatchPolicy::Adaptive { consolidate: true },
        "adaptive" => DispatchPolicy::Adaptive { consolidate: false },
        "timeout" => DispatchPolicy::Timeout {
            delay: millis(parts.next().unwrap()),
            preferred: parts.next().map_or(Vec::new(), |p| p.split(',').map(|n| n.parse().unwrap()).collect()),
        },
        other => panic!("dispatch={other}"),
    }
}

fn level(word: &str) -> PriorityLevel {
    let (bound, action) = word.split_once(':').unwrap_or((word, "reject"));
    let max_queue = if bound == "-" { u32::MAX } else { bound.parse().unwrap() };
    let timeout_action = match action {
        "reject" => TimeoutAction::Reject,
        "delay" => TimeoutAction::Delay,
        other => panic!("levels=...:{other}"),
    };
    PriorityLevel { max_queue, timeout_action }
}

macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { check("scenarios", stringify!($name), run); })*

        #[test]
        fn every_scenario_file_is_a_test() {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/scenarios");
            let mut files: Vec<String> = std::fs::read_dir(folder)
                .unwrap()
                .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
                .collect();
            files.sort();
            let mut tests = [$(stringify!($name)),*];
            tests.sort_unstable();
            assert_eq!(files, tests);
        }
    };
}

scenarios! {
    a_bound_of_zero_rejects_everything,
    a_deadline_that_cannot_be_met_is_rejected,
    a_deferred_request_leaves_before_its_queue_expiry,
    a_device_overdue_is_still_busy,
    a_lower_level_never_shrinks_a_higher_ones_batch,
    a_model_leaves,
    a_new_profile_counts_at_once,
    a_shared_limit_counts_the_batches_of_all_who_share_it,
    a_timeout_longer_than_the_slack_is_cut_short,
    adaptive_waits_while_devices_are_spare_and_not_when_they_are_missed,
    an_expired_candidate_is_as_urgent_as_what_is_left_of_it,
    appendix_d_a_batch_is_sent_before_it_starts,
    appendix_d_a_batch_is_sent_to_a_device_that_is_about_to_be_free,
    appendix_d_a_device_leaves_with_two_batches,
    appendix_d_a_device_that_is_early_takes_what_is_there,
    appendix_d_an_overdue_device_delays_the_next_batch_and_gets_no_third,
    appendix_d_completions_in_any_order,
    appendix_d_stale_timers_on_a_granted_device,
    appendix_d_the_longest_way_sends_early,
    appendix_d_the_reply_is_taken_off_the_deadline,
    appendix_d_the_smallest_device_that_is_free_in_time,
    appendix_d_the_way_counts_as_time_that_a_request_needs,
    at_most_so_many_batches_in_flight,
    cancel_recomputes_the_candidate,
    deadlines_out_of_order,
    devices_join_and_leave,
    head_drop_keeps_the_head_and_runs_a_small_batch,
    higher_levels_go_first,
    kinds_a_free_faster_device_is_waited_for,
    kinds_a_model_never_runs_where_it_has_no_profile,
    kinds_a_slower_device_passes_over_what_only_a_faster_one_can_serve,
    kinds_a_slower_device_takes_over_when_the_faster_one_is_taken,
    kinds_a_slower_device_takes_what_a_busy_faster_one_cannot,
    kinds_hopeless_is_what_the_fastest_kind_with_a_device_cannot_serve,
    kinds_of_equal_speed_are_one,
    kinds_four_all_slower_ones_wait_for_the_free_one_between,
    kinds_the_fastest_first_then_the_smallest_id,
    kinds_three_the_slowest_waits_for_either,
    larger_requests_are_hopeless_earlier,
    queue_bound_is_exact_and_weighted,
    queue_expiry_delay_goes_behind_the_others,
    queue_expiry_fires_while_the_device_is_busy,
    section_3_1_between_frontrun_and_latest_a_newcomer_cannot_join,
    section_3_1_frontrun_moves_earlier_as_the_batch_grows,
    section_3_1_latest_waits_for_the_last_moment,
    section_3_1_schedulable_window,
    section_3_2_a_candidate_without_a_device_waits_and_is_matched_later,
    section_3_2_a_free_device_takes_the_most_urgent_candidate,
    section_3_2_get_batch_is_the_longest_prefix_that_fits,
    section_3_2_hopeless_heads_are_dropped_when_it_is_certain,
    section_3_2_recompute_at_expiry,
    section_3_2_smallest_device_id_first,
    section_3_3_deferred_forms_a_staggered_pattern,
    section_3_3_deferred_recovers_from_three_missing_requests,
    section_3_3_eager_deteriorates_after_three_missing_requests,
    section_3_4_timeout_counts_from_the_first_arrival,
    sizes_count_as_items,
    stale_timers_do_no_harm,
    stray_completions_do_no_harm,
    the_wake_margin_widens_a_narrow_window,
    timeout_a_flush_sends_what_waits,
    timeout_a_request_larger_than_every_preferred_size_goes_at_once,
    timeout_preferred_sizes,
    timeout_preferred_sizes_of_mixed_requests,
    timeout_sends_a_full_batch_at_once,
    window_drop_does_not_send_the_rest_before_its_time,
    window_drop_gives_a_head_up_for_a_larger_batch,
    window_drop_keeps_a_head_whose_loss_gains_nothing,
    without_a_deadline_a_request_waits_so_long_and_no_longer,
    without_a_deadline_deferred_is_eager,
    without_deadlines_the_one_that_waited_longest_goes_first,
    without_drops_late_requests_are_served,
}
