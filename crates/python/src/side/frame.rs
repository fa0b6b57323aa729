//! The frames of the second socket: JSON and bytes, each behind its length.

use std::io::{self, Read, Write};
use std::str::FromStr;

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_engine::{Buffer, Tensor};
use serde::{Deserialize, Serialize};

/// Longest JSON of a frame.
const LONGEST_HEAD: usize = 4 << 20;
/// Most bytes of the tensors of a frame.
const MOST_BYTES: u64 = 2 << 30;
/// Bytes that are read at a time: a length alone reserves no more memory.
const STEP: u64 = 1 << 20;

/// A tensor in a frame. The bytes of the tensors follow each other.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub struct Placed {
    pub name: Option<String>,
    /// The place among the outputs of the model, for an answer.
    pub place: usize,
    pub datatype: String,
    pub shape: Vec<i64>,
    pub len: usize,
}

/// An error of the model's code.
#[derive(Clone, Serialize, Deserialize, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The words of the error.
    pub reason: String,
    /// The number of the kind of error in `TritonError`.
    pub code: u32,
}

/// A message of a process.
#[derive(Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Told {
    /// An answer to a request of a client.
    Answer {
        id: u64,
        request: u64,
        is_final: bool,
        error: Option<Fault>,
        outputs: Option<Vec<Placed>>,
        /// A JSON object.
        #[serde(default)]
        parameters: Option<String>,
    },
    /// Asks whether the client of a request waits for more.
    Look { id: u64, request: u64 },
    /// A request to another model.
    Call(Box<Called>),
    /// The code wants the next answer to a call.
    Pull { id: u64 },
    /// The code wants no more answers to a call.
    Drop { id: u64 },
    /// The answer to a check of readiness. `reason`: why the model is not ready.
    Ready { id: u64, reason: Option<String> },
}

/// A request to another model.
#[derive(Deserialize, Debug)]
pub struct Called {
    pub id: u64,
    pub model: String,
    pub version: String,
    pub request_id: String,
    /// A JSON object.
    pub parameters: String,
    pub outputs: Vec<String>,
    pub inputs: Vec<Placed>,
    pub budget_us: Option<u64>,
    /// Whether any number of answers may come.
    pub decoupled: bool,
    /// Whether the instance does nothing else before the answer.
    pub blocks: bool,
}

/// A reply of the server.
#[derive(Serialize, Debug)]
pub struct Reply {
    pub id: u64,
    pub is_final: bool,
    /// Whether the client of an answer waits for more.
    pub ok: bool,
    pub error: Option<Fault>,
    pub outputs: Option<Vec<Placed>>,
    /// The parameters of an answer, as a JSON object.
    pub parameters: Option<String>,
    /// Whether the server asks the code whether the model is ready, in place of a reply.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub asks_ready: bool,
}

impl Reply {
    /// A last reply without outputs.
    pub fn of(id: u64) -> Self {
        Reply { id, is_final: true, ok: true, error: None, outputs: None, parameters: None, asks_ready: false }
    }
}

/// Reads a frame; `None` at the end of the socket.
pub fn read(stream: &mut impl Read) -> io::Result<Option<(Told, Bytes)>> {
    let mut lengths = [0; 12];
    match stream.read_exact(&mut lengths) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let [a, b, c, d, rest @ ..] = lengths;
    let (head, bytes) = (u32::from_le_bytes([a, b, c, d]) as usize, u64::from_le_bytes(rest));
    if head > LONGEST_HEAD || bytes > MOST_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let head = some(stream, head as u64)?;
    let data = some(stream, bytes)?;
    Ok(Some((serde_json::from_slice(&head)?, Bytes::from(data))))
}

fn some(stream: &mut impl Read, count: u64) -> io::Result<Vec<u8>> {
    let mut data = Vec::new();
    while (data.len() as u64) < count {
        let step = (count - data.len() as u64).min(STEP.max(data.len() as u64));
        data.try_reserve_exact(usize::try_from(step).unwrap_or(usize::MAX)).map_err(|_| io::ErrorKind::OutOfMemory)?;
        if stream.take(step).read_to_end(&mut data)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(data)
}

/// Writes a frame.
pub fn write(stream: &mut impl Write, reply: &Reply, data: &[Bytes]) -> io::Result<()> {
    let head = serde_json::to_vec(reply)?;
    let length = u32::try_from(head.len()).map_err(|_| io::ErrorKind::InvalidData)?;
    let bytes: u64 = data.iter().map(|part| part.len() as u64).sum();
    stream.write_all(&[&length.to_le_bytes()[..], &bytes.to_le_bytes(), &head].concat())?;
    data.iter().try_for_each(|part| stream.write_all(part))
}

/// The tensors of a frame, as they are placed.
///
/// # Errors
/// A text, if a tensor is not in the bytes, or its bytes do not fit its datatype and shape.
pub fn tensors(placed: &[Placed], data: &Bytes) -> Result<Vec<Tensor>, String> {
    let mut at = 0usize;
    let each = placed.iter().map(|placed| {
        let wrong =
            |why: &str| format!("a tensor of {} {:?} with {} bytes {why}", placed.datatype, placed.shape, placed.len);
        let datatype = DataType::from_str(&placed.datatype).map_err(|error| error.to_string())?;
        let shape: Option<Vec<usize>> = placed.shape.iter().map(|size| usize::try_from(*size).ok()).collect();
        let shape = shape.ok_or_else(|| wrong("has a negative size"))?;
        let elements = shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size));
        if let Some(size) = datatype.size()
            && elements.and_then(|count| count.checked_mul(size)) != Some(placed.len)
        {
            return Err(wrong("does not fit its shape"));
        }
        let end = at.checked_add(placed.len).filter(|end| *end <= data.len()).ok_or_else(|| wrong("is cut off"))?;
        let tensor = Tensor { datatype, shape, data: Buffer::from_bytes(data.slice(at..end)) };
        at = end;
        Ok(tensor)
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(head: &str, data: &[u8]) -> Vec<u8> {
        let lengths = [&(head.len() as u32).to_le_bytes()[..], &(data.len() as u64).to_le_bytes()].concat();
        [&lengths, head.as_bytes(), data].concat()
    }

    #[test]
    fn a_frame_is_read_with_its_bytes() {
        let text = r#"{"answer":{"id":3,"request":7,"is_final":true,"error":null,"outputs":
            [{"name":null,"place":1,"datatype":"INT32","shape":[2],"len":8}]}}"#;
        let bytes = frame(text, &[1, 0, 0, 0, 2, 0, 0, 0]);
        let mut stream = &bytes[..];
        let (told, data) = read(&mut stream).unwrap().unwrap();
        let Told::Answer { id: 3, request: 7, is_final: true, error: None, outputs: Some(placed), .. } = told else {
            panic!("{told:?}")
        };
        let tensors = tensors(&placed, &data).unwrap();
        assert_eq!((tensors[0].shape.as_slice(), tensors[0].data.as_slice()), (&[2][..], &data[..]));
        assert!(read(&mut stream).unwrap().is_none());
    }

    #[test]
    fn a_process_that_lies_is_refused() {
        assert!(read(&mut &[255; 12][..]).is_err());
        let mut huge = frame("{}", b"");
        huge[4..12].copy_from_slice(&(1u64 << 30).to_le_bytes());
        assert!(read(&mut &huge[..]).is_err(), "the bytes are not there");
        assert!(read(&mut &frame(r#"{"other":{}}"#, b"")[..]).is_err());
        let placed = |datatype: &str, shape: &[i64], len| Placed {
            name: None,
            place: 0,
            datatype: datatype.into(),
            shape: shape.to_vec(),
            len,
        };
        let data = Bytes::from_static(&[0; 8]);
        for (wrong, expected) in [
            (placed("INT32", &[3], 8), "does not fit its shape"),
            (placed("INT32", &[-1], 8), "negative"),
            (placed("INT32", &[3], 12), "cut off"),
            (placed("INT32", &[i64::MAX, 4], 8), "does not fit its shape"),
            (placed("BYTES", &[1], usize::MAX), "cut off"),
            (placed("INT", &[2], 8), "INT"),
        ] {
            let error = tensors(&[wrong], &data).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
