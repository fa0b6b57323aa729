//! The contents of a shard's mailbox: its messages, and the state that handles them.

use std::sync::Arc;

use downbeat_core::ModelId;
use downbeat_core::cluster::{Demand, Grant, ModelOptions, Shard};
use downbeat_core::journal::Journal;
use downbeat_core::journal::cluster::Input;

use crate::handler::Handler;
use crate::latest_candidates::LatestCandidates;

/// Aligned as [`crate::sync::Line`]: the state shares no cache line with its mutex. Every thread
/// that posts reads the mutex.
#[repr(align(128))]
pub struct ShardState<H: Handler> {
    pub shard: Journal<Shard>,
    pub requests: H::RequestTable,
    /// By model of any shard: the place of its candidates, for models of this shard.
    pub latest: Vec<Option<Arc<LatestCandidates>>>,
    /// The demand that the other shards last read.
    pub demand: Demand,
    /// The changes of demands that this shard has read.
    pub demand_changes: u64,
}

pub enum ToShard<E> {
    Event(E),
    Grant(Grant),
    AddModel {
        model: ModelId,
        options: Box<ModelOptions>,
        latest: Arc<LatestCandidates>,
    },
    RemoveModel(ModelId),
    /// A command to the shard alone.
    Command(Box<Input>),
    Alarm,
}
