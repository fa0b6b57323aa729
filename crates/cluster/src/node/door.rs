//! The door of a process: accepts connections, and hands on the peers that have proved themselves.
//!
//! The door has a thread of its own. A stranger costs the state machine's thread nothing, and other
//! strangers a place for a moment.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use downbeat_roles::Hello;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{LocalSet, spawn_local};

use super::places::{Place, Places};
use super::{Identity, complain, guarded, is_not_connected};
use crate::secrets::SecretFile;
use crate::wire::WireError;
use crate::wire::greeting::{Side, greet};

/// How long a peer may take to prove itself.
pub const PROVES_WITHIN: Duration = Duration::from_secs(2);
/// The pause after a connection that could not be accepted.
const AGAIN_AFTER: Duration = Duration::from_millis(20);
/// How often the addresses of listed schedulers are looked up.
const LOOKS_UP_EVERY: Duration = Duration::from_secs(60);
/// The most peers that have proved themselves and wait for the node's thread.
const PROVED: usize = 64;

/// A peer that has connected and proved itself.
pub struct Proved {
    /// The connection, after its greeting.
    pub stream: std::net::TcpStream,
    /// The peer's address.
    pub from: SocketAddr,
    /// The peer's introduction.
    pub peer: Hello,
}

/// The parts of a door.
pub struct Door {
    /// The identity of the process.
    pub identity: Identity,
    /// The port of the listener.
    pub port: u16,
    /// The cluster's secrets.
    pub secrets: SecretFile,
    /// The addresses of all listed schedulers, whose connections have places of their own.
    pub listed: Vec<String>,
    /// The places of strangers.
    pub places: Arc<Mutex<Places>>,
}

struct AtDoor {
    door: Door,
    proved: mpsc::Sender<Proved>,
}

impl Door {
    /// Opens the door: starts its thread. The thread ends when the receiver is dropped.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn open(self, listener: std::net::TcpListener) -> std::io::Result<mpsc::Receiver<Proved>> {
        let (proved, receiver) = mpsc::channel(PROVED);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let run = move || {
            let door = Rc::new(AtDoor { door: self, proved });
            LocalSet::new().block_on(&runtime, door.listen(listener))
        };
        std::thread::Builder::new().name("door".to_owned()).spawn(move || guarded("door", run))?;
        Ok(receiver)
    }
}

impl AtDoor {
    async fn listen(self: Rc<Self>, listener: std::net::TcpListener) -> std::io::Result<()> {
        let listener = TcpListener::from_std(listener)?;
        spawn_local(self.clone().look_up());
        loop {
            let accepted = tokio::select! {
                biased;
                () = self.proved.closed() => return Ok(()),
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, from)) => {
                    let place = self.door.places.lock().enter(from.ip());
                    drop(spawn_local(self.clone().welcome(stream, from, place)));
                }
                Err(error) => {
                    complain("connections", &error.to_string());
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
            }
        }
    }

    /// Greets a stranger, and hands the peer on.
    async fn welcome(self: Rc<Self>, mut stream: TcpStream, from: SocketAddr, place: Place) {
        let Place { number, is_lost } = place;
        let greeted = tokio::select! {
            biased;
            _ = is_lost => Err(WireError::Displaced),
            greeted = tokio::time::timeout(PROVES_WITHIN, self.greet(&mut stream)) =>
                greeted.unwrap_or_else(|_| Err(WireError::Ended(std::io::ErrorKind::TimedOut.into()))),
        };
        {
            let mut places = self.door.places.lock();
            places.leave(number);
            if greeted.is_ok() {
                places.has_proved(from.ip());
            }
        }
        let peer = greeted.and_then(|peer| Ok(Proved { stream: stream.into_std()?, from, peer }));
        match peer {
            // A node that has ended needs no peers.
            Ok(proved) => drop(self.proved.send(proved).await),
            Err(error) => is_not_connected(&from.ip().to_string(), &error),
        }
    }

    async fn greet(&self, stream: &mut TcpStream) -> Result<Hello, WireError> {
        stream.set_nodelay(true)?;
        let hello = self.door.identity.hello(stream.local_addr()?, self.door.port);
        greet(stream, Side::Listener, &hello, &self.door.secrets.get()).await
    }

    /// Looks the addresses of listed schedulers up, again and again. Names may get other addresses.
    async fn look_up(self: Rc<Self>) {
        let mut found = BTreeMap::<&String, Vec<IpAddr>>::new();
        while !self.door.listed.is_empty() {
            for name in &self.door.listed {
                // An address that cannot be looked up now stays as it was.
                if let Ok(addresses) = tokio::net::lookup_host(name).await {
                    found.insert(name, addresses.map(|address| address.ip()).collect());
                }
            }
            self.door.places.lock().list(found.values().flatten().copied());
            tokio::time::sleep(LOOKS_UP_EVERY).await;
        }
    }
}
