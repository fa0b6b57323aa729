//! Example requests for a model, ready to be pasted: for curl, for Python and for `downbeat infer`.

use std::fmt::Write as _;

use anyhow::Context;
use clap::ValueEnum;
use downbeat_core::tensor::DataType;
use downbeat_protocol::http::{RequestForm, model_path, write_request};
use downbeat_protocol::infer::element_count;
use downbeat_protocol::{InferRequest, InferTensor};
use serde_json::{Value, json};

use super::picture;
use super::sources::zeros;
use super::values::{Number, Numbers, Texts, push, push_text};
use super::wanted::{Rows, Wanted, WantedInput};

/// Sizes that are tried for dimensions that vary, after the most usual size.
const SIZES: [i64; 10] = [1, 16, 32, 64, 128, 224, 256, 512, 3, 10];
/// Longest data in JSON on a command line, bytes. Longer data is zeros after the JSON.
const MOST_DATA: usize = 700;
/// Most zeros that are written one by one for `downbeat infer`.
const MOST_ZEROS: usize = 8;

/// The program that an example is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Program {
    /// A command of curl
    Curl,
    /// Python with the package requests
    Python,
    /// A command of downbeat itself
    Infer,
}

/// The place of a model: the server's URL, the model, and its version or an empty text.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The server, as the user writes it.
    pub url: &'a str,
    /// The model.
    pub model: &'a str,
    /// The version; empty: the server's choice.
    pub version: &'a str,
}

impl Place<'_> {
    fn infer_url(&self) -> String {
        let scheme = if self.url.contains("://") { "" } else { "http://" };
        format!("{scheme}{}{}/infer", self.url.trim_end_matches('/'), model_path(self.model, self.version))
    }
}

/// Example requests, from the most likely to the least likely size of the dimensions that vary.
///
/// # Errors
/// If the smallest tensors of the model are too large for an example.
pub fn candidates(place: Place<'_>, wanted: &Wanted) -> anyhow::Result<Vec<InferRequest>> {
    let inputs = example_inputs(wanted);
    let is_varying = inputs.iter().any(|input| input.row().contains(&-1));
    let first = if inputs.iter().any(picture::takes_pictures) { 224 } else { 8 };
    let others: &[i64] = if is_varying { &SIZES } else { &[] };
    let mut requests = Vec::new();
    for size in std::iter::once(first).chain(others.iter().copied()) {
        let tensors = inputs.iter().map(|input| tensor(input, wanted, size)).collect::<anyhow::Result<Vec<_>>>();
        // Only the first size must have an example.
        match tensors {
            Err(error) if requests.is_empty() => return Err(error),
            Err(_) => break,
            Ok(inputs) => requests.push(InferRequest {
                model_name: place.model.to_owned(),
                model_version: place.version.to_owned(),
                inputs,
                ..InferRequest::default()
            }),
        }
    }
    Ok(requests)
}

/// The inputs that an example needs. A text replaces the inputs that the server makes of the text.
fn example_inputs(wanted: &Wanted) -> Vec<WantedInput> {
    let text = wanted.media.as_ref().filter(|media| media.takes("text/"));
    let filled = |name: &String| text.is_some_and(|media| media.fills.contains(name));
    let needed = wanted.inputs.iter().filter(|input| !input.optional && !filled(&input.name)).cloned();
    text.map(|media| media.input.clone()).into_iter().chain(needed).collect()
}

fn tensor(input: &WantedInput, wanted: &Wanted, varying: i64) -> anyhow::Result<InferTensor> {
    let channels = |place: usize| picture::takes_pictures(input) && place == 1 && wanted.rows != Rows::None;
    let size = |(place, size): (usize, &i64)| match (*size, place) {
        (-1, 0) if input.has_rows => 1,
        (-1, place) if channels(place) => 3,
        (-1, _) => varying,
        (size, _) => size,
    };
    let shape: Vec<i64> = input.shape.iter().enumerate().map(size).collect();
    let mut values = zeros(input, shape).context("the model is too large for an example")?;
    let count = values.data.len() / input.datatype.size().unwrap_or(4);
    if input.datatype == DataType::Bytes {
        values.data.clear();
        (0..count).try_for_each(|_| push_text(&mut values.data, b"a text"))?;
    } else if input.name.to_lowercase().contains("mask") {
        // A mask of zeros would leave nothing of the sequence.
        values.data.clear();
        (0..count).try_for_each(|_| push(&mut values.data, input.datatype, Number::Integer(1))).unwrap_or_default();
    }
    values.into_input(wanted, input, "the example")
}

/// The text of the example for one program.
///
/// # Errors
/// If the request has no form in JSON.
pub fn text(program: Program, place: Place<'_>, request: &InferRequest, wanted: &Wanted) -> anyhow::Result<String> {
    match program {
        Program::Curl => curl(place, request, wanted),
        Program::Python => Ok(python(place, request)),
        Program::Infer => Ok(infer(place, request, wanted)),
    }
}

/// A text as one word of a shell.
fn quoted(text: &str) -> String {
    let is_safe = |c: char| c.is_ascii_alphanumeric() || "-_./:=@,+%".contains(c);
    if !text.is_empty() && text.chars().all(is_safe) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

fn curl(place: Place<'_>, request: &InferRequest, wanted: &Wanted) -> anyhow::Result<String> {
    let body = write_request(request, RequestForm::JSON)?;
    let written: Value = serde_json::from_slice(&body.bytes)?;
    let (mut inputs, mut zeros) = (Vec::new(), 0);
    for (place, tensor) in request.inputs.iter().enumerate() {
        let data = written.pointer(&format!("/inputs/{place}/data")).map(Value::to_string).unwrap_or_default();
        let values = if data.len() > MOST_DATA && is_zero(tensor) {
            zeros += tensor.data.len();
            format!(r#""parameters":{{"binary_data_size":{}}}"#, tensor.data.len())
        } else {
            format!(r#""data":{data}"#)
        };
        let (name, datatype, shape) = (json!(tensor.name), tensor.datatype, json!(tensor.shape));
        inputs.push(format!(r#"{{"name":{name},"datatype":"{datatype}","shape":{shape},{values}}}"#));
    }
    let json = format!(r#"{{"inputs":[{}]}}"#, inputs.join(","));
    let url = quoted(&place.infer_url());
    let mut text = if zeros == 0 {
        format!("curl -s {url} -d {}\n", quoted(&json))
    } else {
        format!(
            "(printf %s {}; head -c {zeros} /dev/zero) | \\\n  curl -s {url} -H 'Inference-Header-Content-Length: {}' \
             -H 'Content-Type: application/octet-stream' --data-binary @-\n",
            quoted(&json),
            json.len()
        )
    };
    if wanted.media.as_ref().is_some_and(|media| media.takes("image/")) {
        let _ = writeln!(text, "# a picture: curl -s {url} -H 'Content-Type: image/jpeg' --data-binary @picture.jpg");
    }
    Ok(text)
}

fn is_zero(tensor: &InferTensor) -> bool {
    tensor.datatype != DataType::Bytes && tensor.data.iter().all(|byte| *byte == 0)
}

/// The first element in the words of JSON, or of Python.
fn first_element(tensor: &InferTensor, is_python: bool) -> String {
    let number = Numbers::of(tensor.datatype, &tensor.data).next();
    match (tensor.datatype, number) {
        (DataType::Bytes, _) => {
            let text = Texts(&tensor.data).next().map(String::from_utf8_lossy).unwrap_or_default();
            json!(text).to_string()
        }
        (DataType::Bool, Some(number)) if is_python => {
            if number == Number::Integer(1) { "True" } else { "False" }.to_owned()
        }
        (DataType::Bool, Some(number)) => (number == Number::Integer(1)).to_string(),
        (_, Some(Number::Float(value))) => format!("{value:?}"),
        (_, Some(Number::Integer(value))) => value.to_string(),
        (_, None) => "0".to_owned(),
    }
}

/// The number of elements. The tensors of an example have one.
fn count(tensor: &InferTensor) -> usize {
    element_count(&tensor.shape).unwrap_or(0)
}

fn python(place: Place<'_>, request: &InferRequest) -> String {
    let mut text = "import requests\n\ninputs = [\n".to_owned();
    for input in &request.inputs {
        let data = match count(input) {
            1 => format!("[{}]", first_element(input, true)),
            count => format!("[{}] * {count}", first_element(input, true)),
        };
        let (name, datatype, shape) = (json!(input.name), input.datatype, &input.shape);
        let _ =
            writeln!(text, r#"    {{"name": {name}, "datatype": "{datatype}", "shape": {shape:?}, "data": {data}}},"#);
    }
    let url = json!(place.infer_url());
    let _ = write!(
        text,
        "]\nanswer = requests.post({url}, json={{\"inputs\": inputs}}, timeout=30).json()\n\
         print(answer.get(\"outputs\") or answer[\"error\"])\n"
    );
    text
}

fn infer(place: Place<'_>, request: &InferRequest, wanted: &Wanted) -> String {
    let mut command = format!("downbeat infer {}", quoted(place.model));
    if place.url != super::DEFAULT_URL {
        let _ = write!(command, " --url {}", quoted(place.url));
    }
    if !place.version.is_empty() {
        let _ = write!(command, " --model-version {}", quoted(place.version));
    }
    let mut text = command.clone();
    for input in &request.inputs {
        let is_media = wanted.media.as_ref().is_some_and(|media| media.input.name == input.name);
        let _ = match is_media {
            true => write!(text, " --text 'a text'"),
            false => write!(text, " --input {}", quoted(&format!("{}={}", input.name, value(input)))),
        };
    }
    text.push('\n');
    for file in files(wanted) {
        let _ = writeln!(text, "# {}: {command} {}", file.0, file.1);
    }
    text
}

/// A value of the command line.
fn value(tensor: &InferTensor) -> String {
    let element = first_element(tensor, false);
    if count(tensor) > MOST_ZEROS && is_zero(tensor) {
        let sizes: Vec<String> = tensor.shape.iter().map(i64::to_string).collect();
        return format!("zeros:{}", sizes.join("x"));
    }
    if tensor.shape.is_empty() || (count(tensor) == 1 && tensor.datatype != DataType::Bytes) {
        return element;
    }
    tensor.shape.iter().rev().fold(element, |inner, size| {
        let elements: Vec<&str> = (0..*size).map(|_| inner.as_str()).collect();
        format!("[{}]", elements.join(","))
    })
}

/// The kinds of files that fill the model's inputs, each with a name of such a file.
fn files(wanted: &Wanted) -> Vec<(&'static str, &'static str)> {
    let media = |kind: &str| wanted.media.as_ref().is_some_and(|media| media.takes(kind));
    // A configuration with a scale of pixels tells that a table of numbers is a gray picture.
    let has_picture = media("image/")
        || wanted.pixels.is_some()
        || wanted.inputs.iter().filter(|input| picture::takes_pictures(input)).count() == 1;
    let is_table = wanted.rows != Rows::None && wanted.inputs.iter().all(|input| input.row().len() <= 1);
    let is_one = wanted.inputs.len() == 1;
    [
        (has_picture, ("a picture", "picture.jpg")),
        (is_table, ("a table", "rows.csv")),
        (is_one, ("a NumPy array", "array.npy")),
        (!is_one, ("NumPy arrays by name", "arrays.npz")),
    ]
    .into_iter()
    .filter_map(|(fits, file)| fits.then_some(file))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place<'static> = Place { url: "localhost:8000/", model: "a b", version: "" };

    fn texts(inputs: &[(&str, DataType, &[i64])]) -> [String; 3] {
        let wanted = Wanted::of(inputs);
        let request = candidates(PLACE, &wanted).unwrap().remove(0);
        [Program::Curl, Program::Python, Program::Infer].map(|program| text(program, PLACE, &request, &wanted).unwrap())
    }

    #[test]
    fn a_small_request_is_written_out() {
        let [curl, python, infer] = texts(&[("it's", DataType::Fp32, &[-1, 2]), ("s", DataType::Bytes, &[-1])]);
        assert!(curl.starts_with("curl -s http://localhost:8000/v2/models/a%20b/infer -d '{\"inputs\":["), "{curl}");
        assert!(curl.contains(r#""name":"it'\''s""#) && curl.contains("[0.0,0.0]"), "{curl}");
        assert!(
            python.contains(r#"{"name": "it's", "datatype": "FP32", "shape": [1, 2], "data": [0.0] * 2},"#),
            "{python}"
        );
        assert!(
            infer.starts_with(
                r#"downbeat infer 'a b' --url localhost:8000/ --input 'it'\''s=[[0.0,0.0]]' --input 's=["a text"]'"#
            ),
            "{infer}"
        );
        assert!(infer.contains("\n# a table: downbeat infer 'a b' --url localhost:8000/ rows.csv\n"), "{infer}");
    }

    #[test]
    fn a_large_request_is_zeros_after_its_json() {
        let [curl, python, infer] =
            texts(&[("x", DataType::Fp32, &[-1, 3, -1, -1]), ("mask", DataType::Int64, &[-1, -1])]);
        assert!(curl.contains("head -c 602112 /dev/zero") && curl.contains("[1,1,1,"), "{curl}");
        let (_, json) = curl.split_once("printf %s '").unwrap();
        let (json, _) = json.split_once("';").unwrap();
        assert!(curl.contains(&format!("Content-Length: {}'", json.len())), "{curl}");
        assert!(python.contains("[0.0] * 150528") && python.contains("[1] * 224"), "{python}");
        assert!(infer.contains("--input x=zeros:1x3x224x224") && infer.contains("# a picture: "), "{infer}");
    }

    #[test]
    fn a_model_too_large_for_an_example_is_an_error() {
        let wanted = Wanted::of(&[("x", DataType::Fp32, &[-1, i64::MAX, 9])]);
        let error = format!("{:#}", candidates(PLACE, &wanted).unwrap_err());
        assert!(error.starts_with("the model is too large for an example"), "{error}");
    }
}
