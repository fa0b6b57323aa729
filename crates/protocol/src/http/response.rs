//! The answer to an inference request on the wire.

use bytes::Bytes;

use super::encoded_body::EncodedBody;
use super::header::{self, BodyParts, ResponseHeader, Role};
use super::json_writer::JsonWriter;
use super::request::OutputForms;
use crate::infer::{CodecError, InferResponse, InferTensor};

/// Writes the body of an inference response.
///
/// # Errors
/// The data of an output does not have the form of its datatype, or a BYTES element that should be
/// JSON is not UTF-8.
pub fn write_response(response: &InferResponse, forms: &OutputForms) -> Result<EncodedBody, CodecError> {
    let is_binary = |output: &InferTensor| forms.is_binary(&output.name) && !output.is_elsewhere();
    let bytes: usize = response.outputs.iter().map(|output| output.data.len()).sum();
    let mut json = JsonWriter::with_capacity(192 + 128 * response.outputs.len() + bytes);
    json.open_object();
    if !response.id.is_empty() {
        json.field("id", &response.id);
    }
    json.field("model_name", &response.model_name);
    json.field("model_version", &response.model_version);
    json.parameters(&response.parameters);
    json.tensors(Role::Output, &response.outputs, is_binary)?;
    json.close_object();
    Ok(json.body(&response.outputs, is_binary))
}

/// Reads the body of an inference response. `header_length` is the value of
/// [`INFERENCE_HEADER_CONTENT_LENGTH`](super::INFERENCE_HEADER_CONTENT_LENGTH). Binary outputs are
/// slices of `body`. An output without data is in shared memory, and has empty data here.
///
/// # Errors
/// If the body is no inference response.
pub fn parse_response(body: Bytes, header_length: Option<usize>) -> Result<InferResponse, CodecError> {
    let parts = BodyParts::new(body, header_length)?;
    let mut rewritten = None;
    let header: ResponseHeader<'_> = header::read(parts.json(), &mut rewritten, "response")?;
    let outputs = header::tensors(header.outputs, Role::Output, &parts)?;
    Ok(InferResponse {
        model_name: header.model_name,
        model_version: header.model_version.unwrap_or_default(),
        id: header.id.unwrap_or_default(),
        parameters: header.parameters.unwrap_or_default(),
        outputs,
    })
}
