//! The protocol's extensions that work on the tensors of any frontend: shared memory and classification.

use std::cmp::Ordering;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use downbeat_core::tensor::DataType;
use downbeat_protocol::infer::{check_data, element_count};
use downbeat_protocol::{InferInput, InferOutput, InferRequest, InferResponse, Parameter, Parameters, RequestedOutput};
use half::{bf16, f16};

use crate::budget::Reservation;
use crate::error::ServiceError;
use crate::offload;
use crate::service::Service;
use crate::shared_memory::{Client, SharedMemory};

/// The extensions that every server has, as the server metadata names them.
const EXTENSIONS: [&str; 8] = [
    "classification",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
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

/// Runs an inference of `client` with the extensions applied: what every frontend calls. `held` is what the request
/// holds of the budget of bytes; what is copied for it is added.
///
/// # Errors
/// Those of [`resolve_inputs`], [`Service::check_inputs`], [`Service::infer`] and [`apply_outputs`]; `QueueFull` if the
/// budget has no room for what would be copied from shared memory.
pub async fn infer<S: Service>(
    service: &S,
    memory: &Arc<SharedMemory>,
    client: Client,
    request: InferRequest,
    held: &mut Reservation,
) -> Result<InferResponse, ServiceError> {
    let shared = check_places(memory, client, &request)?;
    let (mut extended, mut waits) = (Vec::new(), false);
    for output in &request.outputs {
        // Refused before the work, not after it.
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
    let request = match shared.bytes {
        0 => request,
        _ => copy_inputs(service, memory, client, request, shared, held).await?,
    };
    if extended.is_empty() {
        return service.infer(request).await;
    }
    // Looked up before: by the time the answer is here, another version may serve under the name.
    let (name, version) = (request.model_name.clone(), request.model_version.clone());
    let batched = service.model_config(&name, &version).is_ok_and(|config| config.max_batch_size > 0);
    let names: Vec<Vec<String>> = extended.iter().map(|output| service.labels(&name, &version, &output.name)).collect();
    let mut response = service.infer(request).await?;
    let memory = Arc::clone(memory);
    // Ranking a row takes longer than copying it, and a write to shared memory may be the first to a page.
    let bytes = response.outputs.iter().map(|output| output.data.len()).sum::<usize>();
    let heavy = waits || bytes >= offload::PARSE_FROM;
    offload::run_if(heavy, move || {
        let labels = |output: &str| {
            let found = extended.iter().zip(&names).find(|(e, _)| e.name == output);
            found.map(|(_, names)| names.clone()).unwrap_or_default()
        };
        apply_to(&memory, client, labels, batched, &extended, &mut response.outputs)?;
        Ok(response)
    })
    .await?
}

/// What the inputs of a request have in shared memory.
#[derive(Default)]
struct Shared {
    bytes: u64,
    /// Whether some are in a GPU's memory, so that a copy is waited for.
    waits: bool,
}

/// The request with its inputs that are in shared memory copied into it.
async fn copy_inputs<S: Service>(
    service: &S,
    memory: &Arc<SharedMemory>,
    client: Client,
    mut request: InferRequest,
    Shared { bytes, waits }: Shared,
    held: &mut Reservation,
) -> Result<InferRequest, ServiceError> {
    // All that can be told from the request's few bytes comes before the many.
    service.check_inputs(&request)?;
    held.grow(bytes)?;
    let memory = Arc::clone(memory);
    let heavy = waits || usize::try_from(bytes).unwrap_or(usize::MAX) >= offload::PARSE_FROM;
    offload::run_if(heavy, move || resolve_inputs(&memory, client, &mut request).map(|()| request)).await?
}

/// Checks what the inputs say of their places in shared memory; gives what they take together.
fn check_places(memory: &SharedMemory, client: Client, request: &InferRequest) -> Result<Shared, ServiceError> {
    let mut shared = Shared::default();
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
        // A few bytes of request could else ask for copies of a large region without end.
        shared.bytes = shared.bytes.saturating_add(place.byte_size);
        if shared.bytes > MOST_SHARED_BYTES {
            return Err(ServiceError::TooLarge(format!(
                "the inputs in shared memory are larger than {MOST_SHARED_BYTES} bytes together"
            )));
        }
    }
    Ok(shared)
}

/// Copies the inputs that are in `client`'s shared memory into the request. Their parameters stay.
///
/// # Errors
/// `InvalidArgument` if an input has data of its own as well, or its parameters or its byte size are wrong; those of
/// [`SharedMemory::read`].
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
fn check_byte_size(input: &InferInput, byte_size: u64) -> Result<(), ServiceError> {
    let Some(element) = input.datatype.size() else { return Ok(()) };
    let expected = element_count(&input.shape).ok().and_then(|count| count.checked_mul(element));
    // A negative or overflowing shape is named once the data is there.
    match expected {
        Some(expected) if expected as u64 != byte_size => Err(ServiceError::InvalidArgument(format!(
            "input '{}': '{BYTE_SIZE}' is {byte_size}, expected {expected} for shape {:?} of {}",
            input.name, input.shape, input.datatype
        ))),
        _ => Ok(()),
    }
}

/// Applies what was asked of the outputs: classes instead of values, and data in shared memory instead of the answer.
///
/// `labels` gives the labels of an output's classes in class order; `batched` tells that the first dimension is the
/// batch, so that each row has its own classes. Outputs that are requested but not in the answer are left to the
/// service to refuse.
///
/// # Errors
/// `InvalidArgument` if the parameters are wrong, the output's datatype has no order, or the shared memory is too
/// small; those of [`SharedMemory::write`].
pub fn apply_outputs(
    memory: &SharedMemory,
    client: Client,
    labels: impl Fn(&str) -> Vec<String>,
    batched: bool,
    requested: &[RequestedOutput],
    response: &mut InferResponse,
) -> Result<(), ServiceError> {
    apply_to(memory, client, labels, batched, requested, &mut response.outputs)
}

fn apply_to(
    memory: &SharedMemory,
    client: Client,
    labels: impl Fn(&str) -> Vec<String>,
    batched: bool,
    requested: &[RequestedOutput],
    outputs: &mut [InferOutput],
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

/// What a client asked of an output.
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

/// Where in shared memory a tensor is.
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
    output: &mut InferOutput,
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

/// Replaces an output's values by its `count` largest, each as a `BYTES` element `value:index` or
/// `value:index:label`. Equal values: the lower index first. NaN: after all others.
fn classify(output: &mut InferOutput, count: usize, batched: bool, labels: &[String]) -> Result<(), ServiceError> {
    let data = &output.data;
    let texts = match output.datatype {
        DataType::Uint8 => Values::of(data, u8::from_le_bytes).classes(output, count, batched, labels),
        DataType::Uint16 => Values::of(data, u16::from_le_bytes).classes(output, count, batched, labels),
        DataType::Uint32 => Values::of(data, u32::from_le_bytes).classes(output, count, batched, labels),
        DataType::Uint64 => Values::of(data, u64::from_le_bytes).classes(output, count, batched, labels),
        DataType::Int8 => Values::of(data, i8::from_le_bytes).classes(output, count, batched, labels),
        DataType::Int16 => Values::of(data, i16::from_le_bytes).classes(output, count, batched, labels),
        DataType::Int32 => Values::of(data, i32::from_le_bytes).classes(output, count, batched, labels),
        DataType::Int64 => Values::of(data, i64::from_le_bytes).classes(output, count, batched, labels),
        DataType::Fp16 => {
            Values::of(data, |b| Float(f16::from_le_bytes(b).to_f64())).classes(output, count, batched, labels)
        }
        DataType::Bf16 => {
            Values::of(data, |b| Float(bf16::from_le_bytes(b).to_f64())).classes(output, count, batched, labels)
        }
        DataType::Fp32 => {
            Values::of(data, |b| Float(f64::from(f32::from_le_bytes(b)))).classes(output, count, batched, labels)
        }
        DataType::Fp64 => Values::of(data, |b| Float(f64::from_le_bytes(b))).classes(output, count, batched, labels),
        DataType::Bool | DataType::Bytes => Err(ServiceError::InvalidArgument(format!(
            "output '{}': '{CLASSIFICATION}' needs numbers, and its datatype is {}",
            output.name, output.datatype
        ))),
    }?;
    let Classes { rows, per_row, data } = texts;
    output.shape = match rows {
        Some(rows) => vec![rows, per_row],
        None => vec![per_row],
    };
    output.datatype = DataType::Bytes;
    output.data = data;
    Ok(())
}

/// The classes of all rows, as `BYTES` elements.
struct Classes {
    /// `None` if the output has no batch dimension.
    rows: Option<i64>,
    per_row: i64,
    data: Bytes,
}

/// A number with a total order, largest last, and its text as C's `std::to_string` writes it (Triton's).
trait Ranked: Copy {
    fn rank(&self, other: &Self) -> Ordering;
    fn text(&self) -> String;
}

macro_rules! ranked_integers {
    ($($integer:ty),*) => {$(
        impl Ranked for $integer {
            fn rank(&self, other: &Self) -> Ordering {
                self.cmp(other)
            }

            fn text(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

ranked_integers!(u8, u16, u32, u64, i8, i16, i32, i64);

#[derive(Clone, Copy)]
struct Float(f64);

impl Ranked for Float {
    fn rank(&self, other: &Self) -> Ordering {
        // NaN is smaller than every number, the sign of zero does not count.
        self.0.partial_cmp(&other.0).unwrap_or_else(|| other.0.is_nan().cmp(&self.0.is_nan()))
    }

    fn text(&self) -> String {
        if self.0.is_nan() { "nan".into() } else { format!("{:.6}", self.0) }
    }
}

struct Values<T>(Vec<T>);

impl<T: Ranked> Values<T> {
    fn of<const N: usize>(data: &[u8], read: impl Fn([u8; N]) -> T) -> Self {
        Values(data.as_chunks::<N>().0.iter().map(|bytes| read(*bytes)).collect())
    }

    fn classes(
        &self,
        output: &InferOutput,
        count: usize,
        batched: bool,
        labels: &[String],
    ) -> Result<Classes, ServiceError> {
        let rows = if batched { output.shape.first().copied() } else { None };
        let row_count = usize::try_from(rows.unwrap_or(1)).unwrap_or(0);
        let width = self.0.len().checked_div(row_count).unwrap_or(0);
        if width * row_count != self.0.len() {
            return Err(ServiceError::Internal(format!(
                "output '{}' has {} elements, which its shape {:?} does not explain",
                output.name,
                self.0.len(),
                output.shape
            )));
        }
        let count = count.min(width);
        let mut data = BytesMut::new();
        let mut order: Vec<usize> = Vec::with_capacity(width);
        for row in self.0.chunks_exact(width.max(1)) {
            let descending = |a: &usize, b: &usize| match (row.get(*a), row.get(*b)) {
                (Some(x), Some(y)) => y.rank(x).then(a.cmp(b)),
                _ => a.cmp(b),
            };
            order.clear();
            order.extend(0..row.len());
            if count < order.len() {
                order.select_nth_unstable_by(count, descending);
                order.truncate(count);
            }
            order.sort_unstable_by(descending);
            for index in &order {
                let Some(value) = row.get(*index) else { continue };
                let mut text = format!("{}:{index}", value.text());
                if let Some(label) = labels.get(*index).filter(|label| !label.is_empty()) {
                    text.push(':');
                    text.push_str(label);
                }
                data.put_u32_le(u32::try_from(text.len()).unwrap_or(u32::MAX));
                data.put_slice(text.as_bytes());
            }
        }
        Ok(Classes { rows, per_row: i64::try_from(count).unwrap_or(i64::MAX), data: data.freeze() })
    }
}
