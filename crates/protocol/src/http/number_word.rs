//! `NaN`, `Infinity` and `-Infinity` in JSON: floating-point numbers without a form in JSON itself.
//!
//! Triton writes and takes `{"data":[1.5,-Infinity,NaN]}` (RapidJSON's `kWriteNanAndInfFlag` and
//! `kParseNanAndInfFlag`). Python's `json` and `perf_analyzer` do the same, but serde_json refuses
//! the words. Only a text that serde_json has refused is rewritten. Each word becomes an object
//! that the protocol uses nowhere else. A word outside of a number's place remains an error.

use std::borrow::Cow;

use serde::Serialize;
use serde::de::{IgnoredAny, MapAccess};

/// A word, its value, and the object for it in a rewritten text. A word precedes its own prefixes
/// in the list.
struct Word {
    text: &'static str,
    value: f64,
    object: &'static str,
}

/// The objects are as short as possible: a rewritten text is at most 7/3 as long as the text.
const WORDS: [Word; 6] = [
    Word { text: "NaN", value: f64::NAN, object: r#"{"n":0}"# },
    Word { text: "-NaN", value: f64::NAN, object: r#"{"n":0}"# },
    Word { text: "Infinity", value: f64::INFINITY, object: r#"{"+":0}"# },
    Word { text: "-Infinity", value: f64::NEG_INFINITY, object: r#"{"-":0}"# },
    Word { text: "Inf", value: f64::INFINITY, object: r#"{"+":0}"# },
    Word { text: "-Inf", value: f64::NEG_INFINITY, object: r#"{"-":0}"# },
];

/// The value of a word.
pub(super) fn value_of(text: &str) -> Option<f64> {
    WORDS.iter().find(|word| word.text == text).map(|word| word.value)
}

/// The word at the start of a text, and its value.
pub(super) fn starting(text: &[u8]) -> Option<(&'static str, f64)> {
    WORDS.iter().find(|word| text.starts_with(word.text.as_bytes())).map(|word| (word.text, word.value))
}

/// The word for a value; `None` if the value is finite, so that JSON has a form.
pub(super) fn word_for(value: f64) -> Option<&'static str> {
    match value {
        _ if value.is_nan() => Some("NaN"),
        f64::INFINITY => Some("Infinity"),
        f64::NEG_INFINITY => Some("-Infinity"),
        _ => None,
    }
}

/// Appends a number, as JSON or as a word.
pub(super) fn write<T: Serialize + Copy + Into<f64>>(out: &mut Vec<u8>, value: T) -> Result<(), serde_json::Error> {
    match word_for(value.into()) {
        Some(word) => out.extend_from_slice(word.as_bytes()),
        None => serde_json::to_writer(out, &value)?,
    }
    Ok(())
}

/// The value of an object for a word; `None` for another object. A client that sends such an object
/// itself gets the number.
pub(super) fn read_object<'de, A: MapAccess<'de>>(mut map: A) -> Result<Option<f64>, A::Error> {
    let first: Option<(Cow<'de, str>, IgnoredAny)> = map.next_entry()?;
    let value = match first.as_ref().map(|(key, _)| key.as_ref()) {
        Some("n") => f64::NAN,
        Some("+") => f64::INFINITY,
        Some("-") => f64::NEG_INFINITY,
        _ => return Ok(None),
    };
    let is_alone = map.next_entry::<IgnoredAny, IgnoredAny>()?.is_none();
    Ok(is_alone.then_some(value))
}

/// Rewrites the words of a JSON text into objects. [`parse_request`](super::parse_request) and
/// [`parse_response`](super::parse_response) read these objects as the words. `None` if the text
/// has no word. Strings stay as they are.
pub fn words_as_objects(json: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(json.len() + 64);
    let mut rest = json;
    let mut found = false;
    while let [first, after @ ..] = rest {
        let word = match first {
            b'N' | b'I' | b'-' => WORDS.iter().find(|word| rest.starts_with(word.text.as_bytes())),
            _ => None,
        };
        if let Some(word) = word {
            found = true;
            out.extend_from_slice(word.object.as_bytes());
            rest = rest.get(word.text.len()..)?;
        } else if *first == b'"' {
            let length = string_length(after)?;
            let (string, behind) = rest.split_at_checked(length + 1)?;
            out.extend_from_slice(string);
            rest = behind;
        } else {
            out.push(*first);
            rest = after;
        }
    }
    found.then_some(out)
}

/// The length of a string without its opening quote and with its closing quote.
fn string_length(text: &[u8]) -> Option<usize> {
    let mut escaped = false;
    text.iter()
        .position(|byte| {
            let ends = *byte == b'"' && !escaped;
            escaped = *byte == b'\\' && !escaped;
            ends
        })
        .map(|end| end + 1)
}
