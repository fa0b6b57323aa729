//! The answer to an inference request on the wire.

use bytes::Bytes;

use super::EncodedBody;
use super::error::CodecError;
use super::header::{self, BodyParts, ResponseHeader, Role};
use super::json_writer::JsonWriter;
use super::request::OutputForms;
use super::tensor_json;
use crate::infer::{InferOutput, InferResponse, Parameters};

static NO_PARAMETERS: Parameters = Parameters::new();

/// Whether the output's tensor is in a shared memory region and not in the body.
fn is_elsewhere(output: &InferOutput) -> bool {
    output.parameters.contains_key("shared_memory_region")
}

/// Writes the body of an inference response. Of an output in shared memory it says neither data nor place, as Triton
/// does: the client named the place, and clients take any parameters of an output for those of binary data.
///
/// # Errors
/// The data of an output does not have the form of its datatype, or a BYTES element that should be JSON is not UTF-8.
pub fn write_response(response: &InferResponse, forms: &OutputForms) -> Result<EncodedBody, CodecError> {
    let bytes: usize = response.outputs.iter().map(|output| output.data.len()).sum();
    let mut json = JsonWriter::with_capacity(192 + 128 * response.outputs.len() + bytes);
    json.open_object();
    if !response.id.is_empty() {
        json.field("id", &response.id);
    }
    json.field("model_name", &response.model_name);
    json.field("model_version", &response.model_version);
    if !response.parameters.is_empty() {
        json.field("parameters", &response.parameters);
    }
    json.open_list("outputs");
    let mut any_binary = false;
    for output in &response.outputs {
        let binary = forms.is_binary(&output.name) && !is_elsewhere(output);
        any_binary |= binary;
        json.open_object();
        json.tensor_fields(
            &output.name,
            output.datatype,
            &output.shape,
            if is_elsewhere(output) { &NO_PARAMETERS } else { &output.parameters },
            binary.then_some(output.data.len()),
        );
        if !binary && !is_elsewhere(output) {
            json.key("data");
            tensor_json::write(&mut json.out, output.datatype, &output.data)
                .map_err(|e| CodecError(format!("output '{}': {e}", output.name)))?;
        }
        json.close_object();
    }
    json.close_list();
    json.close_object();

    let mut out = json.out;
    let json_length = out.len();
    if any_binary {
        for output in &response.outputs {
            if forms.is_binary(&output.name) && !is_elsewhere(output) {
                out.extend_from_slice(&output.data);
            }
        }
    }
    Ok(EncodedBody { bytes: Bytes::from(out), header_length: any_binary.then_some(json_length) })
}

/// Reads the body of an inference response. `header_length` is the value of
/// [`INFERENCE_HEADER_CONTENT_LENGTH`](super::INFERENCE_HEADER_CONTENT_LENGTH). Binary outputs are slices of `body`.
/// `null` among floating-point numbers is NaN. An output without data is in shared memory; its data here is empty.
///
/// # Errors
/// The body is no inference response.
pub fn parse_response(body: Bytes, header_length: Option<usize>) -> Result<InferResponse, CodecError> {
    let mut parts = BodyParts::new(body, header_length)?;
    let json = parts.json();
    let mut repaired = None;
    let header: ResponseHeader<'_> = header::read(&json, &mut repaired, "response")?;
    let mut outputs = Vec::with_capacity(header.outputs.len());
    for output in header.outputs {
        let tensor = output.read(Role::Output, &mut parts)?;
        outputs.push(InferOutput {
            name: tensor.name,
            datatype: tensor.datatype,
            shape: tensor.shape,
            parameters: tensor.parameters,
            data: tensor.data,
        });
    }
    parts.finish()?;
    Ok(InferResponse {
        model_name: header.model_name,
        model_version: header.model_version.unwrap_or_default(),
        id: header.id.unwrap_or_default(),
        parameters: header.parameters.unwrap_or_default(),
        outputs,
    })
}
