//! A batch that an executor process runs: the messages there and back, on both sides, with an
//! engine that computes nothing.

use std::sync::Arc;

use anyhow::{Result, ensure};
use downbeat_core::tensor::DataType;
use downbeat_engine::{Emulated, Engine, ExecutorProgram, Isolated, LoadOptions, Place, State, Tensor};

use super::server::{INPUTS, MODEL, input_values};
use crate::gate::part::Plan;

/// Counts batches of one request.
pub fn run(plan: &Plan) -> Result<()> {
    let path = plan.folder().join("model.emulated.toml");
    std::fs::write(&path, MODEL)?;
    let program =
        ExecutorProgram { program: std::env::current_exe()?, arguments: vec!["executor-process".into()], worker: None };
    let engine = Isolated::new(Arc::new(Emulated::new()), 1, program)?;
    let model = engine.load(&LoadOptions::new(&path, 1))?;
    let mut lane = model.lane_at(Place::default())?;
    let input: Vec<u8> = input_values().flat_map(f32::to_le_bytes).collect();
    plan.run(|requests| {
        for _ in 0..requests {
            let data = input.as_slice().into();
            let input = Tensor { datatype: DataType::Fp32, shape: vec![1, INPUTS], data };
            let mut state = State { tensors: vec![input] };
            lane.run(0..1, &mut state)?;
            ensure!(state.tensors.len() == 1, "a batch has one output");
        }
        Ok(())
    })
}
