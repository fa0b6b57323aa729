//! The inputs that a model wants, from the metadata and the configuration of its server.

use std::fmt;

use anyhow::{Context, bail};
use downbeat_core::tensor::DataType;
use downbeat_protocol::http::{ModelMetadataBody, TensorMetadataBody};
use downbeat_repository::did_you_mean;
use serde_json::Value;

/// The inputs that a model wants.
#[derive(Debug)]
pub struct Wanted {
    /// The model's name.
    pub model: String,
    /// The model's own inputs.
    pub inputs: Vec<WantedInput>,
    /// The input for encoded pictures or texts, if the server has steps for such an input.
    pub media: Option<MediaInput>,
    /// How many rows a request may have.
    pub rows: Rows,
    /// The conversion of a picture's samples that the configuration gives: scale and offset.
    pub pixels: Option<(f64, f64)>,
    /// The model's outputs.
    pub outputs: Vec<WantedInput>,
    /// The outputs that have labels.
    pub labelled: Vec<String>,
}

/// An input or output of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedInput {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub datatype: DataType,
    /// The sizes. The first one may count rows; -1 stands for any size.
    pub shape: Vec<i64>,
    /// Whether a request may leave the input out.
    pub optional: bool,
    /// Whether the first dimension counts rows.
    pub has_rows: bool,
}

/// An input of datatype BYTES that the server makes into inputs of the model.
#[derive(Debug)]
pub struct MediaInput {
    /// The input, of shape [-1].
    pub input: WantedInput,
    /// The media types, divided by commas.
    types: String,
    /// The model's inputs that the server fills.
    pub fills: Vec<String>,
}

impl MediaInput {
    /// Whether the input takes this kind of media: `image/` or `text/`.
    pub fn takes(&self, kind: &str) -> bool {
        self.types.contains(kind)
    }
}

/// How many rows, which are independent of each other, a request may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// The first dimension counts rows, at most so many.
    UpTo(usize),
    /// The first dimension is always 1: each row takes a request.
    One,
    /// The first dimension varies, and the server does not divide requests.
    Any,
    /// The model has no dimension for rows.
    None,
}

impl Wanted {
    /// Reads the server's answers. A server without the extension for configurations gives `config`
    /// null.
    ///
    /// # Errors
    /// If a datatype is unknown, or a number of the configuration is none.
    pub fn new(model: &str, metadata: &ModelMetadataBody, config: &Value) -> anyhow::Result<Self> {
        let rows = rows(metadata, config);
        let is_optional = |name: &str| {
            let inputs = config.get("input").and_then(Value::as_array);
            let found = inputs.and_then(|all| all.iter().find(|i| i.get("name").and_then(Value::as_str) == Some(name)));
            found.and_then(|input| input.get("optional")).and_then(Value::as_bool).unwrap_or(false)
        };
        let read = |input: &TensorMetadataBody| {
            anyhow::Ok(WantedInput {
                name: input.name.clone(),
                datatype: input.datatype.parse()?,
                shape: input.shape.clone(),
                optional: is_optional(&input.name),
                has_rows: rows != Rows::None,
            })
        };
        Ok(Wanted {
            model: model.to_owned(),
            inputs: metadata.inputs.iter().map(read).collect::<anyhow::Result<_>>()?,
            outputs: metadata.outputs.iter().map(read).collect::<anyhow::Result<_>>()?,
            media: media(config),
            rows,
            pixels: pixels(config)?,
            labelled: labelled(metadata, config),
        })
    }

    /// The input of this name: one of the model, or the input for pictures or texts.
    ///
    /// # Errors
    /// If there is none; the message has the names.
    pub fn named(&self, name: &str) -> anyhow::Result<&WantedInput> {
        let all = || self.inputs.iter().chain(self.media.iter().map(|media| &media.input));
        all().find(|input| input.name == name).with_context(|| {
            let names: Vec<&str> = all().map(|input| input.name.as_str()).collect();
            let hint = did_you_mean(name, names);
            format!("model '{}' has no input '{name}'{hint}; {}", self.model, self.wants())
        })
    }

    /// The only input, for values without a name.
    ///
    /// # Errors
    /// If the model has several inputs.
    pub fn only(&self, shown: &str) -> anyhow::Result<&WantedInput> {
        match self.inputs.as_slice() {
            [input] => Ok(input),
            [] => bail!("model '{}' has no inputs", self.model),
            _ => {
                let needed: Vec<&WantedInput> = self.inputs.iter().filter(|input| !input.optional).collect();
                match needed.as_slice() {
                    [input] => Ok(input),
                    _ => bail!(
                        "{shown} names no input; give each its own value with --input NAME=FILE or --input NAME=VALUE; {}",
                        self.wants()
                    ),
                }
            }
        }
    }

    /// A clause with all inputs: `it wants a FP32 [rows, 4] and b INT64 [rows]`.
    pub fn wants(&self) -> String {
        format!("it wants {}", listed(&self.inputs))
    }

    /// A sentence with the model's inputs and outputs.
    pub fn introduction(&self) -> String {
        let rows = match self.rows {
            Rows::UpTo(most) => format!(", at most {most} rows a request"),
            Rows::One => ", one row a request".to_owned(),
            Rows::Any | Rows::None => String::new(),
        };
        let media = self.media.as_ref().map(|media| {
            let fills = media.fills.join(", ");
            format!(" In place of {fills} it takes {} as {}.", media.types, media.input)
        });
        format!(
            "{} wants {}{rows}. It gives {}.{}",
            self.model,
            listed(&self.inputs),
            listed(&self.outputs),
            media.unwrap_or_default()
        )
    }

    /// A model with these inputs, whose first dimension counts rows.
    #[cfg(test)]
    pub fn of(inputs: &[(&str, DataType, &[i64])]) -> Wanted {
        let input = |(name, datatype, shape): &(&str, DataType, &[i64])| WantedInput {
            name: (*name).into(),
            datatype: *datatype,
            shape: shape.to_vec(),
            optional: false,
            has_rows: true,
        };
        Wanted {
            model: "m".into(),
            inputs: inputs.iter().map(input).collect(),
            media: None,
            rows: Rows::UpTo(8),
            pixels: None,
            outputs: vec![],
            labelled: vec![],
        }
    }
}

/// Inputs or outputs in words.
fn listed(tensors: &[WantedInput]) -> String {
    let tensors: Vec<String> = tensors.iter().map(ToString::to_string).collect();
    match tensors.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => "nothing".to_owned(),
    }
}

impl WantedInput {
    /// The datatype and the sizes, without the name: `FP32 [rows, 4]`. `any` is a size that varies.
    pub fn form(&self) -> String {
        let size = |(place, size): (usize, &i64)| match size {
            _ if place == 0 && self.has_rows => "rows".to_owned(),
            -1 => "any".to_owned(),
            size => size.to_string(),
        };
        let sizes: Vec<String> = self.shape.iter().enumerate().map(size).collect();
        format!("{} [{}]", self.datatype, sizes.join(", "))
    }

    /// The sizes of one row.
    pub fn row(&self) -> &[i64] {
        match self.shape.split_first() {
            Some((_, row)) if self.has_rows => row,
            _ => &self.shape,
        }
    }
}

impl fmt::Display for WantedInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{}", self.name, self.form(), if self.optional { " (optional)" } else { "" })
    }
}

fn rows(metadata: &ModelMetadataBody, config: &Value) -> Rows {
    let all_begin_with = |first: i64| {
        !metadata.inputs.is_empty() && metadata.inputs.iter().all(|input| input.shape.first() == Some(&first))
    };
    let most = config.get("max_batch_size").and_then(Value::as_u64).unwrap_or(0);
    match usize::try_from(most) {
        Ok(most @ 1..) if all_begin_with(-1) => Rows::UpTo(most),
        _ if all_begin_with(-1) => Rows::Any,
        // A vector of one element may be the only row of a model, but as well its only feature.
        _ if all_begin_with(1) && metadata.inputs.iter().all(|input| input.shape.len() > 1) => Rows::One,
        _ => Rows::None,
    }
}

fn parameter<'a>(config: &'a Value, name: &str) -> Option<&'a str> {
    config.pointer(&format!("/parameters/{name}/string_value")).and_then(Value::as_str)
}

fn media(config: &Value) -> Option<MediaInput> {
    let name = parameter(config, "preprocess_input")?;
    let fills = parameter(config, "preprocess_fills").unwrap_or_default();
    let input = WantedInput {
        name: name.to_owned(),
        datatype: DataType::Bytes,
        shape: vec![-1],
        optional: true,
        has_rows: true,
    };
    Some(MediaInput {
        input,
        types: parameter(config, "preprocess_media").unwrap_or_default().to_owned(),
        fills: fills.split(',').map(|name| name.trim().to_owned()).collect(),
    })
}

fn pixels(config: &Value) -> anyhow::Result<Option<(f64, f64)>> {
    let number = |name: &str| -> anyhow::Result<Option<f64>> {
        let read = |text: &str| {
            text.parse().with_context(|| format!("the model's parameter {name} is '{text}', not a number"))
        };
        parameter(config, name).map(read).transpose()
    };
    Ok(match (number("pixel_scale")?, number("pixel_offset")?) {
        (None, None) => None,
        (scale, offset) => Some((scale.unwrap_or(1.0), offset.unwrap_or(0.0))),
    })
}

fn labelled(metadata: &ModelMetadataBody, config: &Value) -> Vec<String> {
    let has_labels = |name: &str| {
        config.get("output").and_then(Value::as_array).is_some_and(|outputs| {
            outputs.iter().any(|o| {
                o.get("name").and_then(Value::as_str) == Some(name)
                    && o.get("label_filename").and_then(Value::as_str).is_some_and(|f| !f.is_empty())
            })
        })
    };
    metadata.outputs.iter().filter(|output| has_labels(&output.name)).map(|output| output.name.clone()).collect()
}
