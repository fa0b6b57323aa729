//! Lists of messages with a bound, which is checked before memory is taken.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

/// Decodes a list of at most `MOST` elements. A longer list fails before its first element is made.
pub fn at_most<'de, D, T, const MOST: usize>(decoder: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    decoder.deserialize_seq(AtMost::<T, MOST>(PhantomData))
}

/// Takes the elements of a list, up to `MOST`.
struct AtMost<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for AtMost<T, MOST> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {MOST} elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vec<T>, A::Error> {
        let count = elements.size_hint().unwrap_or_default();
        if count > MOST {
            return Err(A::Error::invalid_length(count, &self));
        }
        let mut all = Vec::with_capacity(count);
        while let Some(element) = elements.next_element()? {
            if all.len() == MOST {
                return Err(A::Error::invalid_length(MOST + 1, &self));
            }
            all.push(element);
        }
        Ok(all)
    }
}
