//! The memory that a peer has its large tensors in, however it is read: mapped, where it is on this machine, or by UCX.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use downbeat_core::roles::NodeId;
use downbeat_engine::ucx::{Offer, UcxError, UcxMeeting, UcxPeer};
use futures_util::future::try_join_all;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::oneshot;

use super::arena::{Arena, MOST, PeerArena, Place};
use super::wire::WireError;

/// Most bytes of what a peer says about its memory.
const LARGEST_OFFER: usize = 16 << 10;
/// How long the first read by UCX, which is to see whether it works, may take with all that comes before.
const TRIED_WITHIN: Duration = Duration::from_millis(1000);
/// Bytes of the first read.
const TRIED: usize = 64 << 10;

/// How large tensors get from one process to another, the better the greater.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Transport {
    /// In frames.
    #[default]
    Tcp,
    /// Read out of the sender's memory by UCX.
    Ucx,
    /// Read out of the sender's memory, which the reader has mapped.
    SharedMemory,
}

impl Transport {
    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Ucx => "ucx",
            Transport::SharedMemory => "shared_memory",
        }
    }

    /// As it is said to the sender.
    pub fn byte(self) -> u8 {
        match self {
            Transport::Tcp => 0,
            Transport::SharedMemory => 1,
            Transport::Ucx => 2,
        }
    }

    /// What is said by a byte; what nobody says is taken for frames.
    pub fn of_byte(byte: u8) -> Transport {
        match byte {
            1 => Transport::SharedMemory,
            2 => Transport::Ucx,
            _ => Transport::Tcp,
        }
    }
}

/// The memory of a peer.
pub enum PeerMemory {
    /// That of a process of this machine.
    Mapped(PeerArena),
    /// That of any other.
    Ucx(UcxPeer),
}

impl PeerMemory {
    /// How it is read.
    pub fn transport(&self) -> Transport {
        match self {
            PeerMemory::Mapped(_) => Transport::SharedMemory,
            PeerMemory::Ucx(_) => Transport::Ucx,
        }
    }

    /// Reads tensors of these places and lengths; whether all are still there.
    ///
    /// # Errors
    /// If one is outside of the memory, or it cannot be read.
    pub async fn fill(&self, tensors: Vec<(Place, u64, &mut Bytes)>) -> Result<bool, WireError> {
        let mut is_whole = true;
        match self {
            PeerMemory::Mapped(memory) => {
                for (place, length, data) in tensors {
                    let outside = || WireError::Outside(length);
                    let len = usize::try_from(length).map_err(|_| outside())?;
                    match memory.read(place, len).ok_or_else(outside)? {
                        Some(copy) => *data = copy,
                        None => is_whole = false,
                    }
                }
            }
            PeerMemory::Ucx(peer) => {
                let bytes = tensors.iter().map(|(place, length, _)| {
                    let begin = Arena::begin(*place);
                    read(peer, begin, usize::try_from(*length).ok(), *length)
                });
                let bytes = try_join_all(bytes).await?;
                // Asked for once all bytes are here: if any is of a later tensor, the number is not this one's any more.
                let numbers = tensors.iter().map(|(place, length, _)| {
                    let begin = Arena::begin_of_number(*place);
                    read(peer, begin, Some(size_of::<u64>()), *length)
                });
                let numbers = try_join_all(numbers).await?;
                for ((place, _, data), (bytes, number)) in tensors.into_iter().zip(bytes.into_iter().zip(numbers)) {
                    is_whole &= number[..] == place.number.to_ne_bytes();
                    *data = bytes;
                }
            }
        }
        Ok(is_whole)
    }
}

/// Bytes of a peer's memory, for a tensor of this length.
async fn read(peer: &UcxPeer, begin: Option<usize>, len: Option<usize>, length: u64) -> Result<Bytes, WireError> {
    let outside = || WireError::Outside(length);
    let (begin, len) = begin.zip(len).ok_or_else(outside)?;
    let (read, done) = oneshot::channel();
    // Whoever has given up needs no answer.
    if !peer.read(begin, len, move |bytes| drop(read.send(bytes))) {
        return Err(outside());
    }
    Ok(done.await.unwrap_or(Err(UcxError::Ended))?)
}

/// What this process says to a peer about its memory; nothing, if it is not to be read by UCX.
pub async fn offer(arena: Option<&Arena>) -> Result<Option<UcxMeeting>, UcxError> {
    let Some(ucx) = arena.and_then(Arena::ucx) else { return Ok(None) };
    let (meet, met) = oneshot::channel();
    ucx.meet(move |meeting| drop(meet.send(meeting)));
    met.await.unwrap_or(Err(UcxError::Ended)).map(Some)
}

/// As it is written: its length, and what it is.
pub fn written(offer: Option<&Offer>) -> Vec<u8> {
    let body = offer.and_then(|offer| postcard::to_allocvec(offer).ok()).unwrap_or_default();
    let body = if body.len() > LARGEST_OFFER { Vec::new() } else { body };
    let mut bytes = BytesMut::with_capacity(body.len() + 2);
    bytes.put_u16_le(body.len() as u16);
    bytes.extend_from_slice(&body);
    bytes.into()
}

/// Reads what a peer says about its memory; `None`: it is not to be read by UCX.
///
/// # Errors
/// If it cannot be understood.
pub async fn read_offer(reader: &mut (impl AsyncRead + Unpin)) -> Result<Option<Offer>, WireError> {
    let length = usize::from(reader.read_u16_le().await?);
    if length > LARGEST_OFFER {
        return Err(WireError::TooLarge { announced: length as u64, most: LARGEST_OFFER as u64 });
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).await?;
    if body.is_empty() { Ok(None) } else { postcard::from_bytes(&body).map(Some).map_err(WireError::Garbled) }
}

/// Makes the way to a peer's memory, and reads some of it, to see whether it works: it is this peer's by its number.
///
/// # Errors
/// If it does not.
pub async fn reach(meeting: UcxMeeting, offer: Offer, node: NodeId) -> Result<UcxPeer, UcxError> {
    let refused = |why: &str| UcxError::Refused(why.to_owned());
    let reached = async {
        let (connect, connected) = oneshot::channel();
        meeting.connect(offer, MOST, move |peer| drop(connect.send(peer)));
        let peer = connected.await.unwrap_or(Err(UcxError::Ended))?;
        let (read, done) = oneshot::channel();
        if !peer.read(0, TRIED.min(peer.region_bytes()), move |bytes| drop(read.send(bytes))) {
            return Err(refused("it has no memory"));
        }
        let bytes = done.await.unwrap_or(Err(UcxError::Ended))?;
        match bytes.starts_with(&node.0.to_ne_bytes()) {
            true => Ok(peer),
            false => Err(refused("what is read of it is not its memory")),
        }
    };
    let late = |_| refused("a first read of it has taken too long");
    tokio::time::timeout(TRIED_WITHIN, reached).await.map_err(late)?
}

#[cfg(test)]
mod tests;
