//! Faults of a device: the launch fails with words that tell the user the remedy, and everything
//! else goes on.

use downbeat_engine::{Cut, Place, Share, State};

use super::{gpus, load, run};
use crate::support::{Random, copy, example, lane};

/// CUDA's numbers of the errors.
const ILLEGAL_ADDRESS: u32 = 700;
const ECC_UNCORRECTABLE: u32 = 214;

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_launch_without_memory_fails_alone() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let model = load(&engine, &example("digits"), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = Random::new("without_memory").inputs(model.signature(), |_, _| 2);
    let expected = run(&mut *lane, 1, copy(&inputs));
    stand_in.fail_allocation(1);
    let mut state = State { tensors: copy(&inputs) };
    let error = lane.run(0..1, &mut state).expect_err("there is no memory").to_string();
    assert!(error.contains("GPU 0 is out of memory") && error.contains("Serve fewer or smaller models"), "{error}");
    assert!(state.tensors.is_empty());
    let again = run(&mut *lane, 1, inputs);
    assert_eq!(again[0].data.as_slice(), expected[0].data.as_slice(), "the lane goes on");
    drop((expected, again, lane, model, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_device_that_fails_is_named_and_the_others_go_on() {
    for code in [ILLEGAL_ADDRESS, ECC_UNCORRECTABLE] {
        let Some((stand_in, engine)) = gpus(2) else { return };
        let model = load(&engine, &example("digits"), Cut::Whole);
        let at = |device| model.lane_at(Place { device, share: Share::Whole }).expect("there is memory");
        let (mut first, mut second) = (at(0), at(1));
        let inputs = Random::new("a_device_that_fails").inputs(model.signature(), |_, _| 2);
        let expected = run(&mut *second, 1, copy(&inputs));
        run(&mut *first, 1, copy(&inputs));
        stand_in.fail_work(None, 1, code);
        let mut fails = |tensors| {
            let mut state = State { tensors };
            let error = first.run(0..1, &mut state).expect_err("the device has failed").to_string();
            assert!(error.contains("GPU 0 is lost") && error.contains("until the server is started again"), "{error}");
        };
        fails(copy(&inputs));
        fails(copy(&inputs));
        assert!(model.lane_at(Place::default()).is_err_and(|e| e.to_string().contains("GPU 0 is lost")));
        assert_eq!(engine_error(&engine), "", "models are loaded on the other device");
        let again = run(&mut *second, 1, inputs);
        assert_eq!(again[0].data.as_slice(), expected[0].data.as_slice(), "the other device goes on");
    }
}

fn engine_error(engine: &downbeat_engine_ort::OnnxruntimeCuda) -> String {
    use downbeat_engine::{Engine, LoadOptions};
    engine.load(&LoadOptions::new(example("mlp"), 1)).err().map_or_else(String::new, |e| e.to_string())
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_place_that_is_not_there_is_refused() {
    let Some((_stand_in, engine)) = gpus(1) else { return };
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let error = model.lane_at(Place { device: 1, share: Share::Whole }).err().expect("there is one GPU");
    assert!(error.to_string().contains("no device 1: 1 GPUs are in use"), "{error}");
    let error = model.lane_at(Place { device: 0, share: Share::Units(400) }).err().expect("there are 132 units");
    assert!(error.to_string().contains("[400] compute units do not fit GPU 0, which has 132 in steps of 8"), "{error}");
}
