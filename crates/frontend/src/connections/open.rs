//! The connections that are open.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Duration;

use downbeat_service::memory;
use downbeat_service::options::connection_options::ConnectionOptions;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::look::{Look, Verdict};
use super::protocol::Protocol;
use super::threads::FrontendThreads;
use super::traffic::Traffic;
use super::watched::{Request, Watched};
use crate::access::network;
use crate::tls::Tls;

/// How long a used connection must have been idle to make room for another: before that, its next
/// request may be on its way.
const IDLE_BEFORE_MAKING_ROOM: Duration = Duration::from_secs(1);
/// The same for a connection that never had a request.
const UNUSED_BEFORE_MAKING_ROOM: Duration = Duration::from_millis(100);
/// How long the connection that makes room for another may take to end, and then, once it is broken
/// off, its task.
const ROOM_LIMITS: [(Request, Duration); 2] =
    [(Request::Finish, Duration::from_millis(100)), (Request::Stop, Duration::from_secs(1))];
/// The buffers of a connection, bytes, about. They stay allocated when it ends, as do the bytes
/// that it moved.
const CONNECTION_BYTES: u64 = 16 << 10;
/// Bytes of ended connections after which the threads give memory back while others work. Each time
/// costs about a millisecond.
const RELEASE_FROM: u64 = 8 << 20;

/// The open connections of the ports that share a cap.
#[derive(Clone)]
pub struct Connections(Arc<Table>);

struct Table {
    options: ConnectionOptions,
    threads: Option<FrontendThreads>,
    /// `None`: the ports speak no TLS.
    tls: Option<Tls>,
    open: Mutex<BTreeMap<u64, Open>>,
    /// The number of open connections of each address, if it has a limit.
    by_address: Mutex<HashMap<IpAddr, usize>>,
    /// Notified when a connection has ended.
    ended: Notify,
    next: AtomicU64,
    /// Bytes that connections left behind which ended since memory was last given back.
    left: AtomicU64,
    /// Clients that are being refused at the moment.
    refusing: AtomicUsize,
    /// By protocol.
    traffic: [Arc<Traffic>; 2],
}

/// The open connections of a protocol, and the bytes that they have moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct OpenNow {
    pub connections: usize,
    pub received: u64,
    pub sent: u64,
}

struct Open {
    protocol: Protocol,
    watched: Arc<Watched>,
    look: Look,
}

impl Connections {
    /// Makes an empty table. The threads that accept connections will serve them.
    pub fn new(options: ConnectionOptions) -> Self {
        Connections::with(options, None, None)
    }

    /// Makes an empty table whose connections have threads of their own.
    pub fn on(options: ConnectionOptions, threads: FrontendThreads) -> Self {
        Connections::with(options, Some(threads), None)
    }

    /// Makes an empty table whose connections speak TLS, if `tls` is given, and have threads of their
    /// own, if these are given.
    pub(crate) fn with(options: ConnectionOptions, threads: Option<FrontendThreads>, tls: Option<Tls>) -> Self {
        Connections(Arc::new(Table {
            options,
            threads,
            tls,
            open: Mutex::default(),
            by_address: Mutex::default(),
            ended: Notify::new(),
            next: AtomicU64::new(0),
            left: AtomicU64::new(0),
            refusing: AtomicUsize::new(0),
            traffic: Default::default(),
        }))
    }

    /// The options of all connections.
    pub fn options(&self) -> &ConnectionOptions {
        &self.0.options
    }

    /// Answers, connections and bytes of a protocol's ports since the start.
    pub(super) fn traffic(&self, protocol: Protocol) -> &Arc<Traffic> {
        let [http, grpc] = &self.0.traffic;
        if protocol == Protocol::Http { http } else { grpc }
    }

    /// The open connections of a protocol.
    pub(super) fn open_now(&self, protocol: Protocol) -> OpenNow {
        let open = self.0.open.lock();
        let its = open.values().filter(|open| open.protocol == protocol).map(|open| open.watched.seen());
        its.fold(OpenNow::default(), |sum, seen| OpenNow {
            connections: sum.connections + 1,
            received: sum.received + seen.received,
            sent: sum.sent + seen.sent,
        })
    }

    /// The TLS of a new connection; `None`: it speaks none.
    pub(super) fn tls(&self, protocol: Protocol) -> Option<Arc<ServerConfig>> {
        self.0.tls.as_ref().map(|tls| tls.config(protocol))
    }

    /// The event loop that the next connection is on.
    pub(super) fn event_loop(&self) -> Handle {
        self.0.threads.as_ref().and_then(FrontendThreads::next).cloned().unwrap_or_else(Handle::current)
    }

    /// The event loops of the threads that the connections have to themselves.
    pub(crate) fn event_loops(&self) -> impl Iterator<Item = Handle> {
        self.0.threads.iter().flat_map(FrontendThreads::event_loops)
    }

    /// Takes in a connection, if its address may have one more, and there is room or an idle connection
    /// makes room.
    pub(super) async fn admit(
        &self,
        protocol: Protocol,
        watched: &Arc<Watched>,
        peer: IpAddr,
    ) -> Result<Entry, Refused> {
        if !self.has_room() {
            self.make_room().await;
            if !self.has_room() {
                return Err(Refused::Full);
            }
        }
        let address = self.options().max_per_address.map(|most| (network(peer), most));
        if let Some((address, most)) = address {
            let mut by_address = self.0.by_address.lock();
            let count = by_address.entry(address).or_default();
            if *count >= most {
                return Err(Refused::Address);
            }
            *count += 1;
        }
        let address = address.map(|(address, _)| address);
        let id = self.0.next.fetch_add(1, Relaxed);
        let look = Look::new(Instant::now());
        self.0.open.lock().insert(id, Open { protocol, watched: Arc::clone(watched), look });
        self.traffic(protocol).accepted.fetch_add(1, Relaxed);
        Ok(Entry { connections: self.clone(), id, address })
    }

    fn has_room(&self) -> bool {
        self.0.open.lock().len() < self.options().max
    }

    /// Ends the connection that has been idle longest, if any has been for a while.
    pub(super) async fn make_room(&self) {
        let now = Instant::now();
        let longest = {
            let open = self.0.open.lock();
            let idle = open.values().filter_map(|open| {
                let seen = open.watched.seen();
                let since = open.look.idle_since(&seen)?;
                let least = if seen.served == 0 { UNUSED_BEFORE_MAKING_ROOM } else { IDLE_BEFORE_MAKING_ROOM };
                (now.duration_since(since) >= least).then_some((since, &open.watched))
            });
            idle.min_by_key(|(since, _)| *since).map(|(_, watched)| Arc::clone(watched))
        };
        let Some(longest) = longest else { return };
        for (request, limit) in ROOM_LIMITS {
            // A request of it may have come meanwhile.
            if !longest.seen().is_idle() {
                return;
            }
            let ended = self.0.ended.notified();
            longest.ask(request);
            if timeout(limit, ended).await.is_ok() {
                return;
            }
        }
    }

    /// Looks at all connections of a protocol's port. Returns when the port must look again unless
    /// bytes move on one of them; `None`: never.
    pub(super) fn look(&self, protocol: Protocol, draining: bool) -> Option<Instant> {
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        for open in self.0.open.lock().values_mut().filter(|open| open.protocol == protocol) {
            let seen = open.watched.seen();
            let verdict = open.look.handle(now, &seen, &self.0.options, draining);
            let due = if verdict == Verdict::Stay { open.look.due(now, &seen, &self.0.options) } else { Some(now) };
            next = [next, due].into_iter().flatten().min();
            match verdict {
                Verdict::Stay => {}
                Verdict::Rest => open.watched.ask(Request::Rest),
                Verdict::Finish => open.watched.ask(Request::Finish),
                Verdict::Stop(reason) => {
                    tracing::debug!(protocol = protocol.name(), reason, "a connection is closed");
                    open.watched.ask(Request::Stop);
                }
            }
        }
        next
    }

    /// Whether connections that ended have left so much memory behind that it should be given back.
    pub(super) fn have_left_memory(&self) -> bool {
        self.0.left.load(Relaxed) >= RELEASE_FROM
    }

    /// Has the threads that connections are on give memory back that nothing holds.
    pub(super) fn release_memory(&self) {
        self.0.left.store(0, Relaxed);
        memory::release();
        if let Some(threads) = &self.0.threads {
            threads.each(memory::release);
        }
    }

    /// Notes that a client is refused. Returns a guard for the time of its answer, unless too many
    /// are answered at the moment.
    pub(super) fn refuse(&self, protocol: Protocol, why: Refused, most: usize) -> Option<Refusing> {
        self.traffic(protocol).refused.fetch_add(1, Relaxed);
        let (max, protocol) = (self.options().max, protocol.name());
        match why {
            Refused::Full => tracing::warn!(
                max_connections = max,
                protocol,
                "connections are refused: there are as many as may be, and none is idle"
            ),
            Refused::Address => tracing::warn!(
                connections_per_address = self.options().max_per_address,
                protocol,
                "connections are refused: their address has as many as it may have"
            ),
        }
        let refusing = Refusing(self.clone());
        (self.0.refusing.fetch_add(1, Relaxed) < most).then_some(refusing)
    }
}

/// A connection's place among the open ones; given back when dropped.
pub(super) struct Entry {
    connections: Connections,
    id: u64,
    /// The address among [`Table::by_address`].
    address: Option<IpAddr>,
}

/// Why a connection is not taken in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refused {
    /// There are as many as may be, and none is idle.
    Full,
    /// Its address has as many as it may have.
    Address,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let table = &self.connections.0;
        let ended = table.open.lock().remove(&self.id);
        if let Some(address) = self.address {
            let mut by_address = table.by_address.lock();
            if let Some(count) = by_address.get_mut(&address) {
                *count -= 1;
                if *count == 0 {
                    by_address.remove(&address);
                }
            }
        }
        if let Some(open) = &ended {
            let (traffic, seen) = (self.connections.traffic(open.protocol), open.watched.seen());
            traffic.received.fetch_add(seen.received, Relaxed);
            traffic.sent.fetch_add(seen.sent, Relaxed);
        }
        let moved = ended.map_or(0, |open| open.watched.bytes());
        table.left.fetch_add(moved.saturating_add(CONNECTION_BYTES), Relaxed);
        table.ended.notify_waiters();
    }
}

/// A client that is being refused.
pub(super) struct Refusing(Connections);

impl Drop for Refusing {
    fn drop(&mut self) {
        self.0.0.refusing.fetch_sub(1, Relaxed);
    }
}
