//! The emulated engine.

use std::time::{Duration, Instant};

use downbeat_core::tensor::DataType;
use downbeat_engine::{Emulated, Engine, Lane, LoadOptions, Place, Share};

use crate::model::{folder, product, write};
use crate::support::{as_floats, floats, lane, load, run};

const CONFIG: &str = r#"
alpha_ms = 0.01
beta_ms = 0.02
max_batch = 4

[[inputs]]
name = "x"
datatype = "FP32"
dims = [-1, 2]

[[outputs]]
name = "y"
datatype = "FP32"
dims = [-1, 3]

[[outputs]]
name = "label"
datatype = "BYTES"
dims = [-1]
"#;

#[test]
fn outputs_have_the_declared_shapes() {
    let folder = folder();
    let path = folder.path().join("model.emulated.toml");
    std::fs::write(&path, CONFIG).expect("writes");
    let model = load(&Emulated::new(), &path);
    assert_eq!(model.signature().inputs[0].dims, [-1, 2]);
    let mut lane = lane(&*model);
    let outputs = run(&mut *lane, vec![floats(&[3, 2], &[1.; 6])]).expect("runs");
    assert_eq!((outputs[0].shape.as_slice(), as_floats(&outputs[0])), (&[3, 3][..], vec![0.0; 9]));
    assert_eq!((outputs[1].datatype, outputs[1].data.as_slice()), (DataType::Bytes, &[0; 12][..]));
    let error = run(&mut *lane, vec![floats(&[5, 2], &[1.; 10])]).expect_err("beyond the profile");
    assert!(error.reason.contains("batch of 5") && error.reason.contains("4"), "{error}");
    assert!(run(&mut *lane, vec![floats(&[4, 2], &[1.; 8])]).is_ok());
}

#[test]
fn json_and_tables() {
    let folder = folder();
    let path = folder.path().join("model.json");
    let json =
        r#"{"latency_ms": [0.01, 0.02], "inputs": [], "outputs": [{"name": "y", "datatype": "INT8", "dims": [2]}]}"#;
    std::fs::write(&path, json).expect("writes");
    let model = load(&Emulated::new(), &path);
    assert_eq!(run(&mut *lane(&*model), vec![]).expect("runs")[0].data.as_slice(), [0, 0]);
}

#[test]
fn signature_of_an_onnx_file() {
    let folder = folder();
    let path = write(folder.path(), "model.onnx", &product());
    let options = LoadOptions::new(&path, 1);
    let message = Emulated::new().load(&options).err().expect("has no latencies").to_string();
    assert!(message.contains("model.onnx.emulated.toml") && message.contains("alpha_ms"), "{message}");
    let beside = folder.path().join("model.onnx.emulated.toml");
    std::fs::write(&beside, "alpha_ms = 0.001\nbeta_ms = 0.001\nmax_batch = 8").expect("writes");
    let model = load(&Emulated::new(), &path);
    assert_eq!(run(&mut *lane(&*model), vec![floats(&[2, 4], &[1.; 8])]).expect("runs")[0].shape, [2, 2]);
    std::fs::write(&beside, "latency_ms = [0.01]").expect("writes");
    let model = load(&Emulated::new(), &path);
    run(&mut *lane(&*model), vec![floats(&[2, 4], &[1.; 8])]).expect_err("beyond the profile");
}

#[test]
fn wrong_configurations() {
    let folder = folder();
    let path = folder.path().join("model.emulated.toml");
    for (text, words) in [
        (CONFIG.replace("alpha_ms", "alfa_ms"), "alfa_ms"),
        (CONFIG.replace("FP32", "FLOAT"), "unknown datatype 'FLOAT'"),
        (CONFIG.replace("max_batch = 4", ""), "expected either latency_ms"),
        (format!("knee = 0\n{CONFIG}"), "knee is 0; it is the part of the device"),
        (format!("knee = 60\n{CONFIG}"), "above 0 and at most 1"),
        (CONFIG.replace("max_batch = 4", "max_batch = 4000000000"), "max_batch may be at most"),
        (CONFIG.replace("alpha_ms = 0.01", "alpha_ms = -1.0"), "-1 ms"),
        (CONFIG.replace("alpha_ms = 0.01", "alpha_ms = nan"), "NaN ms"),
        (CONFIG.replace("[-1, 3]", "[-2, 3]"), "-2"),
        (
            "latency_ms = [2.0, 1.0]\n[[outputs]]\nname = \"y\"\ndatatype = \"INT8\"\ndims = [1]".into(),
            "fall with the batch size",
        ),
        ("latency_ms = [2.0]".into(), "[[outputs]]"),
    ] {
        std::fs::write(&path, text).expect("writes");
        let options = LoadOptions::new(&path, 1);
        let message = Emulated::new().load(&options).err().unwrap_or_else(|| panic!("took it: {words}")).to_string();
        assert!(message.contains(words) && message.contains("model.emulated.toml"), "no '{words}' in: {message}");
    }
}

#[test]
fn a_byte_order_mark_is_skipped_and_other_content_is_named() {
    let folder = folder();
    for name in ["model.emulated.toml", "model.emulated.json"] {
        let path = folder.path().join(name);
        let json = r#"{"latency_ms": [1.0], "outputs": [{"name": "y", "datatype": "INT8", "dims": [1]}]}"#;
        let text = if name.ends_with("json") { json } else { CONFIG };
        std::fs::write(&path, format!("\u{feff}{text}")).expect("writes");
        load(&Emulated::new(), &path);
        let utf16: Vec<u8> = format!("\u{feff}{text}").encode_utf16().flat_map(u16::to_be_bytes).collect();
        let pointer = b"version https://git-lfs.github.com/spec/v1\nsize 9\n".to_vec();
        for (bytes, words) in
            [(utf16, "the file is UTF-16 text"), (pointer, "the file is a git-lfs pointer to 9 bytes")]
        {
            std::fs::write(&path, bytes).expect("writes");
            let message = Emulated::new().load(&LoadOptions::new(&path, 1)).err().expect("refused").to_string();
            assert!(message.contains(words) && message.contains(name), "no '{words}' in: {message}");
        }
    }
}

/// Two models that take 20 ms alone, with one lane each on these partitions.
fn pair(engine: &Emulated, knee: &str, places: [Share; 2]) -> [Box<dyn Lane>; 2] {
    let folder = folder();
    let text = format!("{knee}\n{}", CONFIG.replace("beta_ms = 0.02", "beta_ms = 20"));
    let path = folder.path().join("model.emulated.toml");
    std::fs::write(&path, text).expect("writes");
    places.map(|share| load(engine, &path).lane_at(Place { device: 0, share }).expect("a place"))
}

/// The time of two launches that begin together.
#[expect(clippy::disallowed_methods, reason = "how long it takes at least is what is asked")]
fn together(lanes: [Box<dyn Lane>; 2]) -> Duration {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for mut lane in lanes {
            scope.spawn(move || run(&mut *lane, vec![floats(&[1, 2], &[1.; 2])]).expect("runs"));
        }
    });
    begun.elapsed()
}

#[test]
fn models_that_fill_a_device_slow_each_other_down() {
    // On a shared machine a test can only check the least time.
    assert!(together(pair(&Emulated::new(), "knee = 1.0", [Share::Whole; 2])) >= Duration::from_millis(40));
    let engine = Emulated::new();
    let division = engine.divide(&["25%".to_owned(), "50 %".to_owned()]).expect("fits");
    assert_eq!(division.parts.iter().map(|part| part.units).collect::<Vec<_>>(), [25, 50]);
    let [first, second] = [0, 1].map(|part| division.parts[part].share);
    assert!(together(pair(&engine, "knee = 1.0", [first, second])) >= Duration::from_millis(80), "a quarter of it");
}

#[test]
fn a_model_on_a_partition_below_its_knee_says_that_it_takes_longer() {
    let engine = Emulated::new();
    let division = engine.divide(&["40%".to_owned(), "60%".to_owned()]).expect("fits");
    let folder = folder();
    let path = folder.path().join("model.emulated.toml");
    std::fs::write(&path, format!("knee = 0.6\n{CONFIG}")).expect("writes");
    let takes = |share| {
        let model = engine.load(&LoadOptions { share, ..LoadOptions::new(&path, 1) }).expect("loads");
        model.profile(Share::Whole).expect("known").latency(1).as_nanos()
    };
    assert_eq!([Share::Whole, division.parts[1].share, division.parts[0].share].map(takes), [30_000, 30_000, 45_000]);
}

#[test]
fn shares_of_an_emulated_device_have_to_fit() {
    let divided = |parts: &[&str]| {
        let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
        Emulated::new().divide(&parts).map_err(|error| error.to_string())
    };
    let said = divided(&["60%", "50%"]).expect_err("too much");
    assert_eq!(said, "partition 1, \"50%\": the partitions before it leave less than that");
    let said = divided(&["60%", "0"]).expect_err("a core");
    assert!(said.contains("partition 1, \"0\"") && said.contains("\"25%\""), "{said}");
}
