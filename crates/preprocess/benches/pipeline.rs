//! The time of a core for a picture on its way to a tensor: `cargo bench -p downbeat-preprocess
//! --bench pipeline -- PICTURE`.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a measurement, not the server")]

use std::hint::black_box;
use std::time::Instant;

use bytes::Bytes;
use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_preprocess::{PictureHeader, Pipeline, Recipe, decode, read_steps};
use serde_json::json;

const ROUNDS: usize = 201;

/// The median time of `work`, microseconds.
fn median_us(mut work: impl FnMut()) -> f64 {
    let mut all: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begin = Instant::now();
            work();
            begin.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    all.sort_by(f64::total_cmp);
    all[ROUNDS / 2]
}

fn main() {
    let Some(file) = std::env::args().skip(1).find(|argument| !argument.starts_with("--")) else {
        println!("name a picture");
        return;
    };
    let bytes = Bytes::from(std::fs::read(&file).unwrap());
    let header = PictureHeader::read(&bytes).unwrap();
    let steps = json!([
        { "step": "decode" },
        { "step": "resize", "size": 256 },
        { "step": "crop", "size": 224 },
        { "step": "normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225] },
        { "step": "layout", "order": "chw" },
    ]);
    let x = TensorSpec { name: "x".to_owned(), datatype: DataType::Fp32, dims: vec![-1, 3, 224, 224] };
    let pipeline = Pipeline::new(
        &Recipe::read(read_steps(&steps).unwrap(), |file| Ok(file.to_owned())).unwrap(),
        &[x],
        true,
        64_000_000,
    )
    .unwrap();
    let items = [bytes.clone()];
    let look = median_us(|| drop(black_box(pipeline.look(&items))));
    let decoding = median_us(|| drop(black_box(decode(&bytes, header, 3))));
    let all = median_us(|| drop(black_box(pipeline.run(&items))));
    println!(
        "{} x {}: header {look:.1} us; decoded {decoding:.0} us; all steps {all:.0} us",
        header.width, header.height
    );
}
