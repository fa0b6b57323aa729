//! A segment of a model, before a session of it is made.

use std::sync::Arc;

use downbeat_core::tensor::DataType;
use downbeat_engine::onnx::proto::{ModelProto, WeightProto};
use prost::Message;

use super::super::cut;
use super::super::session::{Names, Source, Wiring};

/// A segment, from which each lane makes sessions.
pub(super) struct Blueprint {
    /// The model, encoded; `None`: the whole model, as in its file.
    pub model: Option<Vec<u8>>,
    /// The names of its weights, sorted.
    pub weights: Vec<String>,
    pub names: Arc<Names>,
    pub wiring: Wiring,
    /// Whether each output is left on the host, as strings are.
    pub on_host: Vec<bool>,
    /// Whether the kernels are prepared anew when the size of the batch changes: the library keeps
    /// cuDNN's plans for one size only.
    pub has_plans: bool,
}

impl Blueprint {
    pub(super) fn new(segment: cut::Segment) -> Result<Blueprint, String> {
        let cut::Segment { model, inputs, outputs, wiring } = segment;
        let names = Arc::new(Names::new(&inputs, &outputs)?);
        let spec = |index: usize| wiring.gives.iter().find(|(_, source)| *source == Source::Made(index));
        let on_host = (0..outputs.len()).map(|index| spec(index).is_some_and(|(s, _)| s.datatype == DataType::Bytes));
        let on_host = on_host.collect();
        let mut blueprint = Blueprint { model: None, weights: Vec::new(), names, wiring, on_host, has_plans: false };
        if model.is_empty() {
            return Ok(blueprint);
        }
        let proto = ModelProto::decode(model.as_slice()).map_err(|e| format!("the segment cannot be read: {e}"))?;
        let graph = proto.graph.ok_or("the segment has no graph")?;
        blueprint.has_plans = graph.node.iter().any(|node| matches!(node.op_type.as_str(), "Conv" | "ConvTranspose"));
        let names = graph.initializer.iter().map(|bytes| {
            let weight = WeightProto::decode(bytes.clone());
            weight.map(|weight| weight.name).map_err(|e| format!("a weight cannot be read: {e}"))
        });
        blueprint.weights = names.collect::<Result<_, _>>()?;
        blueprint.weights.sort_unstable();
        blueprint.model = Some(model);
        Ok(blueprint)
    }
}
