//! A peer's memory with its large tensors: mapped if the peer is on this machine, or read by UCX.

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::WireError;
use super::arena::{PeerArena, Place};
use super::ucx::{self, Offer, UcxPeer};

/// The most bytes of a peer's offer of memory.
const LARGEST_OFFER: usize = 16 << 10;

/// The ways of large tensors from one process to another. A greater one is better.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Transport {
    /// Tensors go in frames.
    #[default]
    Tcp,
    /// The receiver reads the sender's memory by UCX.
    Ucx,
    /// The receiver reads the sender's memory, which it has mapped.
    SharedMemory,
}

impl Transport {
    /// The transport's name for people.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Ucx => "ucx",
            Transport::SharedMemory => "shared_memory",
        }
    }

    /// The byte that stands for the transport in messages to the sender.
    pub fn byte(self) -> u8 {
        match self {
            Transport::Tcp => 0,
            Transport::SharedMemory => 1,
            Transport::Ucx => 2,
        }
    }

    /// The transport that a byte stands for. Unknown bytes stand for frames.
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
    /// The memory of a process on this machine.
    Mapped(PeerArena),
    /// The memory of any other process.
    Ucx(UcxPeer),
}

impl PeerMemory {
    /// How the memory is read.
    pub fn transport(&self) -> Transport {
        match self {
            PeerMemory::Mapped(_) => Transport::SharedMemory,
            PeerMemory::Ucx(_) => Transport::Ucx,
        }
    }

    /// Reads the tensors at these places, of these lengths. Returns false if any tensor is gone.
    ///
    /// # Errors
    /// If a tensor is outside of the memory, or the memory cannot be read.
    pub async fn fill(&self, tensors: Vec<(Place, u64, &mut Bytes)>) -> Result<bool, WireError> {
        let memory = match self {
            PeerMemory::Mapped(memory) => memory,
            PeerMemory::Ucx(peer) => return ucx::fill(peer, tensors).await,
        };
        let mut is_whole = true;
        for (place, length, data) in tensors {
            let outside = || WireError::Outside(length);
            let len = usize::try_from(length).map_err(|_| outside())?;
            match memory.read(place, len).ok_or_else(outside)? {
                Some(copy) => *data = copy,
                None => is_whole = false,
            }
        }
        Ok(is_whole)
    }
}

/// Encodes an offer: its length, then its bytes.
pub fn written(offer: Option<&Offer>) -> Vec<u8> {
    let body = offer.and_then(|offer| postcard::to_allocvec(offer).ok()).unwrap_or_default();
    let body = if body.len() > LARGEST_OFFER { Vec::new() } else { body };
    let mut bytes = BytesMut::with_capacity(body.len() + 2);
    bytes.put_u16_le(body.len() as u16);
    bytes.extend_from_slice(&body);
    bytes.into()
}

/// Reads a peer's offer of memory. `None`: the memory cannot be read by UCX.
///
/// # Errors
/// If the offer cannot be decoded.
pub async fn read_offer(reader: &mut (impl AsyncRead + Unpin)) -> Result<Option<Offer>, WireError> {
    let length = usize::from(reader.read_u16_le().await?);
    if length > LARGEST_OFFER {
        return Err(WireError::TooLarge { announced: length as u64, most: LARGEST_OFFER as u64 });
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).await?;
    if body.is_empty() { Ok(None) } else { postcard::from_bytes(&body).map(Some).map_err(WireError::Garbled) }
}

#[cfg(test)]
mod tests;
