//! The HTTP form of the protocol: JSON, with tensors in the JSON or, by the binary tensor
//! extension, in bytes after it.
//!
//! Pure functions used by the server and by clients alike:
//!
//! | | server | client |
//! |---|---|---|
//! | request | [`parse_request`] | [`write_request`] |
//! | response | [`write_response`] | [`parse_response`] |
//! | request and response of `generate` | [`parse_generate`], [`write_generate`] | |
//!
//! A body is `JSON` or `JSON ++ tensor bytes ++ tensor bytes ...`. In the second form the header
//! [`INFERENCE_HEADER_CONTENT_LENGTH`] has the length of the JSON, and each tensor with bytes has
//! the parameter `binary_data_size`.
//!
//! As in Triton, `NaN`, `Infinity` and `-Infinity`, for which JSON has no number, are written and
//! read. `Inf` and `-Inf` are read too. In addition to Triton, the same words in quotes are read,
//! and `null` as NaN. `FP16` and `BF16` in JSON are numbers, rounded to the datatype. A finite
//! number beyond the datatype's range is an error.

mod encoded_body;
mod generate;
mod header;
mod json_writer;
mod management;
mod number_list;
mod number_word;
mod parameter;
mod request;
mod request_scanner;
mod response;
mod tensor_json;

pub use encoded_body::EncodedBody;
pub use generate::{parse_generate, write_generate};
pub use management::{
    ErrorBody, IndexRequest, LoadRequest, ModelMetadataBody, RawHandle, RegisterCudaRegionRequest,
    RegisterRegionRequest, ServerMetadataBody, TensorMetadataBody, config_to_json, statistics_from_json,
    statistics_to_json,
};
pub use number_word::words_as_objects;
pub use request::{OutputForms, RequestForm, parse_request, write_request};
pub use response::{parse_response, write_response};

/// `/v2/models/MODEL[/versions/VERSION]`, escaped; no version if it is empty.
pub fn model_path(model: &str, version: &str) -> String {
    let escape = |text: &str| -> String {
        text.bytes()
            .map(|b| match b {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(b).to_string(),
                _ => format!("%{b:02X}"),
            })
            .collect()
    };
    let version = if version.is_empty() { String::new() } else { format!("/versions/{}", escape(version)) };
    format!("/v2/models/{}{version}", escape(model))
}

/// The header with the length in bytes of the JSON at the start of a body that has tensors after
/// it.
pub const INFERENCE_HEADER_CONTENT_LENGTH: &str = "inference-header-content-length";
