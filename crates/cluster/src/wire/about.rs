//! The parts of a request beside its tensors, such as its parameters. A Python model takes requests
//! instead of rows, so its frontend sends these parts behind the tensors.

use bytes::Bytes;
use downbeat_engine::RequestAbout;
use downbeat_host::request::batch_codec::{BatchCodec, OutputPart, Outputs};
use downbeat_models::serving::answer_parameters;
use downbeat_protocol::{InferRequest, Parameters, RequestedOutput};
use downbeat_service::error::ServiceError;
use serde::{Deserialize, Serialize};

/// The parts of a request, as they travel.
#[derive(Serialize, Deserialize)]
struct SentAbout {
    id: String,
    /// A JSON object.
    parameters: String,
    /// The names of the wanted outputs; empty: all.
    outputs: Vec<String>,
    /// The positions of the inputs that the client left out.
    left_out: Vec<usize>,
}

/// A part of a message behind its tensors.
fn behind(data: impl Into<Bytes>) -> OutputPart {
    OutputPart { shape: Vec::new(), data: data.into() }
}

/// The parts of a request, to be sent behind its inputs.
pub fn sent_about(about: &RequestAbout) -> OutputPart {
    let RequestAbout { id, parameters, outputs, left_out, .. } = about;
    let (id, parameters) = (id.clone(), parameters.clone());
    let sent = SentAbout { id, parameters, outputs: outputs.clone(), left_out: left_out.clone() };
    // Encoding cannot fail. An empty result fails in `read_about`, which reports it.
    behind(postcard::to_allocvec(&sent).unwrap_or_default())
}

/// Gives a request the parts that came behind its inputs, and takes away the inputs that its client left
/// out. `request` has all inputs of the model, in order.
///
/// # Errors
/// If the bytes are not the parts of a request.
pub fn read_about(request: &mut InferRequest, part: &OutputPart) -> Result<(), ServiceError> {
    let wrong = |reason: String| {
        ServiceError::Internal(format!("the frontend sent a request whose parameters cannot be read: {reason}"))
    };
    let SentAbout { id, parameters, outputs, left_out } =
        postcard::from_bytes(&part.data).map_err(|error| wrong(error.to_string()))?;
    request.parameters = serde_json::from_str(&parameters).map_err(|error| wrong(error.to_string()))?;
    request.id = id;
    request.outputs = outputs.into_iter().map(|name| RequestedOutput { name, ..RequestedOutput::default() }).collect();
    let mut position = 0..;
    request.inputs.retain(|_| position.next().is_some_and(|position| !left_out.contains(&position)));
    Ok(())
}

/// The parameters of an answer, to be sent behind its outputs.
pub fn sent_parameters(parameters: String) -> OutputPart {
    behind(parameters)
}

/// Takes the parameters of an answer from behind its outputs.
///
/// # Errors
/// If the bytes are no JSON object.
pub fn take_parameters(codec: &BatchCodec, outputs: &mut Outputs) -> Result<Option<Parameters>, ServiceError> {
    if outputs.len() <= codec.outputs.len() {
        return Ok(None);
    }
    let Some(sent) = outputs.pop() else { return Ok(None) };
    answer_parameters(&String::from_utf8_lossy(&sent.data)).map(Some)
}

#[cfg(test)]
mod tests {
    use downbeat_core::tensor::DataType;
    use downbeat_protocol::InferTensor;

    use super::*;

    fn with_inputs(names: &[&str]) -> InferRequest {
        let input = |name: &&str| InferTensor {
            name: (*name).to_owned(),
            datatype: DataType::Int32,
            shape: vec![1],
            parameters: Parameters::default(),
            data: Bytes::from_static(&[0; 4]),
        };
        InferRequest { inputs: names.iter().map(input).collect(), ..InferRequest::default() }
    }

    #[test]
    fn a_request_keeps_its_id_parameters_and_wanted_outputs() {
        let about = RequestAbout {
            id: "7".to_owned(),
            parameters: r#"{"temperature":0.5}"#.to_owned(),
            outputs: vec!["text".to_owned()],
            left_out: vec![1],
            ..RequestAbout::default()
        };
        let mut request = with_inputs(&["prompt", "stop", "seed"]);
        read_about(&mut request, &sent_about(&about)).unwrap();
        let inputs: Vec<&str> = request.inputs.iter().map(|input| &*input.name).collect();
        assert_eq!(inputs, ["prompt", "seed"], "the second was left out");
        assert_eq!((&*request.id, &*request.outputs[0].name), ("7", "text"));
        assert_eq!(serde_json::to_string(&request.parameters).unwrap(), about.parameters);
    }

    #[test]
    fn parts_that_are_garbage_are_refused() {
        let mut request = with_inputs(&["prompt"]);
        let no_object = RequestAbout { parameters: "7".to_owned(), ..RequestAbout::default() };
        for garbage in [behind(Bytes::new()), behind(vec![0xff; 40]), sent_about(&no_object)] {
            let refused = read_about(&mut request, &garbage).unwrap_err().to_string();
            assert!(refused.contains("parameters cannot be read"), "{refused}");
        }
        assert_eq!(request.inputs.len(), 1);
    }
}
