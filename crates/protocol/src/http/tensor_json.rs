//! Tensor elements in JSON: lists of numbers, booleans or strings, flat or nested, to and from the
//! binary form.
//!
//! `null` among floating-point numbers is NaN: servers that keep to the letter of JSON write it so.
//!
//! Written by hand because elements go straight to and from their binary form. Through serde's
//! values a JSON request took twice the instructions (docs/results/speed.md).

use std::fmt;

use bytes::Buf;
use downbeat_core::tensor::DataType;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{number_list, number_word};
use crate::pace;

/// Deepest nesting of lists, as in Triton.
pub(super) const MOST_DEPTH: usize = 100;
/// Elements between two steps of a long list.
const STEP: usize = 4096;

/// Reads `text`, a JSON list of `count` elements, into the binary form. The nesting of lists is
/// free, as in Triton. Elements are taken in the order in which they are written, and a single
/// element needs no list.
pub(super) fn read(text: &[u8], datatype: DataType, count: usize) -> Result<Vec<u8>, String> {
    if let Some(data) = number_list::read(text, datatype, count) {
        return Ok(data);
    }
    let text = std::str::from_utf8(text).map_err(|e| format!("`data` is not UTF-8: {e}"))?;
    // An element takes at least two characters. So a shape that promises more elements than the
    // text has reserves no memory.
    let most = count.min(text.len() / 2 + 1);
    let mut elements = Elements {
        out: Vec::with_capacity(most.saturating_mul(datatype.size().unwrap_or(8))),
        datatype,
        count: 0,
        limit: count,
        depth: 0,
    };
    let mut deserializer = serde_json::Deserializer::from_str(text);
    (&mut elements).deserialize(&mut deserializer).map_err(|e| format!("{e} of `data`"))?;
    if elements.count != count {
        return Err(format!("expected {count} elements in `data`, got {}", elements.count));
    }
    Ok(elements.out)
}

/// Collects elements as they are parsed.
struct Elements {
    out: Vec<u8>,
    datatype: DataType,
    count: usize,
    limit: usize,
    /// The number of open lists.
    depth: usize,
}

impl Elements {
    fn push<E: de::Error>(&mut self, bytes: &[u8]) -> Result<(), E> {
        if self.count == self.limit {
            return Err(E::custom(format_args!("expected {} elements in `data`, got more", self.limit)));
        }
        self.count += 1;
        if self.count.is_multiple_of(STEP) {
            pace::step(8 * STEP as u64);
        }
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    fn is_float(&self) -> bool {
        self.datatype.is_float()
    }

    fn out_of_range<E: de::Error>(&self, value: impl fmt::Display) -> E {
        E::custom(format_args!("{value} is out of the range of {}", self.datatype))
    }

    fn integer<E: de::Error>(&mut self, value: i128) -> Result<(), E> {
        macro_rules! push_as {
            ($type:ty) => {
                match <$type>::try_from(value) {
                    Ok(v) => self.push(&v.to_le_bytes()),
                    Err(_) => Err(self.out_of_range(value)),
                }
            };
        }
        match self.datatype {
            DataType::Uint8 => push_as!(u8),
            DataType::Uint16 => push_as!(u16),
            DataType::Uint32 => push_as!(u32),
            DataType::Uint64 => push_as!(u64),
            DataType::Int8 => push_as!(i8),
            DataType::Int16 => push_as!(i16),
            DataType::Int32 => push_as!(i32),
            DataType::Int64 => push_as!(i64),
            DataType::Bool if value == 0 || value == 1 => self.push(&[u8::from(value == 1)]),
            DataType::Bool => Err(self.out_of_range(value)),
            DataType::Fp16 | DataType::Fp32 | DataType::Fp64 | DataType::Bf16 => self.float(value as f64),
            DataType::Bytes => Err(E::invalid_type(de::Unexpected::Other("number"), &self)),
        }
    }

    /// Appends a float. A finite value that rounds to an infinity is an error.
    fn float<E: de::Error>(&mut self, value: f64) -> Result<(), E> {
        let (fits, pushed) = match self.datatype {
            DataType::Fp32 => {
                let v = value as f32;
                (v.is_finite(), self.push(&v.to_le_bytes()))
            }
            DataType::Fp64 => (value.is_finite(), self.push(&value.to_le_bytes())),
            DataType::Fp16 => {
                let v = half::f16::from_f64(value);
                (v.is_finite(), self.push(&v.to_le_bytes()))
            }
            DataType::Bf16 => {
                let v = half::bf16::from_f64(value);
                (v.is_finite(), self.push(&v.to_le_bytes()))
            }
            _ => return Err(E::invalid_type(de::Unexpected::Float(value), &self)),
        };
        if !fits && value.is_finite() {
            return Err(self.out_of_range(value));
        }
        pushed
    }
}

impl<'de> DeserializeSeed<'de> for &mut Elements {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Elements {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.datatype {
            DataType::Bool => "a list of true and false",
            DataType::Bytes => "a list of strings",
            DataType::Fp16 | DataType::Fp32 | DataType::Fp64 | DataType::Bf16 => "a list of numbers",
            _ => "a list of integers",
        })
    }

    fn visit_bool<E: de::Error>(self, v: bool) -> Result<(), E> {
        match self.datatype {
            DataType::Bool => self.push(&[u8::from(v)]),
            _ => Err(E::invalid_type(de::Unexpected::Bool(v), &self)),
        }
    }

    fn visit_i64<E: de::Error>(self, v: i64) -> Result<(), E> {
        self.integer(i128::from(v))
    }

    fn visit_u64<E: de::Error>(self, v: u64) -> Result<(), E> {
        self.integer(i128::from(v))
    }

    fn visit_f64<E: de::Error>(self, v: f64) -> Result<(), E> {
        self.float(v)
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        match self.is_float() {
            true => self.float(f64::NAN),
            false => Err(E::invalid_type(de::Unexpected::Other("null"), &self)),
        }
    }

    fn visit_str<E: de::Error>(self, v: &str) -> Result<(), E> {
        let length = match (self.datatype, u32::try_from(v.len())) {
            (DataType::Bytes, Ok(length)) => length,
            _ if self.is_float()
                && let Some(value) = number_word::value_of(v) =>
            {
                return self.float(value);
            }
            (DataType::Bytes, Err(_)) => return Err(E::custom("a BYTES element is longer than 4 GiB")),
            _ => {
                let start: String = v.chars().take(32).collect();
                return Err(E::invalid_type(de::Unexpected::Str(&start), &self));
            }
        };
        self.push(&length.to_le_bytes())?;
        self.out.extend_from_slice(v.as_bytes());
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<(), A::Error> {
        let Some(value) = number_word::read_object(map)? else {
            return Err(de::Error::invalid_type(de::Unexpected::Map, &self));
        };
        match self.is_float() {
            true => self.float(value),
            false => {
                let word = number_word::word_for(value).unwrap_or_default();
                Err(de::Error::invalid_type(de::Unexpected::Other(word), &self))
            }
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        if self.depth == MOST_DEPTH {
            return Err(de::Error::custom(format_args!(
                "JSON nesting depth exceeds maximum allowed limit ({MOST_DEPTH})"
            )));
        }
        self.depth += 1;
        while seq.next_element_seed(&mut *self)?.is_some() {}
        self.depth -= 1;
        Ok(())
    }
}

/// Appends the elements of `data` (in the binary form) as a flat JSON list.
pub(super) fn write(out: &mut Vec<u8>, datatype: DataType, data: &[u8]) -> Result<(), String> {
    out.push(b'[');
    match datatype {
        DataType::Bytes => write_strings(out, data)?,
        DataType::Bool => write_each(out, data, write_json, |[v]| v != 0)?,
        DataType::Uint8 => write_each(out, data, write_json, u8::from_le_bytes)?,
        DataType::Uint16 => write_each(out, data, write_json, u16::from_le_bytes)?,
        DataType::Uint32 => write_each(out, data, write_json, u32::from_le_bytes)?,
        DataType::Uint64 => write_each(out, data, write_json, u64::from_le_bytes)?,
        DataType::Int8 => write_each(out, data, write_json, i8::from_le_bytes)?,
        DataType::Int16 => write_each(out, data, write_json, i16::from_le_bytes)?,
        DataType::Int32 => write_each(out, data, write_json, i32::from_le_bytes)?,
        DataType::Int64 => write_each(out, data, write_json, i64::from_le_bytes)?,
        DataType::Fp16 => write_each(out, data, number_word::write, |b| half::f16::from_le_bytes(b).to_f32())?,
        DataType::Bf16 => write_each(out, data, number_word::write, |b| half::bf16::from_le_bytes(b).to_f32())?,
        DataType::Fp32 => write_each(out, data, number_word::write, f32::from_le_bytes)?,
        DataType::Fp64 => write_each(out, data, number_word::write, f64::from_le_bytes)?,
    }
    out.push(b']');
    Ok(())
}

fn write_json<T: serde::Serialize>(out: &mut Vec<u8>, value: T) -> Result<(), serde_json::Error> {
    serde_json::to_writer(out, &value)
}

fn write_each<const SIZE: usize, T>(
    out: &mut Vec<u8>,
    data: &[u8],
    write: impl Fn(&mut Vec<u8>, T) -> Result<(), serde_json::Error>,
    element: impl Fn([u8; SIZE]) -> T,
) -> Result<(), String> {
    let (elements, rest) = data.as_chunks::<SIZE>();
    if !rest.is_empty() {
        return Err(format!("{} bytes are not a whole number of elements of {SIZE} bytes", data.len()));
    }
    for (part, some) in elements.chunks(STEP).enumerate() {
        if part > 0 {
            pace::step((STEP * SIZE) as u64);
            out.push(b',');
        }
        for (i, bytes) in some.iter().enumerate() {
            if i > 0 {
                out.push(b',');
            }
            write(out, element(*bytes)).map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

fn write_strings(out: &mut Vec<u8>, mut data: &[u8]) -> Result<(), String> {
    let mut index = 0_usize;
    while !data.is_empty() {
        let length = data.try_get_u32_le().map_err(|_| "the length of a BYTES element is cut off".to_owned())?;
        let (element, rest) = usize::try_from(length)
            .ok()
            .and_then(|length| data.split_at_checked(length))
            .ok_or_else(|| format!("BYTES element {index} should have {length} bytes, {} are left", data.len()))?;
        let text = std::str::from_utf8(element).map_err(|_| {
            format!("BYTES element {index} is not UTF-8, which JSON cannot carry; ask for the output with binary_data")
        })?;
        if index > 0 {
            out.push(b',');
        }
        serde_json::to_writer(&mut *out, text).map_err(|e| e.to_string())?;
        data = rest;
        index += 1;
    }
    Ok(())
}
