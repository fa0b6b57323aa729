//! Values in JSON: a request's body, inputs by name, or rows.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, anyhow, bail};
use downbeat_protocol::InferTensor;
use downbeat_protocol::http::{parse_request, words_as_objects};
use serde::Deserialize;
use serde::de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::values::Values;
use super::wanted::{Wanted, WantedInput};

/// The content of a JSON file.
#[derive(Debug)]
pub enum Json {
    /// The body of a request, with `inputs`.
    Body,
    /// Values by the names of their inputs.
    Named(BTreeMap<String, Box<RawValue>>),
    /// Values without a name.
    Rows(Box<RawValue>),
}

/// The text as JSON. NaN and Infinity, which the server accepts but JSON does not have, become
/// objects that [`values`] reads.
///
/// # Errors
/// If the text is no JSON.
pub fn with_words(text: &str) -> Result<Vec<u8>, serde_json::Error> {
    let Err(error) = serde_json::from_str::<IgnoredAny>(text) else { return Ok(text.as_bytes().to_vec()) };
    let Some(words) = words_as_objects(text.as_bytes()) else { return Err(error) };
    serde_json::from_slice::<IgnoredAny>(&words).map(|_| words)
}

/// Reads a JSON file.
///
/// # Errors
/// If the text is no JSON, or is neither an object nor a list.
pub fn read(text: &str) -> anyhow::Result<Json> {
    let json = with_words(text).context("the file is not JSON")?;
    match json.trim_ascii_start().first() {
        Some(b'{') => {
            let named: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(&json)?;
            let is_body = named.get("inputs").is_some_and(|inputs| inputs.get().starts_with('['));
            Ok(if is_body { Json::Body } else { Json::Named(named) })
        }
        Some(b'[') => rows(&json),
        _ => Ok(Json::Rows(serde_json::from_slice(&json)?)),
    }
}

/// A list of rows: objects, whose values become one list for each name, or values.
fn rows(json: &[u8]) -> anyhow::Result<Json> {
    let is_object = json.get(1..).is_some_and(|rest| rest.trim_ascii_start().first() == Some(&b'{'));
    if !is_object {
        return Ok(Json::Rows(serde_json::from_slice(json)?));
    }
    let rows: Vec<BTreeMap<String, &RawValue>> =
        serde_json::from_slice(json).context("the first row is an object, so each row must be one")?;
    let mut columns: BTreeMap<&str, String> = BTreeMap::new();
    for (place, row) in rows.iter().enumerate() {
        let first = rows.first().unwrap_or(row);
        if let Some(name) = first.keys().find(|name| !row.contains_key(*name)) {
            bail!("row {} has no '{name}', which the first row has", place + 1);
        }
        if let Some(name) = row.keys().find(|name| !first.contains_key(*name)) {
            bail!("row {} has '{name}', which the first row has not", place + 1);
        }
        for (name, value) in row {
            let column = columns.entry(name).or_default();
            column.push(if column.is_empty() { '[' } else { ',' });
            column.push_str(value.get());
        }
    }
    let named = columns.into_iter().map(|(name, column)| Ok((name.to_owned(), RawValue::from_string(column + "]")?)));
    Ok(Json::Named(named.collect::<Result<_, serde_json::Error>>()?))
}

/// Makes a JSON value into an input: its shape comes from the nesting of its lists.
///
/// # Errors
/// If the lists are of different lengths, or the elements do not fit the input.
pub fn into_input(json: &RawValue, wanted: &Wanted, input: &WantedInput, shown: &str) -> anyhow::Result<InferTensor> {
    let Nesting(shape) = serde_json::from_str(json.get()).map_err(|error| anyhow!("{shown}: {}", plain(&error)))?;
    // The protocol's own reader knows each datatype, its range and its words.
    let header = serde_json::json!({ "name": "x", "datatype": input.datatype.name(), "shape": shape }).to_string();
    let tensor = header.strip_suffix('}').unwrap_or_default();
    let body = format!("{{\"inputs\":[{tensor},\"data\":{}}}]}}", json.get());
    let read = parse_request(String::new(), String::new(), body.into(), None);
    let (request, _) = read.map_err(|error| {
        let said = error.to_string();
        let said = said.strip_prefix("input 'x': ").unwrap_or(&said);
        anyhow!("input '{}' wants {}, but {shown} has other values: {said}", input.name, input.form())
    })?;
    let data = request.inputs.into_iter().next().map(|input| input.data.to_vec()).unwrap_or_default();
    Values { datatype: input.datatype, shape, data }.into_input(wanted, input, shown)
}

/// An error without its place, which would be the place in one value and not in the file.
fn plain(error: &serde_json::Error) -> String {
    let said = error.to_string();
    said.split_once(" at line ").map_or(said.clone(), |(words, _)| words.to_owned())
}

/// The sizes of a value's lists, from the outermost to the innermost. All lists of one depth are of
/// the same length.
struct Nesting(Vec<i64>);

impl<'de> Deserialize<'de> for Nesting {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NestingVisitor)
    }
}

struct NestingVisitor;

macro_rules! scalars {
    ($($visit:ident $type:ty),*) => {
        $(fn $visit<E: de::Error>(self, _: $type) -> Result<Nesting, E> {
            Ok(Nesting(Vec::new()))
        })*
    };
}

impl<'de> Visitor<'de> for NestingVisitor {
    type Value = Nesting;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, a text, or lists of these")
    }

    scalars!(visit_bool bool, visit_i64 i64, visit_u64 u64, visit_f64 f64, visit_str &str);

    fn visit_unit<E: de::Error>(self) -> Result<Nesting, E> {
        Ok(Nesting(Vec::new()))
    }

    /// An object stands for NaN or an infinity; the reader of elements refuses any other.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Nesting, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Nesting(Vec::new()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Nesting, A::Error> {
        let Some(Nesting(first)) = seq.next_element()? else { return Ok(Nesting(vec![0])) };
        let mut length = 1;
        while let Some(Nesting(next)) = seq.next_element()? {
            if next != first {
                let place = length;
                return Err(de::Error::custom(format_args!(
                    "lists beside each other must have the same shape, but element 0 has {first:?} and element {place} \
                     has {next:?}"
                )));
            }
            length += 1;
        }
        Ok(Nesting([vec![length], first].concat()))
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::tensor::DataType;

    use super::*;

    fn filled(json: &str, datatype: DataType, shape: &[i64]) -> anyhow::Result<InferTensor> {
        let wanted = Wanted::of(&[("x", datatype, shape)]);
        let json = RawValue::from_string(String::from_utf8(with_words(json)?)?)?;
        into_input(&json, &wanted, &wanted.inputs[0], "a.json")
    }

    #[test]
    fn the_nesting_of_lists_is_the_shape() {
        let tensor = filled("[[1, 2], [3, 4], [5, 6]]", DataType::Int32, &[-1, 2]).unwrap();
        assert_eq!((tensor.shape.as_slice(), tensor.data.len()), ([3, 2].as_slice(), 24));
        assert_eq!(filled("[1, NaN]", DataType::Fp32, &[-1, 2]).unwrap().shape, [1, 2]);
        assert_eq!(filled("[\"a\", \"b\"]", DataType::Bytes, &[-1, 1]).unwrap().shape, [2, 1]);
        assert_eq!(filled("true", DataType::Bool, &[-1]).unwrap().data.as_ref(), [1]);
        assert_eq!(filled("9007199254740993", DataType::Int64, &[-1]).unwrap().data[0], 1, "no detour by a float");
        assert_eq!(filled("1.5", DataType::Fp16, &[-1]).unwrap().data.len(), 2);
    }

    #[test]
    fn what_does_not_fit_is_told_in_one_line() {
        for (json, datatype, said) in [
            ("[[1, 2], [3]]", DataType::Fp32, "element 0 has [2] and element 1 has [1]"),
            ("[[1, 2, 3]]", DataType::Fp32, "input 'x' wants FP32 [rows, 2], but a.json has FP32 [1, 3]"),
            ("[\"a\", \"b\"]", DataType::Fp32, "expected a list of numbers"),
            ("[1.5, 2]", DataType::Int64, "expected a list of integers"),
            ("[300, 0]", DataType::Uint8, "300 is out of the range of UINT8"),
            ("[{\"a\": 1}, 2]", DataType::Fp32, "invalid type: map"),
        ] {
            let error = filled(json, datatype, &[-1, 2]).unwrap_err().to_string();
            assert!(error.contains(said) && error.lines().count() == 1, "{json}: {error}");
        }
        let deep = "[".repeat(200) + &"]".repeat(200);
        assert!(filled(&deep, DataType::Fp32, &[-1, 2]).is_err());
    }

    #[test]
    fn rows_of_objects_become_columns() {
        let Json::Named(columns) = read(r#"[{"a": 1, "b": "x"}, {"b": "y", "a": 2}]"#).unwrap() else { panic!() };
        assert_eq!((columns["a"].get(), columns["b"].get()), ("[1,2]", r#"["x","y"]"#));
        let error = read(r#"[{"a": 1}, {"b": 2}]"#).unwrap_err().to_string();
        assert_eq!(error, "row 2 has no 'a', which the first row has");
        assert!(matches!(read(r#"{"inputs": [{"name": "x"}]}"#).unwrap(), Json::Body));
        assert!(matches!(read("[[1], [2]]").unwrap(), Json::Rows(_)));
        assert!(format!("{:#}", read("{").unwrap_err()).starts_with("the file is not JSON"));
    }
}
