//! An answer in words: the likeliest classes, or the first elements.

use std::fmt::Write as _;
use std::io::Write;

use downbeat_core::tensor::DataType;
use downbeat_protocol::infer::element_count;
use downbeat_protocol::{InferResponse, InferTensor};
use downbeat_report::Table;

use super::values::{Number, Numbers, Texts};

/// Most elements of an output that are printed for one row.
const SHOWN_ELEMENTS: usize = 16;
/// Most elements of an output in a row of a table.
const SHOWN_IN_TABLE: usize = 6;
/// Most elements of an output that are looked at for classes.
const MOST_LOOKED_AT: usize = 1 << 20;
/// Most rows of a table.
const SHOWN_ROWS: usize = 100;
/// Largest difference to 1 of the sum of probabilities.
const SUM_TOLERANCE: f64 = 1e-2;

/// Largest number shown as a probability. Sums of floats may be a little above 1.
const MAX_PROBABILITY: f64 = 1.0 + 1e-4;

/// Prints an answer: for one row a line an output or class, for several rows a table. `top` is the
/// number of classes to show.
///
/// # Errors
/// If writing fails.
pub fn show(response: &InferResponse, top: usize, out: &mut impl Write) -> std::io::Result<()> {
    let rows = response.outputs.first().and_then(|output| output.shape.first()).copied().unwrap_or(1);
    let is_table = rows > 1 && response.outputs.iter().all(|output| output.shape.first() == Some(&rows));
    if !is_table {
        return response.outputs.iter().try_for_each(|output| show_output(output, top, out));
    }
    let rows = usize::try_from(rows).unwrap_or(usize::MAX);
    let shown = rows.min(SHOWN_ROWS);
    let columns: Vec<Vec<String>> = response.outputs.iter().map(|output| cells(output, rows, shown, top)).collect();
    let mut table = Table::of(0..shown).number("row", |row| row + 1);
    for (output, cells) in response.outputs.iter().zip(&columns) {
        table = table.text(&output.name, |row| cells.get(*row).cloned().unwrap_or_default());
    }
    writeln!(out, "{}", table.to_string().trim_end())?;
    if rows > shown {
        writeln!(out, "{} more rows; --output FILE.csv writes all", rows - shown)?;
    }
    Ok(())
}

fn show_output(output: &InferTensor, top: usize, out: &mut impl Write) -> std::io::Result<()> {
    let elements = elements(output, MOST_LOOKED_AT);
    let classes = classes(output, &elements, top);
    if let Some(classes) = classes {
        return classes.iter().try_for_each(|class| writeln!(out, "{}: {class}", output.name));
    }
    let (name, datatype, shape) = (&output.name, output.datatype, &output.shape);
    writeln!(out, "{name} {datatype} {shape:?}: {}", listed(&elements, SHOWN_ELEMENTS))
}

/// A cell for each of the first `shown` rows.
fn cells(output: &InferTensor, rows: usize, shown: usize, top: usize) -> Vec<String> {
    let width = element_count(output.shape.get(1..).unwrap_or_default()).unwrap_or(0);
    let all = elements(output, width.saturating_mul(shown.min(rows)));
    if width == 0 {
        return Vec::new();
    }
    let cell = |row: &[Element<'_>]| match classes(output, row, top) {
        Some(classes) => classes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        None => listed(row, SHOWN_IN_TABLE),
    };
    all.chunks(width).map(cell).collect()
}

/// An element of an output.
#[derive(Clone, Debug, PartialEq)]
enum Element<'a> {
    Number(Number),
    Truth(bool),
    Text(std::borrow::Cow<'a, str>),
}

impl std::fmt::Display for Element<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Element::Number(number) => number.fmt(f),
            Element::Truth(truth) => truth.fmt(f),
            Element::Text(text) => f.write_str(text),
        }
    }
}

/// The first elements of a tensor.
fn elements(output: &InferTensor, most: usize) -> Vec<Element<'_>> {
    let truth = |number| Element::Truth(number == Number::Integer(1));
    match output.datatype {
        DataType::Bytes => Texts(&output.data).take(most).map(|t| Element::Text(String::from_utf8_lossy(t))).collect(),
        DataType::Bool => Numbers::of(output.datatype, &output.data).take(most).map(truth).collect(),
        // Printed as a number of 32 bits: with 64, 0.1 has 17 digits.
        DataType::Fp32 | DataType::Fp16 | DataType::Bf16 => {
            Numbers::of(output.datatype, &output.data).take(most).map(short).collect()
        }
        _ => Numbers::of(output.datatype, &output.data).take(most).map(Element::Number).collect(),
    }
}

fn short(number: Number) -> Element<'static> {
    match number {
        Number::Float(value) => Element::Text((value as f32).to_string().into()),
        Number::Integer(_) => Element::Number(number),
    }
}

/// The first `most` elements in one line.
fn listed(elements: &[Element<'_>], most: usize) -> String {
    let mut line = String::new();
    for (place, element) in elements.iter().take(most).enumerate() {
        let divider = if place > 0 { ", " } else { "" };
        let _ = write!(line, "{divider}{element}");
    }
    line + if elements.len() > most { ", ..." } else { "" }
}

/// The likeliest classes of one row: as the server names them, or the places of the largest
/// probabilities. `None` if the row has no classes.
fn classes(output: &InferTensor, row: &[Element<'_>], top: usize) -> Option<Vec<Class>> {
    if output.datatype == DataType::Bytes {
        let class = |element: &Element<'_>| match element {
            Element::Text(text) => Class::parse(text),
            _ => None,
        };
        return row.iter().map(class).collect::<Option<Vec<Class>>>().filter(|classes| !classes.is_empty());
    }
    let is_row = match output.shape.as_slice() {
        [_] | [_, _] => row.len() > 1,
        _ => false,
    };
    if !output.datatype.is_float() || !is_row {
        return None;
    }
    let value = |element: &Element<'_>| match element {
        Element::Text(text) => text.parse().ok(),
        Element::Number(Number::Float(value)) => Some(*value),
        _ => None,
    };
    let values: Vec<f64> = row.iter().map(value).collect::<Option<_>>()?;
    let are_probabilities = values.iter().all(|value| (0.0..=MAX_PROBABILITY).contains(value))
        && (values.iter().sum::<f64>() - 1.0).abs() < SUM_TOLERANCE;
    if !are_probabilities {
        return None;
    }
    let mut classes: Vec<Class> = (0..).zip(values).map(|(index, value)| Class { value, index, label: None }).collect();
    classes.sort_by(|a, b| b.value.total_cmp(&a.value).then(a.index.cmp(&b.index)));
    classes.truncate(top);
    Some(classes)
}

/// An element of the classification extension: `VALUE:INDEX[:LABEL]`.
struct Class {
    value: f64,
    index: u64,
    label: Option<String>,
}

impl Class {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, ':');
        let (value, index) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(Class { value, index, label: parts.next().map(str::to_owned) })
    }
}

impl std::fmt::Display for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.label {
            Some(label) => write!(f, "{label}")?,
            None => write!(f, "class {}", self.index)?,
        }
        if (0.0..=MAX_PROBABILITY).contains(&self.value) {
            write!(f, " (probability {:.4})", self.value)
        } else {
            write!(f, " (score {})", self.value)
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn shown(output: InferTensor) -> String {
        let response = InferResponse { outputs: vec![output], ..InferResponse::default() };
        let mut out = Vec::new();
        show(&response, 1, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn output(datatype: DataType, shape: &[i64], data: &[u8]) -> InferTensor {
        let data = Bytes::copy_from_slice(data);
        InferTensor { name: "y".into(), datatype, shape: shape.to_vec(), parameters: Default::default(), data }
    }

    fn texts(rows: i64, texts: &[&str]) -> InferTensor {
        let data: Vec<u8> =
            texts.iter().flat_map(|t| (t.len() as u32).to_le_bytes().into_iter().chain(t.bytes())).collect();
        output(DataType::Bytes, &[rows, texts.len() as i64 / rows], &data)
    }

    fn floats(shape: &[i64], values: &[f32]) -> InferTensor {
        output(DataType::Fp32, shape, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    #[test]
    fn classes_are_shown_with_their_labels() {
        assert_eq!(shown(texts(1, &["0.998:3:three"])), "y: three (probability 0.9980)\n");
        assert_eq!(shown(texts(1, &["12.5:3", "-1:2:a:b"])), "y: class 3 (score 12.5)\ny: a:b (score -1)\n");
        assert_eq!(shown(texts(1, &["just text"])), "y BYTES [1, 1]: just text\n");
    }

    #[test]
    fn probabilities_are_classes_and_other_numbers_are_not() {
        assert_eq!(shown(floats(&[1, 3], &[0.1, 0.7, 0.2])), "y: class 1 (probability 0.7000)\n");
        assert_eq!(shown(floats(&[1, 2], &[1.000_000_1, 0.0])), "y: class 0 (probability 1.0000)\n");
        assert_eq!(shown(floats(&[1, 3], &[0.1, 0.7, 0.3])), "y FP32 [1, 3]: 0.1, 0.7, 0.3\n");
        assert_eq!(shown(floats(&[1, 1], &[1.0])), "y FP32 [1, 1]: 1\n", "one number is no choice");
        assert_eq!(shown(floats(&[1, 1, 2], &[0.5, 0.5])), "y FP32 [1, 1, 2]: 0.5, 0.5\n");
    }

    #[test]
    fn numbers_are_shown_up_to_a_limit() {
        assert_eq!(shown(output(DataType::Int16, &[1, 2], &[1, 0, 0xff, 0xff])), "y INT16 [1, 2]: 1, -1\n");
        assert_eq!(shown(output(DataType::Bool, &[], &[1])), "y BOOL []: true\n");
        let many = shown(output(DataType::Uint8, &[1, 20], &[7; 20]));
        assert!(many.ends_with("7, 7, ...\n") && many.matches('7').count() == 16, "{many}");
        assert_eq!(shown(output(DataType::Bytes, &[1], &[9, 0, 0, 0, 1])), "y BYTES [1]: \n", "a cut text is no panic");
    }

    #[test]
    fn several_rows_are_a_table() {
        let table = shown(floats(&[2, 2], &[0.1, 0.9, 3.0, 4.5]));
        assert_eq!(
            table.lines().skip(2).collect::<Vec<_>>(),
            ["|   1 | class 1 (probability 0.9000) |", "|   2 | 3, 4.5                       |"],
            "{table}"
        );
        let table = shown(texts(2, &["0.9:1:cat", "0.8:0:dog"]));
        assert!(table.contains("cat (probability 0.9000)") && table.contains("dog (probability 0.8000)"), "{table}");
        let table = shown(output(DataType::Uint8, &[250], &[7; 250]));
        assert!(table.ends_with("150 more rows; --output FILE.csv writes all\n"), "{table}");
        assert!(
            shown(output(DataType::Uint8, &[2, i64::MAX, 4], &[7; 8])).contains("row"),
            "a wrong shape is no panic"
        );
    }
}
