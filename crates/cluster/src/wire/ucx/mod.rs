//! Reads large tensors by UCX. The feature `ucx` compiles this module; a build without the feature
//! has `absent.rs` in its place.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use downbeat_engine_ort::ucx;
use downbeat_roles::NodeId;
use futures_util::future::try_join_all;
use tokio::sync::oneshot;

use super::WireError;
use super::arena::{Arena, MOST, Place};

pub use downbeat_engine_ort::ucx::{Offer, UcxError, UcxMeeting, UcxPeer};

/// Limit of the first read by UCX, which tests the way, together with all steps before it.
const TRIED_WITHIN: Duration = Duration::from_millis(1000);
/// Bytes of the first read.
const TRIED: usize = 64 << 10;

/// UCX in this process. Peers read its arena.
pub struct Ucx {
    ucx: ucx::Ucx,
    is_alone: bool,
}

impl Ucx {
    /// Lets peers read this process's arena by UCX. `is_alone`: also peers on this machine.
    ///
    /// # Errors
    /// If UCX is not installed, or cannot be used.
    pub fn start(arena: &Arena, node: NodeId, is_alone: bool) -> Result<Ucx, UcxError> {
        let region = arena.region();
        // The first page has numbers and no tensor, so its own number is free. A reader recognises
        // the process by this number.
        if let Some(number) = region.number(0) {
            number.store(node.0, Ordering::Relaxed);
        }
        Ok(Ucx { ucx: ucx::Ucx::start(region)?, is_alone })
    }

    /// Whether processes of one machine read each other by UCX, too, and map no memory.
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Prepares this process and one peer to read each other's memory.
    ///
    /// # Errors
    /// If UCX refuses.
    pub async fn meet(&self) -> Result<UcxMeeting, UcxError> {
        let (meet, met) = oneshot::channel();
        self.ucx.meet(move |meeting| drop(meet.send(meeting)));
        met.await.unwrap_or(Err(UcxError::Ended))
    }
}

/// Connects to a peer's memory, and tests the connection by a read of its first bytes. The peer's number there shows whose
/// memory it is.
///
/// # Errors
/// If the read fails, or takes longer than [`TRIED_WITHIN`].
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

/// Reads tensors of these places and lengths out of a peer's memory. Returns false if a tensor is gone.
///
/// # Errors
/// If a tensor is outside of the memory, or the memory cannot be read.
pub async fn fill(peer: &UcxPeer, tensors: Vec<(Place, u64, &mut Bytes)>) -> Result<bool, WireError> {
    let bytes = tensors.iter().map(|(place, length, _)| {
        let begin = Arena::begin(*place);
        read(peer, begin, usize::try_from(*length).ok(), *length)
    });
    let bytes = try_join_all(bytes).await?;
    // The numbers are read once all bytes are here: if any byte is of a later tensor, the number has changed.
    let numbers = tensors.iter().map(|(place, length, _)| {
        let begin = Arena::begin_of_number(*place);
        read(peer, begin, Some(size_of::<u64>()), *length)
    });
    let numbers = try_join_all(numbers).await?;
    let mut is_whole = true;
    for ((place, _, data), (bytes, number)) in tensors.into_iter().zip(bytes.into_iter().zip(numbers)) {
        is_whole &= number[..] == place.number.to_ne_bytes();
        *data = bytes;
    }
    Ok(is_whole)
}

/// Reads some bytes of a peer's memory, for a tensor of this length.
async fn read(peer: &UcxPeer, begin: Option<usize>, len: Option<usize>, length: u64) -> Result<Bytes, WireError> {
    let outside = || WireError::Outside(length);
    let (begin, len) = begin.zip(len).ok_or_else(outside)?;
    let (read, done) = oneshot::channel();
    // A caller that has given up needs no answer.
    if !peer.read(begin, len, move |bytes| drop(read.send(bytes))) {
        return Err(outside());
    }
    Ok(done.await.unwrap_or(Err(UcxError::Ended))?)
}
