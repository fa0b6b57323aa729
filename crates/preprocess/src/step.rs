//! The steps from the users' data to a model's inputs, as they are written.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A step, as it is written: `{ step = "resize", size = 256 }`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// Decodes a JPEG or PNG to pixels. The first step for pictures.
    Decode {
        /// The samples of a pixel.
        #[serde(default)]
        color: Color,
        /// The input of datatype BYTES that clients send pictures in.
        #[serde(default = "image")]
        input: String,
        /// The model's input for the pictures; `None`: its only one.
        fills: Option<String>,
    },
    /// Scales the picture to a size.
    Resize {
        /// One number is the size of the shorter side; the longer one follows in proportion.
        size: Size,
        /// The filter.
        #[serde(default)]
        filter: Filter,
    },
    /// Cuts the picture down to a size about the centre.
    Crop {
        /// One number is the size of both sides.
        size: Size,
    },
    /// `(sample * scale - mean) / std`, by channel.
    Normalize {
        /// The factor for the samples, which are 0 to 255.
        #[serde(default = "per_byte")]
        scale: f64,
        /// One value for each channel, or one for all.
        #[serde(default)]
        mean: Vec<f64>,
        /// One value for each channel, or one for all.
        #[serde(default)]
        std: Vec<f64>,
    },
    /// Chooses the order in which samples lie.
    Layout {
        /// The order.
        order: Order,
    },
    /// Turns a text into ids of tokens. The first step for texts.
    Tokenize {
        /// A `tokenizer.json` of Hugging Face's tokenizers, relative to the model's folder.
        file: PathBuf,
        /// The most tokens of a text, added ones included.
        max_length: u32,
        /// Whether longer texts are cut; otherwise they are refused.
        #[serde(default)]
        truncate: bool,
        /// Whether to add the special tokens of the tokenizer's post-processor.
        #[serde(default = "yes")]
        special_tokens: bool,
        /// The input of datatype BYTES that clients send texts in.
        #[serde(default = "text")]
        input: String,
        /// The model's input for the ids.
        #[serde(default = "input_ids")]
        fills: String,
    },
    /// Makes the texts of a request equally long.
    Pad {
        /// The number of tokens; `None`: as many as the longest text of the request has.
        length: Option<u32>,
    },
    /// Fills an input with 1 for each token and 0 for padding.
    Mask {
        /// The model's input for the mask.
        #[serde(default = "attention_mask")]
        fills: String,
    },
    /// Fills an input with the sequence of each token. A single text is always the first sequence.
    Types {
        /// The model's input for the sequences.
        #[serde(default = "token_type_ids")]
        fills: String,
    },
}

/// Reads steps as they are written in a file, a list of tables.
///
/// # Errors
/// The number of the wrong step and its error.
pub fn read_steps(written: &serde_json::Value) -> Result<Vec<Step>, String> {
    let list = written.as_array().ok_or("expected a list of steps, such as [{ step = \"decode\" }]")?;
    let read = |(index, step): (usize, &serde_json::Value)| {
        Step::deserialize(step).map_err(|error| format!("step {}: {error}", index + 1))
    };
    list.iter().enumerate().map(read).collect()
}

impl Step {
    /// The step's name, as it is written.
    pub fn name(&self) -> &'static str {
        match self {
            Step::Decode { .. } => "decode",
            Step::Resize { .. } => "resize",
            Step::Crop { .. } => "crop",
            Step::Normalize { .. } => "normalize",
            Step::Layout { .. } => "layout",
            Step::Tokenize { .. } => "tokenize",
            Step::Pad { .. } => "pad",
            Step::Mask { .. } => "mask",
            Step::Types { .. } => "types",
        }
    }
}

/// The samples of a pixel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Color {
    /// Red, green, blue.
    #[default]
    Rgb,
    /// Blue, green, red.
    Bgr,
    /// One sample: the brightness by Rec. 601.
    Gray,
}

/// The filter for resizing, by Pillow's names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names are the filters' own")]
pub enum Filter {
    Box,
    #[default]
    Bilinear,
    Bicubic,
    Lanczos,
}

/// A size in pixels.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "size: expected a number of pixels, or [height, width]")]
pub enum Size {
    /// One number; the step defines its meaning.
    One(u32),
    /// Height and width.
    Both([u32; 2]),
}

/// The order in which the samples of a picture lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// A plane for each channel.
    Chw,
    /// The samples of a pixel together.
    Hwc,
    /// Gray without an axis for channels.
    Hw,
}

fn image() -> String {
    "image".to_owned()
}

fn text() -> String {
    "text".to_owned()
}

fn input_ids() -> String {
    "input_ids".to_owned()
}

fn attention_mask() -> String {
    "attention_mask".to_owned()
}

fn token_type_ids() -> String {
    "token_type_ids".to_owned()
}

fn yes() -> bool {
    true
}

fn per_byte() -> f64 {
    1.0 / 255.0
}
