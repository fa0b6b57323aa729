//! Scenario files of pipelines: requests in, local deadlines, batches and ends out, readable without
//! Rust.
//!
//! As with the cluster's scenarios (`scenario.rs`) a file has a script, a line of dashes, and the
//! timeline; `UPDATE_SCENARIOS=1` writes the timelines anew. The script (times in milliseconds):
//!
//! ```text
//! # a comment
//! pool gpu 2                                              two devices
//! model detect gpu alpha=2 beta=8 max_batch=4 [eager]     batches of b take 8 + 2 b; deferred unless eager
//! pipeline shop slo=60 detect rank<detect vote<detect,rank weights=3,2,1      vote waits for detect and rank
//! at 0 request r1 shop
//! ```
//!
//! Requests are named r0, r1, ... in the order of the script. At one instant: completions in the
//! order of batches, then the script's requests, then timers.

use std::collections::BTreeMap;
use std::fmt::Write;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::pipeline::*;
use downbeat_core::{BatchId, DeviceId, Duration, LatencyProfile, Time};

use crate::scenario_file::check;

#[derive(Default)]
struct World {
    stage: Stage,
    pools: Vec<String>,
    models: Vec<String>,
    pipelines: Vec<(String, Duration)>,
    shares: Vec<Shares>,
    arrivals: Vec<(Time, usize)>,
}

/// Shares that write down what they decide.
struct Written<'a> {
    shares: Vec<Shares>,
    world: &'a World,
    timeline: String,
}

impl Division for Written<'_> {
    fn local_deadline(&mut self, reached: &Reached<'_>) -> Option<Time> {
        let local = self.shares.local_deadline(reached);
        let step = &self.world.models[self.world.stage.pipelines[reached.pipeline].models[reached.step]];
        let pipeline = &self.world.pipelines[reached.pipeline].0;
        let line = match local {
            Some(local) => format!("{pipeline} reaches {step}, due at {:.3}", ms(local)),
            None => format!("{pipeline} reaches {step} too late"),
        };
        writeln!(self.timeline, "{:8.3}  {line}", ms(reached.now)).unwrap();
        local
    }

    fn last_deadline(&mut self, reached: &Reached<'_>, local: Time) -> Option<Time> {
        self.shares.last_deadline(reached, local)
    }
}

fn ms(at: Time) -> f64 {
    at.since(Time::ZERO).as_millis_f64()
}

fn place(names: &[String], name: &str) -> usize {
    names.iter().position(|known| known == name).unwrap_or_else(|| panic!("no {name} among {names:?}"))
}

fn value<'a>(words: &[&'a str], key: &str) -> &'a str {
    let value = words.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    value.unwrap_or_else(|| panic!("{words:?} has no {key}="))
}

impl World {
    fn read(script: &str) -> World {
        let mut world = World::default();
        for line in script.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[0] {
                "pool" => {
                    world.pools.push(words[1].to_owned());
                    world.stage.pools.push(words[2].parse().unwrap());
                }
                "model" => world.model(&words),
                "pipeline" => world.pipeline(&words),
                "at" => {
                    let pipeline = world.pipelines.iter().position(|(name, _)| name == words[4]).unwrap();
                    let at = Time::ZERO + Duration::from_millis_f64(words[1].parse().unwrap());
                    assert_eq!(words[3], format!("r{}", world.arrivals.len()), "requests are numbered in order");
                    world.arrivals.push((at, pipeline));
                }
                other => panic!("unknown line: {other}"),
            }
        }
        world
    }

    fn model(&mut self, words: &[&str]) {
        let number = |key| value(words, key).parse().unwrap();
        let profile =
            LatencyProfile::linear_ms(number("alpha"), number("beta"), value(words, "max_batch").parse().unwrap())
                .unwrap();
        let dispatch = if words.contains(&"eager") { DispatchPolicy::Eager } else { DispatchPolicy::Deferred };
        let options = ModelOptions::new(profile, dispatch, DropPolicy::HeadDrop);
        self.stage.models.push(StepModel { options, behaviour: None, pool: place(&self.pools, words[2]) });
        self.models.push(words[1].to_owned());
    }

    fn pipeline(&mut self, words: &[&str]) {
        let slo = Duration::from_millis_f64(value(words, "slo").parse().unwrap());
        let steps: Vec<(&str, &str)> = words[3..]
            .iter()
            .filter(|word| !word.contains('='))
            .map(|word| word.split_once('<').unwrap_or((word, "")))
            .collect();
        let step = |name: &str| steps.iter().position(|(known, _)| *known == name).unwrap();
        let after = steps.iter().map(|(_, after)| after.split(',').filter(|name| !name.is_empty()).map(step).collect());
        let shape = Shape::new(after.collect()).unwrap();
        let models: Vec<usize> = steps.iter().map(|(name, _)| place(&self.models, name)).collect();
        let weights = value(words, "weights").split(',').map(|weight| weight.parse().unwrap()).collect();
        let alone: Vec<Duration> =
            models.iter().map(|model| self.stage.models[*model].options.profiles.first().latency(1)).collect();
        self.shares.push(Shares::with_weights(&shape, weights, &alone));
        self.pipelines.push((words[1].to_owned(), slo));
        self.stage.pipelines.push(Pipeline { shape, models });
    }
}

fn run(script: &str) -> String {
    let world = World::read(script);
    let mut flow = Flow::new(&world.stage).unwrap();
    let mut by = Written { shares: world.shares.clone(), world: &world, timeline: String::new() };
    let mut runs: BTreeMap<(Time, BatchId, usize), DeviceId> = BTreeMap::new();
    let mut next = 0;
    loop {
        let arrival = world.arrivals.get(next).map_or(Time::MAX, |(at, _)| *at);
        let end = runs.keys().next().map_or(Time::MAX, |(at, ..)| *at);
        let now = arrival.min(end).min(flow.poll_timeout().unwrap_or(Time::MAX));
        if now == Time::MAX {
            return by.timeline;
        }
        if end == now {
            let ((_, batch, pool), device) = runs.pop_first().unwrap();
            flow.handle_completion(now, pool, device, batch, &mut by);
        } else if arrival == now {
            let (_, pipeline) = world.arrivals[next];
            writeln!(by.timeline, "{:8.3}  r{next} comes", ms(now)).unwrap();
            flow.handle_arrival(now, pipeline, now + world.pipelines[pipeline].1, &mut by);
            next += 1;
        } else {
            flow.handle_timeout(now);
        }
        while let Some(Launch { pool, device, batch, model, size, expected }) = flow.poll_launch() {
            let (model, pool_name) = (&world.models[model], &world.pools[pool]);
            writeln!(by.timeline, "{:8.3}  {pool_name} {device}: {size} of {model}, {expected}", ms(now)).unwrap();
            runs.insert((now + expected, batch, pool), device);
        }
        while let Some(End { request, outcome, step, .. }) = flow.poll_end() {
            let pipeline = world.arrivals[request as usize].1;
            let step = &world.models[world.stage.pipelines[pipeline].models[step]];
            writeln!(by.timeline, "{:8.3}  r{request} ends at {step}: {outcome:?}", ms(now)).unwrap();
        }
    }
}

macro_rules! scenarios {
    ($($name:ident)*) => {
        $(#[test] fn $name() { check("pipeline_scenarios", stringify!($name), run); })*
    };
}

scenarios! {
    a_chain_passes_slack_on
    a_lost_branch_cancels_the_other
    a_short_branch_has_the_time_of_the_long_one
    a_step_of_two_pipelines_orders_by_local_deadlines
    a_step_that_misses_its_local_deadline_tries_once_more
    the_first_step_that_knows_gives_the_request_up
}
