//! The steps from what users have to what a model takes, as they are written.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A step, as it is written: `{ step = "resize", size = 256 }`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// A JPEG or PNG becomes pixels. The first step for pictures.
    Decode {
        /// What a pixel's samples are.
        #[serde(default)]
        color: Color,
        /// The input of datatype BYTES that clients send pictures in.
        #[serde(default = "image")]
        input: String,
        /// The model's input that is made of them; `None`: its only one.
        fills: Option<String>,
    },
    /// Scaled to a size.
    Resize {
        /// A number: of the shorter side, the longer one in proportion.
        size: Size,
        /// How.
        #[serde(default)]
        filter: Filter,
    },
    /// Cut down to a size about the centre.
    Crop {
        /// A number: of both sides.
        size: Size,
    },
    /// `(sample * scale - mean) / std`, by channel.
    Normalize {
        /// Samples are 0 to 255.
        #[serde(default = "per_byte")]
        scale: f64,
        /// One for each channel, or one for all.
        #[serde(default)]
        mean: Vec<f64>,
        /// As `mean`.
        #[serde(default)]
        std: Vec<f64>,
    },
    /// In which order samples lie.
    Layout {
        /// The order.
        order: Order,
    },
    /// A text becomes ids of tokens. The first step for texts.
    Tokenize {
        /// A `tokenizer.json` of Hugging Face's tokenizers, relative to the model's folder.
        file: PathBuf,
        /// The most tokens of a text, with those that are added.
        max_length: u32,
        /// Whether longer texts are cut; else they are refused.
        #[serde(default)]
        truncate: bool,
        /// Whether the tokens are added that its post-processor adds.
        #[serde(default = "yes")]
        special_tokens: bool,
        /// The input of datatype BYTES that clients send texts in.
        #[serde(default = "text")]
        input: String,
        /// The model's input for the ids.
        #[serde(default = "input_ids")]
        fills: String,
    },
    /// Texts of a request become equally long.
    Pad {
        /// So many tokens; `None`: as many as the longest of the request has.
        length: Option<u32>,
    },
    /// 1 where there is a token, 0 where there is padding.
    Mask {
        /// The model's input for it.
        #[serde(default = "attention_mask")]
        fills: String,
    },
    /// The sequence that each token belongs to, which for one text is the first.
    Types {
        /// The model's input for it.
        #[serde(default = "token_type_ids")]
        fills: String,
    },
}

/// Reads steps as they are written in a file, a list of tables.
///
/// # Errors
/// Which step is wrong, and how.
pub fn read_steps(written: &serde_json::Value) -> Result<Vec<Step>, String> {
    let list = written.as_array().ok_or("expected a list of steps, such as [{ step = \"decode\" }]")?;
    let read = |(index, step): (usize, &serde_json::Value)| {
        Step::deserialize(step).map_err(|error| format!("step {}: {error}", index + 1))
    };
    list.iter().enumerate().map(read).collect()
}

impl Step {
    /// Its name, as it is written.
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

/// What the samples of a pixel are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Color {
    /// Red, green, blue.
    #[default]
    Rgb,
    /// Blue, green, red.
    Bgr,
    /// One: the brightness by Rec. 601.
    Gray,
}

/// How a picture is resized, by Pillow's names.
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
    /// One number; what it means the step says.
    One(u32),
    /// Height and width.
    Both([u32; 2]),
}

/// In which order the samples of a picture lie.
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
