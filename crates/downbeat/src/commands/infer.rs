//! `downbeat infer`: sends one request to a server and prints the answer for people.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use clap::Args;
use downbeat_bench::client::Client;
use downbeat_core::file_content;
use downbeat_core::tensor::DataType;
use downbeat_preprocess::PictureHeader;
use downbeat_protocol::http::{ModelMetadataBody, TensorMetadataBody, model_path, words_as_objects};
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter, RequestedOutput};
use downbeat_report::out;
use serde_json::Value;

use crate::commands::picture::{Picture, PixelRange};

/// Largest request body or picture from a file, bytes.
const MAX_REQUEST_BYTES: u64 = 1 << 30;
/// Most elements of an output that are printed.
const SHOWN_ELEMENTS: usize = 16;

/// Send one request to a server and print the answer.
#[derive(Args, Debug)]
pub struct InferArgs {
    /// The model
    model: String,
    /// A picture: a PNG, for models with one input, or a format that the server decodes for the
    /// model (JPEG, PNG)
    #[arg(value_name = "PICTURE", required_unless_present_any = ["request", "text"], conflicts_with_all = ["request", "text"])]
    picture: Option<PathBuf>,
    /// A text instead of a picture, for models whose texts the server tokenises
    #[arg(long, value_name = "TEXT", conflicts_with = "request")]
    text: Option<String>,
    /// The body of an inference request instead of a picture; - for standard input
    #[arg(long, value_name = "FILE")]
    request: Option<PathBuf>,
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://localhost:8000", env = "DOWNBEAT_URL")]
    url: String,
    /// The model's version; without it the server chooses
    #[arg(long, value_name = "VERSION", default_value = "")]
    model_version: String,
    /// Number of the likeliest classes to show
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    top: u32,
    /// How long to wait for each answer
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = crate::options::units::parse_seconds)]
    timeout: downbeat_core::Duration,
}

/// Runs the command.
///
/// # Errors
/// If the file cannot be read or does not fit the model, or the server refuses.
pub fn run(args: &InferArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let response = runtime.block_on(ask(args))?;
    Ok(show(&response, &mut out())?)
}

async fn ask(args: &InferArgs) -> anyhow::Result<InferResponse> {
    let limit = Duration::from(args.timeout);
    let path = model_path(&args.model, &args.model_version);
    if let Some(file) = &args.request {
        let body = read_body(file)?;
        let mut client = Client::connect(&args.url, limit).await?;
        return client.infer_body(&format!("{path}/infer"), body, None).await;
    }
    let sent = match (&args.picture, &args.text) {
        (Some(file), _) => Sent::Picture { file, bytes: read_picture(file)? },
        (None, Some(text)) => Sent::Text(text),
        (None, None) => bail!("no input is given: name a picture file, a text (--text) or a request file (--request)"),
    };
    let mut client = Client::connect(&args.url, limit).await?;
    let metadata: ModelMetadataBody = client.get(&path).await?;
    // The server may lack this extension. Then there are no labels, no scale and no steps, and the
    // request works without them.
    let config: Value = client.get(&format!("{path}/config")).await.unwrap_or(Value::Null);
    let request = request(args, &sent, &metadata, &config)?;
    client.infer(&request).await
}

fn read_body(file: &Path) -> anyhow::Result<Bytes> {
    let body = Bytes::from(read_file(file)?);
    let text = file_content::text(&body).map_err(|error| anyhow!("{} {error}", file.display()))?;
    let is_json = |text: &[u8]| serde_json::from_slice::<serde::de::IgnoredAny>(text);
    // NaN and Infinity are words that the server accepts, but not JSON.
    let read = is_json(text.as_bytes())
        .or_else(|error| words_as_objects(text.as_bytes()).map_or(Err(error), |words| is_json(&words)));
    read.with_context(|| format!("{} is not JSON", file.display()))?;
    Ok(body.slice_ref(text.as_bytes()))
}

/// Reads a whole file; - is standard input.
fn read_file(file: &Path) -> anyhow::Result<Vec<u8>> {
    let shown = file.display();
    let mut bytes = Vec::new();
    let reader: Box<dyn Read> = if file == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(std::fs::File::open(file).with_context(|| format!("cannot read {shown}"))?)
    };
    reader.take(MAX_REQUEST_BYTES + 1).read_to_end(&mut bytes).with_context(|| format!("cannot read {shown}"))?;
    if bytes.len() as u64 > MAX_REQUEST_BYTES {
        bail!("{shown} is larger than {MAX_REQUEST_BYTES} bytes");
    }
    Ok(bytes)
}

/// Reads a file that begins as a picture.
fn read_picture(file: &Path) -> anyhow::Result<Vec<u8>> {
    let bytes = read_file(file)?;
    PictureHeader::read(&bytes)
        .map_err(|why| anyhow!("{} is not a picture that can be read: {why}", file.display()))?;
    Ok(bytes)
}

/// The user's input.
enum Sent<'a> {
    Picture { file: &'a Path, bytes: Vec<u8> },
    Text(&'a str),
}

/// Makes the request. The input is sent unchanged if the server makes it into tensors; otherwise as
/// the pixels of a PNG.
fn request(
    args: &InferArgs,
    sent: &Sent<'_>,
    metadata: &ModelMetadataBody,
    config: &Value,
) -> anyhow::Result<InferRequest> {
    let parameter = |name: &str| config.pointer(&format!("/parameters/{name}/string_value")).and_then(Value::as_str);
    let media = parameter("preprocess_media").unwrap_or_default();
    let taken = |kind: &str| parameter("preprocess_input").filter(|_| media.contains(kind));
    let input = match sent {
        Sent::Text(text) => match taken("text/") {
            Some(input) => one_element(input, text.as_bytes())?,
            None => bail!(
                "model '{}' takes no texts: the server has no steps that turn texts into the model's inputs \
                 (`preprocess` in the server's downbeat.toml)",
                args.model
            ),
        },
        Sent::Picture { file, bytes } => match taken("image/") {
            Some(input) => one_element(input, bytes)?,
            None => pixels(args, &Picture::decode(file, bytes)?, metadata, config)?,
        },
    };
    Ok(InferRequest {
        model_name: args.model.clone(),
        model_version: args.model_version.clone(),
        inputs: vec![input],
        outputs: labelled(args, metadata, config),
        ..InferRequest::default()
    })
}

/// A tensor of datatype BYTES with one element.
fn one_element(name: &str, element: &[u8]) -> anyhow::Result<InferTensor> {
    let length = u32::try_from(element.len()).context("the picture or text is longer than 4 GiB")?;
    let data = [&length.to_le_bytes(), element].concat().into();
    let (name, datatype, shape) = (name.to_owned(), DataType::Bytes, vec![1]);
    Ok(InferTensor { name, datatype, shape, parameters: Default::default(), data })
}

/// Makes a picture the only input of a model.
fn pixels(
    args: &InferArgs,
    picture: &Picture,
    metadata: &ModelMetadataBody,
    config: &Value,
) -> anyhow::Result<InferTensor> {
    let [input] = metadata.inputs.as_slice() else {
        let names: Vec<&str> = metadata.inputs.iter().map(|i| i.name.as_str()).collect();
        bail!(
            "model '{}' has {} inputs ({}), but a picture fills only one; write the request as JSON and send the file \
             with --request",
            args.model,
            names.len(),
            names.join(", ")
        );
    };
    let datatype: DataType = input.datatype.parse()?;
    let batched = config.get("max_batch_size").and_then(Value::as_i64).unwrap_or(0) > 0;
    let dims = match (batched, input.shape.split_first()) {
        (true, Some((_, dims))) => dims,
        _ => &input.shape,
    };
    let number = |key: &str, default: f64| -> anyhow::Result<f64> {
        match config.pointer(&format!("/parameters/{key}/string_value")).and_then(Value::as_str) {
            Some(text) => {
                text.parse().with_context(|| format!("the model's parameter {key} is '{text}', not a number"))
            }
            None => Ok(default),
        }
    };
    let range = PixelRange { scale: number("pixel_scale", 1.0)?, offset: number("pixel_offset", 0.0)? };
    // Without the configuration, a first dimension that varies or is 1 counts as the batch.
    let (data, shape) = match picture.tensor(dims, datatype, range) {
        Ok((data, mut shape)) => {
            if batched {
                shape.insert(0, 1);
            }
            (data, shape)
        }
        Err(error) => match input.shape.split_first() {
            Some((-1 | 1, dims)) if !batched => {
                let Ok((data, mut shape)) = picture.tensor(dims, datatype, range) else { return Err(error) };
                shape.insert(0, 1);
                (data, shape)
            }
            _ => return Err(error),
        },
    };
    Ok(InferTensor { name: input.name.clone(), datatype, shape, parameters: Default::default(), data })
}

/// The outputs that have labels, with their likeliest classes.
fn labelled(args: &InferArgs, metadata: &ModelMetadataBody, config: &Value) -> Vec<RequestedOutput> {
    let labelled = |output: &&TensorMetadataBody| {
        config.get("output").and_then(Value::as_array).is_some_and(|outputs| {
            outputs.iter().any(|o| {
                o.get("name").and_then(Value::as_str) == Some(&output.name)
                    && o.get("label_filename").and_then(Value::as_str).is_some_and(|f| !f.is_empty())
            })
        })
    };
    metadata
        .outputs
        .iter()
        .filter(labelled)
        .map(|output| RequestedOutput {
            name: output.name.clone(),
            parameters: [("classification".to_owned(), Parameter::Int64(i64::from(args.top)))].into(),
        })
        .collect()
}

/// Prints each output: its classes if it has any, otherwise its first elements.
fn show(response: &InferResponse, out: &mut impl Write) -> std::io::Result<()> {
    for output in &response.outputs {
        let elements = elements(output);
        let classes: Option<Vec<Class<'_>>> = match output.datatype {
            DataType::Bytes => elements.iter().map(|e| Class::parse(e)).collect(),
            _ => None,
        };
        match classes.filter(|c| !c.is_empty()) {
            Some(classes) => {
                for class in classes {
                    writeln!(out, "{}: {class}", output.name)?;
                }
            }
            None => {
                let more = if elements.len() > SHOWN_ELEMENTS { ", ..." } else { "" };
                let shown: Vec<&str> = elements.iter().take(SHOWN_ELEMENTS).map(String::as_str).collect();
                writeln!(out, "{} {} {:?}: {}{more}", output.name, output.datatype, output.shape, shown.join(", "))?;
            }
        }
    }
    Ok(())
}

/// An element of the classification extension: `VALUE:INDEX[:LABEL]`.
struct Class<'a> {
    value: f64,
    index: u64,
    label: Option<&'a str>,
}

impl<'a> Class<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.splitn(3, ':');
        Some(Class { value: parts.next()?.parse().ok()?, index: parts.next()?.parse().ok()?, label: parts.next() })
    }
}

impl std::fmt::Display for Class<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.label {
            Some(label) => write!(f, "{label}")?,
            None => write!(f, "class {}", self.index)?,
        }
        if (0.0..=1.0).contains(&self.value) {
            write!(f, " (probability {:.4})", self.value)
        } else {
            write!(f, " (score {})", self.value)
        }
    }
}

/// The elements as text.
fn elements(output: &InferTensor) -> Vec<String> {
    let data = output.data.as_ref();
    macro_rules! numbers {
        ($convert:expr, $size:literal) => {
            data.chunks_exact($size)
                .filter_map(|b| Some($convert(<[u8; $size]>::try_from(b).ok()?).to_string()))
                .collect()
        };
    }
    match output.datatype {
        DataType::Bool => data.iter().map(|b| (*b != 0).to_string()).collect(),
        DataType::Uint8 => data.iter().map(u8::to_string).collect(),
        DataType::Int8 => numbers!(i8::from_le_bytes, 1),
        DataType::Uint16 => numbers!(u16::from_le_bytes, 2),
        DataType::Int16 => numbers!(i16::from_le_bytes, 2),
        DataType::Uint32 => numbers!(u32::from_le_bytes, 4),
        DataType::Int32 => numbers!(i32::from_le_bytes, 4),
        DataType::Uint64 => numbers!(u64::from_le_bytes, 8),
        DataType::Int64 => numbers!(i64::from_le_bytes, 8),
        DataType::Fp16 => numbers!(half::f16::from_le_bytes, 2),
        DataType::Bf16 => numbers!(half::bf16::from_le_bytes, 2),
        DataType::Fp32 => numbers!(f32::from_le_bytes, 4),
        DataType::Fp64 => numbers!(f64::from_le_bytes, 8),
        DataType::Bytes => {
            let mut texts = Vec::new();
            let mut rest = data;
            while let Some((length, after)) = rest.split_first_chunk::<4>() {
                let length = u32::from_le_bytes(*length) as usize;
                let Some((text, after)) = after.split_at_checked(length) else { break };
                texts.push(String::from_utf8_lossy(text).into_owned());
                rest = after;
            }
            texts
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(output: InferTensor) -> String {
        let response = InferResponse { outputs: vec![output], ..InferResponse::default() };
        let mut out = Vec::new();
        show(&response, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn output(datatype: DataType, shape: &[i64], data: &[u8]) -> InferTensor {
        let data = Bytes::copy_from_slice(data);
        InferTensor { name: "y".into(), datatype, shape: shape.to_vec(), parameters: Default::default(), data }
    }

    fn texts(texts: &[&str]) -> InferTensor {
        let data: Vec<u8> =
            texts.iter().flat_map(|t| (t.len() as u32).to_le_bytes().into_iter().chain(t.bytes())).collect();
        output(DataType::Bytes, &[1, texts.len() as i64], &data)
    }

    #[test]
    fn classes_are_shown_with_their_labels() {
        assert_eq!(shown(texts(&["0.998:3:three"])), "y: three (probability 0.9980)\n");
        assert_eq!(shown(texts(&["12.5:3", "-1:2:a:b"])), "y: class 3 (score 12.5)\ny: a:b (score -1)\n");
        assert_eq!(shown(texts(&["just text"])), "y BYTES [1, 1]: just text\n");
    }

    #[test]
    fn numbers_are_shown_up_to_a_limit() {
        assert_eq!(shown(output(DataType::Int16, &[2], &[1, 0, 0xff, 0xff])), "y INT16 [2]: 1, -1\n");
        let many = shown(output(DataType::Uint8, &[20], &[7; 20]));
        assert!(many.ends_with("7, 7, ...\n") && many.matches('7').count() == 16, "{many}");
        assert_eq!(shown(output(DataType::Bytes, &[1], &[9, 0, 0, 0, 1])), "y BYTES [1]: \n", "a cut text is no panic");
    }

    fn args(model: &str) -> InferArgs {
        InferArgs {
            model: model.into(),
            picture: None,
            text: None,
            request: None,
            url: String::new(),
            model_version: String::new(),
            top: 2,
            timeout: downbeat_core::Duration::ZERO,
        }
    }

    #[test]
    fn a_picture_is_a_batch_of_one_and_asks_for_classes() {
        let picture = Picture { width: 2, height: 1, channels: 1, samples: vec![0, 255] };
        let tensor = |name: &str, shape: &[i64]| TensorMetadataBody {
            name: name.into(),
            datatype: "FP32".into(),
            shape: shape.to_vec(),
        };
        let mut metadata = ModelMetadataBody {
            name: "m".into(),
            versions: vec![],
            platform: String::new(),
            inputs: vec![tensor("x", &[-1, 1, 2])],
            outputs: vec![tensor("y", &[-1, 10]), tensor("z", &[-1, 10])],
        };
        let config = serde_json::json!({
            "max_batch_size": 8,
            "output": [{"name": "y", "label_filename": "labels.txt"}, {"name": "z"}],
            "parameters": {"pixel_scale": {"string_value": "0.5"}},
        });
        let pixels_of = |metadata: &ModelMetadataBody, config: &Value| pixels(&args("m"), &picture, metadata, config);
        let input = pixels_of(&metadata, &config).unwrap();
        assert_eq!(input.shape, [1, 1, 2]);
        assert_eq!(input.data.as_ref(), [0.0_f32.to_le_bytes(), 127.5_f32.to_le_bytes()].concat());
        let outputs = labelled(&args("m"), &metadata, &config);
        assert_eq!(outputs.len(), 1);
        assert_eq!(outputs[0].parameters["classification"], Parameter::Int64(2));
        // The batch dimension is recognised even if the server shows no configuration.
        assert_eq!(pixels_of(&metadata, &Value::Null).unwrap().shape, [1, 1, 2]);
        metadata.inputs.push(tensor("x2", &[1]));
        let error = pixels_of(&metadata, &config).unwrap_err().to_string();
        assert!(error.starts_with("model 'm' has 2 inputs (x, x2)"), "{error}");
    }
    #[test]
    fn what_the_server_makes_into_tensors_is_sent_as_it_is() {
        let metadata = ModelMetadataBody {
            name: "m".into(),
            versions: vec![],
            platform: String::new(),
            inputs: vec![],
            outputs: vec![],
        };
        let takes = |media: &str| {
            serde_json::json!({ "parameters": {
                "preprocess_input": { "string_value": "in" }, "preprocess_media": { "string_value": media },
            } })
        };
        let text = Sent::Text("so it is");
        let request_of = |config: &Value| request(&args("m"), &text, &metadata, config);
        let request = request_of(&takes("text/plain")).unwrap();
        let InferTensor { name, datatype, shape, data, .. } = &request.inputs[0];
        assert_eq!((name.as_str(), *datatype, shape.as_slice()), ("in", DataType::Bytes, &[1][..]));
        assert_eq!(data.as_ref(), b"\x08\0\0\0so it is");
        for config in [takes("image/jpeg, image/png"), Value::Null] {
            let error = request_of(&config).unwrap_err().to_string();
            assert!(error.starts_with("model 'm' takes no texts"), "{error}");
        }
    }
}
