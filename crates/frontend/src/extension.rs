//! The protocol's extensions that work on the tensors of any frontend: shared memory and
//! classification.

use std::sync::Arc;

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_protocol::infer::{check_data, element_count};
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter, Parameters, RequestedOutput};
use downbeat_service::answers::StreamAnswer;
use downbeat_service::budget::Reservation;
use downbeat_service::classification::classify;
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;
use downbeat_service::service::Service;
use downbeat_service::work::offload;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;

use crate::shared_memory::SharedMemory;

/// The extensions that every server has, as the server metadata names them.
const EXTENSIONS: [&str; 10] = [
    "classification",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
];

/// The extensions that a server with this shared memory has, as the server metadata names them.
pub fn extensions(memory: &SharedMemory) -> Vec<String> {
    let cuda = memory.has_cuda().then_some("cuda_shared_memory");
    EXTENSIONS.into_iter().chain(cuda).map(str::to_owned).collect()
}

const REGION: &str = "shared_memory_region";
const BYTE_SIZE: &str = "shared_memory_byte_size";
const OFFSET: &str = "shared_memory_offset";
const CLASSIFICATION: &str = "classification";
/// Most bytes that the inputs of one request take from shared memory.
const MOST_SHARED_BYTES: u64 = 1 << 30;

/// Runs an inference of `client` with the extensions applied; every frontend calls this. `held` is
/// the request's part of the budget of bytes; copied data is added.
///
/// # Errors
/// The errors of [`resolve_inputs`], [`Service::check_inputs`], [`Service::infer`] and
/// [`apply_outputs`]; `QueueFull` if the budget has no room for the copies from shared memory.
pub async fn infer<S: Service>(
    service: &S,
    memory: &Arc<SharedMemory>,
    client: Client,
    request: InferRequest,
    held: &mut Reservation,
) -> Result<InferResponse, ServiceError> {
    let shared = check_places(memory, client, &request)?;
    let (extended, waits) = extended_outputs(memory, client, &request)?;
    let request = match shared.bytes {
        0 => request,
        _ => copy_inputs(service, memory, client, request, shared, held).await?,
    };
    if extended.is_empty() {
        // Texts and pictures may be large work for the service.
        if request.inputs.iter().any(|input| input.datatype == DataType::Bytes) {
            return Box::pin(offload::with_sender(client, service.infer(request))).await;
        }
        return service.infer(request).await;
    }
    let wishes = OutputWishes::of(service, memory, client, &request, (extended, waits));
    let response = Box::pin(offload::with_sender(client, service.infer(request))).await?;
    // Boxed: the future of a plain request has no room for it.
    Box::pin(wishes.apply(response)).await
}

/// As [`infer`], for any number of answers. `held` stays until the answers end.
///
/// # Errors
/// The errors of [`infer`], if the request ends before its work begins. Later errors are among the
/// answers.
pub async fn infer_many<S: Service>(
    service: &S,
    memory: &Arc<SharedMemory>,
    client: Client,
    request: InferRequest,
    mut held: Reservation,
) -> Result<BoxStream<'static, StreamAnswer>, ServiceError> {
    let shared = check_places(memory, client, &request)?;
    let (extended, waits) = extended_outputs(memory, client, &request)?;
    let request = match shared.bytes {
        0 => request,
        _ => copy_inputs(service, memory, client, request, shared, &mut held).await?,
    };
    let wishes = (!extended.is_empty()).then(|| OutputWishes::of(service, memory, client, &request, (extended, waits)));
    let answers = Box::pin(offload::with_sender(client, service.infer_stream(request))).await?.holding(held);
    let Some(wishes) = wishes else { return Ok(answers.boxed()) };
    let wishes = Arc::new(wishes);
    Ok(answers
        .then(move |step| {
            let wishes = Arc::clone(&wishes);
            async move {
                let StreamAnswer { answer, is_final } = step;
                let answer = match answer {
                    Some(Ok(response)) => Some(wishes.apply(response).await),
                    other => other,
                };
                StreamAnswer { answer, is_final }
            }
        })
        .boxed())
}

/// The outputs with wishes of the client, checked before the work and not after it, and whether
/// some are in a GPU's memory.
fn extended_outputs(
    memory: &SharedMemory,
    client: Client,
    request: &InferRequest,
) -> Result<(Vec<RequestedOutput>, bool), ServiceError> {
    let (mut extended, mut waits) = (Vec::new(), false);
    for output in &request.outputs {
        match OutputExtension::of(output)? {
            None => continue,
            Some(OutputExtension::Classes(_)) => {}
            Some(OutputExtension::SharedMemory(place)) => {
                waits |= memory
                    .check(client, place.region, place.offset, place.byte_size)
                    .map_err(|error| error.within(format_args!("output '{}'", output.name)))?;
            }
        }
        extended.push(output.clone());
    }
    Ok((extended, waits))
}

/// The client's wishes for outputs, and the labels of their classes.
struct OutputWishes {
    memory: Arc<SharedMemory>,
    client: Client,
    outputs: Arc<[RequestedOutput]>,
    /// The labels of each of these outputs.
    labels: Arc<[Vec<String>]>,
    batched: bool,
    /// Whether some outputs are in a GPU's memory, so that the copy waits.
    waits: bool,
}

impl OutputWishes {
    /// Read before the run: when the answer comes, another version may serve under the name.
    fn of<S: Service>(
        service: &S,
        memory: &Arc<SharedMemory>,
        client: Client,
        request: &InferRequest,
        (extended, waits): (Vec<RequestedOutput>, bool),
    ) -> Self {
        let (name, version) = (&request.model_name, &request.model_version);
        let batched = service.model_config(name, version).is_ok_and(|config| config.max_batch_size > 0);
        let labels = extended.iter().map(|output| service.labels(name, version, &output.name)).collect();
        OutputWishes { memory: Arc::clone(memory), client, outputs: extended.into(), labels, batched, waits }
    }

    async fn apply(&self, mut response: InferResponse) -> Result<InferResponse, ServiceError> {
        // Ranking a row takes longer than copying it, and a write to shared memory may be the first
        // to a page.
        let bytes = response.outputs.iter().map(|output| output.data.len()).sum::<usize>();
        let heavy = self.waits || bytes >= offload::PARSE_FROM;
        let (memory, client, batched) = (Arc::clone(&self.memory), self.client, self.batched);
        let (outputs, labels) = (Arc::clone(&self.outputs), Arc::clone(&self.labels));
        offload::run_if(heavy, client, bytes, move || {
            let labels = |output: &str| {
                let found = outputs.iter().zip(&*labels).find(|(wish, _)| wish.name == output);
                found.map(|(_, names)| names.clone()).unwrap_or_default()
            };
            apply_outputs(&memory, client, labels, batched, &outputs, &mut response.outputs)?;
            Ok(response)
        })
        .await?
    }
}

/// The inputs of a request that are in shared memory.
#[derive(Default)]
struct SharedInputs {
    bytes: u64,
    /// Whether some are in a GPU's memory, so that the copy waits.
    waits: bool,
}

/// The request with its inputs that are in shared memory copied into it.
async fn copy_inputs<S: Service>(
    service: &S,
    memory: &Arc<SharedMemory>,
    client: Client,
    mut request: InferRequest,
    SharedInputs { bytes, waits }: SharedInputs,
    held: &mut Reservation,
) -> Result<InferRequest, ServiceError> {
    // Checks of the request's few bytes come before the many bytes are copied.
    service.check_inputs(&request)?;
    held.grow(bytes)?;
    let memory = Arc::clone(memory);
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let heavy = waits || bytes >= offload::PARSE_FROM;
    offload::run_if(heavy, client, bytes, move || resolve_inputs(&memory, client, &mut request).map(|()| request))
        .await?
}

/// Checks the inputs' places in shared memory. Returns their total size, and whether a copy waits
/// for a GPU.
fn check_places(memory: &SharedMemory, client: Client, request: &InferRequest) -> Result<SharedInputs, ServiceError> {
    let mut shared = SharedInputs::default();
    for input in &request.inputs {
        let Some(place) = Place::of("input", &input.name, &input.parameters)? else { continue };
        if !input.data.is_empty() {
            return Err(ServiceError::InvalidArgument(format!(
                "input '{}' has both data ({} bytes) and '{REGION}'; expected one of them",
                input.name,
                input.data.len()
            )));
        }
        check_byte_size(input, place.byte_size)?;
        shared.waits |= memory
            .check(client, place.region, place.offset, place.byte_size)
            .map_err(|error| error.within(format_args!("input '{}'", input.name)))?;
        // A request of a few bytes could otherwise ask for endless copies of a large region.
        shared.bytes = shared.bytes.saturating_add(place.byte_size);
        if shared.bytes > MOST_SHARED_BYTES {
            return Err(ServiceError::TooLarge(format!(
                "the inputs in shared memory are larger than {MOST_SHARED_BYTES} bytes together"
            )));
        }
    }
    Ok(shared)
}

/// Copies the inputs in `client`'s shared memory into the request. Their parameters stay.
///
/// # Errors
/// `InvalidArgument` if an input has data of its own as well, or its parameters or its byte size
/// are wrong; the errors of [`SharedMemory::read`].
pub fn resolve_inputs(memory: &SharedMemory, client: Client, request: &mut InferRequest) -> Result<(), ServiceError> {
    check_places(memory, client, request)?;
    for input in &mut request.inputs {
        let Some(place) = Place::of("input", &input.name, &input.parameters)? else { continue };
        let data = memory.read(client, place.region, place.offset, place.byte_size);
        input.data = data.map_err(|error| error.within(format_args!("input '{}'", input.name)))?;
        check_data(input.datatype, &input.shape, &input.data)
            .map_err(|error| ServiceError::InvalidArgument(format!("input '{}': {error}", input.name)))?;
    }
    Ok(())
}

/// The byte size is known from shape and datatype; a wrong one is found before anything is copied.
fn check_byte_size(input: &InferTensor, byte_size: u64) -> Result<(), ServiceError> {
    let Some(element) = input.datatype.size() else { return Ok(()) };
    let expected = element_count(&input.shape).ok().and_then(|count| count.checked_mul(element));
    // A negative or overflowing shape is reported once the data is read.
    match expected {
        Some(expected) if expected as u64 != byte_size => Err(ServiceError::InvalidArgument(format!(
            "input '{}': '{BYTE_SIZE}' is {byte_size}, expected {expected} for shape {:?} of {}",
            input.name, input.shape, input.datatype
        ))),
        _ => Ok(()),
    }
}

/// Applies the client's wishes for outputs: classes instead of values, and data in shared memory
/// instead of the answer.
///
/// `labels` returns the labels of an output's classes in class order. With `batched` the first
/// dimension is the batch, and each row has its own classes. The service refuses requested outputs
/// that are not in the answer.
///
/// # Errors
/// `InvalidArgument` if the parameters are wrong, the output's datatype has no order, or the shared
/// memory is too small; the errors of [`SharedMemory::write`].
pub fn apply_outputs(
    memory: &SharedMemory,
    client: Client,
    labels: impl Fn(&str) -> Vec<String>,
    batched: bool,
    requested: &[RequestedOutput],
    outputs: &mut [InferTensor],
) -> Result<(), ServiceError> {
    for request in requested {
        let Some(extension) = OutputExtension::of(request)? else { continue };
        let Some(output) = outputs.iter_mut().find(|output| output.name == request.name) else { continue };
        match extension {
            OutputExtension::Classes(count) => classify(output, count, batched, &labels(&request.name))?,
            OutputExtension::SharedMemory(place) => store(memory, client, &place, output)?,
        }
    }
    Ok(())
}

/// The client's wish for an output.
enum OutputExtension<'a> {
    Classes(usize),
    SharedMemory(Place<'a>),
}

impl<'a> OutputExtension<'a> {
    fn of(output: &'a RequestedOutput) -> Result<Option<Self>, ServiceError> {
        if output.parameters.is_empty() {
            return Ok(None);
        }
        let place = Place::of("output", &output.name, &output.parameters)?;
        let classes = unsigned("output", &output.name, &output.parameters, CLASSIFICATION)?;
        match (place, classes) {
            (Some(_), Some(_)) => Err(ServiceError::InvalidArgument(format!(
                "output '{}' has both '{REGION}' and '{CLASSIFICATION}'; expected one of them",
                output.name
            ))),
            (_, Some(0)) => Err(ServiceError::InvalidArgument(format!(
                "output '{}': '{CLASSIFICATION}' is 0, expected at least 1",
                output.name
            ))),
            (None, Some(count)) => Ok(Some(OutputExtension::Classes(usize::try_from(count).unwrap_or(usize::MAX)))),
            (Some(place), None) => Ok(Some(OutputExtension::SharedMemory(place))),
            (None, None) => Ok(None),
        }
    }
}

/// The place of a tensor in shared memory.
struct Place<'a> {
    region: &'a str,
    offset: u64,
    byte_size: u64,
}

impl<'a> Place<'a> {
    fn of(kind: &str, name: &str, parameters: &'a Parameters) -> Result<Option<Self>, ServiceError> {
        if parameters.is_empty() {
            return Ok(None);
        }
        let region = match parameters.get(REGION) {
            None => return Ok(None),
            Some(Parameter::String(region)) => region,
            Some(other) => return Err(wrong_parameter(kind, name, REGION, "a string", other)),
        };
        let Some(byte_size) = unsigned(kind, name, parameters, BYTE_SIZE)? else {
            return Err(ServiceError::InvalidArgument(format!(
                "{kind} '{name}' has '{REGION}' but no '{BYTE_SIZE}'; expected both"
            )));
        };
        let offset = unsigned(kind, name, parameters, OFFSET)?.unwrap_or(0);
        Ok(Some(Place { region, offset, byte_size }))
    }
}

fn unsigned(kind: &str, name: &str, parameters: &Parameters, key: &str) -> Result<Option<u64>, ServiceError> {
    match parameters.get(key) {
        None => Ok(None),
        Some(Parameter::Uint64(value)) => Ok(Some(*value)),
        Some(Parameter::Int64(value)) if *value >= 0 => Ok(Some(value.unsigned_abs())),
        Some(other) => Err(wrong_parameter(kind, name, key, "an integer of at least 0", other)),
    }
}

fn wrong_parameter(kind: &str, name: &str, key: &str, expected: &str, got: &Parameter) -> ServiceError {
    let got = match got {
        Parameter::Bool(value) => value.to_string(),
        Parameter::Int64(value) => value.to_string(),
        Parameter::Uint64(value) => value.to_string(),
        Parameter::Double(value) => value.to_string(),
        Parameter::String(value) => format!("'{}'", value.chars().take(64).collect::<String>()),
    };
    ServiceError::InvalidArgument(format!("{kind} '{name}': '{key}' is {got}, expected {expected}"))
}

fn store(
    memory: &SharedMemory,
    client: Client,
    place: &Place<'_>,
    output: &mut InferTensor,
) -> Result<(), ServiceError> {
    let size = output.data.len() as u64;
    if size > place.byte_size {
        return Err(ServiceError::InvalidArgument(format!(
            "output '{}': '{BYTE_SIZE}' is {}, expected at least {size} for shape {:?} of {}",
            output.name, place.byte_size, output.shape, output.datatype
        )));
    }
    memory
        .write(client, place.region, place.offset, &output.data)
        .map_err(|error| error.within(format_args!("output '{}'", output.name)))?;
    output.data = Bytes::new();
    output.parameters.insert(REGION.into(), Parameter::String(place.region.to_owned()));
    output.parameters.insert(BYTE_SIZE.into(), Parameter::Uint64(size));
    if place.offset != 0 {
        output.parameters.insert(OFFSET.into(), Parameter::Uint64(place.offset));
    }
    Ok(())
}
