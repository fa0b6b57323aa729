//! Messages of protocol buffers in memory, edited field by field. Fields that no edit touches keep
//! their bytes, also those that this crate does not know.

use std::io::Cursor;

use prost::encoding::encode_varint;

use super::wire::{Reader, WireError, WireValue};

/// A field of a message in memory.
pub struct Field<'a> {
    /// The field's number.
    pub number: u64,
    /// The field with its head.
    pub whole: &'a [u8],
    /// The content of a string or message; empty for numbers.
    pub content: &'a [u8],
}

/// The fields of a message.
///
/// # Errors
/// If the bytes are no message.
pub fn fields(message: &[u8]) -> Result<Vec<Field<'_>>, WireError> {
    let mut reader = Reader::new(Cursor::new(message));
    let (end, mut fields) = (message.len() as u64, Vec::new());
    let cut = |from: u64, to: u64| message.get(from as usize..to as usize).unwrap_or_default();
    loop {
        let from = reader.position();
        let Some((number, value)) = reader.field(end)? else { return Ok(fields) };
        let start = reader.position();
        if let WireValue::Length(len) = value {
            reader.skip_to(start + len)?;
        }
        let (whole, content) = (cut(from, reader.position()), cut(start, reader.position()));
        fields.push(Field { number, whole, content });
    }
}

/// A message with some of its fields replaced. `edit` returns the new content of a field, which is
/// a string or message. `None`: no field has changed.
///
/// # Errors
/// If the bytes are no message, or the error of `edit`.
pub fn edited<E: From<WireError>>(
    message: &[u8],
    mut edit: impl FnMut(&Field<'_>) -> Result<Option<Vec<u8>>, E>,
) -> Result<Option<Vec<u8>>, E> {
    let (mut made, mut is_changed) = (Vec::with_capacity(message.len()), false);
    for field in fields(message)? {
        match edit(&field)? {
            None => made.extend_from_slice(field.whole),
            Some(content) => {
                is_changed = true;
                put(&mut made, field.number, &content);
            }
        }
    }
    Ok(is_changed.then_some(made))
}

/// Appends the head of a string or message of `len` bytes in field `number`.
pub fn put_head(to: &mut Vec<u8>, number: u64, len: u64) {
    encode_varint(number << 3 | 2, to);
    encode_varint(len, to);
}

/// Appends a string or message in field `number`.
pub fn put(to: &mut Vec<u8>, number: u64, content: &[u8]) {
    put_head(to, number, content.len() as u64);
    to.extend_from_slice(content);
}

/// Appends an integer in field `number`.
pub fn put_integer(to: &mut Vec<u8>, number: u64, value: i64) {
    encode_varint(number << 3, to);
    encode_varint(value.cast_unsigned(), to);
}
