//! Handles inference requests over HTTP. This code is kept short, because each microsecond of it
//! delays every inference.

use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use bytes::Bytes;
use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_models::preprocess;
use downbeat_protocol::http::{
    EncodedBody, INFERENCE_HEADER_CONTENT_LENGTH, OutputForms, parse_request, write_response,
};
use downbeat_protocol::{InferRequest, InferTensor};
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;
use downbeat_service::service::Service;
use downbeat_service::traces::open::OpenTrace;
use downbeat_service::work::offload;

use super::answer::{Answer, HandlerResult, HttpError, JSON};
use super::body::{self, WholeBody};
use super::encoding;
use super::path::ModelPath;
use super::sender::Sender;
use super::state::HttpState;
use crate::access::Caller;
use crate::compression::Coding;
use crate::{extension, rollout, trace};

const HEADER_LENGTH: HeaderName = HeaderName::from_static(INFERENCE_HEADER_CONTENT_LENGTH);
/// Numbers in JSON are two characters or more, and eight bytes or less as a tensor. `NaN,` is four,
/// is rewritten to eight, and is eight bytes or less as a tensor.
const MOST_GROWTH: u64 = 4;
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// The route as axum calls it, for [`router`](super::router) in another server;
/// [`serve`](super::serve) calls [`infer`] itself.
pub(super) async fn handler<S: Service>(
    State(state): State<HttpState<S>>,
    path: ModelPath,
    Sender { client, caller }: Sender,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let trace = state.begin_trace(client, &path.model, &headers);
    let inferred = infer(&state, (client, &caller), path, &headers, body, trace.as_ref()).await;
    let mut answered = answer(inferred, headers, trace.as_ref());
    if let Some(trace) = trace {
        trace::end(&trace, answered.status().as_u16(), answered.headers_mut());
    }
    Ok(answered.map(Body::from))
}

/// The answer with this body, or with an error, which goes into the request's `trace` too. The memory
/// of the request's `headers` serves for the answer's headers.
pub(super) fn answer(
    inferred: Result<EncodedBody, HttpError>,
    mut headers: HeaderMap,
    trace: Option<&OpenTrace>,
) -> Answer {
    let encoded = match inferred {
        Ok(encoded) => encoded,
        Err(error) => {
            error.tell(trace);
            return error.answer();
        }
    };
    headers.clear();
    match encoded.header_length {
        Some(length) => {
            headers.insert(CONTENT_TYPE, OCTETS);
            headers.insert(HEADER_LENGTH, HeaderValue::from(length));
        }
        None => {
            headers.insert(CONTENT_TYPE, JSON);
        }
    }
    let mut answer = Response::new(encoded.bytes);
    *answer.headers_mut() = headers;
    answer
}

/// Answers an inference request, whose `trace` is open. Dropping the future cancels it.
pub(super) async fn infer<S: Service, B>(
    state: &HttpState<S>,
    (client, caller): (Client, &Caller),
    path: ModelPath,
    headers: &HeaderMap,
    body: B,
    trace: Option<&OpenTrace>,
) -> Result<EncodedBody, HttpError>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::error::Error + 'static,
{
    let Head { header_length, coding } = match check_head(state.service(), &path, headers) {
        Ok(head) => head,
        Err(error) => return Err(body::unread(error, headers, &body, state.options().max_body_bytes)),
    };
    let WholeBody { bytes, mut held } = WholeBody::of(state, (client, caller), headers, coding, body).await?;
    let ((mut request, forms), mut held) = match header_length {
        None if let Some(media) = picture_type(headers) => {
            (picture_request(state.service(), path, bytes, media)?, held)
        }
        Some(0) => (raw_request(state.service(), path, bytes)?, held),
        _ => {
            let json = header_length.unwrap_or(bytes.len()).min(bytes.len());
            let heavy = json >= offload::PARSE_FROM || bytes.len() >= offload::COPY_FROM;
            let read = move || {
                if heavy {
                    held.grow(MOST_GROWTH * json as u64)?;
                }
                let whole = bytes.len() as u64;
                let read = parse_request(path.model, path.version, bytes, header_length)?;
                if heavy {
                    let tensors: u64 = read.0.inputs.iter().map(|input| input.data.len() as u64).sum();
                    // Tensors in binary form are slices of the body, which stays as long as they
                    // do.
                    held.shrink_to(if header_length.is_some() { whole.max(tensors) } else { tensors });
                }
                Ok::<_, HttpError>((read, held))
            };
            offload::run_if(heavy, client, json, read).await??
        }
    };
    caller.mark(&mut request);
    trace::mark(state.service(), headers, &mut request);
    rollout::mark(state.service(), headers, &mut request);
    trace::received(trace, state.options().traces.is_on(), &mut request);
    let response = extension::infer(state.service(), state.memory(), client, request, &mut held).await?;
    if let Some(trace) = trace {
        trace.answered();
    }

    let cost: usize = response.outputs.iter().map(|output| writing_cost(&forms, output)).sum();
    let encoded =
        offload::run_if(cost >= offload::PARSE_FROM, client, cost, move || write_response(&response, &forms)).await??;
    Ok(EncodedBody { bytes: held.hold(encoded.bytes), ..encoded })
}

/// The media type of a body that is a bare picture.
fn picture_type(headers: &HeaderMap) -> Option<&str> {
    let media = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let media = media.split(';').next().unwrap_or_default().trim();
    media.starts_with("image/").then_some(media)
}

/// A request whose body is a picture, for a model that takes pictures. The answer is always JSON.
fn picture_request<S: Service>(
    service: &S,
    path: ModelPath,
    body: Bytes,
    media: &str,
) -> Result<(InferRequest, OutputForms), HttpError> {
    let config = service.model_config(&path.model, &path.version)?;
    let Some(input) = preprocess::input_for(&config, media) else {
        let reason = format!(
            "model '{}' takes no {media}: the server has no steps that make it the model's input (preprocess in \
             downbeat.toml)",
            path.model
        );
        return Err(ServiceError::InvalidArgument(reason).into());
    };
    let input = one_element(input, vec![1], &body)?;
    let (model_name, model_version) = (path.model, path.version);
    Ok((
        InferRequest { model_name, model_version, inputs: vec![input], ..InferRequest::default() },
        OutputForms::all(false),
    ))
}

/// A tensor of datatype BYTES with one element.
fn one_element(name: &str, shape: Vec<i64>, element: &[u8]) -> Result<InferTensor, ServiceError> {
    let length = u32::try_from(element.len())
        .map_err(|_| ServiceError::InvalidArgument(format!("raw input '{name}': the element is longer than 4 GiB")))?;
    let mut data = Vec::with_capacity(4 + element.len());
    data.extend_from_slice(&length.to_le_bytes());
    data.extend_from_slice(element);
    let (name, data) = (name.to_owned(), Bytes::from(data));
    Ok(InferTensor { name, datatype: DataType::Bytes, shape, parameters: Default::default(), data })
}

/// How a request's body is read, by its headers.
struct Head {
    /// The length of the JSON, if bytes may follow it.
    header_length: Option<usize>,
    coding: Option<Coding>,
}

/// Checks the model and the headers of a request before its body is read.
fn check_head<S: Service>(service: &S, path: &ModelPath, headers: &HeaderMap) -> Result<Head, HttpError> {
    service.check_model(&path.model, &path.version)?;
    let coding = encoding::of_request(headers)?;
    Ok(Head { header_length: header_length(headers)?, coding })
}

/// The cost of writing an output, in bytes of JSON read: a number takes as long as some tens of
/// copied bytes.
fn writing_cost(forms: &OutputForms, output: &InferTensor) -> usize {
    let bytes = output.data.len();
    if forms.is_binary(&output.name) { bytes / (offload::COPY_FROM / offload::PARSE_FROM) } else { bytes }
}

fn header_length(headers: &HeaderMap) -> Result<Option<usize>, HttpError> {
    let Some(value) = headers.get(&HEADER_LENGTH) else {
        return Ok(None);
    };
    value.to_str().ok().and_then(|text| text.trim_ascii().parse().ok()).map(Some).ok_or_else(|| {
        HttpError::new(
            StatusCode::BAD_REQUEST,
            format!("Inference-Header-Content-Length is {value:?}; expected the length of the JSON in bytes"),
        )
    })
}

/// Triton's raw binary request: the whole body is the model's only input, and the model tells its
/// name and shape. At most one dimension besides the batch may vary; its size follows from the
/// others. Error messages use Triton's words.
fn raw_request<S: Service>(
    service: &S,
    path: ModelPath,
    body: Bytes,
) -> Result<(InferRequest, OutputForms), HttpError> {
    let metadata = service.model_metadata(&path.model, &path.version)?;
    let batched = service.model_config(&path.model, &path.version)?.max_batch_size > 0;
    let [input] = metadata.signature.inputs.as_slice() else {
        let reason = format!(
            "Raw request must only have 1 input (found 1) to be deduced but got {} inputs in '{}' model configuration",
            metadata.signature.inputs.len(),
            path.model
        );
        return Err(ServiceError::InvalidArgument(reason).into());
    };
    let (shape, data) = raw_tensor(&path.model, input, batched, body)?;
    debug_assert!(input.datatype == DataType::Bytes || !shape.contains(&-1));
    let request = InferRequest {
        model_name: path.model,
        model_version: path.version,
        inputs: vec![InferTensor {
            name: input.name.clone(),
            datatype: input.datatype,
            shape,
            parameters: Default::default(),
            data,
        }],
        ..InferRequest::default()
    };
    Ok((request, OutputForms::all(true)))
}

/// The shape and the data of a raw request's input: its only element if the input is of datatype
/// BYTES, or else the whole body.
fn raw_tensor(model: &str, input: &TensorSpec, batched: bool, body: Bytes) -> Result<(Vec<i64>, Bytes), ServiceError> {
    let invalid = ServiceError::InvalidArgument;
    let item = input.dims.get(usize::from(batched)..).unwrap_or_default();
    let Some(size) = input.datatype.size() else {
        if item.iter().any(|size| *size != 1) {
            return Err(invalid(format!(
                "For BYTES datatype raw input '{}', the model must have input shape [1]; it has {:?}",
                input.name, input.dims
            )));
        }
        let InferTensor { shape, data, .. } = one_element(&input.name, vec![1; input.dims.len()], &body)?;
        return Ok((shape, data));
    };
    if item.iter().filter(|size| **size < 0).count() > 1 {
        return Err(invalid(format!(
            "The shape of the raw input '{}' can not be deduced because there are more than one variable-sized \
             dimension: {:?}",
            input.name, input.dims
        )));
    }
    let shape = raw_shape(&input.dims, size, body.len()).ok_or_else(|| {
        invalid(format!(
            "model '{model}': {} bytes do not fit input '{}', {} {:?}; expected with Inference-Header-Content-Length: 0 \
             a body that is the model's only input",
            body.len(),
            input.name,
            input.datatype,
            input.dims
        ))
    })?;
    Ok((shape, body))
}

/// The shape of `bytes` bytes of elements of `size` bytes in `dims`. If the first dimension varies
/// and another does, the first is the batch, of 1.
fn raw_shape(dims: &[i64], size: usize, bytes: usize) -> Option<Vec<i64>> {
    let mut shape = dims.to_vec();
    if shape.iter().filter(|&&d| d < 0).count() > 1
        && let Some(first @ i64::MIN..0) = shape.first_mut()
    {
        *first = 1;
    }
    let fixed = shape.iter().filter(|&&d| d >= 0).try_fold(size, |n, &d| n.checked_mul(usize::try_from(d).ok()?))?;
    let mut varying = shape.iter_mut().filter(|d| **d < 0);
    match (varying.next(), varying.next()) {
        (None, _) => (fixed == bytes).then_some(())?,
        (Some(d), None) if fixed > 0 && bytes > 0 && bytes.is_multiple_of(fixed) => {
            *d = i64::try_from(bytes / fixed).ok()?
        }
        _ => return None,
    }
    Some(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raw_body_takes_the_shape_of_the_input() {
        assert_eq!(raw_shape(&[2, 3], 4, 24), Some(vec![2, 3]));
        assert_eq!(raw_shape(&[2, 3], 4, 20), None);
        assert_eq!(raw_shape(&[-1, 784], 4, 3136), Some(vec![1, 784]));
        assert_eq!(raw_shape(&[-1, 784], 4, 6272), Some(vec![2, 784]));
        assert_eq!(raw_shape(&[-1, -1], 4, 40), Some(vec![1, 10]));
        assert_eq!(raw_shape(&[-1, -1, -1], 4, 40), None);
        assert_eq!(raw_shape(&[-1, 0], 4, 0), None);
        assert_eq!(raw_shape(&[-1, 784], 4, 0), None);
        assert_eq!(raw_shape(&[-1, i64::MAX], 4, 8), None);
    }
}
