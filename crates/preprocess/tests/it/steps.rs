//! Wrong steps are an error at load.

use serde_json::json;

use super::*;

fn error(steps: &Value, inputs: &[TensorSpec]) -> String {
    pipeline(steps, inputs).unwrap_err()
}

#[test]
fn each_mistake_names_its_step_and_what_is_expected() {
    let x = || [spec("x", DataType::Fp32, &[-1, 3, 32, 32])];
    let decode = json!({ "step": "decode" });
    let chw = json!({ "step": "layout", "order": "chw" });
    let resize = |size: Value| json!({ "step": "resize", "size": size });
    for (steps, said) in [
        (json!([]), "there are no steps"),
        (json!({ "step": "decode" }), "expected a list of steps"),
        (json!([{ "step": "rezise" }]), "step 1: unknown variant `rezise`, expected one of `decode`, `resize`"),
        (json!([decode, { "step": "resize" }]), "step 2: missing field `size`"),
        (json!([decode, { "step": "crop", "size": 3, "sise": 4 }]), "step 2: unknown field `sise`"),
        (json!([decode, resize(json!("big"))]), "expected a number of pixels, or [height, width]"),
        (json!([decode, resize(json!(0))]), "step 2, 'resize': a side of the size is not from 1 to 65535"),
        (
            json!([{ "step": "crop", "size": 3 }]),
            "step 1, 'crop': the first step must be 'decode' (pictures) or 'tokenize' (texts)",
        ),
        (
            json!([decode, { "step": "normalize" }, resize(json!(3))]),
            "step 3, 'resize': this step must come before 'normalize'",
        ),
        (json!([decode, chw, resize(json!(3))]), "step 3, 'resize': 'layout' must be the last step"),
        (json!([decode, { "step": "pad" }]), "step 2, 'pad': this step is for texts"),
        (json!([decode, decode]), "step 2, 'decode': only the first step may be 'decode'"),
        (json!([decode, { "step": "layout", "order": "hw" }]), "the color gray"),
        (json!([decode, { "step": "normalize", "std": [1.0, 2.0] }]), "2 values of std for 3 channels"),
        (json!([decode, { "step": "normalize", "std": [0.0] }]), "std of 0"),
        (
            json!([decode, resize(json!([32, 32]))]),
            "the steps give [32, 32, 3], but the model's input 'x' is FP32 [3, 32, 32]",
        ),
        (json!([decode, resize(json!([32, 31])), chw]), "the steps give [3, 32, 31]"),
        (json!([decode, resize(json!(32)), chw]), "the steps give [3, -1, -1]"),
        (json!([{ "step": "decode", "fills": "y" }]), "the model has no input 'y' (fills); its inputs are 'x'"),
    ] {
        let found = error(&steps, &x());
        assert!(found.contains(said), "{steps}: {found}");
    }
    let fits = json!([decode, resize(json!([32, 32])), chw]);
    assert!(pipeline(&fits, &x()).is_ok());
    let two = [x()[0].clone(), spec("z", DataType::Fp32, &[-1, 1])];
    assert!(error(&fits, &two).contains("name the one for the picture with `fills`: 'x', 'z'"));
    let own = [x()[0].clone(), spec("image", DataType::Bytes, &[-1, 1])];
    let named = json!([{ "step": "decode", "fills": "x" }, resize(json!([32, 32])), chw]);
    assert!(error(&named, &own).contains("input 'image' of datatype BYTES itself"));
    let bytes = [spec("x", DataType::Uint8, &[-1, 3, 32, 32])];
    assert!(error(&json!([decode, { "step": "normalize" }]), &bytes).contains("'normalize' gives fractions"));
}

#[test]
fn a_tokenizer_that_is_missing_broken_or_too_large_for_its_input_is_told() {
    let ids = |datatype, dims: &[i64]| [spec("input_ids", datatype, dims)];
    let any = || ids(DataType::Int64, &[-1, -1]);
    let tokenize = |file: &str, max_length: u32| json!({ "step": "tokenize", "file": file, "max_length": max_length });
    let own = || tokenize("tokenizer.json", 8);
    for (steps, inputs, said) in [
        (json!([tokenize("missing.json", 8)]), any(), "missing.json: No such file"),
        (json!([tokenize("labels.txt", 8)]), any(), "labels.txt is not a readable tokenizer.json"),
        (json!([tokenize("tokenizer.json", 2)]), any(), "the tokenizer adds 2 tokens to each text"),
        (json!([tokenize("tokenizer.json", 0)]), any(), "max_length is 0"),
        (json!([own(), { "step": "pad", "length": 4 }]), any(), "length is 4, but texts may have 8"),
        (json!([own(), { "step": "mask" }, { "step": "pad" }]), any(), "'pad': this step must come before 'mask'"),
        (json!([own(), { "step": "mask" }]), any(), "the model has no input 'attention_mask'"),
        (json!([own(), { "step": "mask", "fills": "input_ids" }]), any(), "two steps fill the input 'input_ids'"),
        (json!([own(), { "step": "crop", "size": 1 }]), any(), "'crop': this step is for pictures"),
        (json!([own()]), ids(DataType::Fp32, &[-1, -1]), "tokens are whole numbers"),
        (json!([own(), { "step": "pad", "length": 9 }]), ids(DataType::Int64, &[-1, 8]), "the steps give [9]"),
        (json!([own()]), ids(DataType::Int64, &[-1, 8]), "the steps give [-1]"),
    ] {
        let found = error(&steps, &inputs);
        assert!(found.contains(said), "{steps}: {found}");
    }
}
