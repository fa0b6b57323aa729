//! An inference request on the wire.

use bytes::Bytes;

use super::EncodedBody;
use super::header::{self, BodyParts, RequestHeader, Role};
use super::json_writer::JsonWriter;
use crate::infer::{CodecError, InferRequest, InferTensor, Parameter, RequestedOutput};

/// Which outputs of a response are bytes after the JSON: what the client asked for with `binary_data` and
/// `binary_data_output`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OutputForms {
    default_binary: bool,
    exceptions: Vec<String>,
}

impl OutputForms {
    /// Every output as JSON (`false`) or as bytes (`true`).
    pub fn all(binary: bool) -> OutputForms {
        OutputForms { default_binary: binary, exceptions: Vec::new() }
    }

    /// Whether the output is sent as bytes.
    pub fn is_binary(&self, output: &str) -> bool {
        self.default_binary != self.exceptions.iter().any(|name| name == output)
    }
}

/// Reads the body of an inference request. `header_length` is the value of
/// [`INFERENCE_HEADER_CONTENT_LENGTH`](super::INFERENCE_HEADER_CONTENT_LENGTH). Binary inputs are slices of `body`,
/// not copies. `binary_data_size` and `binary_data_output` are consumed; all other parameters are in the request.
///
/// # Errors
/// The body is no JSON of a request, or an input's data does not have the size that its datatype and shape ask for.
pub fn parse_request(
    model_name: String,
    model_version: String,
    body: Bytes,
    header_length: Option<usize>,
) -> Result<(InferRequest, OutputForms), CodecError> {
    let parts = BodyParts::new(body, header_length)?;
    let json = parts.json();
    // serde would also take a list of the fields' values.
    if json.trim_ascii_start().first() == Some(&b'[') {
        return Err(CodecError(
            "the request is a JSON list; expected an inference request object with `inputs`".into(),
        ));
    }
    let mut rewritten = None;
    let header: RequestHeader<'_> = header::read(&json, &mut rewritten, "request")?;

    let inputs = header::tensors(header.inputs, Role::Input, parts)?;
    let mut parameters = header.parameters.unwrap_or_default();
    let mut forms = OutputForms::default();
    if let Some(parameter) = parameters.remove("binary_data_output") {
        forms.default_binary = boolean(&parameter).ok_or_else(|| {
            CodecError("the parameter binary_data_output is no boolean; expected true or false".into())
        })?;
    }
    let mut outputs = Vec::new();
    for output in header.outputs.unwrap_or_default() {
        let parameters = output.parameters.unwrap_or_default();
        if let Some(parameter) = parameters.get("binary_data") {
            let binary = boolean(parameter).ok_or_else(|| {
                CodecError(format!(
                    "output '{}': the parameter binary_data is no boolean; expected true or false",
                    output.name
                ))
            })?;
            if binary != forms.default_binary {
                forms.exceptions.push(output.name.clone());
            }
        }
        outputs.push(RequestedOutput { name: output.name, parameters });
    }
    let request =
        InferRequest { model_name, model_version, id: header.id.unwrap_or_default(), parameters, inputs, outputs };
    Ok((request, forms))
}

fn boolean(parameter: &Parameter) -> Option<bool> {
    match parameter {
        Parameter::Bool(v) => Some(*v),
        _ => None,
    }
}

/// How a client sends a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestForm {
    /// Inputs as bytes after the JSON, not in it.
    pub binary_inputs: bool,
    /// Ask for outputs as bytes (outputs whose parameters have `binary_data` keep that).
    pub binary_outputs: bool,
}

impl RequestForm {
    /// Bytes both ways: the fast form.
    pub const BINARY: RequestForm = RequestForm { binary_inputs: true, binary_outputs: true };
    /// JSON both ways: for people and for servers without the binary tensor extension.
    pub const JSON: RequestForm = RequestForm { binary_inputs: false, binary_outputs: false };
}

/// Writes the body of an inference request. Model name and version are not in it: they are in the path.
///
/// # Errors
/// The data of an input does not have the form of its datatype, or is not UTF-8 and should be JSON.
pub fn write_request(request: &InferRequest, form: RequestForm) -> Result<EncodedBody, CodecError> {
    let is_binary = |input: &InferTensor| form.binary_inputs && !input.is_elsewhere();
    let bytes: usize = request.inputs.iter().map(|input| input.data.len()).sum();
    let mut json = JsonWriter::with_capacity(256 + 128 * request.inputs.len() + bytes);
    json.open_object();
    if !request.id.is_empty() {
        json.field("id", &request.id);
    }
    if form.binary_outputs {
        let mut parameters = request.parameters.clone();
        parameters.insert("binary_data_output".to_owned(), Parameter::Bool(true));
        json.parameters(&parameters);
    } else {
        json.parameters(&request.parameters);
    }
    json.tensors(Role::Input, &request.inputs, is_binary)?;
    if !request.outputs.is_empty() {
        json.open_list("outputs");
        for output in &request.outputs {
            json.open_object();
            json.field("name", &output.name);
            json.parameters(&output.parameters);
            json.close_object();
        }
        json.close_list();
    }
    json.close_object();
    Ok(json.body(&request.inputs, is_binary))
}
