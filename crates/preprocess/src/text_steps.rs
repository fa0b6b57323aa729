//! Turns a text into one item of each of a model's inputs: tokenised, padded, masked.

use std::panic::{AssertUnwindSafe, catch_unwind};

use downbeat_core::tensor::DataType;
use downbeat_protocol::infer::push_number;
use tokenizers::{Tokenizer, TruncationParams};

use crate::pipeline::Work;
use crate::step::Step;

/// Largest text, bytes: a tokenizer takes some tenths of a second for it.
pub const MAX_TEXT_BYTES: usize = 256 << 10;
/// Largest accepted number of tokens.
const MOST_TOKENS: u32 = 1 << 20;
/// Bytes that a tokenizer holds for a byte of text at its peak: the original and the normalised
/// byte, its origin, and the text of the tokens.
const PEAK_PER_BYTE: u64 = 128;
/// Tokens to pad texts with, if the file defines no padding.
const PADDING: [&str; 3] = ["[PAD]", "<pad>", "<|endoftext|>"];

/// The steps of a model that takes texts, checked.
#[derive(Debug)]
pub(crate) struct TextSteps {
    tokenizer: Tokenizer,
    special_tokens: bool,
    max_length: usize,
    padding: Padding,
    pad_id: u32,
    /// The content of each input that the steps fill, in their order.
    pub columns: Vec<Column>,
}

/// The length that the texts of a request are padded to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Padding {
    /// No padding: the texts must be equally long.
    None,
    /// The length of the longest text.
    Longest,
    /// This number of tokens.
    To(usize),
}

/// The content of an input for each token, with the input's name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Column {
    Ids(String),
    Mask(String),
    Types(String),
}

impl Column {
    /// The name of the model's input.
    pub fn fills(&self) -> &str {
        let (Column::Ids(name) | Column::Mask(name) | Column::Types(name)) = self;
        name
    }
}

/// A text as tokens.
pub(crate) struct Tokens {
    ids: Vec<u32>,
    types: Vec<u32>,
}

/// Calls the tokenizers' library, which panics on some files and texts.
fn without_panic<T>(call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err("the tokenizer's library panicked".to_owned()))
}

fn read_tokenizer(bytes: &[u8]) -> Result<Tokenizer, String> {
    let mut written: serde_json::Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    // The library panics on some decoders instead of refusing them, and no text is decoded here.
    if let Some(fields) = written.as_object_mut() {
        fields.remove("decoder");
    }
    without_panic(|| Tokenizer::from_bytes(written.to_string()).map_err(|error| error.to_string()))
}

impl TextSteps {
    /// Checks the steps, of which the first is `tokenize` with this file.
    pub fn new(steps: &[Step], tokenizer: Option<&[u8]>) -> Result<Self, String> {
        let Some((Step::Tokenize { file, max_length, truncate, special_tokens, fills, .. }, others)) =
            steps.split_first()
        else {
            return Err("the first step is not 'tokenize'".to_owned());
        };
        if !(1..=MOST_TOKENS).contains(max_length) {
            return Err(format!(
                "step 1, 'tokenize': max_length is {max_length}; the value must be from 1 to {MOST_TOKENS}"
            ));
        }
        let shown = file.display();
        let bytes = tokenizer.ok_or_else(|| format!("step 1, 'tokenize': {shown} was not read"))?;
        let mut tokenizer = read_tokenizer(bytes)
            .map_err(|reason| format!("step 1, 'tokenize': {shown} is not a readable tokenizer.json: {reason}"))?;
        let from_file = tokenizer.get_padding().map(|padding| padding.pad_id);
        let pad_id = from_file.or_else(|| PADDING.iter().find_map(|token| tokenizer.token_to_id(token))).unwrap_or(0);
        let (max_length, added) = (*max_length as usize, added_tokens(&tokenizer, *special_tokens));
        if max_length <= added {
            return Err(format!(
                "step 1, 'tokenize': the tokenizer adds {added} tokens to each text; raise max_length ({max_length})"
            ));
        }
        let cut = truncate.then(|| TruncationParams { max_length, ..TruncationParams::default() });
        tokenizer.with_padding(None);
        tokenizer.with_truncation(cut).map_err(|error| format!("step 1, 'tokenize': {error}"))?;
        // Some faults of a file show only when it tokenises a text.
        without_panic(|| tokenizer.encode("a", *special_tokens).map_err(|error| error.to_string()))
            .map_err(|reason| format!("step 1, 'tokenize': {shown} tokenises no text: {reason}"))?;
        let (mut padding, mut columns) = (Padding::None, vec![Column::Ids(fills.clone())]);
        for (index, step) in others.iter().enumerate() {
            let here = |reason: String| format!("step {}, '{}': {reason}", index + 2, step.name());
            match step {
                Step::Pad { .. } if padding != Padding::None => {
                    return Err(here("this step is listed twice".to_owned()));
                }
                Step::Pad { .. } if columns.len() > 1 => {
                    return Err(here("this step must come before 'mask' and 'types'".to_owned()));
                }
                Step::Pad { length: None } => padding = Padding::Longest,
                Step::Pad { length: Some(length) } if (*length as usize) < max_length => {
                    return Err(here(format!("length is {length}, but texts may have {max_length} (max_length)")));
                }
                Step::Pad { length: Some(length) } if *length > MOST_TOKENS => {
                    return Err(here(format!("length is {length}, but at most {MOST_TOKENS} tokens are allowed")));
                }
                Step::Pad { length: Some(length) } => padding = Padding::To(*length as usize),
                Step::Mask { fills } => columns.push(Column::Mask(fills.clone())),
                Step::Types { fills } => columns.push(Column::Types(fills.clone())),
                Step::Tokenize { .. } => return Err(here("only the first step may be 'tokenize'".to_owned())),
                _ => return Err(here("this step is for pictures, but 'tokenize' is for texts".to_owned())),
            }
        }
        Ok(TextSteps { tokenizer, special_tokens: *special_tokens, max_length, padding, pad_id, columns })
    }

    /// The number of tokens of every text, if it is always the same.
    pub fn length(&self) -> Option<usize> {
        match self.padding {
            Padding::To(length) => Some(length),
            _ => None,
        }
    }

    /// Whether an input of this datatype can hold the ids.
    pub fn check_datatype(&self, datatype: DataType) -> Result<(), String> {
        let most = match datatype {
            DataType::Int64 | DataType::Uint64 | DataType::Uint32 => u32::MAX,
            DataType::Int32 => i32::MAX as u32,
            DataType::Uint16 => u32::from(u16::MAX),
            DataType::Int16 => i16::MAX as u32,
            _ => return Err(format!("is {datatype}, but tokens are whole numbers: INT64 or INT32")),
        };
        let vocabulary = self.tokenizer.get_vocab_size(true);
        match vocabulary <= most as usize {
            true => Ok(()),
            false => Err(format!("is {datatype}, too small for the ids of a vocabulary of {vocabulary} tokens")),
        }
    }

    /// The work that a text will take.
    ///
    /// # Errors
    /// In words, if the text is too long.
    pub fn look(&self, bytes: &[u8]) -> Result<Work, String> {
        if bytes.len() > MAX_TEXT_BYTES {
            return Err(format!("the text has {} bytes, but at most {MAX_TEXT_BYTES} are allowed", bytes.len()));
        }
        let length = self.length().unwrap_or(self.max_length) as u64;
        let units = bytes.len() as u64;
        Ok(Work { units: units + length, peak: units * PEAK_PER_BYTE, item: length * 8 * self.columns.len() as u64 })
    }

    /// Tokenises a text.
    ///
    /// # Errors
    /// In words, if the text is not UTF-8, or has too many tokens.
    pub fn run(&self, bytes: &[u8]) -> Result<Tokens, String> {
        let text = str::from_utf8(bytes).map_err(|error| format!("the text is not UTF-8: {error}"))?;
        let encode = || self.tokenizer.encode(text, self.special_tokens).map_err(|error| error.to_string());
        let encoded = without_panic(encode).map_err(|reason| format!("the text cannot be tokenised: {reason}"))?;
        let (ids, types) = (encoded.get_ids().to_vec(), encoded.get_type_ids().to_vec());
        if ids.len() > self.max_length {
            return Err(format!(
                "the text has {} tokens, but the model takes at most {} (truncate = true cuts longer texts)",
                ids.len(),
                self.max_length
            ));
        }
        Ok(Tokens { ids, types })
    }

    /// The number of tokens that the texts of a request are padded to.
    ///
    /// # Errors
    /// In words, if nothing pads the texts and their lengths differ.
    pub fn filled(&self, texts: &[Tokens]) -> Result<usize, String> {
        let lengths = || texts.iter().map(|text| text.ids.len());
        let longest = lengths().max().unwrap_or(0);
        match self.padding {
            Padding::To(length) => Ok(length.max(longest)),
            Padding::Longest => Ok(longest),
            Padding::None if lengths().all(|length| length == longest) => Ok(longest),
            Padding::None => Err(format!(
                "texts of one request have {} to {longest} tokens; send one text in each request, or give the model a \
                 step 'pad'",
                lengths().min().unwrap_or(0)
            )),
        }
    }

    /// Appends the content of an input for a text.
    pub fn write(&self, column: &Column, datatype: DataType, text: &Tokens, filled: usize, data: &mut Vec<u8>) {
        let mut push = |value: u32| push_number(data, datatype, f64::from(value));
        let padding = filled.saturating_sub(text.ids.len());
        match column {
            Column::Ids(_) => {
                text.ids.iter().copied().chain(std::iter::repeat_n(self.pad_id, padding)).for_each(&mut push)
            }
            Column::Mask(_) => {
                text.ids.iter().map(|_| 1).chain(std::iter::repeat_n(0, padding)).for_each(&mut push);
            }
            Column::Types(_) => text.types.iter().copied().chain(std::iter::repeat_n(0, padding)).for_each(&mut push),
        }
    }
}

/// The number of special tokens that are added to each text.
fn added_tokens(tokenizer: &Tokenizer, special_tokens: bool) -> usize {
    use tokenizers::PostProcessor;
    let processor = tokenizer.get_post_processor().filter(|_| special_tokens);
    processor.map_or(0, |processor| processor.added_tokens(false))
}
