//! `BYTES` elements: byte strings, each preceded by its length as a little-endian `u32`.

use crate::tensor::buffer::Buffer;

/// Bytes that are not a sequence of length-prefixed strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("element {element}: its length says {said} bytes, but {left} are left")]
pub struct StringsError {
    /// The element, from 0.
    pub element: usize,
    /// The element's stated length (4 if there is no room for a length).
    pub said: usize,
    /// The rest of the tensor's bytes.
    pub left: usize,
}

/// The elements of a `BYTES` tensor, in order. Ends after the first error.
pub fn split(bytes: &[u8]) -> Split<'_> {
    Split { rest: bytes, element: 0 }
}

/// Appends one element.
///
/// # Errors
/// If `element` is longer than a `u32` can say: 4 GiB.
pub fn push(to: &mut Buffer, element: &[u8]) -> Result<(), std::num::TryFromIntError> {
    let len = u32::try_from(element.len())?;
    to.extend_from_slice(&len.to_le_bytes());
    to.extend_from_slice(element);
    Ok(())
}

/// See [`split`].
#[derive(Debug, Clone)]
pub struct Split<'a> {
    rest: &'a [u8],
    element: usize,
}

impl<'a> Iterator for Split<'a> {
    type Item = Result<&'a [u8], StringsError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let element = self.element;
        self.element += 1;
        let Some((len, rest)) = self.rest.split_first_chunk::<4>() else {
            let left = self.rest.len();
            self.rest = &[];
            return Some(Err(StringsError { element, said: 4, left }));
        };
        let said = u32::from_le_bytes(*len) as usize;
        match rest.split_at_checked(said) {
            Some((string, rest)) => {
                self.rest = rest;
                Some(Ok(string))
            }
            None => {
                self.rest = &[];
                Some(Err(StringsError { element, said, left: rest.len() }))
            }
        }
    }
}
