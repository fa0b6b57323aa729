//! Partitions of a GPU.

use downbeat_engine::{Cut, Place, Share};
use downbeat_engine_ort::CudaOptions;
use downbeat_engine_ort::cuda::{Device, Splitter};

use super::{Gpu, micros, products, run, stands_in};
use crate::model;
use crate::support::{Random, copy, example};

#[test]
#[ignore = "needs a GPU"]
fn gpu_has_a_ladder_of_partitions() {
    let _gpu = Gpu::new();
    let device = Device::open(0).expect("it is there");
    let splitter = Splitter::new(&device).expect("it has partitions");
    let (grain, groups) = (splitter.grain(), splitter.groups());
    println!("{}: {} compute units in {groups} groups of {grain}", device.name(), device.compute_units());
    let ladder = splitter.ladder();
    assert_eq!(ladder.len(), groups - 1);
    for (rung, wanted) in ladder.into_iter().zip((1..).map(|step| step * grain)) {
        let rung = rung.unwrap_or_else(|e| panic!("{e}"));
        let (first, rest) = (rung.partition.compute_units(), rung.rest.compute_units());
        println!("{first} and {rest}");
        assert_eq!(first, wanted);
        assert!(first + rest <= device.compute_units() && rest >= grain, "disjoint");
    }
    let parts = splitter.split(&[grain, 2 * grain, grain, grain]).expect("there is memory");
    let units: Vec<u32> = parts.iter().map(|part| part.compute_units()).collect();
    assert_eq!(units[..4], [grain, 2 * grain, grain, grain]);
    assert!(units.len() == 5 && units.iter().sum::<u32>() <= device.compute_units(), "{units:?}");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_shares_give_the_same_answers() {
    let gpu = Gpu::new();
    let model = gpu.load(&example("digits"), Cut::Whole);
    let inputs = Random::new("gpu_shares").inputs(model.signature(), |_, _| 3);
    let shares = [Share::Whole, Share::Units(40), Share::AllBut(40), Share::Units(8)];
    let answers = shares.map(|share| {
        let mut lane = model.lane_at(Place { device: 0, share }).unwrap_or_else(|e| panic!("{e}"));
        run(&mut *lane, 1, copy(&inputs))
    });
    for answer in &answers {
        crate::support::assert_close("another share", &answers[0], answer, 1e-2);
    }
}

/// A model that keeps all units busy is the slower, the fewer it has (GSLICE figure 2).
#[test]
#[ignore = "needs a GPU"]
fn gpu_with_fewer_units_is_slower() {
    let gpu = Gpu::with(&CudaOptions { tf32: false, ..CudaOptions::default() });
    let folder = model::folder();
    let (width, layers, rows) = if stands_in() { (64, 4, 16) } else { (1024, 32, 4096) };
    let model = gpu.load(&products(folder.path(), width, layers, true), Cut::Whole);
    let inputs = Random::new("gpu_units").inputs(model.signature(), |_, _| rows);
    let medians = [8, 16, 32, 64, 0].map(|units| {
        let share = if units == 0 { Share::Whole } else { Share::Units(units) };
        let mut lane = model.lane_at(Place { device: 0, share }).unwrap_or_else(|e| panic!("{e}"));
        let mut times: Vec<u64> = (0..9)
            .map(|_| {
                run(&mut *lane, 1, copy(&inputs));
                micros(&*lane)
            })
            .collect();
        times.sort_unstable();
        println!("{share:?}: {} us", times[4]);
        times[4]
    });
    if !stands_in() {
        assert!(medians.windows(2).all(|pair| pair[1] * 10 <= pair[0] * 11), "{medians:?}");
        assert!(medians[0] > 2 * medians[4], "an eighth of the units and all of them: {medians:?}");
    }
}
