//! How requests of one model version are checked, joined into a batch, and separated again.

mod admission;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use downbeat_core::tensor::Signature;
use downbeat_engine::{Buffer, DefaultValue, Fill, Model, OutOfMemory, ShapeRange, State, Tensor};
use downbeat_repository::TensorBinding;
use smallvec::SmallVec;

/// The sizes of the dimensions that vary from request to request, the batch dimension excluded.
/// Only requests with equal keys can share a batch.
pub type ShapeKey = SmallVec<[i64; 4]>;

/// Largest inputs of a batch of our own making, bytes: for what is tried and measured, no request was paid for.
pub const LARGEST_TRIAL: usize = 1 << 30;

/// The length that varying dimensions have while a model is measured. Other lengths start from what this one took,
/// scaled, and learn their own latency in service.
pub const PROFILED_LENGTH: i64 = 32;

/// What the requests of a model version look like on the wire, and what its engine wants instead.
#[derive(Debug)]
pub struct BatchCodec {
    /// In the engine's order.
    pub inputs: Vec<TensorBinding>,
    /// In the configuration's order.
    pub outputs: Vec<TensorBinding>,
    /// For each input, what it is where a request leaves it out; `None`: no request may.
    defaults: Vec<Option<LeftOut>>,
    /// Whether the first dimension of every tensor is the batch.
    pub batched: bool,
    /// The most items of a batch.
    pub max_batch: u32,
    input_memory: InputMemory,
    /// What requests of our own making hold.
    fill: Fill,
}

/// An input that a request left out: of each of its items, the same.
#[derive(Debug)]
struct LeftOut {
    /// Sizes as clients see them, the batch dimension left out.
    shape: SmallVec<[i64; 4]>,
    /// The elements of one item.
    item: Bytes,
}

/// Where batches are assembled: in the memory that a model's lanes want, or in plain memory.
#[derive(Default)]
struct InputMemory(Option<Arc<dyn Model>>);

impl std::fmt::Debug for InputMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "the engine's" } else { "plain" })
    }
}

/// A request that fits its model.
#[derive(Debug, Default)]
pub struct Admitted {
    /// The bytes of each input, in the engine's order.
    inputs: SmallVec<[Bytes; 2]>,
    /// The shape of each input without the batch dimension, one after another.
    shapes: SmallVec<[i64; 8]>,
    /// Items: the size of the batch dimension (1 if the model has none).
    pub rows: u32,
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

    /// Bytes of all inputs.
    pub fn bytes(&self) -> u64 {
        self.inputs.iter().map(|bytes| bytes.len() as u64).sum()
    }

    /// The bytes of an input, by its place in the engine's order; none if there is no such input.
    pub fn input(&self, index: usize) -> &[u8] {
        self.inputs.get(index).map_or(&[], |bytes| bytes)
    }
}

/// One output of one request.
#[derive(Clone, Debug)]
pub struct OutputPart {
    /// Sizes, the batch dimension included.
    pub shape: Vec<i64>,
    /// Elements in the protocol's binary form.
    pub data: Bytes,
}

/// The outputs of one request, in signature order.
pub type Outputs = SmallVec<[OutputPart; 2]>;

impl BatchCodec {
    /// That of a model with these tensors. `max_batch` 0: the model has no batch dimension, every request runs
    /// alone.
    pub fn new(mut inputs: Vec<TensorBinding>, outputs: Vec<TensorBinding>, max_batch: u32) -> Self {
        inputs.sort_by_key(|input| input.model_index);
        BatchCodec {
            defaults: inputs.iter().map(|_| None).collect(),
            inputs,
            outputs,
            batched: max_batch > 0,
            max_batch: max_batch.max(1),
            input_memory: InputMemory::default(),
            fill: Fill::default(),
        }
    }

    /// The same, for a model that answers requests that hold this ([`crate::warm_up::find_answer`]).
    #[must_use]
    pub fn with_fill(self, fill: Fill) -> Self {
        BatchCodec { fill, ..self }
    }

    /// The same, with requests that may leave inputs out, which then are `defaults`, by name. An optional input that has none is required.
    ///
    /// # Errors
    /// In words, if a value does not have the sizes of its input.
    pub fn with_defaults(mut self, defaults: &BTreeMap<String, DefaultValue>) -> Result<Self, String> {
        for (input, default) in self.inputs.iter().zip(&mut self.defaults) {
            let Some(value) = defaults.get(&input.client.name).filter(|_| input.optional) else { continue };
            let shape = input
                .client_shape(&value.shape)
                .map_err(|reason| format!("the value of the optional input {reason}"))?;
            if self.batched && shape.first() != Some(&1) {
                return Err(format!(
                    "the value of the optional input '{}' has the sizes {shape:?}, of which each item of a batch cannot have one; set \
                     max_batch_size: 0",
                    input.client.name
                ));
            }
            let shape = shape.iter().skip(usize::from(self.batched)).map(|d| i64::try_from(*d).unwrap_or(i64::MAX));
            *default = Some(LeftOut { shape: shape.collect(), item: value.data.clone() });
        }
        Ok(self)
    }

    /// The same, with batches in memory that suits the lanes of `model`.
    #[must_use]
    pub fn for_model(self, model: Arc<dyn Model>) -> Self {
        BatchCodec { input_memory: InputMemory(Some(model)), ..self }
    }

    /// An empty buffer with room for `bytes` bytes of an input.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn input_buffer(&self, bytes: usize) -> Result<Buffer, OutOfMemory> {
        match &self.input_memory.0 {
            None => Buffer::try_with_capacity(bytes),
            Some(model) => model.input_buffer(bytes),
        }
    }

    /// To what length its model would have inputs filled up that are padded anyway.
    pub fn filled_length(&self, length: u32) -> u32 {
        let filled = self.input_memory.0.as_ref().map(|model| model.filled_length(length as usize));
        filled.and_then(|filled| u32::try_from(filled).ok()).unwrap_or(length)
    }

    /// Inputs and outputs as clients see them; the batch dimension is -1.
    pub fn signature(&self) -> Signature {
        let specs = |bindings: &[TensorBinding]| bindings.iter().map(|b| b.client.clone()).collect();
        Signature { inputs: specs(&self.inputs), outputs: specs(&self.outputs) }
    }

    /// The shapes that the model's inputs have in service; `longest`: what varies beside the batch is at most so long, where that is known.
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
        let mut at = 0;
        self.inputs.iter().map(move |binding| {
            let begin = at;
            at += self.item_dims(&binding.client.dims).len();
            request.shapes.get(begin..at).unwrap_or(&[])
        })
    }

    /// The shape in which the engine gets input `index` of a batch of `rows` items of the sizes `item`.
    pub fn engine_shape(&self, index: usize, rows: usize, item: &[usize]) -> Vec<usize> {
        let batch = self.batched.then_some(rows);
        let shape: Vec<usize> = batch.into_iter().chain(item.iter().copied()).collect();
        let Some(binding) = self.inputs.get(index).filter(|binding| binding.is_reshaped()) else { return shape };
        let wire: SmallVec<[i64; 6]> = shape.iter().map(|d| *d as i64).collect();
        // Admission has checked the shape against the very dims that a reshape starts from.
        binding.model_shape(&wire).unwrap_or(shape)
    }

    /// The shapes in which the engine gets the inputs of a batch of `rows` items of a request's sizes.
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

    /// The key of a request: the sizes of what varies.
    pub fn shape_key(&self, admitted: &Admitted) -> ShapeKey {
        let mut key = ShapeKey::new();
        let mut at = 0;
        for binding in &self.inputs {
            for want in self.item_dims(&binding.client.dims) {
                if *want < 0 {
                    key.push(admitted.shapes.get(at).copied().unwrap_or(0));
                }
                at += 1;
            }
        }
        key
    }

    /// Whether requests of one model can differ in [`BatchCodec::shape_key`].
    pub fn has_varying_shapes(&self) -> bool {
        self.inputs.iter().any(|input| self.item_dims(&input.client.dims).iter().any(|d| *d < 0))
    }

    /// Bytes that the inputs of one item take, every varying dimension `varying` long; `None` if that is more than memory.
    pub fn item_bytes(&self, varying: i64) -> Option<usize> {
        self.inputs.iter().try_fold(0usize, |sum, binding| {
            let dims = self.item_dims(&binding.client.dims).iter().map(|d| if *d < 0 { varying } else { *d });
            let size = binding.datatype().size().unwrap_or(4);
            let bytes = dims.into_iter().try_fold(size, |n, d| n.checked_mul(usize::try_from(d).ok()?))?;
            sum.checked_add(bytes)
        })
    }

    /// The key of requests whose varying dimensions are all `varying` long.
    pub fn shape_key_of(&self, varying: i64) -> ShapeKey {
        let dims = self.inputs.iter().flat_map(|input| self.item_dims(&input.client.dims));
        dims.filter(|d| **d < 0).map(|_| varying).collect()
    }

    /// A request of one item that the model is timed and warmed up with, every varying dimension `varying` long: random as far as the model takes that.
    ///
    /// # Errors
    /// In words, if it takes more than [`LARGEST_TRIAL`], or there is no memory for it.
    pub fn trial(&self, varying: i64) -> Result<Admitted, String> {
        self.sample(self.fill, varying)
    }

    /// A request of one item that holds `fill`, every varying dimension `varying` long.
    ///
    /// # Errors
    /// As [`BatchCodec::trial`].
    pub(crate) fn sample(&self, fill: Fill, varying: i64) -> Result<Admitted, String> {
        self.item_bytes(varying).filter(|bytes| *bytes <= LARGEST_TRIAL).ok_or_else(|| self.too_large(varying))?;
        let mut inputs = SmallVec::new();
        let mut shapes = SmallVec::new();
        for binding in &self.inputs {
            let dims = self.item_dims(&binding.client.dims).iter().map(|d| if *d < 0 { varying } else { *d });
            let elements = dims.clone().product::<i64>().max(0) as usize;
            let bytes = elements * fill.size(binding.datatype());
            let mut data = Buffer::try_with_capacity(bytes).map_err(|error| error.to_string())?;
            fill.write(&binding.client.name, binding.datatype(), elements, &mut data);
            inputs.push(data.into_bytes());
            shapes.extend(dims);
        }
        Ok(Admitted { inputs, shapes, rows: 1 })
    }

    /// Says that one item of this length is too large to be tried.
    fn too_large(&self, varying: i64) -> String {
        let shapes: Vec<String> = self
            .inputs
            .iter()
            .map(|binding| {
                let dims = self.item_dims(&binding.client.dims).iter().map(|d| if *d < 0 { varying } else { *d });
                format!("'{}' {:?}", binding.client.name, dims.collect::<Vec<_>>())
            })
            .collect();
        let takes = self.item_bytes(varying).map_or("more than a machine has".to_owned(), |bytes| bytes.to_string());
        format!(
            "one item of its inputs takes {takes} bytes ({}), and at most {LARGEST_TRIAL} are taken for one",
            shapes.join(", ")
        )
    }

    /// Joins requests of one [`ShapeKey`] into the tensors of a batch, in their order.
    ///
    /// # Errors
    /// In words, if there is no memory for it.
    pub fn assemble<'a>(&self, members: impl ExactSizeIterator<Item = &'a Admitted> + Clone) -> Result<State, String> {
        let rows: usize = members.clone().map(|m| m.rows as usize).sum();
        let mut tensors = Vec::with_capacity(self.inputs.len());
        let mut at = 0;
        for (index, binding) in self.inputs.iter().enumerate() {
            let bytes: usize = members.clone().map(|m| m.inputs.get(index).map_or(0, Bytes::len)).sum();
            let mut data = self.input_buffer(bytes).map_err(|error| error.to_string())?;
            for member in members.clone() {
                data.extend_from_slice(member.inputs.get(index).map_or(&[], |b| b));
            }
            let rank = self.item_dims(&binding.client.dims).len();
            let mut shape: SmallVec<[i64; 6]> = SmallVec::new();
            if self.batched {
                shape.push(rows as i64);
            }
            if let Some(first) = members.clone().next() {
                shape.extend_from_slice(first.shapes.get(at..at + rank).unwrap_or(&[]));
            }
            at += rank;
            let as_is = || shape.iter().map(|d| *d as usize).collect();
            // Admission has checked the shape against the very dims that a reshape starts from.
            let shape =
                if binding.is_reshaped() { binding.model_shape(&shape).unwrap_or_else(|_| as_is()) } else { as_is() };
            tensors.push(Tensor { datatype: binding.datatype(), shape, data });
        }
        Ok(State { tensors })
    }

    /// Gives each request of a batch its rows of the outputs. `rows` are the members' batch dimensions.
    ///
    /// # Errors
    /// In words, if the model's outputs do not have a row for each row of the inputs.
    pub fn separate(&self, state: State, rows: &[u32]) -> Result<Vec<Outputs>, String> {
        let total: usize = rows.iter().map(|r| *r as usize).sum();
        let mut members: Vec<Outputs> = rows.iter().map(|_| Outputs::new()).collect();
        let mut tensors: Vec<Option<Tensor>> = state.tensors.into_iter().map(Some).collect();
        for binding in &self.outputs {
            let Some(tensor) = tensors.get_mut(binding.model_index).and_then(Option::take) else {
                return Err(format!("the engine gave no output '{}'", binding.client.name));
            };
            let skip = usize::from(self.batched);
            if self.batched && tensor.shape.first() != Some(&total) {
                return Err(format!(
                    "output '{}' has shape {:?} for a batch of {total}: its first dimension is not the batch. Set \
                     max_batch_size to 0 in the model's config.pbtxt",
                    binding.client.name, tensor.shape
                ));
            }
            let wire: SmallVec<[i64; 6]> = if binding.is_reshaped() {
                binding.client_shape(&tensor.shape)?.iter().skip(skip).map(|d| *d as i64).collect()
            } else {
                tensor.shape.iter().skip(skip).map(|d| *d as i64).collect()
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
                    return Err(format!("output '{}' has fewer bytes than its shape says", binding.client.name));
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
mod tests {
    use downbeat_core::tensor::{DataType, TensorSpec};
    use downbeat_protocol::{InferRequest, InferTensor};
    use proptest::prelude::*;

    use super::*;

    fn binding(name: &str, datatype: DataType, dims: &[i64]) -> TensorBinding {
        TensorBinding {
            client: TensorSpec { name: name.to_owned(), datatype, dims: dims.to_vec() },
            model_index: 0,
            model_dims: dims.to_vec(),
            labels: [].into(),
            batched: true,
            optional: false,
        }
    }

    fn codec() -> BatchCodec {
        let mut text = binding("text", DataType::Bytes, &[-1, -1]);
        text.model_index = 1;
        // The configuration's order is not the engine's.
        BatchCodec::new(vec![text, binding("x", DataType::Int16, &[-1, 2])], vec![], 8)
    }

    fn input(name: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferTensor {
        InferTensor {
            name: name.to_owned(),
            datatype,
            shape: shape.to_vec(),
            parameters: Default::default(),
            data: data.into(),
        }
    }

    fn strings(elements: &[&[u8]]) -> Vec<u8> {
        elements.iter().flat_map(|e| [&(e.len() as u32).to_le_bytes()[..], e].concat()).collect()
    }

    fn request(inputs: Vec<InferTensor>) -> InferRequest {
        InferRequest { model_name: "m".to_owned(), inputs, ..Default::default() }
    }

    fn good() -> Vec<InferTensor> {
        vec![
            input("text", DataType::Bytes, &[2, 1], strings(&[b"a", b""])),
            input("x", DataType::Int16, &[2, 2], vec![1; 8]),
        ]
    }

    /// Sizes that the configuration fixes are not those that vary in the file.
    #[test]
    fn the_shapes_in_service_are_bounded_by_the_largest_batch_and_the_longest_request() {
        let (mut table, image) =
            (binding("table", DataType::Fp32, &[-1]), binding("image", DataType::Fp32, &[-1, 3, 64, 64]));
        table.batched = false;
        let codec = BatchCodec::new(vec![binding("ids", DataType::Int64, &[-1, -1]), image, table], vec![], 8);
        let range = |name: &str, least: &[usize], most: &[Option<usize>]| ShapeRange {
            name: name.to_owned(),
            least: least.into(),
            most: most.into(),
        };
        let image = range("image", &[1, 3, 64, 64], &[Some(8), Some(3), Some(64), Some(64)]);
        let of = |longest: Option<usize>| {
            vec![range("ids", &[1, 1], &[Some(8), longest]), image.clone(), range("table", &[1], &[longest])]
        };
        assert_eq!(codec.shape_ranges(Some(128)), of(Some(128)));
        assert_eq!(codec.shape_ranges(None), of(None));
    }

    #[test]
    fn a_request_that_does_not_fit_is_told_what_was_expected() {
        type Change = fn(&mut Vec<InferTensor>);
        let cases: [(Change, &str); 9] = [
            (|i| i[1].name = "y".into(), "unexpected inference input 'y' for model 'm'; its inputs are ['x','text']"),
            (
                |i| i.truncate(1),
                "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['text'], but missing required input(s) ['x']. Please provide all required input(s).",
            ),
            (
                |i| i[1].datatype = DataType::Fp32,
                "inference input 'x' data-type is 'FP32', but model 'm' expects 'INT16'",
            ),
            (
                |i| i[1].shape = vec![2, 3],
                "unexpected shape for input 'x' for model 'm'. Expected [-1,2], got [2,3]. (-1: any size; the first dimension is the batch, at least 1)",
            ),
            (
                |i| i[1].shape = vec![0, 2],
                "unexpected shape for input 'x' for model 'm'. Expected [-1,2], got [0,2]. (-1: any size; the first dimension is the batch, at least 1)",
            ),
            (
                |i| i[1].data = vec![0; 7].into(),
                "input byte size mismatch for input 'x' for model 'm'. Expected 8, got 7 (shape [2,2] of INT16)",
            ),
            (
                |i| i[0].shape = vec![1, 2],
                "input 'text' batch size does not match other inputs for 'm': it is 1, that of another input 2",
            ),
            (
                |i| i[0].data = vec![9, 0, 0, 0, 1].into(),
                "expected 2 string elements for inference input 'text' for model 'm', got data that end inside an element (shape [2,1]; each element is its length as a little-endian 32-bit number, then its bytes)",
            ),
            (
                |i| i[0].shape = vec![i64::MAX, i64::MAX],
                "input byte size mismatch for input 'text' for model 'm'. Expected a shape with fewer elements, got 9 (shape [9223372036854775807,9223372036854775807] of BYTES)",
            ),
        ];
        for (change, message) in cases {
            let mut inputs = good();
            change(&mut inputs);
            let error = codec().admit(&mut request(inputs)).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
        let large =
            vec![input("text", DataType::Bytes, &[9, 0], vec![]), input("x", DataType::Int16, &[9, 2], vec![0; 36])];
        let error = codec().admit(&mut request(large)).unwrap_err();
        assert!(error.to_string().contains("inference request batch-size must be <= 8 for 'm'"), "{error}");
        assert_eq!(codec().admit(&mut request(good())).unwrap().rows, 2);
    }

    #[test]
    fn an_optional_input_that_is_left_out_has_its_value_in_each_item() {
        let mut x = binding("x", DataType::Int16, &[-1, 2]);
        x.optional = true;
        let mut text = binding("text", DataType::Bytes, &[-1, -1]);
        text.model_index = 1;
        let value = |shape: &[usize]| {
            let value = DefaultValue { shape: shape.to_vec(), data: vec![1, 0, 2, 0].into() };
            BTreeMap::from([("x".to_owned(), value)])
        };
        let codec = || BatchCodec::new(vec![x.clone(), text.clone()], vec![], 8);
        assert!(codec().with_defaults(&value(&[2, 2])).unwrap_err().contains("set max_batch_size: 0"));
        assert!(codec().with_defaults(&value(&[1, 3])).unwrap_err().contains("'x' should have shape [-1,2]"));
        let codec = codec().with_defaults(&value(&[1, 2])).unwrap();
        let only_text = || vec![input("text", DataType::Bytes, &[2, 1], strings(&[b"a", b""]))];
        let left_out = codec.admit(&mut request(only_text())).unwrap();
        assert_eq!((left_out.rows, &left_out.inputs[0][..]), (2, &[1, 0, 2, 0, 1, 0, 2, 0][..]));
        let sent = codec.admit(&mut request(good())).unwrap();
        assert_eq!(&sent.inputs[0][..], [1; 8]);
        assert_eq!(codec.shape_key(&left_out), codec.shape_key(&sent), "they share batches");
        let told = |inputs| codec.admit(&mut request(inputs)).unwrap_err().to_string();
        assert!(told(vec![]).starts_with("expected number of inputs between 1 and 2 but got 0 inputs for model 'm'"));
        assert!(told(vec![only_text().remove(0), only_text().remove(0)]).starts_with("expected number of inputs"));
    }

    #[test]
    fn requests_of_different_shapes_have_different_keys() {
        let key = |words: i64, data: Vec<u8>| {
            let mut inputs = good();
            inputs[0] = input("text", DataType::Bytes, &[2, words], data);
            codec().shape_key(&codec().admit(&mut request(inputs)).unwrap())
        };
        assert_eq!(key(1, strings(&[b"a", b"b"])), key(1, strings(&[b"longer", b""])));
        assert_ne!(key(1, strings(&[b"a", b"b"])), key(2, strings(&[b"a", b"b", b"c", b"d"])));
    }

    proptest! {
        /// What goes into a batch comes out of it, each request its own rows.
        #[test]
        fn a_batch_separates_into_what_it_was_made_of(
            members in prop::collection::vec(prop::collection::vec((any::<[i16; 2]>(), ".{0,5}"), 1..4), 1..6)
        ) {
            let mut text = binding("text", DataType::Bytes, &[-1, 1]);
            text.model_index = 1;
            let both = vec![binding("x", DataType::Int16, &[-1, 2]), text];
            let codec = BatchCodec::new(both.clone(), both, 64);
            let admitted: Vec<Admitted> = members
                .iter()
                .map(|rows| {
                    let numbers = rows.iter().flat_map(|(x, _)| x.iter().flat_map(|v| v.to_le_bytes())).collect();
                    let words: Vec<&[u8]> = rows.iter().map(|(_, word)| word.as_bytes()).collect();
                    let n = rows.len() as i64;
                    codec.admit(&mut request(vec![
                        input("x", DataType::Int16, &[n, 2], numbers),
                        input("text", DataType::Bytes, &[n, 1], strings(&words)),
                    ])).unwrap()
                })
                .collect();
            let rows: Vec<u32> = admitted.iter().map(|a| a.rows).collect();
            let state = codec.assemble(admitted.iter()).unwrap();
            prop_assert_eq!(&state.tensors[0].shape, &vec![rows.iter().sum::<u32>() as usize, 2]);
            let outputs = codec.separate(state, &rows).unwrap();
            for (given, got) in admitted.iter().zip(&outputs) {
                prop_assert_eq!(&given.inputs[0], &got[0].data);
                prop_assert_eq!(&given.inputs[1], &got[1].data);
                prop_assert_eq!(&got[0].shape, &vec![i64::from(given.rows), 2]);
            }
        }
    }
}
