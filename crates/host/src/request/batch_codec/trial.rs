//! Made-up requests, which a model is tried, timed and warmed up with.

use downbeat_engine::{Buffer, Fill};
use downbeat_repository::TensorBinding;
use smallvec::SmallVec;

use super::{Admitted, BatchCodec, LARGEST_TRIAL, PROFILED_LENGTH, ShapeKey};

impl BatchCodec {
    /// The same codec, for a model that answers requests of these values
    /// (`find_answer` in `downbeat_models`).
    #[must_use]
    pub fn with_fill(self, fill: Fill) -> Self {
        BatchCodec { fill, ..self }
    }

    /// The same codec, for a model that answers this request of one item, which measures it and
    /// warms it up.
    #[must_use]
    pub fn with_sample(self, sample: Admitted) -> Self {
        BatchCodec { sample: Some(sample), ..self }
    }

    /// The sizes of an input's item, with every varying dimension `varying` long.
    fn sizes<'a>(&self, input: &'a TensorBinding, varying: i64) -> impl Iterator<Item = i64> + Clone + use<'a> {
        let dims = input.client.dims.get(usize::from(self.batched)..).unwrap_or(&[]);
        dims.iter().map(move |dim| if *dim < 0 { varying } else { *dim })
    }

    /// Bytes of the inputs of the request that [`BatchCodec::trial`] makes for this length; `None`
    /// if they are more than memory.
    pub fn item_bytes(&self, varying: i64) -> Option<usize> {
        if let Some(sample) = self.sample_of(varying) {
            return usize::try_from(sample.bytes()).ok();
        }
        self.bytes_of(&self.shapes_of(varying))
    }

    /// The sizes of all inputs of an item, every varying dimension `varying` long.
    fn shapes_of(&self, varying: i64) -> SmallVec<[i64; 8]> {
        self.inputs.iter().flat_map(|input| self.sizes(input, varying)).collect()
    }

    /// Bytes that the inputs of one item of these sizes take; `None` if that is more than memory.
    pub(super) fn bytes_of(&self, shapes: &[i64]) -> Option<usize> {
        self.by_input(shapes).try_fold(0usize, |sum, (binding, sizes)| {
            let size = binding.datatype().size().unwrap_or(4);
            let bytes = sizes.iter().try_fold(size, |n, d| n.checked_mul(usize::try_from(*d).ok()?))?;
            sum.checked_add(bytes)
        })
    }

    /// The key of requests whose varying dimensions are all `varying` long.
    pub fn shape_key_of(&self, varying: i64) -> ShapeKey {
        let dims = self.inputs.iter().flat_map(|input| self.item_dims(&input.client.dims));
        dims.filter(|d| **d < 0).map(|_| varying).collect()
    }

    /// The key of requests of the shape that the model is measured with.
    pub fn profiled_key(&self) -> ShapeKey {
        self.sample.as_ref().map_or_else(|| self.shape_key_of(PROFILED_LENGTH), |sample| self.shape_key(sample))
    }

    /// The sample that stands for a request of this length, if the model has one.
    fn sample_of(&self, varying: i64) -> Option<&Admitted> {
        let is_alike = |_: &&Admitted| varying == PROFILED_LENGTH || !self.has_varying_shapes();
        self.sample.as_ref().filter(is_alike)
    }

    /// A request of one item that the model is timed and warmed up with, every varying dimension
    /// `varying` long. Its values are random as far as the model takes them. For
    /// [`PROFILED_LENGTH`] it is the model's sample, if there is one.
    ///
    /// # Errors
    /// A text, if it takes more than [`LARGEST_TRIAL`], or there is not enough memory.
    pub fn trial(&self, varying: i64) -> Result<Admitted, String> {
        self.sample_of(varying).map_or_else(|| self.sample(self.fill, varying), |sample| Ok(sample.clone()))
    }

    /// A request of one item that holds `fill`, every varying dimension `varying` long.
    ///
    /// # Errors
    /// The errors of [`BatchCodec::trial`].
    pub fn sample(&self, fill: Fill, varying: i64) -> Result<Admitted, String> {
        let shapes = self.shapes_of(varying);
        self.bytes_of(&shapes).filter(|bytes| *bytes <= LARGEST_TRIAL).ok_or_else(|| self.too_large(varying))?;
        self.filled(fill, &shapes)
    }

    /// A request of one item of these sizes that holds `fill`.
    pub(super) fn filled(&self, fill: Fill, shapes: &[i64]) -> Result<Admitted, String> {
        let mut inputs = SmallVec::new();
        for (binding, sizes) in self.by_input(shapes) {
            let elements = sizes.iter().product::<i64>().max(0) as usize;
            let bytes = elements * fill.size(binding.datatype());
            let mut data = Buffer::try_with_capacity(bytes).map_err(|error| error.to_string())?;
            fill.write(&binding.client.name, binding.datatype(), elements, &mut data);
            inputs.push(data.into_bytes());
        }
        Ok(Admitted { inputs, shapes: shapes.into(), rows: 1, ..Admitted::default() })
    }

    /// The error that an item of this length is too large to be tried.
    fn too_large(&self, varying: i64) -> String {
        let shape = |input: &TensorBinding| {
            format!("'{}' {:?}", input.client.name, self.sizes(input, varying).collect::<Vec<_>>())
        };
        let shapes: Vec<String> = self.inputs.iter().map(shape).collect();
        let takes = self
            .bytes_of(&self.shapes_of(varying))
            .map_or("more than a machine has".to_owned(), |bytes| bytes.to_string());
        format!(
            "one item of the model's inputs takes {takes} bytes ({}), but a made-up item may take at most \
             {LARGEST_TRIAL}",
            shapes.join(", ")
        )
    }
}
