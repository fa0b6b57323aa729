//! Ports: connections accepted, driven, drained.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use socket2::{SockFilter, SockRef};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::{interval, timeout};

use super::looks::Looks;
use super::open::{Connections, Entry};
use super::port_state::PortState;
use super::protocol::Protocol;
use super::refusal::refuse;
use super::stage::{Stage, Stages, reached};
use super::stream::WatchedStream;
use super::watched::Watched;

/// Connections that the kernel may have ready for a port. The kernel lowers this to the system's
/// limit (`somaxconn`).
const BACKLOG: u32 = i32::MAX as u32;
/// How long accepting pauses when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Clients that are told at once that the server is full. Further ones are closed without an
/// answer.
const MOST_REFUSED_AT_ONCE: usize = 8;
/// Silence after which the kernel probes whether a client is still there. HTTP/2 pings would cost
/// more: with them, each frame that comes in reads the clock and takes a lock.
const KEEP_ALIVE: Duration = Duration::from_secs(60);
/// The time between two such probes.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Unanswered probes before the connection is closed.
const KEEP_ALIVE_COUNT: u32 = 3;
/// How long a stopping port waits for one more connection that the kernel has completed.
const LAST_CALL: Duration = Duration::from_millis(20);
/// The most connections that it takes then.
const MOST_AT_LAST_CALL: usize = 4096;
/// How often a draining port looks at its connections.
const DRAIN_LOOK: Duration = Duration::from_millis(25);

/// Listens on `address`.
///
/// # Errors
/// If the address is in use or not this machine's.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A server that starts again has its port though connections of the one before linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Accepts connections and lets `drive` serve each, until [`Stage::Draining`]. Then brings them to
/// their ends, and breaks off the remaining ones at [`Stage::Stopped`].
pub async fn serve<D, F>(listener: TcpListener, protocol: Protocol, connections: Connections, stages: Stages, drive: D)
where
    D: Fn(WatchedStream, Arc<Watched>, IpAddr) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let mut port = Port { protocol, connections, state: Arc::default(), drive, tasks: JoinSet::new() };
    port.accept(&listener, &stages).await;
    port.last_call(listener).await;
    port.drain(&stages).await;
}

struct Port<D> {
    protocol: Protocol,
    connections: Connections,
    state: Arc<PortState>,
    drive: D,
    tasks: JoinSet<()>,
}

impl<D, F> Port<D>
where
    D: Fn(WatchedStream, Arc<Watched>, IpAddr) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    async fn accept(&mut self, listener: &TcpListener, stages: &Stages) {
        let mut looks = Looks::new(self.connections.options().look_every());
        let state = Arc::clone(&self.state);
        let mut left = std::pin::pin!(reached(stages.clone(), Stage::Leaving));
        let mut drained = std::pin::pin!(reached(stages.clone(), Stage::Draining));
        loop {
            tokio::select! {
                biased;
                () = &mut left, if !state.is_leaving() => state.leave(),
                () = &mut drained => return,
                () = looks.due() => {
                    let next = self.connections.look(self.protocol, false);
                    if looks.looked(next, &state) || self.connections.have_left_memory() {
                        self.connections.release_memory();
                    }
                }
                () = state.stirred() => looks.stirred(),
                Some(_) = self.tasks.join_next() => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => self.take_in(stream, peer.ip()).await,
                    Err(error) if is_about_the_client(&error) => {}
                    Err(error) => {
                        tracing::warn!(%error, protocol = self.protocol.name(), "cannot accept connections for now");
                        self.connections.make_room().await;
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
    }

    async fn take_in(&mut self, stream: TcpStream, peer: IpAddr) {
        if let Err(error) = prepare(&stream) {
            // The client has gone already; it still can be tried.
            tracing::debug!(%error, "cannot set the options of a connection");
        }
        // A port that dozes must notice that another connection's idle time begins.
        self.state.stir();
        let watched = Arc::new(Watched::new(
            self.protocol,
            Arc::clone(&self.state),
            Arc::clone(self.connections.traffic(self.protocol)),
        ));
        let why = match self.connections.admit(self.protocol, &watched, peer).await {
            Ok(entry) => return self.begin(stream, watched, peer, entry),
            Err(why) => why,
        };
        if let Some(refusing) = self.connections.refuse(self.protocol, why, MOST_REFUSED_AT_ONCE) {
            // A client of TLS cannot read the answer, and a handshake would be work for nothing.
            if self.connections.tls(self.protocol).is_some() {
                return;
            }
            let options = self.connections.options().clone();
            self.tasks.spawn(async move {
                refuse(stream, why, &options).await;
                drop(refusing);
            });
        }
    }

    /// Drives a connection that is taken in.
    fn begin(&mut self, stream: TcpStream, watched: Arc<Watched>, peer: IpAddr, entry: Entry) {
        let event_loop = self.connections.event_loop();
        let stream = match move_to(&event_loop, stream) {
            Ok(stream) => stream,
            Err(error) => return tracing::warn!(%error, "cannot keep a connection"),
        };
        let tls = self.connections.tls(self.protocol);
        let connection = (self.drive)(WatchedStream::new(stream, Arc::clone(&watched), tls), watched, peer);
        let task = async move {
            connection.await;
            drop(entry);
        };
        self.tasks.spawn_on(task, &event_loop);
    }

    /// Closing a port resets the connections that are not accepted yet, and the requests that were
    /// sent on them. So the port first lets no more in, then accepts the rest, and then closes.
    async fn last_call(&mut self, listener: TcpListener) {
        self.state.leave();
        if let Err(error) = let_nobody_in(&listener) {
            tracing::debug!(%error, "clients that connect at this moment may be reset");
        }
        for _ in 0..MOST_AT_LAST_CALL {
            match timeout(LAST_CALL, listener.accept()).await {
                Ok(Ok((stream, peer))) => self.take_in(stream, peer.ip()).await,
                Ok(Err(error)) if is_about_the_client(&error) => {}
                Ok(Err(_)) | Err(_) => return,
            }
        }
    }

    async fn drain(&mut self, stages: &Stages) {
        let mut looks = interval(DRAIN_LOOK);
        let mut stopped = std::pin::pin!(reached(stages.clone(), Stage::Stopped));
        loop {
            tokio::select! {
                biased;
                () = &mut stopped => break,
                _ = looks.tick() => { self.connections.look(self.protocol, true); }
                task = self.tasks.join_next() => if task.is_none() { return },
            }
        }
        tracing::warn!(
            connections = self.tasks.len(),
            protocol = self.protocol.name(),
            "requests were not done within the drain timeout; their connections are closed"
        );
        self.tasks.shutdown().await;
    }
}

/// Moves the connection to another event loop.
fn move_to(event_loop: &Handle, stream: TcpStream) -> io::Result<TcpStream> {
    if event_loop.id() == Handle::current().id() {
        return Ok(stream);
    }
    let stream = stream.into_std()?;
    let _there = event_loop.enter();
    TcpStream::from_std(stream)
}

/// Lets the kernel drop packets that begin a connection (SYN). A client sends the packet again
/// after a second, and is then refused.
fn let_nobody_in(listener: &TcpListener) -> io::Result<()> {
    const FLAGS_OF_TCP: u32 = 13;
    const SYN: u32 = 2;
    // Classic BPF: BPF_LD | BPF_B | BPF_ABS, BPF_JMP | BPF_JSET | BPF_K, BPF_RET | BPF_K.
    let filter = [
        SockFilter::new(0x30, 0, 0, FLAGS_OF_TCP),
        SockFilter::new(0x45, 0, 1, SYN),
        SockFilter::new(0x06, 0, 0, 0),
        SockFilter::new(0x06, 0, 0, u32::MAX),
    ];
    SockRef::from(listener).attach_filter(&filter)
}

/// Whether `accept` failed because the client has gone already, and not because of this process.
fn is_about_the_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | ConnectionRefused)
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    // With the delay, answers wait for the client's acknowledgement of the one before.
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_COUNT)?;
    Ok(())
}
