//! Connections that a process opens: to schedulers, and to frontends that a scheduler has named.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use downbeat_roles::{Hello, NodeId, Role};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_local};

use super::door::PROVES_WITHIN;
use super::{Machine, Node, WireError, complain, is_not_connected};
use crate::wire::greeting::{Side, greet};

/// How long a connection attempt may take.
const CONNECTS_WITHIN: Duration = Duration::from_secs(2);
/// The pauses before another connection attempt: the first and the longest.
const AGAIN_AFTER: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];
/// The most attempts to connect to a frontend that does not answer.
const TRIES: u32 = 8;

/// The addresses of schedulers, `HOST:PORT`. A scheduler that leaves the list is not connected to
/// again, but its present connection stays.
pub type Schedulers = watch::Receiver<BTreeSet<String>>;

/// A list that never changes.
pub fn fixed(addresses: &[String]) -> Schedulers {
    watch::channel(addresses.iter().cloned().collect()).1
}

impl<M: Machine> Node<M> {
    /// Keeps a connection to each listed scheduler.
    pub(super) async fn dial_schedulers(self: Rc<Self>, mut schedulers: Schedulers) {
        let mut dialled: BTreeMap<String, JoinHandle<()>> = BTreeMap::new();
        loop {
            // A task ends when its address leaves the list. The address may be listed again.
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

    /// Keeps a connection to this address as long as it is listed, and repeats failed attempts.
    async fn keep_dialling(self: Rc<Self>, address: String, schedulers: Schedulers) {
        let mut wait = AGAIN_AFTER[0];
        while schedulers.borrow().contains(&address) {
            match self.dial(&address).await {
                Ok((peer, _)) if peer.node == self.identity.node => return,
                Ok((peer, stream)) if matches!(peer.role, Role::Scheduler { .. }) => {
                    wait = AGAIN_AFTER[0];
                    if let Some(reason) = self.serve(&peer, stream).await {
                        complain(&address, &reason);
                    }
                }
                Ok((peer, _)) => {
                    complain(&address, &format!("there is a {:?}, and no scheduler", peer.role));
                }
                Err(error) => is_not_connected(&address, &error),
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(AGAIN_AFTER[1]);
        }
    }

    /// Connects to a peer that a scheduler has named, unless the peer does not answer.
    pub(super) async fn dial_peer(self: Rc<Self>, node: NodeId, address: String) {
        for tried in 0..TRIES {
            if self.inner.borrow().wires.contains_key(&node) {
                return;
            }
            match self.dial(&address).await {
                Ok((peer, stream)) if peer.node == node => {
                    if let Some(reason) = self.serve(&peer, stream).await {
                        complain(&address, &reason);
                    }
                    return;
                }
                // Another process has this address now.
                Ok(_) => return,
                Err(error) => is_not_connected(&address, &error),
            }
            tokio::time::sleep(AGAIN_AFTER[0] * (tried + 1)).await;
        }
        complain(
            &address,
            "no process answers at that address: is it the address at which others reach that process (--advertise)?",
        );
    }

    /// Connects to an address, and greets the peer there.
    async fn dial(&self, address: &str) -> Result<(Hello, TcpStream), WireError> {
        let late = |_| WireError::Ended(std::io::ErrorKind::TimedOut.into());
        let mut stream = tokio::time::timeout(CONNECTS_WITHIN, TcpStream::connect(address)).await.map_err(late)??;
        stream.set_nodelay(true)?;
        let (me, secrets) = (self.identity.hello(stream.local_addr()?, self.port), self.secrets.get());
        let greeted = greet(&mut stream, Side::Dialler, &me, &secrets);
        let peer = tokio::time::timeout(PROVES_WITHIN, greeted).await.map_err(late)??;
        self.places.lock().has_proved(stream.peer_addr()?.ip());
        Ok((peer, stream))
    }
}
