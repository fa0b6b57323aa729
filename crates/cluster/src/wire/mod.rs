//! The encoding of frames on a connection: the length of a head, the head's CRC-32, the head, and
//! the bytes of its tensors in order.

pub(crate) mod about;
pub(crate) mod arena;
pub(crate) mod greeting;
mod metered;
pub(crate) mod peer_memory;
pub(crate) mod read_budget;
pub(crate) mod tensors;
#[cfg_attr(not(feature = "ucx"), path = "ucx/absent.rs")]
pub(crate) mod ucx;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{BufMut, Bytes, BytesMut};
use downbeat_roles::{Frame, Message, Outcome, PROTOCOL};
use postcard::ser_flavors::Flavor;
use serde::Deserialize as _;
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::wire::arena::{Arena, IN_FRAME, Place};
use crate::wire::metered::Metered;
use crate::wire::peer_memory::PeerMemory;
use crate::wire::read_budget::{LARGEST_HEAD, LISTS, ReadBudget};
use crate::wire::tensors::Tensors;
use crate::wire::ucx::UcxError;

/// The bytes of a head's length and checksum.
const PREFIX: usize = 8;
/// The most bytes of a connection's buffer that stay for the next head.
const KEPT: usize = 1 << 20;
/// The most memory that is taken before any of the announced bytes have come.
const AT_ONCE: u64 = 1 << 20;
/// The most pieces in one write.
const PIECES: usize = 64;

/// How to repair the trust of processes, for messages.
const SAME_SECRET: &str = "give all processes of the cluster the same --cluster-secret FILE";

/// Why a connection can be read no further.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The connection has ended.
    #[error("the connection has ended: {0}")]
    Ended(#[from] std::io::Error),
    /// The peer is not a Downbeat process.
    #[error("the peer does not speak Downbeat's protocol of roles")]
    Foreign,
    /// The peer speaks another version of the protocol.
    #[error(
        "the peer speaks version {0} of the protocol of roles, and this process version {PROTOCOL}: run the same version of downbeat everywhere"
    )]
    Protocol(u16),
    /// The peer has no cluster secret.
    #[error("the peer has no cluster secret, and this process has one: {SAME_SECRET}")]
    WithoutSecret,
    /// This process has no cluster secret.
    #[error("the peer has a cluster secret, and this process has none: {SAME_SECRET}")]
    NeedsSecret,
    /// An end does not know the secret that the other end proves.
    #[error("the peer has another cluster secret than this process: {SAME_SECRET}")]
    OtherSecret,
    /// The peer had to give its place to another.
    #[error("too many connections have not proved themselves, most of them from there: the oldest are closed")]
    Displaced,
    /// The peer announces too many bytes.
    #[error("the peer announces {announced} bytes; the most is {most}")]
    TooLarge {
        /// The announced bytes.
        announced: u64,
        /// The most allowed bytes.
        most: u64,
    },
    /// The bytes of a head are not the bytes that the peer has sent.
    #[error("a message of the peer was damaged on its way: its checksum is wrong")]
    Damaged,
    /// The peer's bytes cannot be decoded.
    #[error("a message of the peer cannot be understood: {0}")]
    Garbled(postcard::Error),
    /// The peer names places of tensors outside of its memory.
    #[error("the peer names {0} bytes of a memory that it does not have")]
    Outside(u64),
    /// The peer's memory can no longer be read.
    #[error("the peer's memory cannot be read: {0}")]
    Unread(#[from] UcxError),
}

/// Reads a frame within the budget of its peer. `scratch` is the buffer for its head.
/// `memory`: the peer's memory, if the peer knows that this process reads it. `None`: the frame's
/// tensors are gone, as if the frame was lost.
///
/// # Errors
/// If there is no frame, or it is too large.
pub async fn read_frame(
    reader: &mut (impl AsyncRead + Unpin),
    scratch: &mut Vec<u8>,
    budget: &ReadBudget,
    memory: Option<&PeerMemory>,
) -> Result<Option<Frame<Tensors>>, WireError> {
    let length = reader.read_u32_le().await?;
    if length > LARGEST_HEAD {
        return Err(WireError::TooLarge { announced: length.into(), most: LARGEST_HEAD.into() });
    }
    let checksum = reader.read_u32_le().await?;
    let _of_head = budget.head(length).await;
    scratch.clear();
    scratch.shrink_to(KEPT);
    // The buffer grows as bytes come, so that no memory is taken for bytes that never come.
    (&mut *reader).take(length.into()).read_to_end(scratch).await?;
    if scratch.len() < length as usize {
        return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
    }
    if crc32fast::hash(scratch) != checksum {
        return Err(WireError::Damaged);
    }
    let mut frame = decoded(scratch).map_err(WireError::Garbled)?;
    let announced = tensors(&frame.messages).fold(0u64, |sum, tensors| sum.saturating_add(tensors.bytes()));
    let most = budget.most_tensors();
    if announced > most {
        return Err(WireError::TooLarge { announced, most });
    }
    let _of_tensors = budget.tensors(announced).await;
    let mut elsewhere = Vec::new();
    for tensors in frame.messages.iter_mut().flat_map(tensors_mut) {
        for (length, data) in tensors.unfilled() {
            if memory.is_some() && length > IN_FRAME as u64 {
                let (page, number) = (reader.read_u32_le().await?, reader.read_u64_le().await?);
                if number > 0 {
                    elsewhere.push((Place { page, number }, length, data));
                    continue;
                }
            }
            let mut buffer = BytesMut::with_capacity(length.min(AT_ONCE) as usize);
            while (buffer.len() as u64) < length {
                let rest = length - buffer.len() as u64;
                if (&mut *reader).take(rest).read_buf(&mut buffer).await? == 0 {
                    return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
                }
            }
            *data = buffer.freeze();
        }
    }
    // The connection's next frame waits meanwhile, so that frames come in order.
    let is_whole = match memory.filter(|_| !elsewhere.is_empty()) {
        Some(memory) => memory.fill(elsewhere).await?,
        None => true,
    };
    Ok(is_whole.then_some(frame))
}

/// The frame in a head, without the bytes of its tensors. The memory of its lists is bounded by
/// [`LISTS`] and the length of the head.
fn decoded(head: &[u8]) -> Result<Frame<Tensors>, postcard::Error> {
    let left = Cell::new(LISTS + 2 * head.len() as u64);
    let mut inner = postcard::Deserializer::from_bytes(head);
    let frame = Frame::deserialize(Metered { inner: &mut inner, left: &left })?;
    inner.finalize()?;
    Ok(frame)
}

/// The tensors of messages, in the order of their bytes.
fn tensors(messages: &[Message<Tensors>]) -> impl Iterator<Item = &Tensors> {
    messages.iter().flat_map(|message| {
        let (granted, answers, streamed) = match message {
            Message::Inputs { granted, .. } => (&granted[..], &[][..], None),
            Message::Answers { answers, .. } => (&[][..], &answers[..], None),
            Message::Streamed { answer, .. } => (&[][..], &[][..], answer.as_ref()),
            _ => (&[][..], &[][..], None),
        };
        let outcomes = answers.iter().map(|(_, outcome)| outcome).chain(streamed);
        granted.iter().map(|(_, _, inputs)| inputs).chain(outcomes.filter_map(|outcome| match outcome {
            Outcome::Outputs(outputs) => Some(outputs),
            Outcome::Failed { .. } | Outcome::Streamed => None,
        }))
    })
}

/// The tensors of a message, mutable, in the same order.
fn tensors_mut(message: &mut Message<Tensors>) -> Vec<&mut Tensors> {
    let outputs = |outcome| match outcome {
        &mut Outcome::Outputs(ref mut outputs) => Some(outputs),
        Outcome::Failed { .. } | Outcome::Streamed => None,
    };
    match message {
        Message::Inputs { granted, .. } => granted.iter_mut().map(|(_, _, inputs)| inputs).collect(),
        Message::Answers { answers, .. } => answers.iter_mut().filter_map(|(_, outcome)| outputs(outcome)).collect(),
        Message::Streamed { answer, .. } => answer.iter_mut().filter_map(outputs).collect(),
        _ => Vec::new(),
    }
}

/// The bytes to write on a connection.
#[derive(Debug, Default)]
pub struct Outbox {
    pieces: VecDeque<Bytes>,
    /// Bytes that come after the pieces.
    tail: BytesMut,
    bytes: usize,
}

/// Lets the encoder append to a buffer.
struct Behind<'a>(&'a mut BytesMut);

impl Flavor for Behind<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.put_u8(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

impl Outbox {
    /// Bytes that are not written yet.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Appends a frame. `memory`: this process's arena, if the peer reads it. Returns the bytes of
    /// tensors on the connection, and the bytes in the arena.
    ///
    /// # Errors
    /// If the frame cannot be encoded, or is larger than peers accept.
    pub fn put_frame(&mut self, frame: &Frame<Tensors>, memory: Option<&Arena>) -> Result<[u64; 2], WireError> {
        let begin = self.tail.len();
        self.tail.put_u64_le(0);
        let written = postcard::serialize_with_flavor(frame, Behind(&mut self.tail));
        let length = self.tail.len() - begin - PREFIX;
        let head = u32::try_from(length).ok().filter(|head| *head <= LARGEST_HEAD);
        let (Ok(()), Some(head)) = (&written, head) else {
            self.tail.truncate(begin);
            let too_large = WireError::TooLarge { announced: length as u64, most: LARGEST_HEAD.into() };
            return Err(written.err().map_or(too_large, WireError::Garbled));
        };
        let checksum = crc32fast::hash(&self.tail[begin + PREFIX..]);
        self.tail[begin..begin + 4].copy_from_slice(&head.to_le_bytes());
        self.tail[begin + 4..begin + PREFIX].copy_from_slice(&checksum.to_le_bytes());
        self.bytes += length + PREFIX;
        let mut sent = [0; 2];
        for data in tensors(&frame.messages).flat_map(Tensors::data) {
            if let Some(memory) = memory.filter(|_| data.len() > IN_FRAME) {
                let place = memory.place_of(data);
                let Place { page, number } = place.unwrap_or(Place { page: 0, number: 0 });
                self.tail.put_u32_le(page);
                self.tail.put_u64_le(number);
                self.bytes += 12;
                if place.is_some() {
                    sent[1] += data.len() as u64;
                    continue;
                }
            }
            sent[0] += data.len() as u64;
            self.bytes += data.len();
            if data.len() <= IN_FRAME {
                self.tail.extend_from_slice(data);
            } else {
                self.close_tail();
                self.pieces.push_back(data.clone());
            }
        }
        Ok(sent)
    }

    fn close_tail(&mut self) {
        if !self.tail.is_empty() {
            self.pieces.push_back(self.tail.split().freeze());
        }
    }

    /// Writes as much as `write` takes. Returns whether everything is written.
    ///
    /// # Errors
    /// The errors of `write`.
    pub fn write(&mut self, mut write: impl FnMut(&[IoSlice<'_>]) -> std::io::Result<usize>) -> std::io::Result<bool> {
        self.close_tail();
        while !self.pieces.is_empty() {
            let slices: smallvec::SmallVec<[IoSlice<'_>; 8]> =
                self.pieces.iter().take(PIECES).map(|piece| IoSlice::new(piece)).collect();
            let written = write(&slices);
            drop(slices);
            match written {
                Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
                Ok(written) => self.take(written),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Removes `written` bytes, which are on the connection now.
    fn take(&mut self, mut written: usize) {
        self.bytes -= written;
        while let Some(first) = self.pieces.front_mut() {
            if written < first.len() {
                let _ = first.split_to(written);
                return;
            }
            written -= first.len();
            self.pieces.pop_front();
        }
    }
}

#[cfg(test)]
mod tests;
