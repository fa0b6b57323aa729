//! The files, texts and values of a command line, and the inputs that they fill.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use downbeat_core::file_content;
use downbeat_core::tensor::DataType;
use downbeat_preprocess::PictureHeader;
use downbeat_protocol::InferTensor;
use downbeat_protocol::infer::element_count;
use serde_json::value::RawValue;

use super::csv_rows::CsvRows;
use super::json_values::{self, Json};
use super::picture::{self, Pixels};
use super::values::{Values, joined, push_text};
use super::wanted::{Wanted, WantedInput};
use super::{npy, wanted};

/// Largest file, bytes.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// Values for one input or several. Such values wait until the model's inputs are known.
#[derive(Debug)]
pub struct Source {
    /// The input that the user names.
    name: Option<String>,
    /// The words for the source in messages.
    shown: String,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Picture(Bytes),
    Array(Values),
    Arrays(Vec<(String, Values)>),
    Csv(CsvRows),
    Json(Json, Bytes),
    Text(String),
    /// A value on the command line, whose form depends on its input.
    Value(String),
    /// Zeros, in this shape or in the smallest that the input takes.
    Zeros(Option<Vec<i64>>),
}

impl Source {
    /// Reads a file; - is standard input.
    ///
    /// # Errors
    /// If the file cannot be read, or is of no kind that fills inputs.
    pub fn file(file: &Path) -> anyhow::Result<Source> {
        let shown = if file == Path::new("-") { "standard input".to_owned() } else { file.display().to_string() };
        let content = content(file, &shown, read_file(file)?)?;
        Ok(Source { name: None, shown, content })
    }

    /// A text.
    pub fn text(text: &str) -> Source {
        Source { name: None, shown: "the text".to_owned(), content: Content::Text(text.to_owned()) }
    }

    /// `NAME=FILE` or `NAME=VALUE`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn named(argument: &str) -> anyhow::Result<Source> {
        let (name, value) = argument
            .split_once('=')
            .filter(|(name, _)| !name.is_empty())
            .with_context(|| format!("'{argument}' names no input; expected NAME=FILE or NAME=VALUE"))?;
        let name = Some(name.to_owned());
        let path = Path::new(value);
        if value == "-" || path.is_file() || is_file_name(path) {
            return Ok(Source { name, ..Source::file(path)? });
        }
        let zeros = match value.strip_prefix("zeros") {
            Some("") => Some(None),
            Some(rest) => rest.strip_prefix(':').and_then(sizes).map(Some),
            None => None,
        };
        let content = zeros.map_or_else(|| Content::Value(value.to_owned()), Content::Zeros);
        Ok(Source { name, shown: "the command line".to_owned(), content })
    }

    /// The body, if the source is a whole request.
    pub fn body(&self) -> Option<&Bytes> {
        match &self.content {
            Content::Json(Json::Body, body) if self.name.is_none() => Some(body),
            _ => None,
        }
    }
}

/// The sizes `1x3x224x224`.
fn sizes(text: &str) -> Option<Vec<i64>> {
    let sizes: Vec<i64> = text.split('x').map(|size| size.parse().ok()).collect::<Option<_>>()?;
    sizes.iter().all(|size| *size >= 0).then_some(sizes)
}

/// Whether a value without a file must be a mistyped file name.
fn is_file_name(path: &Path) -> bool {
    let extension = extension(path);
    matches!(extension.as_str(), "png" | "jpg" | "jpeg" | "npy" | "npz" | "csv" | "tsv" | "json" | "txt")
        && !path.to_string_lossy().contains(char::is_whitespace)
}

fn extension(path: &Path) -> String {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase()).unwrap_or_default()
}

/// Reads a whole file; - is standard input.
///
/// # Errors
/// If the file cannot be read or is too large.
pub fn read_file(file: &Path) -> anyhow::Result<Vec<u8>> {
    let shown = file.display();
    let mut bytes = Vec::new();
    let reader: Box<dyn Read> = if file == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(std::fs::File::open(file).with_context(|| format!("cannot read {shown}"))?)
    };
    reader.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).with_context(|| format!("cannot read {shown}"))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        bail!("{shown} is larger than {MAX_FILE_BYTES} bytes");
    }
    Ok(bytes)
}

/// The content of a file, by its first bytes, and otherwise by its name.
fn content(file: &Path, shown: &str, bytes: Vec<u8>) -> anyhow::Result<Content> {
    let extension = extension(file);
    if bytes.starts_with(npy::MAGIC) {
        return npy::read(&bytes).map(Content::Array).with_context(|| shown.to_owned());
    }
    if bytes.starts_with(npy::ZIP_MAGIC) {
        return npy::read_archive(&bytes, MAX_FILE_BYTES).map(Content::Arrays).with_context(|| shown.to_owned());
    }
    if let Err(why) = file_content::refuse_lfs_pointer(&bytes) {
        bail!("{shown} {why}");
    }
    match (PictureHeader::read(&bytes), extension.as_str()) {
        (Ok(_), _) => return Ok(Content::Picture(bytes.into())),
        (Err(why), "png" | "jpg" | "jpeg") => bail!("{shown} is not a picture that can be read: {why}"),
        (_, "npy" | "npz") => bail!("{shown} is not a NumPy file: it does not begin as one"),
        _ => {}
    }
    let bytes = Bytes::from(bytes);
    let text = file_content::text(&bytes)
        .map_err(|why| anyhow!("{shown} is neither a picture (PNG, JPEG) nor a NumPy file, and {why}"))?;
    match extension.as_str() {
        "csv" | "tsv" => Ok(Content::Csv(CsvRows::read(text, shown)?)),
        "json" => {
            let json = json_values::read(text).with_context(|| shown.to_owned())?;
            Ok(Content::Json(json, bytes.slice_ref(text.as_bytes())))
        }
        "txt" => Ok(Content::Text(text.trim_end_matches(['\r', '\n']).to_owned())),
        _ => match json_values::read(text) {
            Ok(json) => Ok(Content::Json(json, bytes.slice_ref(text.as_bytes()))),
            Err(error) if text.trim_start().starts_with(['{', '[']) => Err(error.context(shown.to_owned())),
            Err(_) if is_table(text) => Ok(Content::Csv(CsvRows::read(text, shown)?)),
            Err(_) => Ok(Content::Text(text.trim_end_matches(['\r', '\n']).to_owned())),
        },
    }
}

/// Whether a text without a file name is a CSV file: numbers only, or lines with equally many commas.
fn is_table(text: &str) -> bool {
    let commas = |line: &str| line.matches([',', ';', '\t']).count();
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let Some(first) = lines.next() else { return false };
    let is_number = |cell: &str| cell.trim().parse::<f64>().is_ok();
    let mut rest = lines.peekable();
    first.split([',', ';', '\t']).all(is_number)
        || commas(first) > 0 && rest.peek().is_some() && rest.all(|line| commas(line) == commas(first))
}

/// Fills the inputs of a model.
///
/// # Errors
/// If a source fits no input, or an input gets no values.
pub fn fill(sources: Vec<Source>, wanted: &Wanted, pixels: Option<Pixels>) -> anyhow::Result<Vec<InferTensor>> {
    let mut parts: Vec<InferTensor> = Vec::new();
    let mut pictures: Vec<(WantedInput, String, Vec<Bytes>)> = Vec::new();
    for source in sources {
        if let Content::Picture(picture) = source.content {
            let input = picture_input(wanted, source.name.as_deref(), &source.shown)?;
            match pictures.iter_mut().find(|(known, ..)| known.name == input.name) {
                Some((_, _, pictures)) => pictures.push(picture),
                None => pictures.push((input.clone(), source.shown, vec![picture])),
            }
            continue;
        }
        parts.extend(inputs_of(source, wanted)?);
    }
    for (input, shown, pictures) in pictures {
        parts.push(match input.datatype {
            DataType::Bytes => elements(&input, pictures.iter().map(|picture| &picture[..]), wanted, &shown)?,
            _ => picture::rows(&pictures, &shown, wanted, &input, pixels)?,
        });
    }
    let mut inputs = Vec::new();
    for input in wanted.inputs.iter().chain(wanted.media.iter().map(|media| &media.input)) {
        let (its, others): (Vec<_>, Vec<_>) = parts.into_iter().partition(|part| part.name == input.name);
        parts = others;
        if !its.is_empty() {
            inputs.push(joined(its, input)?);
        }
    }
    check_complete(&inputs, wanted)?;
    Ok(inputs)
}

/// The inputs that a source fills, other than a picture.
fn inputs_of(source: Source, wanted: &Wanted) -> anyhow::Result<Vec<InferTensor>> {
    let Source { name, shown, content } = source;
    let named = || match &name {
        Some(name) => wanted.named(name),
        None => wanted.only(&shown),
    };
    Ok(match content {
        Content::Array(values) => vec![values.into_input(wanted, named()?, &shown)?],
        Content::Arrays(mut arrays) => {
            // The only array of a file may have any name, such as NumPy's `arr_0`.
            let is_input = |array: &(String, Values)| wanted.inputs.iter().any(|input| input.name == array.0);
            match arrays.as_slice() {
                [array] if name.is_some() || !is_input(array) => {
                    let (_, values) = arrays.remove(0);
                    vec![values.into_input(wanted, named()?, &shown)?]
                }
                _ => {
                    let fill =
                        |(name, values): (String, Values)| values.into_input(wanted, wanted.named(&name)?, &shown);
                    arrays.into_iter().map(fill).collect::<anyhow::Result<_>>()?
                }
            }
        }
        Content::Csv(rows) if name.is_none() => rows.into_inputs(wanted)?,
        Content::Csv(rows) => vec![rows.into_input(wanted, named()?)?],
        Content::Json(Json::Named(values), _) if name.is_none() => {
            let fill = |(name, json): (String, Box<RawValue>)| {
                json_values::into_input(&json, wanted, wanted.named(&name)?, &shown)
            };
            values.into_iter().map(fill).collect::<anyhow::Result<_>>()?
        }
        Content::Json(Json::Rows(json), _) => vec![json_values::into_input(&json, wanted, named()?, &shown)?],
        Content::Json(..) => bail!(
            "{shown} is a JSON object with names of inputs or a whole request; give the file alone, without other inputs"
        ),
        Content::Text(text) => {
            let input = text_input(wanted, name.as_deref())?;
            vec![elements(input, [text.as_bytes()].into_iter(), wanted, &shown)?]
        }
        Content::Value(value) => {
            let input = named()?;
            let json = value_json(&value, input)?;
            vec![json_values::into_input(&json, wanted, input, &shown)?]
        }
        Content::Zeros(shape) => {
            let input = named()?;
            let smallest = || input.shape.iter().map(|size| if *size == -1 { 1 } else { *size }).collect();
            vec![zeros(input, shape.unwrap_or_else(smallest))?.into_input(wanted, input, &shown)?]
        }
        Content::Picture(_) => bail!("{shown} is a picture among values"),
    })
}

/// Zeros, false or empty texts.
///
/// # Errors
/// If the memory does not hold them.
pub fn zeros(input: &WantedInput, shape: Vec<i64>) -> anyhow::Result<Values> {
    let count = element_count(&shape).map_err(|why| anyhow!("{why}"))?;
    let bytes = count.checked_mul(input.datatype.size().unwrap_or(4)).filter(|bytes| *bytes as u64 <= MAX_FILE_BYTES);
    let bytes = bytes.with_context(|| format!("zeros of shape {shape:?} are larger than {MAX_FILE_BYTES} bytes"))?;
    Ok(Values { datatype: input.datatype, shape, data: vec![0; bytes] })
}

/// A value of the command line as JSON.
fn value_json(value: &str, input: &WantedInput) -> anyhow::Result<Box<RawValue>> {
    let json = |text: &str| {
        let words = json_values::with_words(text).ok()?;
        RawValue::from_string(String::from_utf8(words).ok()?).ok()
    };
    if input.datatype == DataType::Bytes {
        let is_json = value.starts_with('[') || value.starts_with('"');
        let text = || RawValue::from_string(serde_json::to_string(value)?);
        return Ok(json(value).filter(|_| is_json).map_or_else(text, Ok)?);
    }
    let lower = value.to_lowercase();
    let word = || matches!(lower.as_str(), "true" | "false").then(|| json(&lower)).flatten();
    json(value).or_else(word).or_else(|| json(&format!("[{value}]"))).with_context(|| {
        format!("input '{}' wants {}, but '{value}' is neither a file nor such values", input.name, input.form())
    })
}

/// The input for a text.
fn text_input<'a>(wanted: &'a Wanted, name: Option<&str>) -> anyhow::Result<&'a WantedInput> {
    if let Some(name) = name {
        return wanted.named(name);
    }
    if let Some(media) = wanted.media.as_ref().filter(|media| media.takes("text/")) {
        return Ok(&media.input);
    }
    let texts: Vec<&WantedInput> = wanted.inputs.iter().filter(|input| input.datatype == DataType::Bytes).collect();
    match texts.as_slice() {
        [input] => Ok(input),
        [] => bail!(
            "model '{}' takes no texts: the server has no steps that turn texts into the model's inputs (`preprocess` \
             in the server's downbeat.toml); {}",
            wanted.model,
            wanted.wants()
        ),
        _ => bail!("a text names no input; give each its own with --input NAME=TEXT; {}", wanted.wants()),
    }
}

/// The input for a picture.
fn picture_input<'a>(wanted: &'a Wanted, name: Option<&str>, shown: &str) -> anyhow::Result<&'a WantedInput> {
    if let Some(name) = name {
        return wanted.named(name);
    }
    if let Some(media) = wanted.media.as_ref().filter(|media| media.takes("image/")) {
        return Ok(&media.input);
    }
    let pictures: Vec<&WantedInput> = wanted.inputs.iter().filter(|input| picture::takes_pictures(input)).collect();
    match pictures.as_slice() {
        [input] => Ok(input),
        _ => wanted.only(shown),
    }
}

/// A tensor of datatype BYTES with these elements, one a row.
fn elements<'a>(
    input: &WantedInput,
    elements: impl ExactSizeIterator<Item = &'a [u8]>,
    wanted: &Wanted,
    shown: &str,
) -> anyhow::Result<InferTensor> {
    let shape = vec![elements.len() as i64];
    let mut data = Vec::new();
    for element in elements {
        push_text(&mut data, element)?;
    }
    Values { datatype: DataType::Bytes, shape, data }.into_input(wanted, input, shown)
}

/// Checks that each input that the model needs has values, and that all have equally many rows.
fn check_complete(inputs: &[InferTensor], wanted: &Wanted) -> anyhow::Result<()> {
    let given = |name: &str| inputs.iter().any(|input| input.name == name);
    let filled: Vec<&str> = match &wanted.media {
        Some(media) if given(&media.input.name) => media.fills.iter().map(String::as_str).collect(),
        _ => Vec::new(),
    };
    let missing =
        |input: &&WantedInput| !input.optional && !given(&input.name) && !filled.contains(&input.name.as_str());
    if let Some(input) = wanted.inputs.iter().find(missing) {
        bail!(
            "model '{}' needs a value for {input}: add --input {name}=FILE or --input {name}=VALUE",
            wanted.model,
            name = input.name
        );
    }
    if wanted.rows == wanted::Rows::None {
        return Ok(());
    }
    let rows = |input: &InferTensor| input.shape.first().copied().unwrap_or(0);
    let Some(first) = inputs.first() else { return Ok(()) };
    if let Some(other) = inputs.iter().find(|input| rows(input) != rows(first)) {
        bail!(
            "input '{}' has {} rows, but input '{}' has {}: each row needs a value for every input",
            first.name,
            rows(first),
            other.name,
            rows(other)
        );
    }
    if rows(first) == 0 {
        bail!("input '{}' has no rows", first.name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(arguments: &[&str], wanted: &Wanted) -> anyhow::Result<Vec<InferTensor>> {
        fill(arguments.iter().map(|a| Source::named(a)).collect::<anyhow::Result<_>>()?, wanted, None)
    }

    #[test]
    fn values_of_the_command_line_take_the_form_of_their_input() {
        let all = Wanted::of(&[
            ("x", DataType::Fp32, &[-1, 2]),
            ("n", DataType::Int64, &[-1, 1]),
            ("s", DataType::Bytes, &[-1]),
            ("b", DataType::Bool, &[-1]),
        ]);
        let inputs = filled(&["x=1,2.5", "n=7", "s=a=b, [c]", "b=True"], &all).unwrap();
        let shapes: Vec<&[i64]> = inputs.iter().map(|input| &input.shape[..]).collect();
        assert_eq!(shapes, [&[1, 2][..], &[1, 1], &[1], &[1]]);
        assert!(inputs[2].data.ends_with(b"a=b, [c]"));
        let inputs = filled(&["x=[[1,2],[3,4]]", "n=[7,8]", "s=[\"a\",\"b\"]", "b=0,1"], &all).unwrap();
        assert!(inputs.iter().all(|input| input.shape[0] == 2), "{inputs:?}");
        let one = Wanted::of(&[("x", DataType::Fp32, &[-1, 2])]);
        assert_eq!(filled(&["x=zeros"], &one).unwrap()[0].data.as_ref(), [0; 8]);
        assert_eq!(filled(&["x=zeros:3x2"], &one).unwrap()[0].shape, [3, 2]);
    }

    #[test]
    fn each_fault_of_the_command_line_has_its_message() {
        let two = Wanted::of(&[("first", DataType::Fp32, &[-1, 2]), ("second", DataType::Int64, &[-1])]);
        for (arguments, said) in [
            (&["first=1,2"][..], "model 'm' needs a value for second INT64 [rows]: add --input second=FILE or"),
            (
                &["frist=1,2"],
                "model 'm' has no input 'frist'; did you mean 'first'?; it wants first FP32 [rows, 2] and second",
            ),
            (&["first=1,2", "second=1,2"], "input 'first' has 1 rows, but input 'second' has 2"),
            (&["first=a"], "input 'first' wants FP32 [rows, 2], but 'a' is neither a file nor such values"),
            (&["first=no_such.npy"], "cannot read no_such.npy"),
            (&["first"], "'first' names no input; expected NAME=FILE or NAME=VALUE"),
            (&["first=zeros:1000000000x2"], "are larger than"),
            (&["first=zeros:0x2", "second=[]"], "has no rows"),
        ] {
            let error = format!("{:#}", filled(arguments, &two).unwrap_err());
            assert!(error.contains(said), "{arguments:?}: {error}");
        }
        let error = fill(vec![Source::text("a")], &two, None).unwrap_err().to_string();
        assert!(error.starts_with("model 'm' takes no texts"), "{error}");
    }

    #[test]
    fn texts_without_a_name_are_told_apart() {
        let kind = |text: &str| content(Path::new("-"), "standard input", text.as_bytes().to_vec());
        assert!(matches!(kind("{\"x\": 1}").unwrap(), Content::Json(Json::Named(_), _)));
        assert!(matches!(kind("1,2\n3,4\n").unwrap(), Content::Csv(_)));
        assert!(matches!(kind("a,b\n3,4\n").unwrap(), Content::Csv(_)));
        assert!(
            matches!(kind("Well, this is a text.\n").unwrap(), Content::Text(text) if text == "Well, this is a text.")
        );
        assert!(format!("{:#}", kind("{\"x\": ").unwrap_err()).contains("not JSON"));
        let binary = content(Path::new("a.bin"), "a.bin", vec![0xff, 0xfe, 0xfd]).unwrap_err().to_string();
        assert!(binary.starts_with("a.bin is neither a picture (PNG, JPEG) nor a NumPy file, and"), "{binary}");
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n".to_vec();
        assert!(content(Path::new("a.png"), "a.png", pointer).unwrap_err().to_string().contains("git lfs pull"));
    }

    #[test]
    fn texts_are_rows_of_the_input_for_texts() {
        let one = Wanted::of(&[("s", DataType::Bytes, &[-1, 1]), ("x", DataType::Fp32, &[-1, 1])]);
        let sources = vec![Source::text("a"), Source::text("b"), Source::named("x=1,2").unwrap()];
        let inputs = fill(sources, &one, None).unwrap();
        assert_eq!(
            (inputs[0].shape.as_slice(), inputs[0].data.as_ref()),
            ([2, 1].as_slice(), b"\x01\0\0\0a\x01\0\0\0b".as_slice())
        );
    }
}
