//! Steps from a text or a picture to a model's inputs, and the tokenizer that they name.

use bytes::Bytes;
use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_preprocess::{Pipeline, Recipe, Step, read_steps};

/// The most pixels of a picture that these targets decode.
const MOST_PIXELS: u64 = 1 << 16;
/// The most bytes that a request may become in these targets.
const MOST_BYTES: u64 = 1 << 22;
const TEXT: &str = "What a fine day! \u{1F600} 1,024";
const TOKENIZER: &[u8] = include_bytes!("tokenizer.json");

fn inputs() -> Vec<TensorSpec> {
    let spec = |name: &str, datatype, dims: &[i64]| TensorSpec { name: name.into(), datatype, dims: dims.to_vec() };
    vec![
        spec("input_ids", DataType::Int64, &[-1, -1]),
        spec("attention_mask", DataType::Int64, &[-1, -1]),
        spec("x", DataType::Fp32, &[-1, 3, -1, -1]),
    ]
}

/// Takes the steps, if they fit, with a picture or a text.
///
/// # Panics
/// If they are refused without a word.
fn take(recipe: &Recipe, item: Bytes) {
    match Pipeline::new(recipe, &inputs(), true, MOST_PIXELS) {
        Ok(pipeline) => {
            let items = [item];
            if pipeline.look(&items).is_ok_and(|work| work.bytes() < MOST_BYTES) {
                let _ = pipeline.run(&items);
            }
        }
        Err(reason) => assert!(!reason.is_empty()),
    }
}

/// Steps in their written form: JSON of a list, a line break, and a picture or text to take through
/// the steps.
///
/// # Panics If they are refused without a word.
pub fn recipe(data: &[u8]) {
    let mut parts = data.splitn(2, |byte| *byte == b'\n');
    let (steps, item) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let Ok(written) = serde_json::from_slice(steps) else { return };
    match read_steps(&written) {
        Ok(steps) => {
            let tokenizer = matches!(steps.first(), Some(Step::Tokenize { .. })).then(|| TOKENIZER.to_vec());
            take(&Recipe { steps, tokenizer }, Bytes::copy_from_slice(item));
        }
        Err(reason) => assert!(!reason.is_empty()),
    }
}

/// A `tokenizer.json`, and a text.
///
/// # Panics
/// If it is refused without a word.
pub fn tokenizer(data: &[u8]) {
    let steps = serde_json::json!([
        { "step": "tokenize", "file": "tokenizer.json", "max_length": 32, "truncate": true },
        { "step": "pad" },
        { "step": "mask" },
    ]);
    let steps = read_steps(&steps).expect("these are steps");
    take(&Recipe { steps, tokenizer: Some(data.to_vec()) }, Bytes::from_static(TEXT.as_bytes()));
}
