//! The cost of a run through the trait, from the requests' bytes to the replies' bytes: `cargo
//! bench -p downbeat-engine-ort`.
//!
//! Prints microseconds a run of the `mlp` example (784-128-10), or of the model at the given path,
//! in this process and in an executor process. A figure is the least of many short rounds that
//! alternate between the rows, because other work of the machine can only add to a time.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use downbeat_core::tensor::DataType;
use downbeat_engine::{Buffer, Engine, ExecutorProgram, Isolated, Lane, LoadOptions, Rten, State, Tensor};
use downbeat_engine_ort::{Onnxruntime, Search};

const ROUNDS: usize = 60;
/// The argument with which this program becomes an executor process.
const EXECUTOR: &str = "executor";
/// The time that one round of one row takes.
const ROUND: Duration = Duration::from_millis(8);

fn main() {
    if std::env::args().nth(1).is_some_and(|first| first == EXECUTOR) {
        return downbeat_engine::isolation::serve(&downbeat_engine_ort::of_executor)
            .unwrap_or_else(|e| println!("{e}"));
    }
    let path = std::env::args().skip(1).find(|a| !a.starts_with('-')).map_or_else(mlp, PathBuf::from);
    let mut rows = Vec::new();
    let mut engines: Vec<Arc<dyn Engine>> = vec![Arc::new(Rten::new())];
    let search = Search { python: true, threads: 2, ..Search::from_env() };
    match Onnxruntime::find(&search) {
        Ok(Some(engine)) => engines.push(Arc::new(engine)),
        Ok(None) => println!("no onnxruntime library found: rten only (set ORT_DYLIB_PATH)"),
        Err(e) => println!("{e}"),
    }
    let program = std::env::current_exe().unwrap_or_default();
    for engine in engines.clone() {
        let program = ExecutorProgram { program: program.clone(), arguments: vec![EXECUTOR.into()], worker: None };
        match Isolated::new(engine, 2, program) {
            Ok(engine) => engines.push(Arc::new(engine)),
            Err(e) => println!("{e}"),
        }
    }
    for engine in &engines {
        for threads in [1, 2] {
            let model = match engine.load(&LoadOptions::new(&path, threads)) {
                Ok(model) => model,
                Err(e) => {
                    println!("{e}");
                    continue;
                }
            };
            let spec = model.signature().inputs.first().cloned();
            let (Some(spec), Ok(lane)) = (spec, model.lane()) else { continue };
            if spec.datatype != DataType::Fp32 {
                println!("{}: only models of one FP32 input", path.display());
                return;
            }
            let row: usize = spec.dims.iter().skip(1).map(|d| usize::try_from(*d).unwrap_or(1)).product();
            let tail: Vec<usize> = spec.dims.iter().skip(1).map(|d| usize::try_from(*d).unwrap_or(1)).collect();
            let apart = if model.executor().is_some() { " in a process" } else { "" };
            rows.push(Row { name: format!("{}{apart}, {threads} threads", engine.info().name), lane, row, tail });
        }
    }
    println!("{:32}{:>10}{:>10}{:>10}   us a run, {}", "", "batch 1", "batch 8", "batch 32", path.display());
    let mut least = vec![[f64::INFINITY; 3]; rows.len()];
    for (column, batch) in [1usize, 8, 32].into_iter().enumerate() {
        for _ in 0..ROUNDS {
            for (row, least) in rows.iter_mut().zip(&mut least) {
                least[column] = row.round(batch).min(least[column]);
            }
        }
    }
    for (row, [one, eight, thirty_two]) in rows.iter().zip(least) {
        println!("{:32}{one:10.1}{eight:10.1}{thirty_two:10.1}", row.name);
    }
}

fn mlp() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models/mlp/1/model.onnx")
}

struct Row {
    name: String,
    lane: Box<dyn Lane>,
    /// Elements of an item.
    row: usize,
    tail: Vec<usize>,
}

impl Row {
    /// Microseconds a run, the batch assembled from requests as the server does.
    fn round(&mut self, batch: usize) -> f64 {
        let request = vec![0u8; self.row * 4];
        let began = now();
        let mut runs = 0u32;
        let mut took = Duration::ZERO;
        while took < ROUND {
            for _ in 0..16 {
                let mut data = Buffer::with_capacity(request.len() * batch);
                (0..batch).for_each(|_| data.extend_from_slice(&request));
                let mut shape = vec![batch];
                shape.extend(&self.tail);
                let mut state = State { tensors: vec![Tensor { datatype: DataType::Fp32, shape, data }] };
                if let Err(e) = self.lane.run(0..1, &mut state) {
                    println!("{e}");
                    return f64::NAN;
                }
                let outputs: Vec<_> = state.tensors.into_iter().map(|t| t.data.into_bytes()).collect();
                black_box(outputs);
                runs += 1;
            }
            took = began.elapsed();
        }
        took.as_secs_f64() * 1e6 / f64::from(runs)
    }
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
fn now() -> std::time::Instant {
    std::time::Instant::now()
}
