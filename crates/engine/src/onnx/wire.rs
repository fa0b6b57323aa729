//! The wire format of protocol buffers, read from a file without holding it in memory.
//!
//! Engines parse models with libraries that trust lengths. So this code first walks a file, checks
//! every length against the enclosing message, and skips tensors by seeking.

use std::io::{BufRead, Read, Seek};

/// The longest string that is read (names, paths); in models they are below a kilobyte.
const STRING_LIMIT: u64 = 1 << 16;
/// The most fields that are read: two orders of magnitude above the largest models, a few seconds
/// of work.
const FIELD_LIMIT: u64 = 50_000_000;

/// The reason why bytes are not a message.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum WireError {
    #[error("the file ends in the middle of a value at byte {0}: it is truncated")]
    Truncated(u64),
    #[error(
        "the value at byte {at} has a length of {len} bytes, but only {left} follow: the file is truncated or corrupt"
    )]
    TooLong { at: u64, len: u64, left: u64 },
    #[error("the bytes at {0} are not those of an ONNX model: the file is corrupt or of another format")]
    Invalid(u64),
    #[error("messages are nested more than {0} deep")]
    TooDeep(u32),
    #[error("the file has more than {FIELD_LIMIT} fields")]
    TooManyFields,
    #[error("it cannot be read: {0}")]
    Io(#[from] std::io::Error),
}

/// The value of a field; for `Length`, its bytes are next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireValue {
    /// An integer.
    Varint(u64),
    /// Four or eight bytes, which were skipped.
    Fixed,
    /// The number of bytes of a string or message.
    Length(u64),
}

/// Reads fields one after the other.
pub struct Reader<R> {
    inner: R,
    position: u64,
    fields: u64,
}

impl<R: BufRead + Seek> Reader<R> {
    /// Begins at byte 0 of `inner`.
    pub fn new(inner: R) -> Self {
        Reader { inner, position: 0, fields: 0 }
    }

    /// Bytes read or skipped so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The next field's number and value; `None` at `end`, which must be where the enclosing
    /// message ends.
    ///
    /// # Errors
    /// If the bytes are no field, or the field is longer than the enclosing message.
    pub fn field(&mut self, end: u64) -> Result<Option<(u64, WireValue)>, WireError> {
        if self.position >= end {
            return Ok(None);
        }
        self.fields += 1;
        if self.fields > FIELD_LIMIT {
            return Err(WireError::TooManyFields);
        }
        let at = self.position;
        let tag = self.varint(end)?;
        let number = tag >> 3;
        if number == 0 || number > (1 << 29) - 1 {
            return Err(WireError::Invalid(at));
        }
        let value = match tag & 7 {
            0 => WireValue::Varint(self.varint(end)?),
            1 => {
                self.advance(8, end)?;
                WireValue::Fixed
            }
            2 => {
                let len = self.varint(end)?;
                let left = end - self.position;
                if len > left {
                    return Err(WireError::TooLong { at, len, left });
                }
                WireValue::Length(len)
            }
            5 => {
                self.advance(4, end)?;
                WireValue::Fixed
            }
            _ => return Err(WireError::Invalid(at)),
        };
        Ok(Some((number, value)))
    }

    /// Skips the bytes before `end`. It must be in the enclosing message and not before the
    /// position.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn skip_to(&mut self, end: u64) -> Result<(), WireError> {
        self.seek(end - self.position)
    }

    /// The `len` bytes that are next. `len` must be at most `limit`.
    ///
    /// # Errors
    /// If there are more bytes than the limit, or fewer than `len` in the file.
    pub fn bytes(&mut self, len: u64, limit: u64) -> Result<Vec<u8>, WireError> {
        let at = self.position;
        if len > limit {
            return Err(WireError::Invalid(at));
        }
        // Read to the end of the file at most, so that a sparse message allocates what it has.
        let mut bytes = Vec::new();
        (&mut self.inner).take(len).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != len {
            return Err(WireError::Truncated(at));
        }
        self.position += len;
        Ok(bytes)
    }

    /// The string of `len` bytes that is next.
    ///
    /// # Errors
    /// If the string is longer than any name in a model, or is not UTF-8.
    pub fn string(&mut self, len: u64) -> Result<String, WireError> {
        let at = self.position;
        if len > STRING_LIMIT {
            return Err(WireError::Invalid(at));
        }
        let mut bytes = vec![0; len as usize];
        self.inner.read_exact(&mut bytes).map_err(|e| ended(e, at))?;
        self.position += len;
        String::from_utf8(bytes).map_err(|_| WireError::Invalid(at))
    }

    fn varint(&mut self, end: u64) -> Result<u64, WireError> {
        let at = self.position;
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            if self.position >= end {
                return Err(WireError::Truncated(self.position));
            }
            let mut byte = [0];
            self.inner.read_exact(&mut byte).map_err(|e| ended(e, at))?;
            self.position += 1;
            let [byte] = byte;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(WireError::Invalid(at))
    }

    fn advance(&mut self, len: u64, end: u64) -> Result<(), WireError> {
        if len > end - self.position {
            return Err(WireError::Truncated(self.position));
        }
        self.seek(len)
    }

    fn seek(&mut self, len: u64) -> Result<(), WireError> {
        // Within the file, which is smaller than i64::MAX: `field` compared the length with the
        // enclosing message's.
        self.inner.seek_relative(len as i64)?;
        self.position += len;
        Ok(())
    }
}

fn ended(error: std::io::Error, at: u64) -> WireError {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => WireError::Truncated(at),
        _ => WireError::Io(error),
    }
}
