//! How frames are written on a connection, and read: the length of a head, the head, and the bytes of its tensors one after another.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{BufMut, Bytes, BytesMut};
use downbeat_core::roles::{Frame, Hello, Message, Outcome, PROTOCOL};
use postcard::ser_flavors::Flavor;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::arena::{Arena, IN_FRAME, Place};
use super::peer_memory::PeerMemory;
use super::tensors::Tensors;
use super::ucx::UcxError;

/// The first bytes of a connection.
const MAGIC: [u8; 8] = *b"downbeat";
/// Most bytes of a [`Hello`] with its names.
const LARGEST_HELLO: usize = 1024;
/// Most bytes of a head: what models of a backend are, with the names of their classes, is the most that is said at once.
const LARGEST_HEAD: u32 = 64 << 20;
/// Most bytes that memory is taken for before any of them has come.
const AT_ONCE: u64 = 1 << 20;
/// Pieces that are written at once.
const PIECES: usize = 64;

/// Why a connection cannot be read any further.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// It has ended.
    #[error("the connection has ended: {0}")]
    Ended(#[from] std::io::Error),
    /// It is something else's.
    #[error("it does not speak Downbeat's protocol of roles")]
    Foreign,
    /// It is of another version.
    #[error(
        "it speaks version {0} of the protocol of roles, and this process version {PROTOCOL}: run the same version of downbeat everywhere"
    )]
    Protocol(u16),
    /// More than anybody may send.
    #[error("it announces {announced} bytes, and at most {most} are taken")]
    TooLarge {
        /// What is to come.
        announced: u64,
        /// What may.
        most: u64,
    },
    /// It says nothing that can be understood.
    #[error("what it sends cannot be understood: {0}")]
    Garbled(postcard::Error),
    /// It says that tensors are where it has no memory.
    #[error("it says that {0} bytes are in its memory where it has none")]
    Outside(u64),
    /// Its memory cannot be read any more.
    #[error("its memory cannot be read: {0}")]
    Unread(#[from] UcxError),
}

/// What a process says first.
pub fn greeting(hello: &Hello) -> Vec<u8> {
    let body = postcard::to_allocvec(hello).unwrap_or_default();
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&PROTOCOL.to_le_bytes());
    bytes.extend_from_slice(&(body.len().min(LARGEST_HELLO) as u16).to_le_bytes());
    bytes.extend_from_slice(&body);
    bytes
}

/// Reads what the other says first.
///
/// # Errors
/// If it is none of ours, or of another version.
pub async fn read_greeting(reader: &mut (impl AsyncRead + Unpin)) -> Result<Hello, WireError> {
    let mut head = [0; 12];
    reader.read_exact(&mut head).await?;
    let [magic @ .., p0, p1, l0, l1] = head;
    if magic != MAGIC {
        return Err(WireError::Foreign);
    }
    let (protocol, length) = (u16::from_le_bytes([p0, p1]), u16::from_le_bytes([l0, l1]));
    // What follows is written in another way there.
    if protocol != PROTOCOL {
        return Err(WireError::Protocol(protocol));
    }
    if usize::from(length) > LARGEST_HELLO {
        return Err(WireError::TooLarge { announced: length.into(), most: LARGEST_HELLO as u64 });
    }
    let mut body = vec![0; length.into()];
    reader.read_exact(&mut body).await?;
    let hello: Hello = postcard::from_bytes(&body).map_err(WireError::Garbled)?;
    // People read them in logs.
    let is_proper = |text: &str| text.chars().all(|c| !c.is_control());
    if is_proper(&hello.name) && is_proper(&hello.address) { Ok(hello) } else { Err(WireError::Foreign) }
}

/// Reads a frame, with at most `most` bytes of tensors; `scratch` is for its head. `memory`: of the peer, if it was told that it is read. `None`: its tensors are not there any more, as if it was lost.
///
/// # Errors
/// If there is none, or it is too large.
pub async fn read_frame(
    reader: &mut (impl AsyncRead + Unpin),
    scratch: &mut Vec<u8>,
    most: u64,
    memory: Option<&PeerMemory>,
) -> Result<Option<Frame<Tensors>>, WireError> {
    let length = reader.read_u32_le().await?;
    if length > LARGEST_HEAD {
        return Err(WireError::TooLarge { announced: length.into(), most: LARGEST_HEAD.into() });
    }
    scratch.clear();
    // As it comes, so that nobody is given memory for what never does.
    (&mut *reader).take(length.into()).read_to_end(scratch).await?;
    if scratch.len() < length as usize {
        return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
    }
    let mut frame: Frame<Tensors> = postcard::from_bytes(scratch).map_err(WireError::Garbled)?;
    let announced = tensors(&frame.messages).fold(0u64, |sum, tensors| sum.saturating_add(tensors.bytes()));
    if announced > most {
        return Err(WireError::TooLarge { announced, most });
    }
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
    // What follows on the connection waits meanwhile, so that frames come in order.
    let is_whole = match memory.filter(|_| !elsewhere.is_empty()) {
        Some(memory) => memory.fill(elsewhere).await?,
        None => true,
    };
    Ok(is_whole.then_some(frame))
}

/// The tensors of messages, in the order in which their bytes follow.
fn tensors(messages: &[Message<Tensors>]) -> impl Iterator<Item = &Tensors> {
    messages.iter().flat_map(|message| {
        let (granted, answers) = match message {
            Message::Inputs { granted, .. } => (&granted[..], &[][..]),
            Message::Answers(answers) => (&[][..], &answers[..]),
            _ => (&[][..], &[][..]),
        };
        granted.iter().map(|(_, _, inputs)| inputs).chain(answers.iter().filter_map(|(_, outcome)| match outcome {
            Outcome::Outputs(outputs) => Some(outputs),
            Outcome::Failed { .. } => None,
        }))
    })
}

/// The same, to be filled.
fn tensors_mut(message: &mut Message<Tensors>) -> Vec<&mut Tensors> {
    match message {
        Message::Inputs { granted, .. } => granted.iter_mut().map(|(_, _, inputs)| inputs).collect(),
        Message::Answers(answers) => {
            let outputs = answers.iter_mut().filter_map(|(_, outcome)| match outcome {
                Outcome::Outputs(outputs) => Some(outputs),
                Outcome::Failed { .. } => None,
            });
            outputs.collect()
        }
        _ => Vec::new(),
    }
}

/// What is to be written on a connection.
#[derive(Debug, Default)]
pub struct Outbox {
    pieces: VecDeque<Bytes>,
    /// What comes after them.
    tail: BytesMut,
    bytes: usize,
}

/// Lets the encoder write behind what is there.
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

    /// Puts a frame in; `memory`: this process's, if the peer reads it. Gives how many bytes of tensors are on the connection, and how many there.
    ///
    /// # Errors
    /// If it cannot be written, or is larger than anybody takes.
    pub fn put_frame(&mut self, frame: &Frame<Tensors>, memory: Option<&Arena>) -> Result<[u64; 2], WireError> {
        let begin = self.tail.len();
        self.tail.put_u32_le(0);
        let written = postcard::serialize_with_flavor(frame, Behind(&mut self.tail));
        let length = self.tail.len() - begin - 4;
        let head = u32::try_from(length).ok().filter(|head| *head <= LARGEST_HEAD);
        let (Ok(()), Some(head)) = (&written, head) else {
            self.tail.truncate(begin);
            let too_large = WireError::TooLarge { announced: length as u64, most: LARGEST_HEAD.into() };
            return Err(written.err().map_or(too_large, WireError::Garbled));
        };
        self.tail[begin..begin + 4].copy_from_slice(&head.to_le_bytes());
        self.bytes += length + 4;
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

    /// Writes as much as `write` takes; says whether that is all.
    ///
    /// # Errors
    /// Of `write`.
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

    /// So many bytes are written.
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
