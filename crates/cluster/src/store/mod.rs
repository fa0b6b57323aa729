//! A cluster's data in etcd: the last allotted epoch, the plan of its sub-clusters, and its
//! schedulers ([`membership`](crate::store::membership)).
//!
//! A scheduler that wants to lead raises `PREFIX/epoch`. Its transaction fails if another scheduler
//! has raised the epoch meanwhile. Two schedulers never get the same number, even if they cannot
//! hear each other. If etcd's answer is lost on the way, no scheduler uses that number.
//!
//! The plan is `PREFIX/plan`, as JSON. A newer plan replaces an older one, and never the other way
//! round, even if its write comes late.
//!
//! No request waits for etcd. While etcd is away, known schedulers stay known, and the leader goes
//! on.

pub(crate) mod etcd;
pub(crate) mod etcd_access;
pub(crate) mod membership;

use std::collections::BTreeSet;
use std::time::Duration;

use downbeat_roles::{NodeId, SubClusterPlan};
use downbeat_service::options::cluster_options::ClusterOptions;
use tokio::sync::{mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior};

use crate::node::status::StatusBoard;
use crate::scheduler::scheduler_role::StoreWork;
use crate::store::etcd::Etcd;
use crate::store::etcd_access::EtcdAccess;
use crate::store::membership::{LOOKS_EVERY, MOST_SCHEDULERS, Members, Seat};

/// How often other schedulers may be faster in one request for an epoch.
const TRIES: usize = 8;
/// How long a scheduler that ends waits for its removal from etcd.
const LEAVES_WITHIN: Duration = Duration::from_secs(1);

/// A cluster's data in etcd.
pub struct Store {
    etcd: Etcd,
    /// The key of the last epoch.
    epoch: String,
    /// The key of the plan.
    plan: String,
    /// A plan that must still be written.
    unkept: Option<SubClusterPlan>,
    /// The key of the schedulers' folder.
    schedulers: String,
    /// This process's place, if it is a scheduler.
    seat: Option<Seat>,
    /// Whether the last request to etcd succeeded.
    is_there: Option<bool>,
}

impl Store {
    /// The store of this cluster; `None`: it has no etcd.
    ///
    /// # Errors
    /// If the files or options for the access to etcd are wrong.
    pub fn new(options: &ClusterOptions) -> anyhow::Result<Option<Self>> {
        let prefix = &options.etcd_prefix;
        if options.etcd.is_empty() {
            return Ok(None);
        }
        Ok(Some(Store {
            etcd: Etcd::new(options.etcd.clone(), EtcdAccess::open(options)?),
            epoch: format!("{prefix}/epoch"),
            plan: format!("{prefix}/plan"),
            unkept: None,
            schedulers: format!("{prefix}/schedulers"),
            seat: None,
            is_there: None,
        }))
    }

    /// Makes this process a scheduler: see [`Seat::new`].
    pub fn sit(&mut self, node: NodeId, name: Option<String>, address: (Option<String>, u16), rank: Option<u32>) {
        self.seat = Some(Seat::new(&self.schedulers, node, name, address, rank));
    }

    /// Waits until this process is one of the schedulers, and the others have read its entry.
    /// Returns its rank.
    ///
    /// # Errors
    /// If another process has the rank.
    pub async fn join(&mut self) -> anyhow::Result<u32> {
        let (mut looks, mut waits) = (looks(), false);
        loop {
            looks.tick().await;
            let found = self.look().await;
            self.say(&found);
            let Ok(members) = found else { continue };
            let Some(seat) = &self.seat else { anyhow::bail!("a process that is no scheduler has no rank") };
            if let (true, Some(rank)) = (seat.is_taken(), seat.rank()) {
                if !members.addresses(MOST_SCHEDULERS).is_empty() {
                    // Leaves the others time to connect and name their leader, before this one
                    // takes the lead.
                    tokio::time::sleep(LOOKS_EVERY).await;
                }
                return Ok(rank);
            }
            self.displaced()?;
            if let Some((who, _)) = seat.held_by_another()
                && !std::mem::replace(&mut waits, true)
            {
                tracing::info!("{who}: waiting until its lease ends, in case it is not alive");
            }
        }
    }

    /// Does the `wanted` work, keeps this process among the schedulers, and updates `dial` with the
    /// addresses that it connects to. `give` gets each allotted epoch, with the stored plan
    /// (`None`: no epoch now). Runs for ever.
    ///
    /// # Errors
    /// If another process has this one's rank.
    pub async fn serve(
        &mut self,
        wanted: &mut mpsc::UnboundedReceiver<StoreWork>,
        board: &StatusBoard,
        give: impl Fn(Option<(u64, Option<SubClusterPlan>)>),
        dial: Option<watch::Sender<BTreeSet<String>>>,
    ) -> anyhow::Result<()> {
        let mut looks = looks();
        loop {
            let found = tokio::select! {
                biased;
                Some(work) = wanted.recv() => {
                    // A node that has asked again meanwhile needs one answer.
                    let mut above = None;
                    for work in std::iter::once(work).chain(std::iter::from_fn(|| wanted.try_recv().ok())) {
                        match work {
                            StoreWork::Allot(number) => above = Some(number),
                            StoreWork::Keep(plan) => self.unkept = Some(plan),
                        }
                    }
                    match above {
                        Some(above) => {
                            let allotted = self.allot(above).await;
                            give(allotted.as_ref().ok().cloned());
                            allotted.map(drop)
                        }
                        None => self.keep().await,
                    }
                }
                _ = looks.tick() => match self.look().await {
                    Ok(members) => {
                        if let Some(dial) = &dial {
                            let rank = self.seat.as_ref().and_then(Seat::rank).unwrap_or(MOST_SCHEDULERS);
                            say_where(dial, members.addresses(rank));
                        }
                        self.keep().await
                    }
                    Err(reason) => Err(reason),
                },
            };
            board.etcd_answers(found.is_ok());
            self.say(&found);
            self.displaced()?;
        }
    }

    /// Updates `dial` with the schedulers' addresses, for as long as a node uses it.
    pub async fn follow(mut self, board: StatusBoard, dial: watch::Sender<BTreeSet<String>>) {
        let mut looks = looks();
        while !dial.is_closed() {
            looks.tick().await;
            let found = self.look().await;
            board.etcd_answers(found.is_ok());
            self.say(&found);
            if let Ok(members) = found {
                say_where(&dial, members.addresses(MOST_SCHEDULERS));
            }
        }
    }

    /// Removes this process from the schedulers.
    pub async fn leave(mut self) {
        if let Some(mut seat) = self.seat.take() {
            // Otherwise the lease ends by itself.
            let _ = tokio::time::timeout(LEAVES_WITHIN, seat.leave(&mut self.etcd)).await;
        }
    }

    /// Allots an epoch above this number, which no other scheduler has. Also returns the stored
    /// plan.
    async fn allot(&mut self, above: u64) -> Result<(u64, Option<SubClusterPlan>), String> {
        for _ in 0..TRIES {
            let kept = self.etcd.get(&self.epoch).await?;
            let number = |value: &[u8]| std::str::from_utf8(value).ok()?.parse::<u64>().ok();
            let last = kept.as_ref().map_or(Some(0), |kept| number(&kept.value));
            let last = last.ok_or_else(|| {
                format!("its key '{}' has something else than a number: delete it, or take another prefix", self.epoch)
            })?;
            let epoch = last.max(above).checked_add(1).ok_or("there are no epochs left")?;
            let revision = kept.map_or(0, |kept| kept.revision);
            if self.etcd.replace(&self.epoch, revision, epoch.to_string().as_bytes(), None).await? {
                return Ok((epoch, self.kept_plan().await?.0));
            }
        }
        Err("other schedulers raised the epoch again and again".to_owned())
    }

    /// The stored plan, and the revision of its key. An unreadable plan counts as none.
    async fn kept_plan(&mut self) -> Result<(Option<SubClusterPlan>, u64), String> {
        let Some(kept) = self.etcd.get(&self.plan).await? else { return Ok((None, 0)) };
        let plan = serde_json::from_slice(&kept.value);
        let plan = plan.inspect_err(|error| tracing::warn!(key = %self.plan, %error, "the value in etcd is not a plan of sub-clusters: the next plan replaces it"));
        Ok((plan.ok(), kept.revision))
    }

    /// Writes the plan that must still be written, unless etcd has a newer plan.
    async fn keep(&mut self) -> Result<(), String> {
        let Some(plan) = self.unkept.clone() else { return Ok(()) };
        let text = serde_json::to_vec(&plan).map_err(|error| format!("a plan cannot be written: {error}"))?;
        for _ in 0..TRIES {
            let (kept, revision) = self.kept_plan().await?;
            let is_newer = kept.is_some_and(|kept| kept.stamp >= plan.stamp);
            if is_newer || self.etcd.replace(&self.plan, revision, &text, None).await? {
                self.unkept = None;
                return Ok(());
            }
        }
        Err("other schedulers wrote plans again and again".to_owned())
    }

    /// Reads the schedulers, and renews the own entry of a process that is a scheduler.
    async fn look(&mut self) -> Result<Members, String> {
        let members = Members::read(&mut self.etcd, &self.schedulers).await?;
        if let Some(seat) = &mut self.seat {
            seat.keep(&mut self.etcd, &members).await?;
        }
        Ok(members)
    }

    fn displaced(&self) -> anyhow::Result<()> {
        match self.seat.as_ref().and_then(Seat::held_by_another) {
            Some((who, true)) => anyhow::bail!(
                "{who}, which is alive: stop that one, or give this one another rank (--rank) or cluster (--etcd-prefix)"
            ),
            _ => Ok(()),
        }
    }

    /// Logs whether etcd works, when that changes.
    fn say<T>(&mut self, found: &Result<T, String>) {
        let is_there = found.is_ok();
        if self.is_there.replace(is_there) == Some(is_there) {
            return;
        }
        let servers = self.etcd.servers();
        match found {
            Ok(_) => tracing::info!(?servers, "etcd answers"),
            Err(reason) => tracing::warn!(
                ?servers, %reason,
                "etcd cannot be used now: known schedulers are kept and the leader goes on, but no other scheduler can begin to lead"
            ),
        }
    }
}

/// Updates the addresses, if they have changed.
fn say_where(dial: &watch::Sender<BTreeSet<String>>, addresses: BTreeSet<String>) {
    dial.send_if_modified(|known| std::mem::replace(known, addresses.clone()) != addresses);
}

fn looks() -> Interval {
    let mut looks = tokio::time::interval(LOOKS_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    looks
}
