//! The memory that a peer has its large tensors in, however it is read: mapped, where it is on this machine, or by UCX.

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::arena::{PeerArena, Place};
use super::ucx::{self, Offer, UcxPeer};
use super::wire::WireError;

/// Most bytes of what a peer says about its memory.
const LARGEST_OFFER: usize = 16 << 10;

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

#[cfg(test)]
mod tests;
