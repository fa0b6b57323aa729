//! Partitions: green contexts of the driver (GSLICE §4).

use cuda_stand_in::{Count, Kind};
use downbeat_engine::cuda::{Device, PartitionError, Splitter, Stream};
use downbeat_engine::{Cut, Place, Share};

use super::{gpus, load, run};
use crate::support::{Random, copy, example};

#[test]
fn a_ladder_has_every_share_that_the_grain_allows() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let device = Device::open(0).expect("it is there");
    let splitter = Splitter::new(&device).expect("it has partitions");
    assert_eq!(splitter.grain(), 8, "of Hopper");
    let ladder = splitter.ladder().expect("there is memory");
    let sizes: Vec<u32> = ladder.iter().map(|rung| rung.partition.compute_units()).collect();
    assert_eq!(sizes, (1..=16).map(|rung| rung * 8).collect::<Vec<u32>>());
    for rung in &ladder {
        let rest = rung.rest.as_ref().map_or(0, |rest| rest.compute_units());
        assert!(
            rung.partition.compute_units() + rest <= 132
                && (rest > 0 || sizes.last() == Some(&rung.partition.compute_units()))
        );
    }
    assert_eq!(
        stand_in.count(Count::GreenContexts),
        2 * 16 - u64::from(ladder.last().is_some_and(|r| r.rest.is_none()))
    );
    let parts = splitter.split(&[40, 24, 60]).expect("they fit");
    let units: Vec<u32> = parts.iter().map(|part| part.compute_units()).collect();
    assert_eq!(units.first_chunk::<3>(), Some(&[40, 24, 64]), "rounded up to the grain");
    assert!(units.iter().sum::<u32>() <= 132);
    assert!(matches!(splitter.split(&[100, 40]), Err(PartitionError::TooLarge { units: 132, grain: 8, .. })));
    drop((ladder, parts, splitter, device, engine));
    stand_in.assert_clean();
}

#[test]
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

/// GSLICE §4.3: a model gets another share by being run on another lane; its weights and answers are the same.
#[test]
fn a_model_changes_its_share_by_changing_its_lane() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let model = load(&engine, &example("digits"), Cut::Whole);
    let inputs = Random::new("another_share").inputs(model.signature(), |_, _| 3);
    let shares = [Share::Whole, Share::Units(40), Share::AllBut(40), Share::Units(64)];
    let mut lanes = shares.map(|share| model.lane_at(Place { device: 0, share }).expect("there is memory"));
    let partitions = stand_in.count(Count::GreenContexts);
    assert_eq!(partitions, 4, "of 40 units and the rest, of 64 and the rest");
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
