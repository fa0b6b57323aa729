//! The schedulers of a cluster, as etcd lists them. Each scheduler keeps `PREFIX/schedulers/RANK`
//! under a lease, which ends with the scheduler.
//!
//! A rank belongs to one process. Example: a scheduler starts with rank 1, but another live process
//! has rank 1. The new scheduler then ends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use downbeat_roles::NodeId;
use serde::{Deserialize, Serialize};

use super::etcd::{Etcd, Kept, Lease};
use crate::node::status::shown;

/// How often a scheduler renews its lease and reads the schedulers.
pub const LOOKS_EVERY: Duration = Duration::from_secs(1);
/// How long a silent scheduler stays listed.
const LEASE: Duration = Duration::from_secs(5);
/// How often another process must be seen at a rank until its lease is surely renewed.
const MOST_LOOKS: u32 = 10;
/// All ranks are below this number.
pub const MOST_SCHEDULERS: u32 = 64;

/// A scheduler's entry in etcd.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Member {
    /// The scheduler's number, drawn when it started.
    node: String,
    /// The scheduler's name for people.
    name: String,
    /// The address for others' connections, `HOST:PORT`.
    address: String,
}

/// The contents of a rank's key. `member` is `None` if they describe no scheduler.
struct Found {
    member: Option<Member>,
    revision: u64,
}

/// The schedulers, by rank.
pub struct Members(BTreeMap<u32, Found>);

/// A scheduler's own place among the schedulers.
pub struct Seat {
    folder: String,
    node: String,
    name: Option<String>,
    address: Option<String>,
    port: u16,
    /// The rank; `None`: take the lowest free one.
    rank: Option<u32>,
    /// The lease of this scheduler's key.
    lease: Option<Lease>,
    /// Another process at this rank, and the number of looks that found this process.
    held_by: Option<(Member, u32)>,
}

impl Members {
    /// Reads the schedulers.
    ///
    /// # Errors
    /// In words, if etcd does not answer.
    pub async fn read(etcd: &mut Etcd, folder: &str) -> Result<Self, String> {
        let found = |(key, kept): (String, Kept)| {
            let rank: u32 = key.parse().ok()?;
            let found = Found { member: serde_json::from_slice(&kept.value).ok(), revision: kept.revision };
            (rank < MOST_SCHEDULERS && rank.to_string() == key).then_some((rank, found))
        };
        Ok(Members(etcd.list(folder, 2 * MOST_SCHEDULERS).await?.into_iter().filter_map(found).collect()))
    }

    /// The addresses of the schedulers below this rank.
    pub fn addresses(&self, below: u32) -> BTreeSet<String> {
        self.0.range(..below).filter_map(|(_, found)| Some(found.member.as_ref()?.address.clone())).collect()
    }

    fn lowest_free(&self) -> Result<u32, String> {
        let free = (0..MOST_SCHEDULERS).find(|rank| !self.0.contains_key(rank));
        free.ok_or_else(|| format!("all {MOST_SCHEDULERS} ranks of schedulers are taken"))
    }
}

impl Seat {
    /// A place for this process in `folder`. `name`: its name for people, if not by its rank.
    /// `address`: where others connect, at `port`; `None`: the local address of its connection to
    /// etcd. `rank`: `None`: the lowest free one.
    pub fn new(
        folder: &str,
        node: NodeId,
        name: Option<String>,
        (address, port): (Option<String>, u16),
        rank: Option<u32>,
    ) -> Self {
        let folder = folder.to_owned();
        Seat { folder, node: shown(node), name, address, port, rank, lease: None, held_by: None }
    }

    /// The scheduler's rank; `None`: not yet known.
    pub fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// Keeps this scheduler's entry in etcd, unless another process has its rank. Call this again
    /// and again.
    ///
    /// # Errors
    /// In words, if etcd does not answer.
    pub async fn keep(&mut self, etcd: &mut Etcd, members: &Members) -> Result<(), String> {
        let rank = self.rank.map_or_else(|| members.lowest_free(), Ok)?;
        let (key, found) = (format!("{}/{rank}", self.folder), members.0.get(&rank));
        match found.map(|found| &found.member) {
            Some(None) => return Err(format!("its key '{key}' has something else: delete it, or take another prefix")),
            Some(Some(other)) if other.node != self.node => {
                let looks = self.held_by.take().filter(|(known, _)| known.node == other.node).map_or(0, |held| held.1);
                (self.lease, self.held_by) = (None, Some((other.clone(), looks + 1)));
                return Ok(());
            }
            _ => self.held_by = None,
        }
        if let Some(lease) = self.lease.take_if(|_| found.is_some())
            && etcd.renew(&lease).await?
        {
            self.lease = Some(lease);
            return Ok(());
        }
        let lease = etcd.grant(LEASE).await?;
        let name = self.name.clone().unwrap_or_else(|| format!("scheduler {rank}"));
        let here = || SocketAddr::new(etcd.local(), self.port).to_string();
        let me = Member { node: self.node.clone(), name, address: self.address.clone().unwrap_or_else(here) };
        let value = serde_json::to_vec(&me).map_err(|error| error.to_string())?;
        if !etcd.replace(&key, found.map_or(0, |found| found.revision), &value, Some(&lease)).await? {
            // Another process was faster, and is seen at the next look.
            return etcd.revoke(lease).await;
        }
        tracing::info!(rank, address = me.address, "etcd has this scheduler");
        (self.rank, self.lease) = (Some(rank), Some(lease));
        Ok(())
    }

    /// Whether this scheduler's entry is in etcd, as far as it knows.
    pub fn is_taken(&self) -> bool {
        self.lease.is_some()
    }

    /// The other process at this scheduler's rank, and whether it is known to be alive.
    pub fn held_by_another(&self) -> Option<(String, bool)> {
        let (Member { node, name, address }, looks) = self.held_by.as_ref()?;
        let rank = self.rank?;
        let who = format!("rank {rank} is that of the scheduler '{name}' at {address} (node {node})");
        Some((who, *looks >= MOST_LOOKS))
    }

    /// Removes this scheduler's entry.
    ///
    /// # Errors
    /// In words, if etcd does not answer. The lease then ends by itself.
    pub async fn leave(&mut self, etcd: &mut Etcd) -> Result<(), String> {
        match self.lease.take() {
            Some(lease) => etcd.revoke(lease).await,
            None => Ok(()),
        }
    }
}
