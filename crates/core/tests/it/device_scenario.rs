//! Scenario files of device policies: requests in, launches out, readable without Rust.
//!
//! As with the cluster's scenarios (`scenario.rs`) a file has a script, a line of dashes, and the
//! timeline; `UPDATE_SCENARIOS=1` writes the timelines anew. A launch takes as long as the script
//! says, also beside other launches. The script (times in milliseconds):
//!
//! ```text
//! # a comment
//! segment 0.25 0.5                    one line a segment: its time for 1, 2, ... items
//! segment 1: 0.5 0.5; 2: 1 1          ... for lengths 1 and 2
//! policy windowed max_batch=4 window=4 [fill] [ahead=1]
//! policy elastic mix=1,1,2,4 max=8 ring=16 [cores=2] [brief=1]      or: mixes=4:4;8:8;16:4,4,8
//! policy staged pairs=2 max_batch=4 [length] [operator] [load] [window=0] [comp_wait=9] [always] [ring=8]
//! transfer 0.1                        what bringing one input takes
//! drop                                give up what cannot be answered in time
//! bound 8                             items that may wait
//! at 0 request r1 [size=1] [length=2] [deadline=10]
//! at 0 requests r1..r4 [length=1]
//! at 3 cancel r1
//! exit r1 after 1                     its answer is final after stage 1
//! ```
//!
//! With `arrived=0` a request's latency counts from time 0. A request r0 does not count in the
//! mean: it keeps the device busy until other requests have arrived.
//!
//! At one instant: the script's events, then completions, inputs, timers.

use std::collections::BTreeMap;

use downbeat_core::device::*;
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};

use crate::device_world::World;
use crate::scenario_file::check;

fn ms(text: &str) -> Duration {
    Duration::from_millis_f64(text.parse().unwrap_or_else(|_| panic!("'{text}' is no time")))
}

fn name(text: &str) -> RequestId {
    RequestId(text.trim_start_matches('r').parse().unwrap_or_else(|_| panic!("'{text}' is no request")))
}

fn options<'a>(words: &[&'a str]) -> BTreeMap<&'a str, &'a str> {
    words.iter().map(|word| word.split_once('=').unwrap_or((word, ""))).collect()
}

#[derive(Default)]
struct Script<'a> {
    lengths: Vec<u32>,
    segments: Vec<Vec<LatencyProfile>>,
    policy: Vec<&'a str>,
    transfer: Duration,
    drop: bool,
    bound: Option<u32>,
    exits: Vec<(RequestId, u16)>,
    events: Vec<Vec<&'a str>>,
}

fn table(text: &str) -> LatencyProfile {
    LatencyProfile::from_table(text.split_whitespace().map(ms).collect()).unwrap()
}

impl<'a> Script<'a> {
    fn read(text: &'a str) -> Self {
        let mut script = Script::default();
        for line in text.lines().map(|line| line.split('#').next().unwrap_or("").trim()).filter(|line| !line.is_empty())
        {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "segment" if rest.contains(':') => {
                    let tables = rest.split(';').map(|part| part.split_once(':').expect("LENGTH: TIMES"));
                    let tables: Vec<_> =
                        tables.map(|(length, times)| (length.trim().parse().unwrap(), table(times))).collect();
                    script.lengths = tables.iter().map(|(length, _)| *length).collect();
                    script.segments.push(tables.into_iter().map(|(_, table)| table).collect());
                }
                "segment" => {
                    script.lengths = vec![0];
                    script.segments.push(vec![table(rest)]);
                }
                "policy" => script.policy = rest.split_whitespace().collect(),
                "transfer" => script.transfer = ms(rest),
                "drop" => script.drop = true,
                "bound" => script.bound = rest.parse().ok(),
                "exit" => {
                    let words: Vec<&str> = rest.split_whitespace().collect();
                    script.exits.push((name(words[0]), words[2].parse().unwrap()));
                }
                "at" => script.events.push(rest.split_whitespace().collect()),
                other => panic!("unknown word '{other}'"),
            }
        }
        script
    }

    fn world(&self) -> World {
        let profile = SegmentProfile::new(self.lengths.clone(), &self.segments).unwrap();
        let (kind, words) = self.policy.split_first().expect("a policy");
        let options = options(words);
        let number = |key: &str, default: u32| options.get(key).map_or(default, |value| value.parse().unwrap());
        let time = |key: &str| options.get(key).map(|value| ms(value));
        let has = |key: &str| options.contains_key(key);
        let (queue_bound, drop) = (self.bound.unwrap_or(1000), self.drop);
        let ring = number("ring", 0);
        let policy: Box<dyn DevicePolicy> = match *kind {
            "windowed" => Box::new(Windowed::new(WindowedOptions {
                profile: profile.clone(),
                max_batch: number("max_batch", 1),
                window: time("window").unwrap_or(Duration::ZERO),
                fill: has("fill"),
                drop,
                queue_bound,
                ahead: number("ahead", 0),
            })),
            "elastic" => {
                let mixes = match (options.get("mix"), options.get("mixes")) {
                    (Some(mix), _) => MixTable::single(mix.parse().unwrap()).unwrap(),
                    (_, Some(mixes)) => MixTable::enhanced(
                        mixes
                            .split(';')
                            .map(|entry| entry.split_once(':').unwrap())
                            .map(|(load, mix)| (load.parse().unwrap(), mix.parse().unwrap()))
                            .collect(),
                    )
                    .unwrap(),
                    _ => MixTable::naive(number("max", 8)),
                };
                Box::new(Elastic::new(ElasticOptions {
                    profile: profile.clone(),
                    mixes,
                    max_running: number("max", 8),
                    ring_slots: ring,
                    drop,
                    queue_bound,
                    cores: options.get("cores").map(|count| Cores {
                        count: count.parse().unwrap(),
                        brief: time("brief").unwrap_or(Duration::ZERO),
                    }),
                }))
            }
            "staged" => Box::new(Staged::new(StagedOptions {
                profile: profile.clone(),
                pairs: number("pairs", 2) as u16,
                max_batch: number("max_batch", 1),
                by_length: has("length"),
                by_operator: has("operator"),
                by_load: has("load"),
                window: time("window"),
                comp_wait: time("comp_wait"),
                joining: if has("always") { Joining::Always } else { Joining::IfSooner },
                ring_slots: ring,
                drop,
                queue_bound,
            })),
            other => panic!("unknown policy '{other}'"),
        };
        World::new(policy, profile, ring, self.transfer)
    }
}

fn run(text: &str) -> String {
    let script = Script::read(text);
    let mut world = script.world();
    for (request, stage) in &script.exits {
        world.exit_after(*request, *stage);
    }
    for event in &script.events {
        let now = Time::ZERO + ms(event[0]);
        let options = options(&event[3..]);
        let number = |key: &str, default: u32| options.get(key).map_or(default, |value| value.parse().unwrap());
        let deadline = options.get("deadline").map_or(Time::MAX, |value| Time::ZERO + ms(value));
        let request = |id| DeviceRequest {
            id,
            model: ModelId(0),
            deadline,
            size: number("size", 1),
            length: number("length", 0),
        };
        match event[1] {
            "request" => {
                let arrived = options.get("arrived").map_or(now, |value| Time::ZERO + ms(value));
                world.request_that_came(arrived, now, request(name(event[2])));
            }
            "requests" => {
                let (first, last) = event[2].split_once("..").expect("FIRST..LAST");
                for id in name(first).0..=name(last).0 {
                    world.request(now, request(RequestId(id)));
                }
            }
            "cancel" => world.cancel(now, name(event[2])),
            other => panic!("unknown event '{other}'"),
        }
    }
    world.finish();
    world.latencies.remove(&RequestId(0));
    let nanos: u64 = world.latencies.values().map(|latency| latency.as_nanos()).sum();
    let mean = nanos as f64 / 1e6 / world.latencies.len().max(1) as f64;
    format!("{}mean latency {mean:.3} ms\n", world.log)
}

macro_rules! scenarios {
    ($($(#[$doc:meta])* $name:ident)*) => {$( $(#[$doc])* #[test] fn $name() { check("device_scenarios", stringify!($name), run); } )*};
}

scenarios! {
    /// DVABatch figure 3, case I, above: 4 T for all.
    figure_3_case_1_padded
    /// DVABatch figure 3, case I, below: two batches, 2.5 T, -37.5%.
    figure_3_case_1_by_length
    /// DVABatch figure 3, case I, as exits of one batch (§9.2): 2.5 T too.
    figure_3_case_1_by_exit
    /// DVABatch figure 3, case II, below: 2.875 T, -28.1%.
    figure_3_case_2
    /// DVABatch figure 3, case III, above: 8 T.
    figure_3_case_3_windowed
    /// DVABatch figure 3, case III, below: 5.25 T, -34.4%.
    figure_3_case_3
    /// DVABatch figure 8: new, stretch at stage 2, split at stage 3.
    figure_8
    /// DVABatch §6.2, figure 2: one pair of buffers makes the stages work one after another.
    one_pair_is_serial
    /// DVABatch §6.2, figure 2: two pairs make them a pipeline.
    two_pairs_are_a_pipeline
    /// DVABatch §5.2.2: no request joins a batch that may be split.
    a_batch_that_may_split_is_not_stretched
    /// DVABatch §7.2, policy III: no request joins a batch that is old.
    an_old_batch_is_not_stretched
    requests_join_only_if_it_is_sooner
    /// DVABatch §7.2, policy III: T_comp_wait alone decides.
    requests_always_join_a_young_batch
    a_cancelled_member_leaves_at_the_next_stage
    all_members_exit
    /// DVABatch §7.2, policy II, and §6.2: the serial manner.
    parts_of_a_split_batch_run_one_after_another
    nobody_is_left_to_join
    /// E²bird figure 10: 8 requests run, and 4 more start without waiting.
    elastic_figure_10
    /// E²bird algorithm 1: no more than MaxInf at once.
    elastic_is_bounded
    /// If launches share cores, requests that come while all cores are taken become one larger
    /// batch, not many small ones.
    elastic_on_two_cores
    /// Brief launches do not begin side by side either.
    elastic_with_brief_launches
    elastic_with_brief_launches_by_length
    /// E²bird algorithm 2: lanes by load.
    elastic_switches_lanes
    /// E²bird §5.1: a run goes on across the end of the ring.
    elastic_across_the_wrap
    elastic_back_pressure
    room_for_those_behind_one_that_goes
    who_has_gone_waits_for_no_room
    elastic_with_a_request_of_several_items
    a_hole_in_the_ring_parts_a_batch
    windowed_static_fills_up
    /// DVABatch §8.1: the Triton of its measurements made batches ahead, and no request joined them
    /// (Triton's issue 3624).
    a_frozen_batch_does_not_grow
    no_more_batches_are_frozen_than_ahead
    /// Triton's queue times out requests in the queue, not requests in a batch.
    who_is_in_a_frozen_batch_is_not_given_up
    who_goes_leaves_a_frozen_batch
    hopeless_requests_are_dropped
}
