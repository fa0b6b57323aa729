//! Lists of numbers in JSON, read from the bytes straight into the binary form.
//!
//! Nearly all bytes of a JSON request are numbers. serde_json reads each byte three times: to find
//! the end of the list, the end of the number, and its value. This module reads each byte once. It
//! refuses a list with a mistake, such as `[1, "two"]` or `[1 2]`. serde_json then names the
//! mistake and its place.

use downbeat_core::tensor::DataType;

use super::number_word;
use super::tensor_json::MOST_DEPTH;
use crate::pace;

/// Bytes of text between two steps of a long list.
const STEP: usize = 32 << 10;

/// Reads `text`, a list of `count` numbers or booleans, flat or nested, into the binary form.
/// `None` if the text is no such list, or has a number that the datatype cannot hold.
pub(super) fn read(text: &[u8], datatype: DataType, count: usize) -> Option<Vec<u8>> {
    macro_rules! integers {
        ($type:ty, $number:ident) => {
            list(text, count, |numbers| Some(<$type>::try_from(numbers.$number()?).ok()?.to_le_bytes()))
        };
    }
    match datatype {
        DataType::Bool => list(text, count, |numbers| Some([u8::from(numbers.boolean()?)])),
        DataType::Uint8 => integers!(u8, unsigned),
        DataType::Uint16 => integers!(u16, unsigned),
        DataType::Uint32 => integers!(u32, unsigned),
        DataType::Uint64 => integers!(u64, unsigned),
        DataType::Int8 => integers!(i8, signed),
        DataType::Int16 => integers!(i16, signed),
        DataType::Int32 => integers!(i32, signed),
        DataType::Int64 => integers!(i64, signed),
        DataType::Fp16 => floats(text, count, half::f16::from_f64, half::f16::is_finite, half::f16::to_le_bytes),
        DataType::Bf16 => floats(text, count, half::bf16::from_f64, half::bf16::is_finite, half::bf16::to_le_bytes),
        DataType::Fp32 => floats(text, count, |value| value as f32, f32::is_finite, f32::to_le_bytes),
        DataType::Fp64 => floats(text, count, |value| value, f64::is_finite, f64::to_le_bytes),
        DataType::Bytes => None,
    }
}

/// Refuses a finite number that the datatype rounds to an infinity.
fn floats<const SIZE: usize, T: Copy>(
    text: &[u8],
    count: usize,
    rounded: impl Fn(f64) -> T,
    is_finite: impl Fn(T) -> bool,
    bytes: impl Fn(T) -> [u8; SIZE],
) -> Option<Vec<u8>> {
    list(text, count, |numbers| {
        let value = numbers.float()?;
        let fits = rounded(value);
        (is_finite(fits) || !value.is_finite()).then(|| bytes(fits))
    })
}

fn list<const SIZE: usize>(
    text: &[u8],
    count: usize,
    element: impl Fn(&mut Numbers<'_>) -> Option<[u8; SIZE]>,
) -> Option<Vec<u8>> {
    // Short lists are read by code without steps.
    if text.len() <= STEP {
        elements::<SIZE, false>(text, count, element)
    } else {
        elements::<SIZE, true>(text, count, element)
    }
}

fn elements<const SIZE: usize, const STEPS: bool>(
    text: &[u8],
    count: usize,
    element: impl Fn(&mut Numbers<'_>) -> Option<[u8; SIZE]>,
) -> Option<Vec<u8>> {
    // An element takes at least two characters. So a shape that promises more elements than the
    // text has reserves no memory.
    if text.first() != Some(&b'[') || count > text.len() / 2 {
        return None;
    }
    let mut data = vec![0; count.checked_mul(SIZE)?];
    let mut places = data.as_chunks_mut::<SIZE>().0.iter_mut();
    let mut numbers = Numbers { rest: text };
    let mut depth = 0_usize;
    // The length of the rest at which the next step is due.
    let mut next = text.len();
    loop {
        if STEPS && numbers.rest.len() <= next {
            pace::step(STEP as u64);
            next = numbers.rest.len().saturating_sub(STEP);
        }
        numbers.skip_spaces();
        if numbers.take(b'[') {
            depth += 1;
            if depth > MOST_DEPTH {
                return None;
            }
            numbers.skip_spaces();
            if numbers.rest.first() != Some(&b']') {
                continue;
            }
        } else {
            *places.next()? = element(&mut numbers)?;
        }
        // A value was read. Lists may end after it.
        loop {
            numbers.skip_spaces();
            if numbers.take(b',') {
                break;
            }
            if !numbers.take(b']') {
                return None;
            }
            depth -= 1;
            if depth == 0 {
                let is_whole = numbers.rest.is_empty() && places.next().is_none();
                return is_whole.then_some(data);
            }
        }
    }
}

/// The rest of a list's text.
struct Numbers<'a> {
    rest: &'a [u8],
}

impl Numbers<'_> {
    fn take(&mut self, byte: u8) -> bool {
        match self.rest {
            [first, rest @ ..] if *first == byte => {
                self.rest = rest;
                true
            }
            _ => false,
        }
    }

    fn take_text(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text.as_bytes());
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn skip_spaces(&mut self) {
        while let [b' ' | b'\n' | b'\t' | b'\r', rest @ ..] = self.rest {
            self.rest = rest;
        }
    }

    fn boolean(&mut self) -> Option<bool> {
        if self.take_text("true") {
            return Some(true);
        }
        if self.take_text("false") {
            return Some(false);
        }
        match self.unsigned()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn unsigned(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        let mut rest = self.rest;
        while let [digit @ b'0'..=b'9', behind @ ..] = rest {
            value = value.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
            rest = behind;
        }
        let digits = self.rest.len() - rest.len();
        if digits == 0 || (digits > 1 && self.rest.first() == Some(&b'0')) {
            return None;
        }
        self.rest = rest;
        Some(value)
    }

    /// `-0` is refused here, because it is a floating-point number.
    fn signed(&mut self) -> Option<i64> {
        match self.take(b'-') {
            true => self.unsigned().filter(|value| *value > 0).and_then(|value| 0_i64.checked_sub_unsigned(value)),
            false => i64::try_from(self.unsigned()?).ok(),
        }
    }

    /// The nearest value of a number, or the value of a word.
    fn float(&mut self) -> Option<f64> {
        if let Some(value) = self.short_float() {
            return Some(value);
        }
        let unsigned = self.rest.strip_prefix(b"-").unwrap_or(self.rest);
        let integer = unsigned.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(unsigned.len());
        // fast_float takes `01`, `.5`, `1.`, `+1` and `inf`, which are invalid JSON.
        match unsigned.get(integer..) {
            _ if integer == 0 => return self.word(),
            _ if integer > 1 && unsigned.first() == Some(&b'0') => return None,
            Some([b'.', behind @ ..]) if !behind.first().is_some_and(u8::is_ascii_digit) => return None,
            _ => {}
        }
        let (value, length) = fast_float2::parse_partial::<f64, _>(self.rest).ok()?;
        self.rest = self.rest.get(length..)?;
        value.is_finite().then_some(value)
    }

    /// A number of a few digits, such as `-12.25`. A whole number and a power of ten, both exact,
    /// have an exact quotient to round. `None` if the text may be another number.
    fn short_float(&mut self) -> Option<f64> {
        const TENS: [f64; MOST_FRACTION + 1] = [1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7];
        let unsigned = self.rest.strip_prefix(b"-");
        let (integer, mut rest) = digits(0, unsigned.unwrap_or(self.rest));
        let count = unsigned.unwrap_or(self.rest).len() - rest.len();
        let is_zero = unsigned.unwrap_or(self.rest).first() == Some(&b'0');
        if count == 0 || count > MOST_INTEGER || (is_zero && count > 1) {
            return None;
        }
        let mut value = integer as f64;
        if let [b'.', fraction @ ..] = rest {
            // This check comes first: most numbers with as many digits have even more.
            if fraction.first_chunk().is_some_and(|eight| are_digits(*eight)) {
                return None;
            }
            let (both, behind) = digits(integer, fraction);
            value = both as f64 / TENS.get(fraction.len() - behind.len()).filter(|_| behind.len() < fraction.len())?;
            rest = behind;
        }
        if let [b'e' | b'E', ..] = rest {
            return None;
        }
        self.rest = rest;
        Some(if unsigned.is_some() { -value } else { value })
    }

    fn word(&mut self) -> Option<f64> {
        if self.take_text("null") {
            return Some(f64::NAN);
        }
        let is_quoted = self.take(b'"');
        let (text, value) = number_word::starting(self.rest)?;
        (self.take_text(text) && (!is_quoted || self.take(b'"'))).then_some(value)
    }
}

/// Most digits of a short number before the point. With [`MOST_FRACTION`] they are 15: such a
/// number is below 2^53.
const MOST_INTEGER: usize = 8;
/// Most digits after the point.
const MOST_FRACTION: usize = 7;

/// Appends the digits at the start of `text` to a number. Also returns the text after them. The
/// number is wrong if it does not fit.
fn digits(mut number: u64, mut text: &[u8]) -> (u64, &[u8]) {
    while let [digit @ b'0'..=b'9', behind @ ..] = text {
        number = number.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'));
        text = behind;
    }
    (number, text)
}

/// Whether all bytes are from `0` (0x30) to `9` (0x39). Then the upper half of each is 3, also with
/// 6 added.
fn are_digits(bytes: [u8; 8]) -> bool {
    let bytes = u64::from_le_bytes(bytes);
    let upper = |bytes: u64| bytes & 0xf0f0_f0f0_f0f0_f0f0;
    upper(bytes) == 0x3030_3030_3030_3030 && upper(bytes.wrapping_add(0x0606_0606_0606_0606)) == 0x3030_3030_3030_3030
}
