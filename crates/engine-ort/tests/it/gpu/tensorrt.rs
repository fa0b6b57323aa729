//! The engine `tensorrt`, apart from TensorRT itself, which has no stand-in.

use downbeat_engine::{Engine, LoadOptions, ShapeRange};
use downbeat_engine_ort::{CudaOptions, Provider};

use super::{gpus_with, has_provider, run};
use crate::engines::onnxruntime;
use crate::support::{Random, assert_close, copy, example, lane, load as load_on};

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn compiled_engines_are_kept_and_extreme_shapes_run_at_load() {
    let options = CudaOptions { provider: Provider::Tensorrt, ..CudaOptions::default() };
    let Some((stand_in, engine)) = gpus_with(1, &options) else { return };
    if has_provider(&engine) {
        println!("skipped: TensorRT is not there");
        return;
    }
    let cache = tempfile::tempdir().expect("temporary folder");
    let folders = || {
        let entries = std::fs::read_dir(cache.path().join("tensorrt")).expect("is made");
        entries.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.path().is_dir())).count()
    };
    for (name, kept) in [("digits", 1), ("digits", 1), ("mlp", 2)] {
        let path = example(name);
        let options = LoadOptions { cache: Some(cache.path().to_owned()), ..LoadOptions::new(&path, 1) };
        let model = engine.load(&options).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(folders(), kept, "{name}");
        let input = &model.signature().inputs[0];
        let least = input.dims.iter().map(|d| usize::try_from(*d).unwrap_or(1)).collect();
        let most = input.dims.iter().map(|d| Some(usize::try_from(*d).unwrap_or(8))).collect();
        model.set_shapes(vec![ShapeRange { name: input.name.clone(), least, most }]);
        assert_eq!((model.sizes_to_warm(8), model.sizes_to_warm(1)), (vec![8, 1], vec![1]));
        let host = load_on(&onnxruntime().expect("found before"), &path);
        let inputs = Random::new("tensorrt").inputs(model.signature(), |_, _| 3);
        let expected = run(&mut *lane(&*host), 1, copy(&inputs));
        assert_close(name, &expected, &run(&mut *lane(&*model), 1, inputs), 1e-5);
    }
    drop(engine);
    stand_in.assert_clean();
}
