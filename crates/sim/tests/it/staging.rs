//! The search for stages and buffer pairs, as scenarios that need no Rust to read.
//!
//! A file has a script, a line of dashes, and the trials with the choice that follow. The script
//! has a line for each segment as the model is cut finely:
//!
//! | line | says |
//! |---|---|
//! | `segment 1 1.5 2` | the segment takes 1 ms for one item, 1.5 for two, 2 for three |
//! | `2 x segment 1 1.5 2` | two such segments |
//! | `overlap 1.2` | two lanes together do 1.2 times the work of one |
//! | `launch 0.01` | a launch costs 0.01 ms more |
//! | `slo 50` | requests are due after 50 ms |
//! | `set stages 3` | the owner's setting |

#[path = "../../../core/tests/it/scenario_file.rs"]
mod scenario_file;

use std::fmt::Write;

use downbeat_core::device::{Overlap, OverlapPoint, PolicyName, SegmentProfile, WrittenSettings};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_sim::device_replay::StagingSearch;
use scenario_file::check;

fn ms(text: &str) -> Duration {
    Duration::from_millis_f64(text.parse().unwrap())
}

fn run(script: &str) -> String {
    let (mut segments, mut written) = (Vec::new(), WrittenSettings::new());
    let (mut overlap, mut launch, mut slo) = (Overlap::default(), Duration::ZERO, None);
    for line in script.lines().filter(|line| !line.starts_with('#')) {
        let (count, line) = line.split_once(" x ").map_or((1, line), |(count, line)| (count.parse().unwrap(), line));
        let (what, rest) = line.split_once(' ').unwrap();
        match what {
            "segment" => {
                let profile = LatencyProfile::from_table(rest.split(' ').map(ms).collect()).unwrap();
                segments.extend(vec![vec![profile]; count]);
            }
            "overlap" => {
                let alone = Duration::from_secs_f64(rest.parse::<f64>().unwrap() / 2.0);
                overlap = Overlap::new(vec![OverlapPoint { batch: 1, alone, together: Duration::from_secs_f64(1.0) }]);
            }
            "launch" => launch = ms(rest),
            "slo" => slo = Some(ms(rest)),
            "set" => {
                let (key, value) = rest.split_once(' ').unwrap();
                written.insert(key.to_owned(), serde_json::from_str(value).unwrap());
            }
            other => panic!("no line begins with '{other}'"),
        }
    }
    let settings = PolicyName::STAGED.read(&written).unwrap().settings;
    let segments = SegmentProfile::new(vec![0], &segments).unwrap();
    let max_batch = segments.max_rows();
    let search = StagingSearch { settings: &*settings, segments, overlap, launch, max_batch, slo, seed: 1 };
    let tuned = search.run();
    let mut shown = String::new();
    for tried in &tuned.tried {
        let latency = tried.mean_ms.map_or(String::new(), |ms| format!(", {ms:.2} ms at high load"));
        let peak = if tried.peak > 0.0 { format!("{:.0}/s", tried.peak) } else { "less".to_owned() };
        writeln!(shown, "{}: {peak}{latency}", tried.choice).unwrap();
    }
    let chosen = tuned.chosen.map_or("none".to_owned(), |chosen| chosen.to_string());
    writeln!(shown, "chosen: {chosen}").unwrap();
    shown
}

macro_rules! scenarios {
    ($($(#[$doc:meta])* $name:ident)*) => {$( $(#[$doc])* #[test] fn $name() { check("staging_scenarios", stringify!($name), run); } )*};
}

scenarios! {
    /// DVABatch §7.1: a model whose segments do not disturb each other gains by a pipeline.
    lanes_that_do_not_disturb_each_other_are_a_pipeline
    /// DVABatch §8.6, the other way round: a full device gains nothing by a second pair.
    a_full_device_wants_one_pair_or_few_stages
    /// DVABatch §8.7: many stages cost a launch each.
    launches_that_cost_much_want_few_stages
    /// The owner's number of stages is not touched.
    the_owners_stages_stay
    /// With both settings there is one choice.
    with_both_settings_nothing_is_searched
    /// Within a long SLO a short burst is answered at any rate. Such rates hold no load.
    an_slo_of_many_batches_bounds_the_load_too
    /// A model that takes longer than its SLO holds no load.
    a_model_slower_than_its_slo_has_no_choice
}
