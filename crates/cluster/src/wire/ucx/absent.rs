//! A build without the feature `ucx`: no process reads tensors by UCX. Peers with UCX hear that
//! this process offers no memory.

use std::convert::Infallible;

use bytes::Bytes;
use downbeat_roles::NodeId;
use downbeat_service::options::cluster_options::NO_UCX;
use serde::{Deserialize, Serialize};

use super::WireError;
use super::arena::{Arena, Place};

/// Has no value in this build.
pub struct Ucx(Infallible);
/// Has no value in this build.
pub type UcxMeeting = Ucx;
/// Has no value in this build.
pub type UcxPeer = Ucx;

/// The offer of a peer, of which this build reads nothing.
#[derive(PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Offer;

/// The build has no UCX.
#[derive(Debug, thiserror::Error)]
#[error("{NO_UCX}")]
pub struct UcxError;

impl Ucx {
    /// # Errors
    /// Always: the build has no UCX.
    pub fn start(_arena: &Arena, _node: NodeId, _is_alone: bool) -> Result<Ucx, UcxError> {
        Err(UcxError)
    }

    /// No `Ucx` exists that could be asked.
    pub fn is_alone(&self) -> bool {
        match self.0 {}
    }

    /// No `Ucx` exists that could meet a peer.
    pub async fn meet(&self) -> Result<UcxMeeting, UcxError> {
        match self.0 {}
    }

    /// No meeting exists that could have an offer.
    pub fn offer(&self) -> &Offer {
        match self.0 {}
    }
}

/// No meeting exists that could lead to a peer.
pub async fn reach(meeting: UcxMeeting, _offer: Offer, _node: NodeId) -> Result<UcxPeer, UcxError> {
    match meeting.0 {}
}

/// No peer exists that could be read.
pub async fn fill(peer: &UcxPeer, _tensors: Vec<(Place, u64, &mut Bytes)>) -> Result<bool, WireError> {
    match peer.0 {}
}
