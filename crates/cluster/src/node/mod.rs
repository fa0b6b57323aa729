//! A process of the cluster: one thread with a role's state machine, its connections and its timer.
//!
//! The thread takes in all input before it decides anything, so that messages to one peer share
//! frames. It writes frames once each time it wakes. No other thread stands between a socket and
//! the state machine: a request crosses five connections, and would wait for ten threads.

pub(crate) mod busy_poll;
mod door;
pub(crate) mod machine;
mod places;
pub(crate) mod status;
pub(crate) mod timer;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::panic::AssertUnwindSafe;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use downbeat_core::{Duration as Span, Time};
use downbeat_roles::{Frame, Hello, NodeId, PROTOCOL, Role, RoleNode};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc};
use tokio::task::{LocalSet, spawn_local};

mod dialling;

use downbeat_service::clock::Clock;
use parking_lot::Mutex;

use crate::node::busy_poll::BusyPoll;
use crate::node::door::{Door, Proved};
use crate::node::machine::{Machine, Step};
use crate::node::places::Places;
use crate::node::status::StatusBoard;
use crate::node::timer::Timer;
use crate::secrets::SecretFile;
use crate::wire::arena::{Arena, PeerArena};
use crate::wire::peer_memory::{self, PeerMemory, Transport};
use crate::wire::read_budget::ReadBudget;
use crate::wire::tensors::Tensors;
use crate::wire::ucx::{self, Ucx, UcxMeeting};
use crate::wire::{self, Outbox, WireError};

pub use dialling::{Schedulers, fixed};

/// Bytes in one read.
const READ_BYTES: usize = 64 << 10;
/// The most events of other threads that are taken in at once.
const EVENTS: usize = 1024;
/// How long a peer may take to agree on the way of tensors.
const AGREES_WITHIN: Duration = Duration::from_secs(2);
/// How often the state of the links is reported.
const REPORTS_EVERY: Duration = Duration::from_secs(1);

/// The identity of a process for its peers.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The process's id.
    pub node: NodeId,
    /// The process's role.
    pub role: Role,
    /// The process's name for people.
    pub name: String,
    /// The address for others' connections; `None`: the local address of the connection to them,
    /// with the port of the listener.
    pub advertise: Option<String>,
}

impl Identity {
    /// The introduction to a peer that is connected from this address. `port`: that of the own
    /// listener, or 0.
    fn hello(&self, local: SocketAddr, port: u16) -> Hello {
        let Identity { node, role, name, advertise } = self;
        let here = || if port == 0 { String::new() } else { SocketAddr::new(local.ip(), port).to_string() };
        let address = advertise.clone().unwrap_or_else(here);
        Hello { protocol: PROTOCOL, node: *node, role: *role, name: name.clone(), address }
    }
}

/// The parts of a node's thread besides its state machine.
pub struct Setup {
    /// The node's own identity.
    pub identity: Identity,
    /// The listener for peers, if peers connect to this node.
    pub listener: Option<std::net::TcpListener>,
    /// The schedulers that the node connects to.
    pub dial: Schedulers,
    /// The addresses of all listed schedulers, which always find a place at the listener.
    pub listed: Vec<String>,
    /// The secrets that the node and its peers prove to each other.
    pub secrets: SecretFile,
    /// The clock of the state machine.
    pub clock: Clock,
    /// The most bytes of tensors in the frames that one address sends at a time, and the most that
    /// wait for one peer.
    pub most_bytes: u64,
    /// The memory for this process's large tensors, which other processes read, if there is any.
    pub arena: Option<Arc<Arena>>,
    /// Lets processes read the arena without mapping it.
    pub ucx: Option<Ucx>,
    /// Shows which peers share memory.
    pub board: StatusBoard,
    /// How long the thread looks for events before it sleeps.
    pub busy_poll: Span,
}

/// The sender of events to a node. The node's thread ends with the last sender.
pub type Events<M> = mpsc::UnboundedSender<<M as Machine>::Event>;

/// The handles of a node that runs.
pub struct Started<M: Machine> {
    /// Events to the node.
    pub events: Events<M>,
    /// The event loop of the thread. It takes no turn while the state machine hangs.
    pub event_loop: Handle,
    /// The thread, to wait for its end.
    pub thread: std::thread::JoinHandle<()>,
}

/// Starts a node's thread.
///
/// # Errors
/// If the operating system has no thread left.
pub fn start<M: Machine>(setup: Setup, machine: impl FnOnce() -> M + Send + 'static) -> anyhow::Result<Started<M>> {
    let (sender, events) = mpsc::unbounded_channel();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let event_loop = runtime.handle().clone();
    let run = move || {
        let local = LocalSet::new();
        local.block_on(&runtime, async move { Node::new(setup, machine())?.run(events).await })
    };
    let run = move || guarded("node", run);
    let thread = std::thread::Builder::new().name("node".to_owned()).spawn(run)?;
    Ok(Started { events: sender, event_loop, thread })
}

/// Runs a thread that the process cannot do without: if the thread fails, the process ends.
fn guarded(thread: &str, run: impl FnOnce() -> std::io::Result<()>) {
    let reason = match std::panic::catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the thread ended in a panic: this is a defect".to_owned(),
    };
    // No thread would answer any more. The other processes go on without this one, and its
    // parent may start another.
    tracing::error!(%reason, "the thread '{thread}' has ended, and so does the process");
    downbeat_engine::process::end(1)
}

struct Node<M> {
    identity: Identity,
    clock: Clock,
    dial: Schedulers,
    /// The peers that have proved themselves at the door of a node with a listener.
    proved: RefCell<Option<mpsc::Receiver<Proved>>>,
    places: Arc<Mutex<Places>>,
    secrets: SecretFile,
    port: u16,
    most_bytes: u64,
    /// By address: the budget of its connections. A budget lives as long as its connections.
    budgets: RefCell<BTreeMap<IpAddr, Weak<ReadBudget>>>,
    arena: Option<Arc<Arena>>,
    ucx: Option<Ucx>,
    board: StatusBoard,
    busy_poll: BusyPoll,
    inner: RefCell<Inner<M>>,
    /// Notified when input has come.
    woken: Notify,
}

struct Inner<M> {
    machine: M,
    wires: BTreeMap<NodeId, Wire>,
    next_wire: u64,
}

/// The two halves of a new connection.
struct Halves {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    /// The peer's memory, if this process reads it.
    memory: Option<PeerMemory>,
    /// How the peer reads this process's tensors.
    reads_mine: Transport,
}

/// A connection to a known peer.
struct Wire {
    number: u64,
    outbox: Outbox,
    half: Rc<OwnedWriteHalf>,
    /// Whether the connection takes no more for now. Its task writes the rest.
    is_full: bool,
    /// How the peer reads this process's tensors.
    reads_mine: Transport,
    writes: Rc<Notify>,
    closed: Rc<Notify>,
}

/// Logs a complaint about a peer. The log has limits of its own for repeated complaints.
fn complain(peer: &str, what: &str) {
    tracing::warn!(peer, "{what}");
}

/// Logs why a connection came to nothing. That a connection has ended is no reason to complain.
fn is_not_connected(peer: &str, error: &WireError) {
    tracing::debug!(peer, %error, "not connected");
    if !matches!(error, WireError::Ended(_)) {
        complain(peer, &error.to_string());
    }
}

impl<M: Machine> Node<M> {
    fn new(setup: Setup, machine: M) -> std::io::Result<Rc<Self>> {
        let Setup { identity, listener, dial, listed, secrets, clock, most_bytes, arena, ucx, board, busy_poll } =
            setup;
        let port = listener.as_ref().map_or(Ok(0), |listener| listener.local_addr().map(|address| address.port()))?;
        let places = Arc::<Mutex<Places>>::default();
        let door = |listener| {
            let (identity, secrets, places) = (identity.clone(), secrets.clone(), places.clone());
            Door { identity, port, secrets, listed, places }.open(listener)
        };
        let proved = listener.map(door).transpose()?;
        let inner = Inner { machine, wires: BTreeMap::new(), next_wire: 0 };
        let (proved, inner) = (RefCell::new(proved), RefCell::new(inner));
        Ok(Rc::new(Node {
            identity,
            clock,
            dial,
            proved,
            places,
            secrets,
            port,
            most_bytes,
            budgets: RefCell::default(),
            arena,
            ucx,
            board,
            busy_poll: BusyPoll::new(busy_poll, clock),
            inner,
            woken: Notify::new(),
        }))
    }

    /// Runs until the last sender of events is gone, or the state machine ends.
    async fn run(self: Rc<Self>, mut events: mpsc::UnboundedReceiver<M::Event>) -> std::io::Result<()> {
        if let Some(proved) = self.proved.take() {
            spawn_local(self.clone().welcome_all(proved));
        }
        if let Some(arena) = self.arena.clone().filter(|_| self.maps()) {
            spawn_local(arena.hand_out(self.identity.node));
        }
        spawn_local(self.clone().dial_schedulers(self.dial.clone()));
        let mut timer = Timer::new(self.clock)?;
        let mut come = Vec::with_capacity(EVENTS);
        let mut reports = tokio::time::interval(REPORTS_EVERY);
        let mut due = Time::MAX;
        loop {
            self.busy_poll.look(due, || !events.is_empty()).await;
            tokio::select! {
                _ = reports.tick() => self.report(),
                () = self.woken.notified() => {}
                count = events.recv_many(&mut come, EVENTS) => {
                    if count == 0 {
                        return Ok(());
                    }
                }
                gone_off = timer.wait() => {
                    gone_off?;
                    // Input is taken in before any peer is declared silent.
                    tokio::task::yield_now().await;
                }
            }
            let now = self.clock.now();
            if !come.is_empty() {
                self.busy_poll.has_come(now);
            }
            let is_over = downbeat_host::request::reply::together(|| self.turn(now, &mut come));
            if is_over {
                return Ok(());
            }
            due = self.inner.borrow().due();
            timer.set(due)?;
        }
    }

    /// Reports the state of the links and of the role.
    fn report(&self) {
        let inner = self.inner.borrow();
        self.board.measured(inner.machine.node().links());
        inner.machine.report();
    }

    /// Takes in the events, takes the state machine's steps, and writes to the connections. Returns
    /// whether the node must end.
    fn turn(self: &Rc<Self>, now: Time, come: &mut Vec<M::Event>) -> bool {
        let inner = &mut *self.inner.borrow_mut();
        come.drain(..).for_each(|event| inner.machine.handle_event(now, event));
        if inner.due() <= now {
            inner.machine.node_mut().handle_timeout(now);
        }
        while let Some(step) = inner.machine.poll_step(now) {
            match step {
                Step::Send(peer, frame) => self.send(inner, peer, &frame),
                Step::Connect(peer, address) => drop(spawn_local(self.clone().dial_peer(peer, address))),
                Step::Close(peer) => {
                    self.board.disconnected(peer);
                    if let Some(wire) = inner.wires.remove(&peer) {
                        wire.closed.notify_one();
                    }
                }
                Step::End => return true,
            }
        }
        let broken: Vec<NodeId> =
            inner.wires.iter_mut().filter_map(|(peer, wire)| (!wire.flush()).then_some(*peer)).collect();
        for peer in broken {
            self.end(inner, peer);
        }
        false
    }

    fn send(&self, inner: &mut Inner<M>, peer: NodeId, frame: &Frame<Tensors>) {
        let Some(wire) = inner.wires.get_mut(&peer) else { return };
        let written = wire.outbox.put_frame(frame, self.arena.as_deref().filter(|_| wire.reads_mine > Transport::Tcp));
        let waits = wire.outbox.bytes() as u64;
        let reason = match written {
            Err(error) => format!("a frame for it cannot be written: {error}"),
            Ok(_) if waits > self.most_bytes => format!("the peer reads too slowly: {waits} bytes wait"),
            Ok(sent) => return self.board.sent(wire.reads_mine, sent),
        };
        complain(&format!("{peer:?}"), &reason);
        self.end(inner, peer);
    }

    /// Ends the connection of a peer.
    fn end(&self, inner: &mut Inner<M>, peer: NodeId) {
        if let Some(wire) = inner.wires.remove(&peer) {
            wire.closed.notify_one();
            self.board.disconnected(peer);
            inner.machine.node_mut().handle_disconnected(self.clock.now(), peer);
            self.woken.notify_one();
        }
    }

    /// Takes in the peers that have proved themselves at the door.
    async fn welcome_all(self: Rc<Self>, mut proved: mpsc::Receiver<Proved>) {
        while let Some(proved) = proved.recv().await {
            drop(spawn_local(self.clone().welcome(proved)));
        }
    }

    /// The life of a connection that a peer has opened.
    async fn welcome(self: Rc<Self>, Proved { stream, from, peer }: Proved) {
        let is_accepted = self.inner.borrow().machine.accepts(peer.role);
        let refused = match TcpStream::from_std(stream) {
            Err(error) => Some(error.to_string()),
            Ok(stream) if is_accepted => self.serve(&peer, stream).await,
            Ok(_) => Some(format!("a {:?} has nothing to say to a {:?}", peer.role, self.identity.role)),
        };
        if let Some(reason) = refused {
            complain(&from.ip().to_string(), &reason);
        }
    }

    /// Agrees with a peer on how tensors go.
    async fn agree(&self, peer: &Hello, stream: TcpStream) -> Result<Halves, WireError> {
        let (reader, mut writer) = stream.into_split();
        let mut reader = BufReader::with_capacity(READ_BYTES, reader);
        let exchange = async {
            let memory = self.map(peer).await;
            // UCX is for peers with tensors. Schedulers have none.
            let is_by_ucx = memory.is_none() && !matches!(peer.role, Role::Scheduler { .. }) && self.ucx.is_some();
            let mine =
                if is_by_ucx { Transport::Ucx } else { memory.as_ref().map_or(Transport::Tcp, PeerMemory::transport) };
            writer.write_all(&[mine.byte()]).await?;
            let its = Transport::of_byte(reader.read_u8().await?);
            if mine != Transport::Ucx && its != Transport::Ucx {
                return Ok((memory, its));
            }
            let meeting = match &self.ucx {
                Some(ucx) => ucx.meet().await.map_or_else(|error| self.refuse_memory(peer, &error), Some),
                None => None,
            };
            writer.write_all(&peer_memory::written(meeting.as_ref().map(UcxMeeting::offer))).await?;
            // Both ends connect and read by UCX, even if only one wished to. The UCX connection
            // lasts as long as both ends hold it.
            let by_ucx = match (meeting, peer_memory::read_offer(&mut reader).await?) {
                (Some(meeting), Some(offer)) => {
                    let reached = ucx::reach(meeting, offer, peer.node).await;
                    reached.map_or_else(|error| self.refuse_memory(peer, &error), Some)
                }
                _ => None,
            };
            let memory = by_ucx.map(PeerMemory::Ucx).or(memory);
            writer.write_all(&[memory.as_ref().map_or(Transport::Tcp, PeerMemory::transport).byte()]).await?;
            Ok::<_, WireError>((memory, Transport::of_byte(reader.read_u8().await?)))
        };
        let late = || WireError::Ended(std::io::ErrorKind::TimedOut.into());
        let (memory, reads_mine) = tokio::time::timeout(AGREES_WITHIN, exchange).await.map_err(|_| late())??;
        let reads_mine = if self.arena.is_some() { reads_mine } else { Transport::Tcp };
        Ok(Halves { reader, writer, memory, reads_mine })
    }

    /// Whether this process and its peers on this machine map each other's memory.
    fn maps(&self) -> bool {
        !self.ucx.as_ref().is_some_and(Ucx::is_alone)
    }

    /// The memory of a peer on this machine, if this process maps memory.
    async fn map(&self, peer: &Hello) -> Option<PeerMemory> {
        self.arena.as_ref().filter(|_| self.maps())?;
        let memory = PeerArena::of(peer.node).await;
        memory.unwrap_or_else(|error| self.refuse_memory(peer, &error)).map(PeerMemory::Mapped)
    }

    /// Logs why this process does not read a peer's memory in this way.
    fn refuse_memory<T>(&self, peer: &Hello, error: &dyn std::fmt::Display) -> Option<T> {
        complain(&peer.name, &format!("the peer's memory is not read: {error}"));
        None
    }

    /// The budget of an address, which its connections share.
    fn budget_of(&self, address: IpAddr) -> Rc<ReadBudget> {
        let budgets = &mut *self.budgets.borrow_mut();
        budgets.retain(|_, budget| budget.strong_count() > 0);
        let known = budgets.get(&address).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let budget = Rc::new(ReadBudget::new(self.most_bytes));
            budgets.insert(address, Rc::downgrade(&budget));
            budget
        })
    }

    /// The life of a connection to a peer that has proved itself. Returns why the connection was
    /// refused or given up, if that is worth a log line.
    async fn serve(self: &Rc<Self>, peer: &Hello, stream: TcpStream) -> Option<String> {
        let budget = self.budget_of(stream.peer_addr().ok()?.ip());
        let Halves { mut reader, writer, memory, reads_mine } = match self.agree(peer, stream).await {
            Ok(halves) => halves,
            Err(WireError::Ended(_)) => return None,
            Err(error) => return Some(error.to_string()),
        };
        let (number, closed, writes) = {
            let inner = &mut *self.inner.borrow_mut();
            if peer.node == self.identity.node || inner.wires.contains_key(&peer.node) {
                return Some(format!("{:?} is connected already: a second process of that name is refused", peer.node));
            }
            let (closed, writes) = (Rc::new(Notify::new()), Rc::new(Notify::new()));
            let number = inner.next_wire;
            inner.next_wire += 1;
            let (half, outbox) = (Rc::new(writer), Outbox::default());
            spawn_local(self.clone().write_rest(peer.node, number, half.clone(), writes.clone()));
            let (is_full, its) = (false, (writes.clone(), closed.clone()));
            let wire = Wire { number, outbox, half, is_full, reads_mine, writes: its.0, closed: its.1 };
            inner.wires.insert(peer.node, wire);
            self.board.connected(peer);
            inner.machine.node_mut().handle_connected(self.clock.now(), peer);
            let reads_its = memory.as_ref().map_or(Transport::Tcp, PeerMemory::transport);
            self.board.goes(peer.node, reads_mine.min(reads_its));
            (number, closed, writes)
        };
        self.woken.notify_one();
        let arena = self.arena.as_ref().filter(|_| reads_mine > Transport::Tcp);
        arena.inspect(|arena| arena.is_read(true));
        let ended = tokio::select! {
            ended = self.read(peer.node, number, &mut reader, (memory.as_ref(), &budget)) => Some(ended),
            () = closed.notified() => None,
        };
        arena.inspect(|arena| arena.is_read(false));
        writes.notify_one();
        let inner = &mut *self.inner.borrow_mut();
        if inner.wires.get(&peer.node).is_some_and(|wire| wire.number == number) {
            self.end(inner, peer.node);
        }
        match ended {
            None | Some(WireError::Ended(_)) => None,
            Some(reason) => Some(format!("the connection of {} is given up: {reason}", peer.name)),
        }
    }

    /// Takes frames in until the connection ends.
    async fn read(
        &self,
        peer: NodeId,
        number: u64,
        reader: &mut BufReader<OwnedReadHalf>,
        (memory, budget): (Option<&PeerMemory>, &ReadBudget),
    ) -> WireError {
        let mut scratch = Vec::new();
        loop {
            let frame = match wire::read_frame(reader, &mut scratch, budget, memory).await {
                Ok(None) => continue,
                Ok(Some(frame)) if frame.from == peer => frame,
                Ok(_) => return WireError::Foreign,
                Err(error) => return error,
            };
            let inner = &mut *self.inner.borrow_mut();
            if inner.wires.get(&peer).is_some_and(|wire| wire.number == number) {
                let now = self.clock.now();
                // Heartbeats do not count, or the thread would never sleep.
                if !frame.messages.is_empty() {
                    self.busy_poll.has_come(now);
                }
                inner.machine.node_mut().handle_frame(now, frame);
                self.woken.notify_one();
            }
        }
    }

    /// Writes the bytes that a connection did not take at once, until the connection is closed.
    async fn write_rest(self: Rc<Self>, peer: NodeId, number: u64, half: Rc<OwnedWriteHalf>, writes: Rc<Notify>) {
        loop {
            writes.notified().await;
            while half.writable().await.is_ok() {
                let inner = &mut *self.inner.borrow_mut();
                let Some(wire) = inner.wires.get_mut(&peer).filter(|wire| wire.number == number) else { return };
                wire.is_full = false;
                if !wire.flush() {
                    return self.end(inner, peer);
                }
                if !wire.is_full {
                    break;
                }
            }
        }
    }
}

impl<M: Machine> Inner<M> {
    /// When the state machine has something to do; [`Time::MAX`]: not without an input.
    fn due(&self) -> Time {
        self.machine.node().poll_timeout().map_or(Time::MAX, |(at, _)| at)
    }
}

impl Wire {
    /// Writes as much as the connection takes now. Returns false if the connection is broken.
    fn flush(&mut self) -> bool {
        if self.is_full {
            return true;
        }
        let half = &self.half;
        match self.outbox.write(|pieces| half.try_write_vectored(pieces)) {
            Ok(true) => true,
            Ok(false) => {
                self.is_full = true;
                self.writes.notify_one();
                true
            }
            Err(_) => false,
        }
    }
}
