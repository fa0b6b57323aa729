//! The ports of a process: their servers, and their end.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{self, Poll};
use std::time::Duration;

use anyhow::Context;
use downbeat_service::budget::ByteBudget;
use downbeat_service::options::ServerOptions;
use downbeat_service::service::Service;
use downbeat_service::traces::Traces;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::access::Access;
use crate::connections::{self, ConnectionOptions, Connections, FrontendThreads, Stage, TrafficMetrics};
use crate::grpc::{self, GrpcOptions};
use crate::health_port;
use crate::http::{self, HttpOptions, HttpState};
use crate::liveness::{HUNG_AFTER, Liveness, Part};
use crate::metrics_port::{self, MetricsText};
use crate::shared_memory::SharedMemory;
use crate::tls::Tls;

/// Most connections of the metrics port.
const METRICS_CONNECTIONS: usize = 8;

/// A port that is open, and its address.
type Port = Option<(TcpListener, SocketAddr)>;

/// The ports of a process, open.
pub struct Ports {
    http: Port,
    grpc: Port,
    metrics: Port,
    health: Port,
    management: Port,
    access: Option<Arc<Access>>,
    /// Connections of HTTP and gRPC.
    connections: Connections,
    /// Connections of the metrics port.
    own: Connections,
    /// The parts of the process beside its ports, which must go on.
    others: Vec<Part>,
}

/// The parts that answers need beside the service.
pub struct Answering {
    /// The bytes that requests may hold.
    pub budget: Arc<ByteBudget>,
    /// The GPUs whose memory clients may share, by number.
    pub gpus: Vec<u32>,
    /// The answer at `/metrics`.
    pub metrics: MetricsText,
    /// Traces of requests, and their settings.
    pub traces: Arc<Traces>,
}

impl Ports {
    /// Opens the ports.
    ///
    /// # Errors
    /// If a port is in use.
    pub fn open(options: &ServerOptions) -> anyhow::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let connection_options = connection_options(options, cores);
        let tls = Tls::open(&options.tls)?;
        let threads = Some(FrontendThreads::start(cores)?);
        let connections = Connections::with(connection_options.clone(), threads, tls.clone());
        let host = |address: Option<IpAddr>| address.unwrap_or(options.host);
        let http = bind(host(options.http_address), options.http_port, "HTTP", "--http-port")?;
        let grpc = bind(host(options.grpc_address), options.grpc_port, "gRPC", "--grpc-port")?;
        let metrics = bind(host(options.metrics_address), options.metrics_port, "metrics", "--metrics-port")?;
        let health = bind(options.host, options.health_port, "probes", "--health-port")?;
        let management = bind(
            host(options.access.management_address),
            options.access.management_port,
            "management",
            "--management-port",
        )?;
        let access = Access::open(&options.access)?;
        let options_of_own = ConnectionOptions { max: METRICS_CONNECTIONS, ..connection_options };
        let own = Connections::with(options_of_own, None, tls);
        let open = options.open_ports();
        if !open.is_empty() {
            let ports = open.join(", ");
            match (&options.access.keys, &options.tls.certificate) {
                (None, _) => tracing::info!(
                    ports,
                    "listening on every interface of this machine, without authentication; --host 127.0.0.1 keeps the \
                     ports to this machine, and --api-keys FILE asks for keys"
                ),
                (Some(_), None) => tracing::warn!(
                    ports,
                    "listening on every interface of this machine with API keys and without TLS: who sees the network \
                     sees the keys; --tls-certificate and --tls-key encrypt them"
                ),
                (Some(_), Some(_)) => tracing::info!(ports, "listening on every interface of this machine"),
            }
        }
        Ok(Ports { http, grpc, metrics, health, management, access, connections, own, others: Vec::new() })
    }

    /// Has the health port watch a part of the process beside the ports. The process is live only if
    /// this part goes on.
    pub fn watch(&mut self, part: Part) {
        self.others.push(part);
    }

    /// Adds the counts of connections, answers and bytes of the clients' ports to a registry of metrics.
    ///
    /// # Errors
    /// If the registry has such metrics already: a defect.
    pub fn count_in(&self, registry: &prometheus::Registry) -> Result<(), prometheus::Error> {
        TrafficMetrics::register(registry, &self.connections)
    }

    /// Serves the ports with this service. Returns the frontends, which end with `stages`.
    ///
    /// # Errors
    /// If the memory of GPUs cannot be shared.
    pub fn answer<S: Service>(
        self,
        options: &ServerOptions,
        service: Arc<S>,
        Answering { budget, gpus, metrics, traces }: Answering,
        stages: &watch::Receiver<Stage>,
    ) -> anyhow::Result<Vec<JoinHandle<()>>> {
        if let Some(access) = &self.access {
            access.share_with(service.clone()).context("the tenants of the file of API keys (--api-keys)")?;
        }
        let memory = if options.shared_memory { SharedMemory::new() } else { SharedMemory::disabled() };
        let memory = Arc::new(memory.with_gpus(gpus)?);
        let mut frontends = Vec::new();
        let http_options = HttpOptions {
            max_body_bytes: options.max_body_bytes,
            budget: budget.clone(),
            allow_host: options.allow_host.clone(),
            access: self.access.clone(),
            traces: traces.clone(),
        };
        let connections = self.connections;
        if let Some((listener, address)) = self.management {
            tracing::info!(%address, "management");
            let access = self.access.as_ref().map(|access| access.of_management());
            let options = HttpOptions { access, ..http_options.clone() };
            let state = HttpState::new(service.clone(), memory.clone(), options);
            frontends.push(tokio::spawn(http::serve(listener, self.own.clone(), state, stages.clone())));
        }
        let state = HttpState::new(service.clone(), memory.clone(), http_options);
        answer_health(self.health, &self.own, &state, &connections, self.others)?;
        if let Some((listener, address)) = self.http {
            tracing::info!(%address, "HTTP");
            frontends.push(tokio::spawn(http::serve(listener, connections.clone(), state.clone(), stages.clone())));
        }
        if let Some((listener, address)) = self.grpc {
            tracing::info!(%address, "gRPC");
            let max_message_bytes = options.max_grpc_message_bytes;
            let access = self.access;
            let grpc_options = GrpcOptions { max_message_bytes, budget, access, traces, ..GrpcOptions::default() };
            frontends.push(tokio::spawn(grpc::serve(
                listener,
                connections,
                service,
                memory,
                grpc_options,
                stages.clone(),
            )));
        }
        if let Some((listener, address)) = self.metrics {
            tracing::info!(%address, "metrics");
            // The metrics port is no frontend: it serves until the end, to show the last moments of
            // a drain.
            tokio::spawn(metrics_port::serve(listener, self.own, metrics, (state, http::health_routes())));
        }
        Ok(frontends)
    }

    /// Answers probes and people at the ports of HTTP and metrics. The gRPC port does not answer.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn answer_probes<S: Service>(
        self,
        options: &ServerOptions,
        service: Arc<S>,
        metrics: MetricsText,
    ) -> anyhow::Result<()> {
        let memory = Arc::new(SharedMemory::disabled());
        let (allow_host, access) = (options.allow_host.clone(), self.access);
        let http_options = HttpOptions { allow_host, access, ..HttpOptions::default() };
        let state = HttpState::new(service, memory, http_options);
        answer_health(self.health, &self.own, &state, &self.connections, self.others)?;
        for (port, what) in [(self.http, "HTTP"), (self.metrics, "metrics")] {
            if let Some((listener, address)) = port {
                tracing::info!(%address, "{what}");
                let (own, metrics) = (self.own.clone(), metrics.clone());
                let answers = (state.clone(), http::health_routes_with_page());
                tokio::spawn(metrics_port::serve(listener, own, metrics, answers));
            }
        }
        Ok(())
    }
}

/// Serves the health port, unless the options turn it off. The port watches the calling event loop, the
/// loops of `connections`, and `others`.
fn answer_health<S: Service>(
    port: Port,
    own: &Connections,
    state: &HttpState<S>,
    connections: &Connections,
    others: Vec<Part>,
) -> anyhow::Result<()> {
    let Some((listener, address)) = port else { return Ok(()) };
    tracing::info!(%address, "probes");
    let loops = connections.event_loops().chain([Handle::current()]);
    let parts = loops.map(|event_loop| Part::event_loop("an event loop", event_loop)).chain(others);
    health_port::serve(listener, own.options().clone(), state.clone(), Liveness::new(parts, HUNG_AFTER))
        .context("cannot start a thread for the health port")
}

/// The file in which the kernel lists the signals that this process ignores.
const STATUS: &str = "/proc/self/status";

/// The signals that tell a process to end.
pub struct Signals {
    /// SIGTERM, SIGHUP and SIGQUIT: the process drains.
    pub terminate: Terminate,
    /// SIGINT.
    pub interrupt: Signal,
}

impl Signals {
    /// From now on the signals end the process in good order.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn new() -> std::io::Result<Self> {
        let mut kinds = vec![SignalKind::terminate(), SignalKind::quit()];
        // `nohup` starts a process that ignores SIGHUP, so that the process outlives its terminal.
        let status = std::fs::read_to_string(STATUS).unwrap_or_default();
        if !is_ignored(&status, SignalKind::hangup()) {
            kinds.push(SignalKind::hangup());
        }
        let signals = kinds.into_iter().map(signal).collect::<Result<_, _>>()?;
        Ok(Signals { terminate: Terminate(signals), interrupt: signal(SignalKind::interrupt())? })
    }

    /// The next of any.
    pub async fn end(&mut self) {
        tokio::select! {
            () = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// The signals that ask a process to drain.
pub struct Terminate(Vec<Signal>);

impl Terminate {
    /// Completes when one of them arrives.
    pub async fn recv(&mut self) {
        let poll = |cx: &mut task::Context<'_>| {
            let came = self.0.iter_mut().any(|signal| signal.poll_recv(cx).is_ready());
            if came { Poll::Ready(()) } else { Poll::Pending }
        };
        std::future::poll_fn(poll).await;
    }
}

/// Whether the process ignores a signal, by `status`, the text of [`STATUS`].
fn is_ignored(status: &str, kind: SignalKind) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    // Signals are counted from 1.
    mask >> (kind.as_raw_value() - 1) & 1 == 1
}

/// Lets frontends accept for `grace` and then finish their requests, within `limit` in all. Returns
/// whether they have. A second signal ends the wait. Then they count as finished if no request is
/// under way (`is_idle`).
pub async fn leave(
    stage: &watch::Sender<Stage>,
    mut frontends: Vec<JoinHandle<()>>,
    Signals { terminate, interrupt }: &mut Signals,
    grace: Duration,
    limit: Duration,
    is_idle: impl Fn() -> bool,
) -> bool {
    let limit = tokio::time::Instant::now() + limit;
    stage.send_replace(Stage::Leaving);
    let mut interrupted = false;
    tokio::select! {
        () = tokio::time::sleep(grace) => {}
        () = terminate.recv() => {}
        _ = interrupt.recv() => interrupted = true,
    }
    stage.send_replace(Stage::Draining);
    let all = async {
        for frontend in &mut frontends {
            if let Err(error) = frontend.await {
                tracing::error!(%error, "a frontend of the server failed");
            }
        }
    };
    let finished = !interrupted
        && tokio::select! {
            () = all => true,
            () = tokio::time::sleep_until(limit) => false,
            _ = interrupt.recv() => false,
        };
    let finished = finished || is_idle();
    // Breaks off the connections that are left.
    stage.send_replace(Stage::Stopped);
    finished
}

fn connection_options(options: &ServerOptions, event_loops: usize) -> ConnectionOptions {
    let limit = |duration: downbeat_core::Duration| {
        let duration = Duration::from(duration);
        (!duration.is_zero()).then_some(duration)
    };
    let files = connections::raise_file_limit();
    let suited = connections::default_max_connections(files, event_loops);
    let max = match options.max_connections {
        0 => suited,
        asked => {
            let room = connections::room_for_connections(files, event_loops);
            if asked > room {
                tracing::warn!(
                    asked,
                    room,
                    "the limit of open files allows fewer connections than --max-connections asks for; raise the \
                     limit (ulimit -n)"
                );
            }
            asked.min(room)
        }
    };
    ConnectionOptions {
        max,
        max_per_address: options.access.connections_per_address,
        idle_timeout: limit(options.idle_timeout),
        transfer_timeout: limit(options.transfer_timeout),
        min_rate: options.min_rate,
        linger: Duration::from(options.shutdown_grace).min(ConnectionOptions::default().linger),
    }
}

fn bind(host: IpAddr, port: Option<u16>, what: &str, flag: &str) -> anyhow::Result<Port> {
    let Some(port) = port else { return Ok(None) };
    let wanted = SocketAddr::new(host, port);
    let listener = connections::bind(wanted).with_context(|| {
        format!("cannot listen on {wanted} for {what}; is another server running? Choose another with {flag}")
    })?;
    let address = listener.local_addr()?;
    Ok(Some((listener, address)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_mask_says_which_signals_are_ignored() {
        let nohup = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000006\n";
        let ignored = |status: &str, kind| is_ignored(status, kind);
        assert!(ignored(nohup, SignalKind::hangup()) && ignored(nohup, SignalKind::pipe()));
        assert!(!ignored(nohup, SignalKind::quit()) && !ignored("", SignalKind::hangup()));
    }
}
