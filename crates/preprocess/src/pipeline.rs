//! All steps of a model: from the input that users fill to the inputs of the model.

use bytes::Bytes;
use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_protocol::{InferTensor, pace};

use crate::picture_steps::PictureSteps;
use crate::recipe::Recipe;
use crate::step::Step;
use crate::text_steps::TextSteps;

/// Least bytes that an item counts for in [`pace::step`]. Other work may go first before each item.
const STEP: u64 = 128 << 10;

/// All steps of a model: from the input that users fill to the inputs of the model.
///
/// The users' input is of datatype BYTES, with an item for each picture or text. A request that has
/// it leaves out the model's inputs that the steps fill.
#[derive(Debug)]
pub struct Pipeline {
    input: String,
    steps: Steps,
    /// The model's inputs that the steps fill, in the order of the steps.
    fills: Vec<TensorSpec>,
    batched: bool,
}

#[derive(Debug)]
enum Steps {
    Picture(Box<PictureSteps>),
    Text(Box<TextSteps>),
}

/// The kind of an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Media {
    /// An encoded picture.
    Picture,
    /// A text.
    Text,
}

impl Media {
    /// The accepted media types, divided by commas.
    pub fn types(self) -> &'static str {
        match self {
            Media::Picture => "image/jpeg, image/png",
            Media::Text => "text/plain",
        }
    }
}

/// The work that the items of a request take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// The unit that time grows with: pixels, or bytes of text.
    pub units: u64,
    /// Most bytes held while an item is worked on.
    pub peak: u64,
    /// Most bytes of the result.
    pub item: u64,
}

impl Work {
    /// Most bytes that are held in all.
    pub fn bytes(&self) -> u64 {
        self.peak.saturating_add(self.item)
    }

    /// Adds an item that is worked on after these.
    fn and(self, other: Work) -> Work {
        Work {
            units: self.units.saturating_add(other.units),
            peak: self.peak.max(other.peak),
            item: self.item.saturating_add(other.item),
        }
    }
}

/// The reason why a request's items cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PreprocessError {
    /// An item is wrong.
    #[error("item {index} of input '{input}': {reason}")]
    Item {
        /// The input.
        input: String,
        /// The item's place, from 0.
        index: usize,
        /// The error in words.
        reason: String,
    },
    /// The items do not go together, or there are none.
    #[error("input '{input}': {reason}")]
    Items {
        /// The input.
        input: String,
        /// The error in words.
        reason: String,
    },
}

impl Pipeline {
    /// Checks the steps of a model against its inputs, as clients see them. With `batched`, the
    /// first dimension of each input is the batch. No picture may have more than `most_pixels`.
    ///
    /// # Errors
    /// In words: the wrong step, or why its result does not fit the model.
    pub fn new(
        Recipe { steps, tokenizer }: &Recipe,
        inputs: &[TensorSpec],
        batched: bool,
        most_pixels: u64,
    ) -> Result<Self, String> {
        let names = || inputs.iter().map(|input| format!("'{}'", input.name)).collect::<Vec<_>>().join(", ");
        let named = |name: &str| {
            let found = inputs.iter().find(|input| input.name == name);
            found.ok_or_else(|| format!("the model has no input '{name}' (fills); its inputs are {}", names()))
        };
        let pipeline = match steps.split_first() {
            Some((Step::Decode { color, input, fills }, others)) => {
                let filled = match (fills, inputs) {
                    (Some(name), _) => named(name)?,
                    (None, [only]) => only,
                    (None, _) => {
                        return Err(format!(
                            "step 1, 'decode': the model has several inputs; name the one for the picture with \
                             `fills`: {}",
                            names()
                        ));
                    }
                };
                let steps = PictureSteps::new(*color, others, filled.datatype, most_pixels)?;
                let steps = Steps::Picture(Box::new(steps));
                Pipeline { input: input.clone(), steps, fills: vec![filled.clone()], batched }
            }
            Some((Step::Tokenize { input, .. }, _)) => {
                let text = TextSteps::new(steps, tokenizer.as_deref())?;
                let fills = text.columns.iter().map(|column| named(column.fills()).cloned());
                let fills: Vec<TensorSpec> = fills.collect::<Result<_, _>>()?;
                for (place, filled) in fills.iter().enumerate() {
                    if fills.iter().take(place).any(|before| before.name == filled.name) {
                        return Err(format!("two steps fill the input '{}'", filled.name));
                    }
                    let checked = text.check_datatype(filled.datatype);
                    checked.map_err(|reason| format!("the model's input '{}' {reason}", filled.name))?;
                }
                Pipeline { input: input.clone(), steps: Steps::Text(Box::new(text)), fills, batched }
            }
            Some((step, _)) => {
                return Err(format!(
                    "step 1, '{}': the first step must be 'decode' (pictures) or 'tokenize' (texts)",
                    step.name()
                ));
            }
            None => return Err("there are no steps".to_owned()),
        };
        if inputs.iter().any(|spec| spec.name == pipeline.input && spec.datatype == DataType::Bytes) {
            let name = &pipeline.input;
            return Err(format!(
                "the model has an input '{name}' of datatype BYTES itself; give the step another `input`"
            ));
        }
        pipeline.check_dims()?;
        Ok(pipeline)
    }

    /// The input that users fill, of datatype BYTES.
    pub fn input(&self) -> &str {
        &self.input
    }

    /// The kind of the input's items.
    pub fn media(&self) -> Media {
        match self.steps {
            Steps::Picture(_) => Media::Picture,
            Steps::Text(_) => Media::Text,
        }
    }

    /// The names of the model's inputs that the steps fill.
    pub fn fills(&self) -> impl Iterator<Item = &str> {
        self.fills.iter().map(|input| input.name.as_str())
    }

    /// The sizes of an item; -1 where a size varies.
    fn item_dims(&self) -> Vec<i64> {
        match &self.steps {
            Steps::Picture(steps) => steps.item_dims(),
            Steps::Text(steps) => vec![steps.length().map_or(-1, |length| length as i64)],
        }
    }

    /// Checks that the result of the steps fits the model's inputs.
    fn check_dims(&self) -> Result<(), String> {
        let item = self.item_dims();
        for filled in &self.fills {
            let wanted = self.wanted(filled, item.len());
            // A varying size could fit by chance, but a model that takes one size is better refused
            // now.
            let fits =
                wanted.len() == item.len() && wanted.iter().zip(&item).all(|(want, got)| *want < 0 || want == got);
            if !fits {
                let batch = if self.batched { ", the batch left out" } else { "" };
                return Err(format!(
                    "the steps give {item:?}, but the model's input '{}' is {} {wanted:?}{batch} (-1: any size)",
                    filled.name, filled.datatype
                ));
            }
        }
        Ok(())
    }

    /// The sizes of one item that an input expects.
    fn wanted<'a>(&self, filled: &'a TensorSpec, rank: usize) -> &'a [i64] {
        match filled.dims.split_first() {
            Some((_, item)) if self.batched => item,
            // A batch dimension that the model does not name as one.
            Some((-1 | 1, item)) if item.len() == rank => item,
            _ => &filled.dims,
        }
    }

    fn wrong(&self, index: usize, reason: String) -> PreprocessError {
        PreprocessError::Item { input: self.input.clone(), index, reason }
    }

    /// The work that a request's items will take, by their headers and lengths.
    ///
    /// # Errors
    /// If there are no items, or the steps do not accept an item.
    pub fn look(&self, items: &[Bytes]) -> Result<Work, PreprocessError> {
        let mut work = Work::default();
        if items.is_empty() {
            let reason = "the input has no items; expected at least one".to_owned();
            return Err(PreprocessError::Items { input: self.input.clone(), reason });
        }
        for (index, item) in items.iter().enumerate() {
            let its = match &self.steps {
                Steps::Picture(steps) => steps.look(item),
                Steps::Text(steps) => steps.look(item),
            };
            work = work.and(its.map_err(|reason| self.wrong(index, reason))?);
        }
        Ok(work)
    }

    /// Makes the model's inputs of items that [`Pipeline::look`] has accepted, in steps
    /// ([`pace::step`]).
    ///
    /// # Errors
    /// If an item cannot be read, or the items do not go together.
    pub fn run(&self, items: &[Bytes]) -> Result<Vec<InferTensor>, PreprocessError> {
        match &self.steps {
            Steps::Picture(steps) => self.run_pictures(steps, items),
            Steps::Text(steps) => self.run_texts(steps, items),
        }
    }

    fn run_pictures(&self, steps: &PictureSteps, items: &[Bytes]) -> Result<Vec<InferTensor>, PreprocessError> {
        let (mut data, mut shape): (Vec<u8>, Option<Vec<i64>>) = (Vec::new(), None);
        for (index, item) in items.iter().enumerate() {
            pace::step(STEP);
            let its = steps.run(item, &mut data).map_err(|reason| self.wrong(index, reason))?;
            let first = shape.get_or_insert_with(|| {
                data.reserve(data.len().saturating_mul(items.len() - 1));
                its.clone()
            });
            if *first != its {
                let reason = format!(
                    "the picture becomes {its:?}, but the pictures before become {first:?}; send pictures of one \
                     size, or give the model a step 'resize'"
                );
                return Err(self.wrong(index, reason));
            }
        }
        let data = vec![Bytes::from(data)];
        Ok(self.tensors(data, items.len(), &shape.unwrap_or_default()))
    }

    fn run_texts(&self, steps: &TextSteps, items: &[Bytes]) -> Result<Vec<InferTensor>, PreprocessError> {
        let mut texts = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            pace::step(STEP);
            texts.push(steps.run(item).map_err(|reason| self.wrong(index, reason))?);
        }
        let alike = |reason| PreprocessError::Items { input: self.input.clone(), reason };
        let filled = steps.filled(&texts).map_err(alike)?;
        let data = steps.columns.iter().zip(&self.fills).map(|(column, spec)| {
            let mut data = Vec::with_capacity(filled * texts.len() * spec.datatype.size().unwrap_or(1));
            texts.iter().for_each(|text| steps.write(column, spec.datatype, text, filled, &mut data));
            Bytes::from(data)
        });
        Ok(self.tensors(data.collect(), items.len(), &[filled as i64]))
    }

    /// Makes the tensors of a request with this number of items.
    fn tensors(&self, data: Vec<Bytes>, items: usize, item: &[i64]) -> Vec<InferTensor> {
        let tensor = |(data, spec): (Bytes, &TensorSpec)| {
            let has_batch = spec.dims.len() > item.len();
            let batch = has_batch.then_some(items as i64);
            InferTensor {
                name: spec.name.clone(),
                datatype: spec.datatype,
                shape: batch.into_iter().chain(item.iter().copied()).collect(),
                parameters: Default::default(),
                data,
            }
        };
        data.into_iter().zip(&self.fills).map(tensor).collect()
    }
}
