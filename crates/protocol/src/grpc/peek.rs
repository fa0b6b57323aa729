//! Reads two facts from a message's bytes before it is decoded: the model's name, and the memory
//! that decoding will take.

use prost::encoding::decode_varint;

/// The model's name in the first bytes of a `ModelInferRequest`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peek<'a> {
    /// The model's name.
    Name(&'a str),
    /// More bytes are needed.
    Short,
    /// The name is not at the start, where every client writes it, or it is invalid.
    Unknown,
}

/// Longest name to wait for, bytes.
const MOST_NAME: usize = 1024;

/// The model's name, if a `ModelInferRequest` starts with it.
pub fn model_name(start: &[u8]) -> Peek<'_> {
    const KEY: u8 = 1 << 3 | WIRE_BYTES as u8;
    let (Some(&key), Some(mut rest)) = (start.first(), start.get(1..)) else { return Peek::Short };
    if key != KEY {
        return Peek::Unknown;
    }
    let Ok(length) = decode_varint(&mut rest) else {
        return if start.len() < 11 { Peek::Short } else { Peek::Unknown };
    };
    let Some(length) = usize::try_from(length).ok().filter(|length| *length <= MOST_NAME) else { return Peek::Unknown };
    match rest.get(..length).map(std::str::from_utf8) {
        None => Peek::Short,
        Some(Ok(name)) => Peek::Name(name),
        Some(Err(_)) => Peek::Unknown,
    }
}

const WIRE_BYTES: u64 = 2;
/// An upper bound of the memory of one tensor, requested output or parameter in a list that has
/// doubled. It leaves out the memory behind pointers.
const ENTRY_BYTES: u64 = 640;
/// Bytes of a raw tensor's slice of its message.
const SLICE_BYTES: u64 = 64;

/// An upper bound of the bytes that a `ModelInferRequest` takes besides the message, once it is
/// decoded and its tensors are in their final form. A message of nothing but empty tensors grows a
/// hundredfold. For a cut or wrong message, the bound covers the readable part.
pub fn decoded_bytes(message: &[u8]) -> u64 {
    fields(message)
        .map(|(number, payload)| match number {
            4 | 6 => ENTRY_BYTES.saturating_add(nested_bytes(payload)),
            5 => fields(payload)
                .map(|(number, payload)| match number {
                    5 => contents_bytes(payload),
                    _ => nested_bytes(payload),
                })
                .fold(ENTRY_BYTES, u64::saturating_add),
            7 => SLICE_BYTES,
            _ => payload.len() as u64,
        })
        .fold(0, u64::saturating_add)
}

/// The bytes for names, shapes and parameters.
fn nested_bytes(payload: &[u8]) -> u64 {
    (payload.len() as u64).saturating_mul(32)
}

/// The bytes for numbers that are not raw: decoded, in lists that have doubled, and as a tensor.
fn contents_bytes(payload: &[u8]) -> u64 {
    let bytes = |(number, payload): (u64, &[u8])| {
        let length = payload.len() as u64;
        match number {
            1 | 6 | 7 => 4 * (1 + length),
            2 | 4 => 16 * (1 + length),
            8 => 2 * SLICE_BYTES + 4 * length,
            _ => 32 * (1 + length),
        }
    };
    fields(payload).map(bytes).fold(0, u64::saturating_add)
}

/// The fields of a message with their content, as far as the message can be read.
fn fields(mut message: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    std::iter::from_fn(move || {
        let key = decode_varint(&mut message).ok()?;
        let length = match key & 7 {
            0 => message.iter().position(|byte| byte & 0x80 == 0)? + 1,
            1 => 8,
            WIRE_BYTES => usize::try_from(decode_varint(&mut message).ok()?).ok()?,
            5 => 4,
            _ => return None,
        };
        let (payload, rest) = message.split_at_checked(length)?;
        message = rest;
        Some((key >> 3, payload))
    })
}
