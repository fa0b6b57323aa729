//! The JSON of a request in its usual form, read in one pass.
//!
//! Nearly every request looks like
//! `{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}]}`. serde takes a sixth of
//! a frontend's instructions to read the head of a binary request. The scanner refuses escapes,
//! fields that the protocol does not have, and mistakes. serde then reads such a request, and names
//! the mistake.

use std::borrow::Cow;

use memchr::{memchr2, memchr3};

use super::header::{DataText, OutputHeader, RequestHeader, TensorHeader};
use super::parameter::TensorParameters;
use crate::infer::{Parameter, Parameters};

/// Reads the JSON of a request. `None` if serde must read it. The scanner does not check the data
/// of tensors.
pub(super) fn scan(json: &[u8]) -> Option<RequestHeader<'_>> {
    let mut text = Text { rest: json };
    text.skip_spaces();
    let header = text.request()?;
    text.skip_spaces();
    text.rest.is_empty().then_some(header)
}

/// The ASCII characters that stand for themselves in a string.
const STANDS_FOR_ITSELF: [bool; 256] = {
    let mut stands = [false; 256];
    let mut byte = b' ';
    while byte <= b'~' {
        stands[byte as usize] = byte != b'"' && byte != b'\\';
        byte += 1;
    }
    stands
};

/// The rest of the JSON. Each method leaves no spaces at its start.
struct Text<'a> {
    rest: &'a [u8],
}

impl<'a> Text<'a> {
    fn skip_spaces(&mut self) {
        while let [b' ' | b'\n' | b'\t' | b'\r', rest @ ..] = self.rest {
            self.rest = rest;
        }
    }

    /// Takes a JSON sign, and the spaces after it.
    fn sign(&mut self, sign: u8) -> Option<()> {
        self.rest = self.rest.strip_prefix(&[sign])?;
        self.skip_spaces();
        Some(())
    }

    /// Continues to the next member of an object or a list that ends with `close`; `false` at its
    /// end.
    fn next(&mut self, close: u8, is_first: &mut bool) -> Option<bool> {
        if self.rest.first() == Some(&close) {
            self.sign(close)?;
            return Some(false);
        }
        if !std::mem::take(is_first) {
            self.sign(b',')?;
        }
        Some(true)
    }

    /// Takes a string of ASCII characters without escapes.
    fn ascii(&mut self) -> Option<&'a [u8]> {
        let text = self.rest.strip_prefix(b"\"")?;
        let end =
            text.iter().position(|byte| !STANDS_FOR_ITSELF.get(usize::from(*byte)).is_some_and(|stands| *stands))?;
        let (string, rest) = text.split_at_checked(end)?;
        self.rest = rest;
        self.sign(b'"')?;
        Some(string)
    }

    fn string(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.ascii()?).ok()
    }

    fn key(&mut self) -> Option<&'a [u8]> {
        let key = self.ascii()?;
        self.sign(b':')?;
        Some(key)
    }

    /// Takes an object. `value` gets the key of each member and reads its value.
    fn object(&mut self, mut value: impl FnMut(&mut Self, &'a [u8]) -> Option<()>) -> Option<()> {
        self.sign(b'{')?;
        let mut is_first = true;
        while self.next(b'}', &mut is_first)? {
            let key = self.key()?;
            value(self, key)?;
        }
        Some(())
    }

    fn list<T>(&mut self, mut member: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        self.sign(b'[')?;
        let mut members = Vec::new();
        let mut is_first = true;
        while self.next(b']', &mut is_first)? {
            members.push(member(self)?);
        }
        Some(members)
    }

    fn request(&mut self) -> Option<RequestHeader<'a>> {
        let (mut id, mut parameters, mut inputs, mut outputs) = (None, None, None, None);
        let mut binary_data_output = None;
        self.object(|text, key| match key {
            b"id" => once(&mut id, text.string()?.to_owned()),
            b"parameters" => {
                let mut others = Parameters::new();
                text.object(|text, key| {
                    let value = text.parameter()?;
                    if key == b"binary_data_output" {
                        binary_data_output = Some(value);
                    } else {
                        others.insert(text_of(key)?, value);
                    }
                    Some(())
                })?;
                once(&mut parameters, others)
            }
            b"inputs" => once(&mut inputs, text.list(Text::input)?),
            b"outputs" => once(&mut outputs, text.list(Text::output)?),
            _ => None,
        })?;
        Some(RequestHeader { id, parameters, binary_data_output, inputs: inputs?, outputs })
    }

    fn input(&mut self) -> Option<TensorHeader<'a>> {
        let (mut name, mut datatype, mut shape, mut parameters, mut data) = (None, None, None, None, None);
        self.object(|text, key| match key {
            b"name" => once(&mut name, text.string()?.to_owned()),
            b"datatype" => once(&mut datatype, Cow::Borrowed(text.string()?)),
            b"shape" => once(&mut shape, text.list(Text::size)?),
            b"parameters" => once(&mut parameters, text.tensor_parameters()?),
            b"data" => once(&mut data, DataText(text.skipped_list()?)),
            _ => None,
        })?;
        let parameters = parameters.unwrap_or_default();
        Some(TensorHeader { name: name?, datatype: datatype?, shape: shape?, parameters, data })
    }

    fn output(&mut self) -> Option<OutputHeader> {
        let (mut name, mut parameters) = (None, None);
        self.object(|text, key| match key {
            b"name" => once(&mut name, text.string()?.to_owned()),
            b"parameters" => {
                let mut read = Parameters::new();
                text.object(|text, key| {
                    read.insert(text_of(key)?, text.parameter()?);
                    Some(())
                })?;
                once(&mut parameters, read)
            }
            _ => None,
        })?;
        Some(OutputHeader { name: name?, parameters })
    }

    fn tensor_parameters(&mut self) -> Option<TensorParameters> {
        let mut parameters = TensorParameters::default();
        self.object(|text, key| {
            if key == b"binary_data_size" {
                parameters.binary_data_size = Some(u64::try_from(text.size()?).ok()?);
            } else {
                parameters.others.insert(text_of(key)?, text.parameter()?);
            }
            Some(())
        })?;
        Some(parameters)
    }

    fn parameter(&mut self) -> Option<Parameter> {
        for (word, value) in [("true", true), ("false", false)] {
            if let Some(rest) = self.rest.strip_prefix(word.as_bytes()) {
                self.rest = rest;
                self.skip_spaces();
                return Some(Parameter::Bool(value));
            }
        }
        match self.rest.first()? {
            b'"' => Some(Parameter::String(self.string()?.to_owned())),
            _ => Some(Parameter::Int64(self.size()?)),
        }
    }

    /// Takes an integer, such as a size.
    fn size(&mut self) -> Option<i64> {
        let unsigned = self.rest.strip_prefix(b"-");
        let digits = unsigned.unwrap_or(self.rest);
        let mut value = 0_i64;
        let mut rest = digits;
        while let [digit @ b'0'..=b'9', behind @ ..] = rest {
            value = value.checked_mul(10)?.checked_add(i64::from(digit - b'0'))?;
            rest = behind;
        }
        let count = digits.len() - rest.len();
        let is_zero = digits.first() == Some(&b'0');
        // `01` is no number, `-0` no integer, nor are `1.5` and `1e3`.
        if count == 0 || is_zero && (count > 1 || unsigned.is_some()) || matches!(rest, [b'.' | b'e' | b'E', ..]) {
            return None;
        }
        self.rest = rest;
        self.skip_spaces();
        Some(if unsigned.is_some() { -value } else { value })
    }

    /// Takes the text of a list unread, from its opening to its closing bracket.
    fn skipped_list(&mut self) -> Option<&'a [u8]> {
        let whole = self.rest;
        let mut behind = whole.strip_prefix(b"[")?;
        let mut depth = 1_usize;
        while depth > 0 {
            let at = memchr3(b'[', b']', b'"', behind)?;
            let [found, rest @ ..] = behind.get(at..)? else { return None };
            behind = rest;
            match found {
                b'[' => depth += 1,
                b']' => depth -= 1,
                _ => behind = behind_string(behind)?,
            }
        }
        let list = whole.get(..whole.len() - behind.len())?;
        self.rest = behind;
        self.skip_spaces();
        Some(list)
    }
}

/// The text after a string whose opening quote is left out.
fn behind_string(mut text: &[u8]) -> Option<&[u8]> {
    loop {
        let at = memchr2(b'"', b'\\', text)?;
        match text.get(at..)? {
            [b'"', rest @ ..] => return Some(rest),
            [_, _, rest @ ..] => text = rest,
            _ => return None,
        }
    }
}

fn text_of(key: &[u8]) -> Option<String> {
    std::str::from_utf8(key).ok().map(str::to_owned)
}

/// Sets a place that is not set yet; `None` if it is.
fn once<T>(place: &mut Option<T>, value: T) -> Option<()> {
    place.replace(value).is_none().then_some(())
}
