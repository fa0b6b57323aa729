//! Runs models on one engine for `tools/conformance.py`: a line of JSON in, a line of JSON out.
//!
//! ```text
//! {"model": "add/model.onnx", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0, 0, 128, 63]}]}
//! {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [0, 0, 0, 64]}]}
//! ```
//!
//! A model that the engine does not load, or does not run, is answered with `{"refused": REASON}`.

use std::io::{BufRead, Write, stdin, stdout};
use std::path::PathBuf;
use std::sync::Arc;

use downbeat_core::tensor::DataType;
use downbeat_engine::{Buffer, Engine, LoadOptions, State, Tensor};
use downbeat_engine_ort::{CudaOptions, Search, choose};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Case {
    model: PathBuf,
    inputs: Vec<Value>,
}

#[derive(Serialize, Deserialize)]
struct Value {
    name: String,
    datatype: String,
    shape: Vec<usize>,
    /// Elements in the protocol's binary form.
    data: Vec<u8>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Outputs(Vec<Value>),
    Refused(String),
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = std::env::args().nth(1).ok_or("name the engine: rten or onnxruntime")?;
    let search = Search { threads: 1, ..Search::from_env() };
    let engine = choose(engine.parse()?, &search, &CudaOptions::default())?.engine;
    for line in stdin().lock().lines() {
        let case: Case = serde_json::from_str(&line?)?;
        let answer = run(&engine, case).map_or_else(Answer::Refused, Answer::Outputs);
        writeln!(stdout(), "{}", serde_json::to_string(&answer)?)?;
    }
    Ok(())
}

fn run(engine: &Arc<dyn Engine>, case: Case) -> Result<Vec<Value>, String> {
    let model = engine.load(&LoadOptions::new(&case.model, 1)).map_err(|e| e.to_string())?;
    let signature = model.signature();
    let tensors = signature.inputs.iter().map(|spec| {
        let value = case.inputs.iter().find(|value| value.name == spec.name);
        let value = value.ok_or_else(|| format!("the case has no input '{}'", spec.name))?;
        let datatype = DataType::ALL.into_iter().find(|d| d.name() == value.datatype);
        let datatype = datatype.ok_or_else(|| format!("no datatype {}", value.datatype))?;
        Ok(Tensor { datatype, shape: value.shape.clone(), data: Buffer::from(value.data.as_slice()) })
    });
    let mut state = State { tensors: tensors.collect::<Result<_, String>>()? };
    let mut lane = model.lane().map_err(|e| e.to_string())?;
    lane.run(0..model.segments(), &mut state).map_err(|e| e.to_string())?;
    let outputs = signature.outputs.iter().zip(state.tensors);
    Ok(outputs
        .map(|(spec, tensor)| Value {
            name: spec.name.clone(),
            datatype: tensor.datatype.name().to_owned(),
            shape: tensor.shape.clone(),
            data: tensor.data.as_slice().to_vec(),
        })
        .collect())
}
