//! How requests of one model version are checked, joined into a batch, and separated again.

mod admission;
mod asked;
mod empty_batch;
mod trial;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use downbeat_core::tensor::Signature;
use downbeat_engine::{Buffer, DefaultValue, Fill, Model, OutOfMemory, RequestAbout, ShapeRange, State, Tensor};
use downbeat_repository::TensorBinding;
use smallvec::SmallVec;

/// The sizes of the dimensions that vary from request to request, the batch dimension excluded.
/// Only requests with equal keys can share a batch.
pub type ShapeKey = SmallVec<[i64; 4]>;

/// Largest inputs of a made-up batch, bytes. No client pays for the memory of trials and
/// measurements.
pub const LARGEST_TRIAL: usize = 1 << 30;

/// The length that varying dimensions have while a model is measured. Other lengths start from its
/// latency, scaled, and learn their own latency in service.
pub const PROFILED_LENGTH: i64 = 32;

/// The tensors of a model version's requests on the wire, and the tensors that its engine wants
/// instead.
#[derive(Debug)]
pub struct BatchCodec {
    /// The model's name, for the log.
    model: String,
    /// The inputs, in the engine's order.
    pub inputs: Vec<TensorBinding>,
    /// The outputs, in the configuration's order.
    pub outputs: Vec<TensorBinding>,
    /// For each input, its value if a request leaves it out; `None`: every request must have it.
    defaults: Vec<Option<LeftOut>>,
    /// Whether the first dimension of every tensor is the batch.
    pub batched: bool,
    /// The most items of a batch.
    pub max_batch: u32,
    input_memory: InputMemory,
    /// The values of made-up requests.
    fill: Fill,
    /// A request of one item that the model is known to answer, if requests of [`PROFILED_LENGTH`]
    /// do not suit it.
    sample: Option<Admitted>,
    /// The item that runs in the place of none, where items do not vary in shape.
    stand_in: OnceLock<Admitted>,
    /// Whether the inputs go on to other models, which know what an optional input stands for.
    passes_on: bool,
    /// Whether the log is silent about answers of other sizes than declared. It is silent until the
    /// model serves, since made-up requests have such answers. It is silent again after the first
    /// warning.
    is_misfit_told: AtomicBool,
    /// Whether the model takes requests and not the rows of a batch. Its requests then carry
    /// ids and parameters.
    pub takes_requests: bool,
}

/// An input that a request left out: of each of its items, the same.
#[derive(Debug)]
struct LeftOut {
    /// Sizes as clients see them, the batch dimension left out.
    shape: SmallVec<[i64; 4]>,
    /// The elements of one item.
    item: Bytes,
}

/// The memory where batches are assembled: memory that a model's lanes want, or plain memory.
#[derive(Default)]
struct InputMemory(Option<Arc<dyn Model>>);

impl std::fmt::Debug for InputMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "the engine's" } else { "plain" })
    }
}

/// The parts of a [`BatchCodec`] that may go to another process: all but the memory for its
/// batches.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct CodecParts {
    inputs: Vec<TensorBinding>,
    outputs: Vec<TensorBinding>,
    /// For each input, the sizes and elements of an item that stand for it if a request leaves it
    /// out.
    defaults: Vec<Option<(Vec<i64>, Vec<u8>)>>,
    /// 0: the model has no batch dimension.
    max_batch: u32,
    takes_requests: bool,
}

impl From<CodecParts> for BatchCodec {
    fn from(parts: CodecParts) -> Self {
        let CodecParts { inputs, outputs, defaults, max_batch, takes_requests } = parts;
        let mut codec = BatchCodec::new(inputs, outputs, max_batch).taking_requests(takes_requests);
        for (default, left_out) in codec.defaults.iter_mut().zip(defaults) {
            *default = left_out.map(|(shape, item)| LeftOut { shape: shape.into(), item: item.into() });
        }
        codec
    }
}

/// A request that fits its model.
#[derive(Clone, Debug, Default)]
pub struct Admitted {
    /// The bytes of each input, in the engine's order.
    inputs: SmallVec<[Bytes; 2]>,
    /// The shape of each input without the batch dimension, one after another.
    shapes: SmallVec<[i64; 8]>,
    /// Items: the size of the batch dimension (1 if the model has none).
    pub rows: u32,
    /// The request has no items: the one here stands in for them ([`BatchCodec::without_rows`]).
    pub is_empty: bool,
    /// The other parts of the request, for a model that takes requests.
    pub about: Option<Arc<RequestAbout>>,
}

impl Admitted {
    /// A request of one item, of these bytes and item shapes in the engine's order.
    pub fn of_one(tensors: impl Iterator<Item = (Bytes, Vec<i64>)>) -> Self {
        let mut request = Admitted { rows: 1, ..Admitted::default() };
        for (bytes, shape) in tensors {
            request.inputs.push(bytes);
            request.shapes.extend(shape);
        }
        request
    }

    /// The request with other elements: `changes` gives the new bytes of each input, in the
    /// engine's order, or `None` for the same bytes. The sizes stay.
    #[must_use]
    pub fn map_inputs<F: Fn(&[u8]) -> Option<Vec<u8>>>(mut self, changes: impl Iterator<Item = F>) -> Self {
        for (data, change) in self.inputs.iter_mut().zip(changes) {
            *data = change(data).map_or_else(|| data.clone(), Bytes::from);
        }
        self
    }

    /// Bytes of all inputs.
    pub fn bytes(&self) -> u64 {
        self.inputs.iter().map(|bytes| bytes.len() as u64).sum()
    }

    /// The bytes of an input, by its place in the engine's order; none if there is no such input.
    pub fn input(&self, index: usize) -> &[u8] {
        self.inputs.get(index).map_or(&[], |bytes| bytes)
    }
}

/// An output of a request.
#[derive(Clone, Debug)]
pub struct OutputPart {
    /// Sizes, the batch dimension included.
    pub shape: Vec<i64>,
    /// Elements in the protocol's binary form.
    pub data: Bytes,
}

impl OutputPart {
    /// The place of an output that the model did not give.
    pub fn absent() -> Self {
        OutputPart { shape: vec![-1], data: Bytes::new() }
    }

    /// Whether the model did not give the output. The sizes of real outputs are not negative.
    pub fn is_absent(&self) -> bool {
        self.shape.first().is_some_and(|size| *size < 0)
    }
}

/// The outputs of one request, in signature order.
pub type Outputs = SmallVec<[OutputPart; 2]>;

impl BatchCodec {
    /// Makes the codec of a model with these tensors. `max_batch` 0: the model has no batch
    /// dimension, every request runs alone.
    pub fn new(mut inputs: Vec<TensorBinding>, outputs: Vec<TensorBinding>, max_batch: u32) -> Self {
        inputs.sort_by_key(|input| input.model_index);
        BatchCodec {
            defaults: inputs.iter().map(|_| None).collect(),
            inputs,
            outputs,
            batched: max_batch > 0,
            max_batch: max_batch.max(1),
            model: String::new(),
            input_memory: InputMemory::default(),
            fill: Fill::default(),
            sample: None,
            stand_in: OnceLock::new(),
            passes_on: false,
            is_misfit_told: AtomicBool::new(true),
            takes_requests: false,
        }
    }

    /// The same codec, with the model's name.
    #[must_use]
    pub fn named(self, model: &str) -> Self {
        BatchCodec { model: model.to_owned(), ..self }
    }

    /// The same codec, for inputs that go on to other models. Requests may leave out optional ones.
    #[must_use]
    pub fn passing_on(self) -> Self {
        BatchCodec { passes_on: true, ..self }
    }

    /// The same codec, with the values `defaults`, by name, for inputs that requests leave out. An
    /// optional input without a value is required.
    ///
    /// # Errors
    /// A text, if a value does not have the sizes of its input.
    pub fn with_defaults(mut self, defaults: &BTreeMap<String, DefaultValue>) -> Result<Self, String> {
        for (input, default) in self.inputs.iter().zip(&mut self.defaults) {
            let Some(value) = defaults.get(&input.client.name).filter(|_| input.optional) else { continue };
            let shape = input
                .client_shape(&value.shape)
                .map_err(|reason| format!("the value of the optional input {reason}"))?;
            if self.batched && shape.first() != Some(&1) {
                return Err(format!(
                    "the value of the optional input '{}' has the sizes {shape:?}, so the items of a batch cannot \
                     have one value each; set max_batch_size: 0",
                    input.client.name
                ));
            }
            let shape = shape.iter().skip(usize::from(self.batched)).map(|d| i64::try_from(*d).unwrap_or(i64::MAX));
            *default = Some(LeftOut { shape: shape.collect(), item: value.data.clone() });
        }
        Ok(self)
    }

    /// The same codec, with batches in memory that suits the lanes of `model`.
    #[must_use]
    pub fn for_model(self, model: Arc<dyn Model>) -> Self {
        BatchCodec { input_memory: InputMemory(Some(model)), ..self }
    }

    /// An empty buffer with room for `bytes` bytes of an input.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn input_buffer(&self, bytes: usize) -> Result<Buffer, OutOfMemory> {
        match &self.input_memory.0 {
            None => Buffer::try_with_capacity(bytes),
            Some(model) => model.input_buffer(bytes),
        }
    }

    /// The length to which the model prefers inputs of `length` to be padded.
    pub fn filled_length(&self, length: u32) -> u32 {
        let filled = self.input_memory.0.as_ref().map(|model| model.filled_length(length as usize));
        filled.and_then(|filled| u32::try_from(filled).ok()).unwrap_or(length)
    }

    /// The parts from which another process checks requests as this codec does.
    pub fn parts(&self) -> CodecParts {
        let left_out = |default: &LeftOut| (default.shape.to_vec(), default.item.to_vec());
        CodecParts {
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            defaults: self.defaults.iter().map(|default| default.as_ref().map(left_out)).collect(),
            max_batch: if self.batched { self.max_batch } else { 0 },
            takes_requests: self.takes_requests,
        }
    }

    /// The inputs of a request that fits, as clients would send them, in the engine's order.
    pub fn client_inputs(&self, request: Admitted) -> Vec<OutputPart> {
        let batch = self.batched.then_some(i64::from(request.rows));
        let shapes = self.item_shapes(&request).map(|item| batch.into_iter().chain(item.iter().copied()).collect());
        let shapes: Vec<Vec<i64>> = shapes.collect();
        shapes.into_iter().zip(request.inputs).map(|(shape, data)| OutputPart { shape, data }).collect()
    }

    /// Inputs and outputs as clients see them; the batch dimension is -1.
    pub fn signature(&self) -> Signature {
        let specs = |bindings: &[TensorBinding]| bindings.iter().map(|b| b.client.clone()).collect();
        Signature { inputs: specs(&self.inputs), outputs: specs(&self.outputs) }
    }

    /// The shapes of the model's inputs in service. `longest` bounds the dimensions that vary
    /// beside the batch, if the bound is known.
    pub fn shape_ranges(&self, longest: Option<u32>) -> Vec<ShapeRange> {
        let range = |input: &TensorBinding| {
            let sizes = input.model_dims.iter().enumerate().map(|(axis, size)| match usize::try_from(*size) {
                Ok(size) => (size, Some(size)),
                Err(_) if axis == 0 && input.batched => (1, Some(self.max_batch as usize)),
                Err(_) => (1, longest.map(|length| length as usize)),
            });
            let (least, most) = sizes.unzip();
            ShapeRange { name: input.client.name.clone(), least, most }
        };
        self.inputs.iter().map(range).collect()
    }

    /// The sizes of each input of a request, the batch dimension left out, in the engine's order.
    pub fn item_shapes<'a>(&'a self, request: &'a Admitted) -> impl Iterator<Item = &'a [i64]> {
        self.by_input(&request.shapes).map(|(_, sizes)| sizes)
    }

    /// Each input with its own part of the concatenated sizes.
    fn by_input<'a>(&'a self, shapes: &'a [i64]) -> impl Iterator<Item = (&'a TensorBinding, &'a [i64])> {
        let mut at = 0;
        self.inputs.iter().map(move |binding| {
            let begin = at;
            at += self.item_dims(&binding.client.dims).len();
            (binding, shapes.get(begin..at).unwrap_or(&[]))
        })
    }

    /// The shape in which the engine gets input `index` of a batch of `rows` items of the sizes
    /// `item`.
    pub fn engine_shape(&self, index: usize, rows: usize, item: &[usize]) -> Vec<usize> {
        let batch = self.batched.then_some(rows);
        let shape: Vec<usize> = batch.into_iter().chain(item.iter().copied()).collect();
        let Some(binding) = self.inputs.get(index).filter(|binding| binding.is_reshaped()) else { return shape };
        let wire: SmallVec<[i64; 6]> = shape.iter().map(|d| *d as i64).collect();
        // Admission has checked the shape against the very dims that a reshape starts from.
        binding.model_shape(&wire).unwrap_or(shape)
    }

    /// The shapes in which the engine gets the inputs of a batch of `rows` items of a request's
    /// sizes.
    pub fn engine_shapes<'a>(&'a self, request: &'a Admitted, rows: usize) -> impl Iterator<Item = Vec<usize>> + 'a {
        self.item_shapes(request).enumerate().map(move |(index, item)| {
            let item: SmallVec<[usize; 6]> = item.iter().map(|d| (*d).max(0) as usize).collect();
            self.engine_shape(index, rows, &item)
        })
    }

    /// The sizes of an input that a client gives, the batch dimension left out.
    fn item_dims<'a>(&self, dims: &'a [i64]) -> &'a [i64] {
        dims.get(usize::from(self.batched)..).unwrap_or(&[])
    }

    /// The key of a request: its varying sizes.
    pub fn shape_key(&self, admitted: &Admitted) -> ShapeKey {
        let wanted = self.inputs.iter().flat_map(|input| self.item_dims(&input.client.dims));
        wanted.zip(&admitted.shapes).filter(|(want, _)| **want < 0).map(|(_, size)| *size).collect()
    }

    /// The shape of the requests with this key, without the batch dimension, such as `[128]`; empty: all
    /// requests have one shape.
    pub fn shape_of(&self, key: &[i64]) -> String {
        let mut sizes = key.iter();
        let mut shapes: Vec<String> = Vec::new();
        for input in &self.inputs {
            let dims = self.item_dims(&input.client.dims);
            if dims.iter().any(|size| *size < 0) {
                let size = |wanted: &i64| match (*wanted < 0).then(|| sizes.next()).flatten() {
                    Some(size) => size.to_string(),
                    None => wanted.to_string(),
                };
                let shape = format!("[{}]", dims.iter().map(size).collect::<Vec<_>>().join(","));
                if !shapes.contains(&shape) {
                    shapes.push(shape);
                }
            }
        }
        shapes.join(" ")
    }

    /// Whether requests of one model can differ in [`BatchCodec::shape_key`].
    pub fn has_varying_shapes(&self) -> bool {
        self.inputs.iter().any(|input| self.item_dims(&input.client.dims).iter().any(|d| *d < 0))
    }

    /// Joins requests of one [`ShapeKey`] into the tensors of a batch, in their order.
    ///
    /// # Errors
    /// A text, if there is not enough memory.
    pub fn assemble<'a>(&self, members: impl ExactSizeIterator<Item = &'a Admitted> + Clone) -> Result<State, String> {
        let rows: usize = members.clone().map(|m| m.rows as usize).sum();
        let Some(first) = members.clone().next() else { return Ok(State::default()) };
        let each = self.inputs.iter().zip(self.engine_shapes(first, rows)).enumerate();
        let tensors = each.map(|(index, (binding, shape))| {
            let bytes = members.clone().map(|member| member.input(index).len()).sum();
            let mut data = self.input_buffer(bytes).map_err(|error| error.to_string())?;
            members.clone().for_each(|member| data.extend_from_slice(member.input(index)));
            Ok(Tensor { datatype: binding.datatype(), shape, data })
        });
        Ok(State { tensors: tensors.collect::<Result<_, String>>()? })
    }

    /// Gives each request of a batch its rows of the outputs. `rows` are the members' batch
    /// dimensions.
    ///
    /// # Errors
    /// A text, if the model's outputs do not have a row for each row of the inputs.
    pub fn separate(&self, state: State, rows: &[u32]) -> Result<Vec<Outputs>, String> {
        let total: usize = rows.iter().map(|r| *r as usize).sum();
        let mut members: Vec<Outputs> = rows.iter().map(|_| Outputs::new()).collect();
        // Requests of such a model share no output. Only made-up requests are joined, to be timed.
        if self.takes_requests {
            return Ok(members);
        }
        let mut tensors: Vec<Option<Tensor>> = state.tensors.into_iter().map(Some).collect();
        for binding in &self.outputs {
            let Some(tensor) = tensors.get_mut(binding.model_index).and_then(Option::take) else {
                return Err(format!("the engine gave no output '{}'", binding.client.name));
            };
            let skip = usize::from(self.batched);
            if self.batched && tensor.shape.first() != Some(&total) {
                return Err(format!(
                    "output '{}' has shape {:?} for a batch of {total}: the first dimension is not the batch. Set \
                     max_batch_size to 0 in the model's config.pbtxt",
                    binding.client.name, tensor.shape
                ));
            }
            let fits = fits(&binding.model_dims, &tensor.shape);
            if !fits && !self.is_misfit_told.swap(true, Ordering::Relaxed) {
                self.warn_of_misfit(binding, &tensor.shape);
            }
            let wire: SmallVec<[i64; 6]> = match binding.client_shape(&tensor.shape) {
                Ok(shape) if binding.is_reshaped() => shape.iter().skip(skip).map(|d| *d as i64).collect(),
                // The engine has computed these sizes: they are right even if the file declares
                // others.
                _ => tensor.shape.iter().skip(skip).map(|d| *d as i64).collect(),
            };
            let row_elements = tensor.shape.iter().skip(skip).try_fold(1usize, |n, d| n.checked_mul(*d));
            let row_elements = row_elements
                .ok_or_else(|| format!("output '{}' has shape {:?}: too large", binding.client.name, tensor.shape))?;
            let data = tensor.data.into_bytes();
            let mut begin = 0;
            for (member, its_rows) in members.iter_mut().zip(rows) {
                let elements = row_elements * if self.batched { *its_rows as usize } else { 1 };
                let length = match binding.datatype().size() {
                    Some(size) => elements * size,
                    None => strings_length(&data[begin..], elements)
                        .ok_or_else(|| format!("output '{}' is cut off inside an element", binding.client.name))?,
                };
                if begin + length > data.len() {
                    return Err(format!("output '{}' has fewer bytes than its shape needs", binding.client.name));
                }
                let mut shape = Vec::with_capacity(wire.len() + skip);
                if self.batched {
                    shape.push(i64::from(*its_rows));
                }
                shape.extend_from_slice(&wire);
                member.push(OutputPart { shape, data: data.slice(begin..begin + length) });
                begin += length;
            }
        }
        Ok(members)
    }

    /// The model serves from now on: the log reports the first answer that has other sizes than
    /// declared.
    pub fn begin_service(&self) {
        self.is_misfit_told.store(false, Ordering::Relaxed);
    }

    /// Warns that an output has other sizes than the metadata declare. The caller limits the
    /// warning to once.
    fn warn_of_misfit(&self, output: &TensorBinding, shape: &[usize]) {
        tracing::warn!(
            model = %self.model, output = %output.client.name,
            "the model's metadata declare the sizes {:?} for this output, but the model answered {shape:?}; the \
             server passes such answers on unchanged",
            output.client.dims
        );
    }
}

/// Whether a tensor has sizes that were declared; -1 is any.
fn fits(declared: &[i64], shape: &[usize]) -> bool {
    let is_size = |(declared, size): (&i64, &usize)| *declared < 0 || usize::try_from(*declared) == Ok(*size);
    declared.len() == shape.len() && declared.iter().zip(shape).all(is_size)
}

/// The bytes that the first `elements` length-prefixed elements of `data` take.
fn strings_length(data: &[u8], elements: usize) -> Option<usize> {
    let mut at = 0usize;
    for _ in 0..elements {
        let length = data.get(at..)?.first_chunk::<4>()?;
        at = at.checked_add(4 + u32::from_le_bytes(*length) as usize)?;
        if at > data.len() {
            return None;
        }
    }
    Some(at)
}

#[cfg(test)]
mod tests;
