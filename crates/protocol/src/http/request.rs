//! An inference request on the wire.

use bytes::Bytes;

use super::encoded_body::EncodedBody;
use super::header::{self, BodyParts, RequestHeader, Role};
use super::json_writer::JsonWriter;
use super::request_scanner;
use crate::infer::{CodecError, InferRequest, InferTensor, Parameter, RequestedOutput};

/// The outputs of a response that are bytes after the JSON, as the client asked with `binary_data`
/// and `binary_data_output`.
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
/// [`INFERENCE_HEADER_CONTENT_LENGTH`](super::INFERENCE_HEADER_CONTENT_LENGTH). Binary inputs are
/// slices of `body`, not copies. `binary_data_size` and `binary_data_output` are consumed; all
/// other parameters are in the request.
///
/// ```
/// use downbeat_protocol::http::parse_request;
///
/// let body = r#"{"inputs": [{"name": "x", "datatype": "INT64", "shape": [2], "data": [1, 2]}]}"#;
/// let (request, _) = parse_request("digits".to_owned(), String::new(), body.into(), None)?;
/// assert_eq!(request.inputs[0].name, "x");
/// assert_eq!(request.inputs[0].data[..], [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
/// # Ok::<(), downbeat_protocol::CodecError>(())
/// ```
///
/// # Errors
/// If the body is no JSON of a request, or an input's data does not have the size of its datatype
/// and shape.
pub fn parse_request(
    model_name: String,
    model_version: String,
    body: Bytes,
    header_length: Option<usize>,
) -> Result<(InferRequest, OutputForms), CodecError> {
    let parts = BodyParts::new(body, header_length)?;
    let usual = request_scanner::scan(parts.json()).and_then(|header| read_header(header, &parts).ok());
    // serde names a mistake and its place.
    let (request, forms) = usual.map_or_else(|| read_unusual(&parts), Ok)?;
    Ok((InferRequest { model_name, model_version, ..request }, forms))
}

/// Reads any request.
fn read_unusual(parts: &BodyParts) -> Result<(InferRequest, OutputForms), CodecError> {
    // serde would also take a list of the fields' values.
    if parts.json().trim_ascii_start().first() == Some(&b'[') {
        return Err(CodecError(
            "the request is a JSON list; expected an inference request object with `inputs`".into(),
        ));
    }
    let mut rewritten = None;
    read_header(header::read(parts.json(), &mut rewritten, "request")?, parts)
}

/// The request of a header and of the binary tensors after that header, without the model.
fn read_header(header: RequestHeader<'_>, parts: &BodyParts) -> Result<(InferRequest, OutputForms), CodecError> {
    let inputs = header::tensors(header.inputs, Role::Input, parts)?;
    let mut parameters = header.parameters.unwrap_or_default();
    let mut forms = OutputForms::default();
    if let Some(parameter) = header.binary_data_output.or_else(|| parameters.remove("binary_data_output")) {
        forms.default_binary = boolean(&parameter).ok_or_else(|| {
            CodecError("the parameter binary_data_output is not a boolean; expected true or false".into())
        })?;
    }
    let mut outputs = Vec::new();
    for output in header.outputs.unwrap_or_default() {
        let parameters = output.parameters.unwrap_or_default();
        if let Some(parameter) = parameters.get("binary_data") {
            let binary = boolean(parameter).ok_or_else(|| {
                CodecError(format!(
                    "output '{}': the parameter binary_data is not a boolean; expected true or false",
                    output.name
                ))
            })?;
            if binary != forms.default_binary {
                forms.exceptions.push(output.name.clone());
            }
        }
        outputs.push(RequestedOutput { name: output.name, parameters });
    }
    let id = header.id.unwrap_or_default();
    Ok((InferRequest { id, parameters, inputs, outputs, ..InferRequest::default() }, forms))
}

fn boolean(parameter: &Parameter) -> Option<bool> {
    match parameter {
        Parameter::Bool(v) => Some(*v),
        _ => None,
    }
}

/// The form of a client's request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestForm {
    /// Whether inputs are bytes after the JSON, not part of it.
    pub binary_inputs: bool,
    /// Whether to ask for outputs as bytes (outputs with their own `binary_data` keep it).
    pub binary_outputs: bool,
}

impl RequestForm {
    /// Bytes both ways: the fast form.
    pub const BINARY: RequestForm = RequestForm { binary_inputs: true, binary_outputs: true };
    /// JSON both ways: for people and for servers without the binary tensor extension.
    pub const JSON: RequestForm = RequestForm { binary_inputs: false, binary_outputs: false };
}

/// Writes the body of an inference request. Model name and version are in the path, not in the
/// body.
///
/// # Errors
/// If the data of an input does not have the form of its datatype, or is not UTF-8 and should be
/// JSON.
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

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Requests in the usual form of clients. The scanner reads each of them.
    const USUAL: [&str; 8] = [
        r#"{"inputs":[{"name":"x","datatype":"FP32","shape":[2,3],"data":[1,-2.5,3e-7,0.1,123456789.125,1E+5]}]}"#,
        r#"{"id": "7", "inputs": [{"shape": [1, 4], "data": [[NaN, -Infinity, "Inf", null]], "name": "x", "datatype": "FP64"}]}"#,
        r#"{"inputs":[{"name":"a","datatype":"INT8","shape":[3],"data":[0,-128,127]},{"name":"b","datatype":"UINT64","shape":[1],"data":[18446744073709551615]}]}"#,
        r#"{"inputs":[{"name":"s","datatype":"BYTES","shape":[3],"data":["a]\"","\\","é"]}],"outputs":[{"name":"y"}]}"#,
        r#"{"inputs":[{"name":"x","datatype":"BOOL","shape":[2,2],"data":[[true,false],[1,0]]}],"parameters":{"timeout":5}}"#,
        r#"{"inputs":[{"name":"x","datatype":"FP16","shape":[0],"data":[]},{"name":"z","datatype":"BF16","shape":[1],"data":[0.30000000000000004]}]}"#,
        r#"{"parameters":{"binary_data_output":true,"a":"b"},"inputs":[{"name":"x","datatype":"UINT8","shape":[0],"parameters":{"binary_data_size":0,"k":true}}]}"#,
        r#"{"inputs":[{"name":"x","datatype":"INT32","shape":[2],"parameters":{"shared_memory_region":"r","shared_memory_byte_size":8}}],"outputs":[{"name":"y","parameters":{"binary_data":true,"classification":3}}]}"#,
    ];

    /// Pieces of text that damage a request.
    const PIECES: [&str; 30] = [
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        "\"",
        "\\",
        " ",
        "\n",
        "0",
        "1",
        "-",
        ".",
        "e",
        "-0",
        "01",
        "1.",
        ".5",
        "+1",
        "1e400",
        "NaN",
        "null",
        "true",
        "18446744073709551616",
        "0.12345678901234567890123",
        "é",
        "\u{7f}",
        "\"x\":1,",
        "\"data\":[1],",
    ];

    type Read = (InferRequest, OutputForms);

    /// The request as the scanner reads it, if it can, and as serde reads it.
    fn both(text: &str) -> (Option<Read>, Result<Read, CodecError>) {
        let parts = BodyParts::new(Bytes::copy_from_slice(text.as_bytes()), None).unwrap();
        let usual = request_scanner::scan(parts.json()).and_then(|header| read_header(header, &parts).ok());
        (usual, read_unusual(&parts))
    }

    #[test]
    fn a_usual_request_is_read_in_one_pass_as_serde_reads_it() {
        for text in USUAL {
            let (usual, any) = both(text);
            assert_eq!(usual, any.ok(), "{text}");
            assert!(usual.is_some(), "{text}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        #[test]
        fn what_is_read_in_one_pass_is_what_serde_reads(
            text in prop::sample::select(USUAL.to_vec()),
            damage in vec((any::<prop::sample::Index>(), 0_usize..3, prop::sample::select(PIECES.to_vec())), 1..3),
        ) {
            let mut characters: Vec<char> = text.chars().collect();
            for (place, gone, piece) in damage {
                let place = place.index(characters.len());
                let end = (place + gone).min(characters.len());
                characters.splice(place..end, piece.chars());
            }
            let text: String = characters.into_iter().collect();
            let (usual, any) = both(&text);
            if let Some(usual) = usual {
                prop_assert_eq!(Ok(usual), any, "{}", text);
            }
        }

        #[test]
        fn a_number_is_what_serde_reads(digits in "-?(0|[1-9][0-9]{0,19})([.][0-9]{1,20})?([eE][-+]?[0-9]{1,3})?") {
            for (datatype, size) in [("FP32", 4), ("FP64", 8), ("FP16", 2), ("INT64", 8), ("UINT64", 8), ("INT16", 2)] {
                let text = format!(r#"{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":[1],"data":[{digits}]}}]}}"#);
                let (usual, any) = both(&text);
                if let Some(usual) = usual {
                    prop_assert_eq!(usual.0.inputs[0].data.len(), size);
                    prop_assert_eq!(Ok(usual), any, "{}", text);
                } else {
                    prop_assert!(any.is_err(), "{} is read by serde alone", text);
                }
            }
        }
    }
}
