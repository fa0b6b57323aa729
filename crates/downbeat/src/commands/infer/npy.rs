//! NumPy files: `.npy`, and `.npz`, a ZIP archive of `.npy` files.
//!
//! The format is read by hand. The crate npyz reads a header by a recursive grammar, and multiplies
//! sizes unchecked. A damaged file can thus end the program. npyz also brings nine other crates.

use std::io::{Cursor, Read, Write};

use anyhow::{Context, anyhow, bail};
use downbeat_core::tensor::DataType;
use downbeat_protocol::InferTensor;
use downbeat_protocol::infer::element_count;
use zip::write::SimpleFileOptions;

use super::values::{Texts, Values, push_text};

/// How an `.npy` file begins.
pub const MAGIC: &[u8] = b"\x93NUMPY";
/// How a ZIP archive begins.
pub const ZIP_MAGIC: &[u8] = b"PK\x03\x04";
/// Most arrays of an archive.
const MOST_ARRAYS: usize = 1024;
/// Most dimensions that NumPy 2 gives an array.
const MOST_DIMENSIONS: usize = 64;

/// The header of an `.npy` file.
#[derive(Debug, PartialEq, Eq)]
struct Header<'a> {
    descr: &'a str,
    is_fortran: bool,
    shape: Vec<i64>,
}

/// Reads an `.npy` file.
///
/// # Errors
/// If the file is damaged, or has elements that are neither numbers nor texts.
pub fn read(bytes: &[u8]) -> anyhow::Result<Values> {
    let (text, data) = parts(bytes).context("the NumPy file is damaged: it ends in its header")?;
    let header = std::str::from_utf8(text).ok().and_then(header);
    let header = header.context("the NumPy file is damaged: its header has no descr, fortran_order and shape")?;
    let count = element_count(&header.shape).map_err(|why| anyhow!("the NumPy file is damaged: {why}"))?;
    let (kind, size) = kind(header.descr)?;
    let bytes = count.checked_mul(size).filter(|bytes| *bytes == data.len());
    if bytes.is_none() {
        bail!(
            "the NumPy file is damaged: {} of shape {:?} takes {} bytes, but the file has {}",
            header.descr,
            header.shape,
            count as u128 * size as u128,
            data.len()
        );
    }
    let mut data = data.to_vec();
    if header.is_fortran && header.shape.len() > 1 {
        data = row_major(&data, &header.shape, size);
    }
    let unit = if kind == Kind::Unicode { 4 } else { size };
    if header.descr.starts_with('>') && kind != Kind::Text && unit > 1 {
        data.chunks_exact_mut(unit).for_each(<[u8]>::reverse);
    }
    let (datatype, data) = match kind {
        Kind::Number(DataType::Bool) => (DataType::Bool, data.into_iter().map(|b| u8::from(b != 0)).collect()),
        Kind::Number(datatype) => (datatype, data),
        _ => (DataType::Bytes, texts(kind, &data, size, count)?),
    };
    Ok(Values { datatype, shape: header.shape, data })
}

/// The header's text and the data.
fn parts(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = bytes.strip_prefix(MAGIC)?;
    let (version, rest) = rest.split_first_chunk::<2>()?;
    let (length, rest) = match version {
        [1, _] => rest.split_first_chunk::<2>().map(|(l, rest)| (usize::from(u16::from_le_bytes(*l)), rest))?,
        _ => {
            let (length, rest) = rest.split_first_chunk::<4>()?;
            (usize::try_from(u32::from_le_bytes(*length)).ok()?, rest)
        }
    };
    rest.split_at_checked(length)
}

/// Reads `{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }`.
fn header(text: &str) -> Option<Header<'_>> {
    let value = |key: &str| {
        let (_, after) = text.split_once(&format!("'{key}'"))?;
        after.trim_start().strip_prefix(':').map(str::trim_start)
    };
    let descr = value("descr")?;
    // A list of fields stands for a structured array, which no tensor is.
    let descr = descr.strip_prefix('\'').and_then(|rest| rest.split_once('\'')).map_or("fields", |(descr, _)| descr);
    let is_fortran = value("fortran_order")?.starts_with("True");
    let (sizes, _) = value("shape")?.strip_prefix('(')?.split_once(')')?;
    let sizes = sizes.split(',').map(|size| size.trim().trim_end_matches('L')).filter(|size| !size.is_empty());
    let shape: Vec<i64> = sizes.map(|size| size.parse().ok()).collect::<Option<_>>()?;
    (shape.len() <= MOST_DIMENSIONS).then_some(Header { descr, is_fortran, shape })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Number(DataType),
    /// Bytes, filled up with zeros.
    Text,
    /// Characters of four bytes, filled up with zeros.
    Unicode,
}

/// The kind of the elements, and the size of an element in bytes.
fn kind(descr: &str) -> anyhow::Result<(Kind, usize)> {
    let name = descr.trim_start_matches(['<', '>', '|', '=']);
    let number = match name {
        "b1" => Some(DataType::Bool),
        "u1" => Some(DataType::Uint8),
        "u2" => Some(DataType::Uint16),
        "u4" => Some(DataType::Uint32),
        "u8" => Some(DataType::Uint64),
        "i1" => Some(DataType::Int8),
        "i2" => Some(DataType::Int16),
        "i4" => Some(DataType::Int32),
        "i8" => Some(DataType::Int64),
        "f2" => Some(DataType::Fp16),
        "f4" => Some(DataType::Fp32),
        "f8" => Some(DataType::Fp64),
        // ml_dtypes.bfloat16, which NumPy saves as two bytes without a meaning.
        "V2" | "bfloat16" => Some(DataType::Bf16),
        _ => None,
    };
    if let Some(datatype) = number {
        return Ok((Kind::Number(datatype), datatype.size().unwrap_or(1)));
    }
    let length = |prefix: char| name.strip_prefix(prefix).and_then(|length| length.parse::<usize>().ok());
    if let Some(length) = length('S').or_else(|| length('a')) {
        return Ok((Kind::Text, length));
    }
    if let Some(bytes) = length('U').and_then(|length| length.checked_mul(4)) {
        return Ok((Kind::Unicode, bytes));
    }
    if name == "O" {
        bail!("the NumPy file has Python objects; save texts with array.astype(str), numbers with array.astype(float)");
    }
    bail!("the NumPy file has elements of type {descr}, which no model takes; convert them with array.astype")
}

/// Reorders elements of `size` bytes from the order of Fortran, whose first index runs fastest.
fn row_major(data: &[u8], shape: &[i64], size: usize) -> Vec<u8> {
    let sizes: Vec<usize> = shape.iter().map(|size| usize::try_from(*size).unwrap_or(0)).collect();
    let stride = |next: &mut usize, size: &usize| {
        let this = *next;
        *next *= size;
        Some(this)
    };
    let strides: Vec<usize> = sizes.iter().scan(size, stride).collect();
    let mut index = vec![0; sizes.len()];
    let mut out = Vec::with_capacity(data.len());
    while out.len() < data.len() {
        let from: usize = index.iter().zip(&strides).map(|(index, stride)| index * stride).sum();
        out.extend_from_slice(data.get(from..from + size).unwrap_or_default());
        for (index, size) in index.iter_mut().zip(&sizes).rev() {
            *index += 1;
            if *index < *size {
                break;
            }
            *index = 0;
        }
    }
    out
}

fn texts(kind: Kind, data: &[u8], size: usize, count: usize) -> anyhow::Result<Vec<u8>> {
    let mut out = Vec::new();
    if size == 0 {
        (0..count).try_for_each(|_| push_text(&mut out, b""))?;
    }
    for element in data.chunks_exact(size.max(1)) {
        if kind == Kind::Text {
            let end = element.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            push_text(&mut out, element.get(..end).unwrap_or_default())?;
            continue;
        }
        let characters = element.as_chunks().0.iter().map(|bytes| char::from_u32(u32::from_le_bytes(*bytes)));
        let text: String = characters.collect::<Option<_>>().context("the NumPy file has a text that is no Unicode")?;
        push_text(&mut out, text.trim_end_matches('\0').as_bytes())?;
    }
    Ok(out)
}

/// Reads an `.npz` archive: each array with its name. All arrays together have at most `most` bytes.
///
/// # Errors
/// If the archive or an array is damaged, or the arrays are too large.
pub fn read_archive(bytes: &[u8], most: u64) -> anyhow::Result<Vec<(String, Values)>> {
    let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).context("the .npz file is a damaged archive")?;
    if archive.len() > MOST_ARRAYS {
        bail!("the .npz file has {} arrays, but at most {MOST_ARRAYS} are read", archive.len());
    }
    let mut left = most;
    let mut arrays = Vec::new();
    for place in 0..archive.len() {
        let damaged = "the .npz file is a damaged archive";
        let file = archive.by_index(place).context(damaged)?;
        let name = file.name().context(damaged)?.trim_end_matches(".npy").to_owned();
        let mut array = Vec::new();
        file.take(left + 1)
            .read_to_end(&mut array)
            .with_context(|| format!("the array '{name}' of the .npz file is damaged"))?;
        left = left
            .checked_sub(array.len() as u64)
            .with_context(|| format!("the arrays of the .npz file take more than {most} bytes"))?;
        arrays.push((name.clone(), read(&array).with_context(|| format!("array '{name}'"))?));
    }
    Ok(arrays)
}

/// Writes a tensor as an `.npy` file.
pub fn write(tensor: &InferTensor) -> Vec<u8> {
    let longest = || Texts(&tensor.data).map(<[u8]>::len).max().unwrap_or(0).max(1);
    let (descr, width) = match tensor.datatype {
        DataType::Bool => ("|b1".to_owned(), 0),
        DataType::Uint8 => ("|u1".to_owned(), 0),
        DataType::Int8 => ("|i1".to_owned(), 0),
        DataType::Uint16 => ("<u2".to_owned(), 0),
        DataType::Uint32 => ("<u4".to_owned(), 0),
        DataType::Uint64 => ("<u8".to_owned(), 0),
        DataType::Int16 => ("<i2".to_owned(), 0),
        DataType::Int32 => ("<i4".to_owned(), 0),
        DataType::Int64 => ("<i8".to_owned(), 0),
        DataType::Fp16 => ("<f2".to_owned(), 0),
        // As ml_dtypes writes bfloat16.
        DataType::Bf16 => ("<V2".to_owned(), 0),
        DataType::Fp32 => ("<f4".to_owned(), 0),
        DataType::Fp64 => ("<f8".to_owned(), 0),
        DataType::Bytes => {
            let longest = longest();
            (format!("|S{longest}"), longest)
        }
    };
    let sizes: String = tensor.shape.iter().map(|size| format!("{size}, ")).collect();
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", sizes.trim_end());
    // The data starts at a multiple of 64 bytes, after a line end.
    let before = MAGIC.len() + 4;
    let padding = 63 - (before + header.len()) % 64;
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    let mut out = [MAGIC, &[1, 0], &(header.len() as u16).to_le_bytes(), header.as_bytes()].concat();
    if tensor.datatype != DataType::Bytes {
        out.extend_from_slice(&tensor.data);
        return out;
    }
    for text in Texts(&tensor.data) {
        out.extend_from_slice(text);
        out.extend(std::iter::repeat_n(0, width - text.len()));
    }
    out
}

/// Writes tensors as an `.npz` archive.
///
/// # Errors
/// If the archive cannot hold the tensors.
pub fn write_archive(tensors: &[InferTensor]) -> anyhow::Result<Vec<u8>> {
    let mut archive = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for tensor in tensors {
        let options = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored).large_file(true);
        archive.start_file(format!("{}.npy", tensor.name), options)?;
        archive.write_all(&write(tensor))?;
    }
    Ok(archive.finish()?.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(descr: &str, is_fortran: bool, shape: &str, data: &[u8]) -> Vec<u8> {
        let order = if is_fortran { "True" } else { "False" };
        let header = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n");
        [MAGIC, &[1, 0], &(header.len() as u16).to_le_bytes(), header.as_bytes(), data].concat()
    }

    #[test]
    fn arrays_come_back_as_they_were_written() {
        for (datatype, shape, data) in [
            (DataType::Fp32, vec![2, 1], vec![1, 2, 3, 4, 5, 6, 7, 8]),
            (DataType::Bf16, vec![], vec![1, 2]),
            (DataType::Bool, vec![3], vec![1, 0, 1]),
            (DataType::Int64, vec![0, 4], vec![]),
            (DataType::Bytes, vec![2], b"\x02\0\0\0ab\x01\0\0\0c".to_vec()),
        ] {
            let tensor =
                InferTensor { name: "x".into(), datatype, shape, parameters: Default::default(), data: data.into() };
            let written = write(&tensor);
            let at = written.iter().position(|byte| *byte == b'\n').unwrap() + 1;
            assert_eq!(at % 64, 0, "the data is aligned");
            let values = read(&written).unwrap();
            assert_eq!((values.datatype, &values.shape, &values.data[..]), (datatype, &tensor.shape, &tensor.data[..]));
            let archive = write_archive(std::slice::from_ref(&tensor)).unwrap();
            assert_eq!(read_archive(&archive, 1 << 20).unwrap(), [("x".to_owned(), values)]);
            assert!(read_archive(&archive, 16).unwrap_err().to_string().contains("more than 16 bytes"));
        }
    }

    #[test]
    fn both_orders_of_bytes_and_of_elements_are_read() {
        assert_eq!(read(&file(">i2", false, "(2,)", &[0, 1, 1, 0])).unwrap().data, [1, 0, 0, 1]);
        // [[1, 2, 3], [4, 5, 6]], column by column.
        assert_eq!(read(&file("|u1", true, "(2, 3)", &[1, 4, 2, 5, 3, 6])).unwrap().data, [1, 2, 3, 4, 5, 6]);
        let unicode: Vec<u8> = [u32::from('ä'), 0].iter().flat_map(|c| c.to_be_bytes()).collect();
        assert_eq!(read(&file(">U2", false, "()", &unicode)).unwrap().data, [2, 0, 0, 0, 0xc3, 0xa4]);
    }

    #[test]
    fn a_damaged_file_is_an_error() {
        let whole = file("<f4", false, "(2,)", &[0; 8]);
        for length in 0..whole.len() {
            assert!(read(&whole[..length]).is_err(), "{length}");
        }
        for (descr, shape, said) in [
            ("<f4", "(9223372036854775807, 9)", "exceed maximum size"),
            ("<f4", "(-1, -2)", "negative size"),
            ("<f4", "(1000000000,)", "takes 4000000000 bytes, but the file has 8"),
            ("|O", "(1,)", "Python objects"),
            ("<c8", "(1,)", "elements of type <c8"),
            ("<U99999999999999999999", "(1,)", "elements of type"),
            ("<S4611686018427387904", "(4,)", "damaged"),
        ] {
            let error = format!("{:#}", read(&file(descr, false, shape, &[0; 8])).unwrap_err());
            assert!(error.contains(said), "{descr} {shape}: {error}");
        }
    }
}
