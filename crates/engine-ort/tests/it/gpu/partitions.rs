//! Partitions: green contexts of the driver (GSLICE §4).

use std::collections::BTreeSet;

use cuda_stand_in::{Count, Kind, StandIn};
use downbeat_engine::{Cut, Engine, Lane, LoadOptions, Place, Share, Tensor};
use downbeat_engine_ort::OnnxruntimeCuda;
use downbeat_engine_ort::cuda::{Device, Splitter, Stream};

use super::{gpus, load, run};
use crate::support::{Random, copy, example};

/// CUDA's numbers of the errors.
const OUT_OF_MEMORY: u32 = 2;
const INVALID_RESOURCE_CONFIGURATION: u32 = 915;

/// Fails the test if two of the partitions have a unit in common. Returns the units of all.
fn together<'a>(partitions: impl IntoIterator<Item = &'a Vec<u64>>) -> usize {
    let mut all = BTreeSet::new();
    for unit in partitions.into_iter().flatten() {
        assert!(all.insert(unit), "unit {unit} is in two partitions");
    }
    all.len()
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_ladder_has_every_share_that_the_grain_allows() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let device = Device::open(0).expect("it is there");
    let splitter = Splitter::new(&device).expect("it has partitions");
    assert_eq!((splitter.grain(), splitter.groups()), (8, 15), "of Hopper");
    let ladder: Vec<_> = splitter.ladder().into_iter().map(|rung| rung.expect("there is memory")).collect();
    let sizes: Vec<_> = ladder.iter().map(|rung| (rung.partition.compute_units(), rung.rest.compute_units())).collect();
    assert_eq!(sizes, (1..15).map(|rung| (rung * 8, 132 - rung * 8)).collect::<Vec<_>>());
    let partitions: Vec<Vec<u64>> = stand_in.partitions().into_iter().map(|(_, units)| units).collect();
    for (rung, pair) in sizes.iter().zip(partitions.chunks(2)) {
        assert_eq!((pair[0].len(), together(pair)), (rung.0 as usize, 132));
    }
    drop((ladder, splitter, device, engine));
    stand_in.assert_clean();
}

/// cuda.h: the result of a split cannot be split again.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn any_number_of_partitions_come_out_of_one_split() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let device = Device::open(0).expect("it is there");
    let splitter = Splitter::new(&device).expect("it has partitions");
    let asked: [(&[u32], &[u32]); 5] = [
        (&[40, 24, 60], &[40, 24, 68]),
        (&[1, 20, 33, 8], &[8, 24, 40, 8, 52]),
        (&[132], &[132]),
        (&[112, 20], &[112, 20]),
        (&[8; 15], &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 20]),
    ];
    for (asked, expected) in asked {
        let parts = splitter.split(asked).expect("they fit");
        let units: Vec<u32> = parts.iter().map(|part| part.compute_units()).collect();
        assert_eq!(units, expected, "rounded up to groups");
        let partitions = stand_in.partitions();
        assert!(partitions.iter().map(|(_, units)| units.len() as u32).eq(units));
        assert_eq!(together(partitions.iter().map(|(_, units)| units)), 132);
    }
    let too_large = splitter.split(&[100, 40]).expect_err("more than there are").to_string();
    assert!(too_large.contains("[100, 40]") && too_large.contains("132 in steps of 8"), "{too_large}");
    assert_eq!(stand_in.calls("cuDevSmResourceSplitByCount"), 1);
    drop((splitter, device, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_rung_that_fails_costs_no_other() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let device = Device::open(0).expect("it is there");
    let splitter = Splitter::new(&device).expect("it has partitions");
    stand_in.fail_call("cuGreenCtxCreate", 6, OUT_OF_MEMORY);
    let ladder = splitter.ladder();
    let failed: Vec<_> = ladder.iter().enumerate().filter_map(|(at, rung)| Some((at, rung.as_ref().err()?))).collect();
    assert!(matches!(failed[..], [(2, _)]), "the third has 24 units and 108");
    assert!(failed[0].1.to_string().contains("making a partition of 108 compute units"), "{}", failed[0].1);
    assert_eq!(stand_in.count(Count::GreenContexts), 2 * 13);
    drop((ladder, splitter, device, engine));
    stand_in.assert_clean();
}

/// cuda.h: the remainder of a split does not have the guarantees of its groups.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn what_is_left_over_is_left_out_where_it_cannot_be_used() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let device = Device::open(0).expect("it is there");
    stand_in.fail_call("cuDevResourceGenerateDesc", 1, INVALID_RESOURCE_CONFIGURATION);
    let splitter = Splitter::new(&device).expect("it has partitions");
    let parts = splitter.split(&[64]).expect("they fit");
    assert_eq!((parts[0].compute_units(), parts[1].compute_units()), (64, 56));
    drop((parts, splitter, device, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_driver_without_partitions_says_so() {
    let Some((stand_in, _engine)) = gpus(1) else { return };
    stand_in.set_version(12_030);
    let device = Device::open(0).expect("it is there");
    let error = Splitter::new(&device).err().expect("the driver is too old").to_string();
    assert!(
        error.contains("for CUDA 12.3, they came with 12.4") && error.contains("share the whole device"),
        "{error}"
    );
}

/// The units that a lane's kernels run on.
fn units(stand_in: &StandIn, lane: &mut dyn Lane, inputs: &[Tensor]) -> Vec<u64> {
    stand_in.forget();
    run(lane, 1, copy(inputs));
    let kernel = stand_in.trace().into_iter().find(|work| work.kind == Kind::Kernel).expect("one has run");
    let found = stand_in.partitions().into_iter().find(|(context, _)| *context == kernel.context);
    found.map_or_else(|| (0..132).collect(), |(_, units)| units)
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn shares_of_lanes_are_apart_on_each_gpu() {
    let Some((stand_in, engine)) = gpus(2) else { return };
    let model = load(&engine, &example("digits"), Cut::Whole);
    let inputs = Random::new("shares_apart").inputs(model.signature(), |_, _| 2);
    let at = |device, share| model.lane_at(Place { device, share }).expect("there is memory");
    for device in 0..2 {
        let shares = [Share::Units(40), Share::AllBut(40), Share::Units(64), Share::AllBut(64)];
        let mut lanes = shares.map(|share| at(device, share));
        let mut both = (at(device, Share::Units(33)), at(1 - device, Share::Units(33)));
        let [small, rest, large, least] = lanes.each_mut().map(|lane| units(&stand_in, &mut **lane, &inputs));
        assert_eq!((small.len(), rest.len(), large.len(), least.len()), (40, 92, 64, 68));
        assert_eq!(together([&small, &rest]), 132);
        assert_eq!(together([&small, &least]), 108, "shares of different sizes at once");
        assert!(small.iter().all(|unit| large.contains(unit)) && least.iter().all(|unit| rest.contains(unit)));
        assert_eq!(units(&stand_in, &mut *both.0, &inputs), small, "the same partition");
        assert_eq!(units(&stand_in, &mut *both.1, &inputs), small, "that of the other GPU");
    }
    assert_eq!(stand_in.count(Count::GreenContexts), 2 * 4, "each is made once");
    drop((inputs, model, engine));
    stand_in.assert_clean();
}

/// GSLICE §4.3: a model gets another share by running on another lane. Its weights and answers are
/// the same.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_model_changes_its_share_by_changing_its_lane() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let model = load(&engine, &example("digits"), Cut::Whole);
    let inputs = Random::new("another_share").inputs(model.signature(), |_, _| 3);
    let shares = [Share::Whole, Share::Units(40), Share::AllBut(40), Share::Units(64)];
    let mut lanes = shares.map(|share| model.lane_at(Place { device: 0, share }).expect("there is memory"));
    let partitions = stand_in.count(Count::GreenContexts);
    assert_eq!(partitions, 3, "of 40 units and the rest, and of 64");
    let mut answers = Vec::new();
    let mut contexts = Vec::new();
    for lane in &mut lanes {
        stand_in.forget();
        answers.push(run(&mut **lane, 1, copy(&inputs)));
        let kernel = stand_in.trace().into_iter().find(|work| work.kind == Kind::Kernel).expect("one has run");
        contexts.push(kernel.context);
    }
    assert!(answers.windows(2).all(|pair| pair[0][0].data.as_slice() == pair[1][0].data.as_slice()));
    contexts.sort_unstable();
    contexts.dedup();
    assert_eq!(contexts.len(), 4, "each share has its own");
    let before = stand_in.count(Count::GreenContexts);
    drop(model.lane_at(Place { device: 0, share: Share::Units(37) }).expect("40 units"));
    assert!(stand_in.count(Count::GreenContexts) >= before, "partitions stay: they are made once");
    let device = Device::open(0).expect("it is there");
    drop(Stream::new(&device).expect("there is memory"));
    drop((answers, device, lanes, model, engine));
    stand_in.assert_clean();
}

fn divide(engine: &OnnxruntimeCuda, parts: &[&str]) -> Result<Vec<String>, String> {
    let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
    let division = engine.divide(&parts).map_err(|error| error.to_string())?;
    let shares = division.parts.iter().map(|part| part.share);
    assert!(shares.eq((0..parts.len() as u32).map(Share::Part)));
    Ok(division.parts.into_iter().map(|part| part.size).collect())
}

/// GSLICE §4: models of different partitions have no unit in common, however many they are.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn partitions_of_many_models_are_apart_on_each_gpu() {
    let Some((stand_in, engine)) = gpus(2) else { return };
    let sizes = divide(&engine, &["40", "25%", "20", "8"]).expect("they fit");
    assert_eq!(sizes, ["40 compute units", "32 compute units", "24 compute units", "8 compute units"]);
    assert_eq!(stand_in.count(Count::GreenContexts), 2 * 4, "nothing is held for what is left over");
    // A model may be loaded for its partition, or a lane may be made in the partition.
    let on = |part| LoadOptions { share: Share::Part(part), ..LoadOptions::new(example("digits"), 1) };
    let own: Vec<_> = (0..3).map(|part| engine.load(&on(part)).expect("there is memory")).collect();
    let inputs = Random::new("many_apart").inputs(own[0].signature(), |_, _| 2);
    for device in 0..2 {
        let at = |part: usize, share| own[part].lane_at(Place { device, share }).expect("there is memory");
        let mut lanes = [at(0, Share::Whole), at(1, Share::Whole), at(2, Share::Whole), at(0, Share::Part(3))];
        let used = lanes.each_mut().map(|lane| units(&stand_in, &mut **lane, &inputs));
        assert_eq!(used.each_ref().map(Vec::len), [40, 32, 24, 8]);
        assert_eq!(together(&used), 104);
    }
    let error = own[0].lane_at(Place { device: 0, share: Share::Part(4) }).err().expect("there are four").to_string();
    assert!(error.contains("GPU 0 is divided into 4 partitions; there is none with the number 4"), "{error}");
    drop((inputs, own, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn partitions_that_a_gpu_cannot_have_are_refused_with_what_it_has() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let refused = |parts: &[&str]| divide(&engine, parts).expect_err("they cannot be");
    let grain = "a partition has at least 8 compute units, in steps of 8; the GPU has 132";
    assert_eq!(refused(&["40", "4"]), format!("partition 1, \"4\": {grain}"));
    assert_eq!(refused(&["1%"]), format!("partition 0, \"1%\": {grain}"));
    assert_eq!(refused(&["0"]), format!("partition 0, \"0\": {grain}"));
    let kinds = "on a GPU it is a number of compute units such as \"40\", or a share of them such as \"25%\"";
    for text in ["0-3", "", "101%", "0%", "many", "-8"] {
        assert_eq!(refused(&[text]), format!("partition 0, \"{text}\": {kinds}"));
    }
    let large = refused(&["100", "50%"]);
    assert_eq!(large, "partitions of [100, 64] compute units do not fit GPU 0, which has 132 in steps of 8");
    assert_eq!(refused(&["8"; 16]), "16 partitions are too many for 15 groups of compute units");
    assert_eq!(divide(&engine, &["25%"; 4]).expect("quarters fit").len(), 4);
    drop(engine);
    stand_in.assert_clean();
}
