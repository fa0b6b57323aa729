//! Connections that a process opens: to schedulers, and to frontends that one has named.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use downbeat_core::roles::{Hello, NodeId, Role};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_local};

use super::{Halves, Machine, Node, WireError, complain};

/// How long a connection may take to come about.
const CONNECTS_WITHIN: Duration = Duration::from_secs(2);
/// How long it is waited before somebody is connected to again, at first and at most.
const AGAIN_AFTER: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];
/// How often a frontend is tried that is not there.
const TRIES: u32 = 8;

/// Where schedulers are, `HOST:PORT`. One that leaves the list is not connected to again; its connection lives as long as it does.
pub type Schedulers = watch::Receiver<BTreeSet<String>>;

/// A list that stays as it is.
pub fn fixed(addresses: &[String]) -> Schedulers {
    watch::channel(addresses.iter().cloned().collect()).1
}

impl<M: Machine> Node<M> {
    /// Has a connection to each of these.
    pub(super) async fn dial_schedulers(self: Rc<Self>, mut schedulers: Schedulers) {
        let mut dialled: BTreeMap<String, JoinHandle<()>> = BTreeMap::new();
        loop {
            // One that has ended was of an address that was not in the list then, but may be again.
            dialled.retain(|_, task| !task.is_finished());
            let addresses = schedulers.borrow_and_update().clone();
            for address in addresses {
                let dial = || spawn_local(self.clone().keep_dialling(address.clone(), schedulers.clone()));
                dialled.entry(address.clone()).or_insert_with(dial);
            }
            if schedulers.changed().await.is_err() {
                return;
            }
        }
    }

    /// Has a connection to this address, again and again, as long as it is in the list.
    async fn keep_dialling(self: Rc<Self>, address: String, schedulers: Schedulers) {
        let mut wait = AGAIN_AFTER[0];
        while schedulers.borrow().contains(&address) {
            match self.dial(&address).await {
                Ok((peer, _)) if peer.node == self.identity.node => return,
                Ok((peer, halves)) if matches!(peer.role, Role::Scheduler { .. }) => {
                    wait = AGAIN_AFTER[0];
                    if let Some(reason) = self.serve(&peer, halves).await {
                        complain(&address, &reason);
                    }
                }
                Ok((peer, _)) => {
                    complain(&address, &format!("there is a {:?}, and no scheduler", peer.role));
                }
                Err(error) => {
                    tracing::debug!(%address, %error, "not connected");
                    if !matches!(error, WireError::Ended(_)) {
                        complain(&address, &error.to_string());
                    }
                }
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(AGAIN_AFTER[1]);
        }
    }

    /// Has a connection to a peer that somebody has named, unless it is not there.
    pub(super) async fn dial_peer(self: Rc<Self>, node: NodeId, address: String) {
        for tried in 0..TRIES {
            if self.inner.borrow().wires.contains_key(&node) {
                return;
            }
            match self.dial(&address).await {
                Ok((peer, halves)) if peer.node == node => {
                    if let Some(reason) = self.serve(&peer, halves).await {
                        complain(&address, &reason);
                    }
                    return;
                }
                // It has started again since, and is somebody else.
                Ok(_) => return,
                Err(error) => tracing::debug!(%address, %error, "not connected"),
            }
            tokio::time::sleep(AGAIN_AFTER[0] * (tried + 1)).await;
        }
        complain(&address, "nobody answers there: is it the address at which others reach it (--advertise)?");
    }

    async fn dial(&self, address: &str) -> Result<(Hello, Halves), WireError> {
        let late = |_| WireError::Ended(std::io::ErrorKind::TimedOut.into());
        let stream = tokio::time::timeout(CONNECTS_WITHIN, TcpStream::connect(address)).await.map_err(late)??;
        self.greet(stream).await
    }
}
