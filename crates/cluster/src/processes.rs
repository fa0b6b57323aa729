//! The processes of a cluster, from their options to their end.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, ensure};
use downbeat_core::Duration as Span;
use downbeat_core::pages::Pointer;
use downbeat_frontend::connections::{self, Stage};
use downbeat_frontend::liveness::Part;
use downbeat_frontend::metrics_port::MetricsText;
use downbeat_frontend::ports::{Answering, Ports, Signals, leave};
use downbeat_host::decision_log::{DecisionLog, LogBounds};
use downbeat_host::request_log::RequestLog;
use downbeat_host::scheduler::WAKE_MARGIN;
use downbeat_models::preprocess::Preprocessing;
use downbeat_models::registry::Registry;
use downbeat_roles::{
    BackendOptions, FrontendOptions, MoveLimit, NodeId, Role, SchedulerOptions, SubClusterCount, SubClusterOptions,
};
use downbeat_service::budget::ByteBudget;
use downbeat_service::clock::Clock;
use downbeat_service::memory;
use downbeat_service::metrics::Metrics;
use downbeat_service::metrics::trouble::{self, TroubleWatch};
use downbeat_service::options::ServerOptions;
use downbeat_service::options::cluster_options::{ClusterOptions, FRONTEND_PORT, SCHEDULER_PORT, SubClusters, UcxUse};
use downbeat_service::report::autoscale::AutoscaleWatch;
use downbeat_service::start::start;
use downbeat_service::traces::Traces;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use crate::backend::backend_figures;
use crate::backend::backend_offer::OfferMaker;
use crate::backend::backend_role::{BackendEvent, BackendRole};
use crate::backend::model_loader;
use crate::backend::slot_map::SlotMap;
use crate::frontend::frontend_figures::FrontendFigures;
use crate::frontend::frontend_role::{FrontendEvent, FrontendRole};
use crate::frontend::remote_models::RemoteModels;
use crate::frontend::remote_serving::RemoteServing;
use crate::frontend::tenant_counts::TenantCounts;
use crate::node::status::{StatusBoard, role_name};
use crate::node::{self, Events, Identity, Schedulers, Setup, Started};
use crate::scheduler::cluster_load::ClusterLoad;
use crate::scheduler::planner;
use crate::scheduler::rehearsing::{self, Findings};
use crate::scheduler::scheduler_role::{SchedulerEvent, SchedulerRole};
use crate::scheduler::scheduler_service::SchedulerService;
use crate::secrets::SecretFile;
use crate::store::Store;
use crate::store::membership::MOST_SCHEDULERS;
use crate::view::answers::Answerer;
use crate::view::asks::Asks;
use crate::view::{Me, View};
use crate::wire::arena::Arena;
use crate::wire::ucx::Ucx;

/// The most bytes of a process's name and address together, which its greeting has.
const LONGEST_NAMES: usize = 900;
/// How often a backend checks whether its offer has changed.
const LOOKS_EVERY: Duration = Duration::from_millis(100);
/// How often a frontend's decision log is written at least.
const LOG_EVERY: Duration = Duration::from_millis(1_000);
/// How long the last traces of a frontend may take.
const TRACES_END_WITHIN: Duration = Duration::from_millis(2_000);
/// The most bytes of tensors in a frame to a scheduler, which gets none, and the most that wait for
/// one of its peers.
const SCHEDULER_BYTES: u64 = 256 << 20;

/// Serves clients with the models of backends until SIGTERM or SIGINT, then drains.
///
/// # Errors
/// If the options cannot be followed (a port in use, no scheduler named).
pub fn serve_frontend(options: ServerOptions) -> anyhow::Result<()> {
    start(options, frontend)
}

/// Decides for frontends and backends, or stands by, until SIGTERM or SIGINT.
///
/// # Errors
/// If the options cannot be followed (a port in use, a rank that is not in the list).
pub fn serve_scheduler(options: ServerOptions) -> anyhow::Result<()> {
    start(options, scheduler)
}

/// Makes the memory that other processes read tensors from, and starts UCX if the options say so.
/// Both are `None` if the system has no such memory.
///
/// # Errors
/// If an option asks for UCX, and UCX cannot be used.
fn arena(most: u64, node: NodeId, ucx: UcxUse) -> anyhow::Result<(Option<Arc<Arena>>, Option<Ucx>)> {
    let arena = match Arena::new(most) {
        Ok(arena) => arena,
        Err(error) if ucx == UcxUse::Off => {
            tracing::info!(%error, "shared memory cannot be used: tensors go over TCP");
            return Ok((None, None));
        }
        Err(error) => {
            return Err(error).context("there is no memory that tensors could be read from by UCX (--ucx)");
        }
    };
    let ucx = (ucx != UcxUse::Off).then(|| Ucx::start(&arena, node, ucx == UcxUse::Always)).transpose();
    Ok((Some(Arc::new(arena)), ucx.context("tensors are to go by UCX (--ucx), and cannot")?))
}

/// Draws a number that no other process has.
fn draw_node() -> NodeId {
    // The keys of hashers come from the operating system's random numbers.
    NodeId(RandomState::new().hash_one(std::process::id()))
}

/// The identity and the name of a process.
fn identity(node: NodeId, role: Role, options: &ClusterOptions) -> anyhow::Result<Identity> {
    let name = options.name.clone().unwrap_or_else(|| match role {
        Role::Scheduler { rank } => format!("scheduler {rank}"),
        role => format!("{} {}", role_name(role), std::process::id()),
    });
    let length = name.len() + options.advertise.as_ref().map_or(0, String::len);
    ensure!(
        length <= LONGEST_NAMES,
        "--node-name and --advertise have {length} bytes together, and at most {LONGEST_NAMES} are allowed"
    );
    Ok(Identity { node, role, name, advertise: options.advertise.clone() })
}

/// The thread with the role's state machine, for [`Ports::watch`].
fn node_part(event_loop: Handle) -> Part {
    Part::event_loop("the role's own thread", event_loop)
}

/// The addresses of the schedulers for a process of another role: from the options' list, or from
/// etcd.
fn schedulers(options: &ClusterOptions, board: &StatusBoard) -> anyhow::Result<Schedulers> {
    Ok(match Store::new(options)?.filter(|_| options.schedulers.is_empty()) {
        None => node::fixed(&options.schedulers),
        Some(store) => {
            let (sender, dial) = watch::channel(BTreeSet::new());
            tokio::spawn(store.follow(board.clone(), sender));
            dial
        }
    })
}

/// The address where a process listens for peers. Others than processes of this machine may reach
/// the address only if peers prove a secret, or the options allow it.
fn peers_address(options: &ServerOptions, port: u16, what: &str) -> anyhow::Result<SocketAddr> {
    let cluster = &options.cluster;
    let address = cluster.listen.unwrap_or(SocketAddr::new(options.host, port));
    if address.ip().is_loopback() || cluster.secret.is_some() {
        return Ok(address);
    }
    ensure!(
        cluster.is_insecure,
        "{address} is for {what}, and without a secret all who reach it could read, answer and stop requests: give \
         all processes of the cluster --cluster-secret FILE (`downbeat key secret FILE` makes the file), or \
         --insecure-cluster if nobody else reaches this address ({})",
        Pointer::CLUSTER_TRUST
    );
    tracing::warn!(
        %address,
        "peers prove nothing (--insecure-cluster): all who reach this port can read, answer and stop requests"
    );
    Ok(address)
}

/// Opens the port for peers, and reads the secrets that they must prove.
fn listen(options: &ServerOptions, port: u16, what: &str) -> anyhow::Result<(TcpListener, SecretFile)> {
    let (address, secrets) = (peers_address(options, port, what)?, SecretFile::open(&options.cluster)?);
    let listener = connections::bind(address)
        .with_context(|| format!("cannot listen on {address} for {what}; choose another address with --listen"))?;
    let listener = listener.into_std()?;
    if address.ip().is_loopback() && options.cluster.schedulers.iter().any(|scheduler| !is_on_this_machine(scheduler)) {
        tracing::warn!(
            %address,
            "only processes of this machine reach this port, and schedulers are named that may be on others; --host \
             0.0.0.0 opens it to them"
        );
    }
    tracing::info!(address = %listener.local_addr()?, "{what}");
    Ok((listener, secrets))
}

/// Whether `HOST:PORT` names the loopback interface.
fn is_on_this_machine(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn budget(options: &ServerOptions) -> Arc<ByteBudget> {
    ByteBudget::new(options.max_in_flight_bytes.map_or_else(memory::default_budget, |bytes| bytes as u64))
}

async fn frontend(options: ServerOptions) -> anyhow::Result<()> {
    let options = Arc::new(options);
    let mut ports = Ports::open(&options)?;
    let (listener, secrets) = listen(&options, FRONTEND_PORT, "backends")?;
    let (clock, budget) = (Clock::start(), budget(&options));
    let metrics = Arc::new(Metrics::new()?.detailed_for(options.metrics_detailed_models));
    ports.count_in(metrics.registry())?;
    let traces = Traces::new(clock, &options.traces)?;
    downbeat_telemetry::start(&traces, &options.server_name, metrics.registry())?;
    let cluster = &options.cluster;
    let identity = identity(draw_node(), Role::Frontend, cluster)?;
    let board = StatusBoard::new(identity.node, &identity.name, identity.role, metrics.registry())?;
    let models = Arc::new(RemoteModels::new(Preprocessing::new(&options, clock)));
    let figures = Arc::new(FrontendFigures {
        server: options.server_name.clone(),
        clock,
        models: models.clone(),
        tenants: Arc::new(TenantCounts::new(metrics.tenants())),
        history: Mutex::default(),
    });
    let shared = (models, metrics.clone(), board.clone());
    let (arena, ucx) = arena(budget.limit(), identity.node, cluster.ucx)?;
    let (node, me) = (identity.node, Me::of(&identity));
    let machine =
        FrontendOptions { heartbeat: peer_heartbeat(cluster), lost_after: cluster.lost_after, tries: cluster.tries };
    let dial = schedulers(cluster, &board)?;
    let setup = Setup {
        identity,
        listener: Some(listener),
        dial,
        listed: cluster.schedulers.clone(),
        secrets,
        clock,
        most_bytes: budget.limit(),
        arena: arena.clone(),
        ucx,
        board: board.clone(),
        busy_poll: cluster.busy_poll,
    };
    tokio::spawn(watch_trouble(figures.clone()));
    let (questions, asked) = mpsc::unbounded_channel();
    let decisions = decision_log(&options, clock, &metrics)?;
    let log = decisions.as_ref().map(|sink| Arc::new(RequestLog::new(sink.clone(), clock)));
    if let Some(log) = log.clone() {
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOG_EVERY).await;
                log.flush();
            }
        });
    }
    let beside = (Asks::new(questions), log.clone());
    let role = move || FrontendRole::new(node, machine, clock.now(), shared, beside);
    let Started { events, event_loop, .. } = node::start(setup, role)?;
    ports.watch(node_part(event_loop));
    let its = figures.clone();
    let answerer: Answerer = Arc::new(move |question| its.answer(question));
    let node = events.clone();
    let send = move |event| node.send(FrontendEvent::View(event)).is_ok();
    let view = View::answering((options.server_name.clone(), clock, me, board), (asked, answerer), send);
    let shared = (metrics, figures, view);
    let (sent, its) = ((events, arena), log.clone());
    let serving = RemoteServing::new(options.clone(), clock, budget.clone(), shared, sent, its);
    let scraped = serving.clone();
    let metrics: MetricsText = Arc::new(move || scraped.metrics());
    let answering = Answering { budget, gpus: Vec::new(), metrics, traces: traces.clone() };
    let (stage, stages) = watch::channel(Stage::Serving);
    let frontends = ports.answer(&options, serving.clone(), answering, &stages)?;
    let mut signals = Signals::new()?;
    let grace = tokio::select! {
        () = signals.terminate.recv() => options.shutdown_grace.min(options.drain_timeout).into(),
        _ = signals.interrupt.recv() => Duration::ZERO,
    };
    tracing::info!(limit = %options.drain_timeout, ?grace, "stopping: not ready any more, new requests are still answered");
    serving.start_draining();
    let finished =
        leave(&stage, frontends, &mut signals, grace, options.drain_timeout.into(), || serving.is_idle()).await;
    let flushed = tokio::task::spawn_blocking(move || traces.flush());
    let _ = tokio::time::timeout(TRACES_END_WITHIN, flushed).await;
    if let Some((log, decisions)) = log.zip(decisions) {
        log.flush();
        decisions.close();
    }
    match finished && serving.is_idle() {
        true => tracing::info!("stopped"),
        false => tracing::warn!("stopped with requests unfinished"),
    }
    Ok(())
}

/// The decision log of a frontend, if the options name a folder. It has the requests alone.
fn decision_log(options: &ServerOptions, clock: Clock, metrics: &Metrics) -> anyhow::Result<Option<Arc<DecisionLog>>> {
    let bounds = LogBounds { bytes: options.decision_log_bytes as u64, age: options.decision_log_age };
    let open = |folder| DecisionLog::open(folder, (0, 0), bounds, clock, metrics).map(Arc::new);
    options.decision_log.as_deref().map(open).transpose()
}

/// Logs once a minute the models of a frontend with too few answered requests, and notes their
/// history, until the process ends.
async fn watch_trouble(figures: Arc<FrontendFigures>) {
    let mut watch = TroubleWatch::default();
    loop {
        tokio::time::sleep(trouble::EVERY).await;
        figures.note_history();
        let all = figures.models.all();
        let samples: Vec<_> = all.values().flat_map(|m| m.versions.values().map(|version| version.sample())).collect();
        watch.look(figures.clock.now(), &samples, false);
    }
}

/// The port that the list has for this scheduler.
fn listed_port(cluster: &ClusterOptions) -> Option<u16> {
    cluster.schedulers.get(cluster.rank.unwrap_or(0) as usize)?.rsplit_once(':')?.1.parse().ok()
}

async fn scheduler(options: ServerOptions) -> anyhow::Result<()> {
    let cluster = &options.cluster;
    let mut ports = Ports::open(&options)?;
    let port = listed_port(cluster).unwrap_or(SCHEDULER_PORT);
    let (listener, secrets) = listen(&options, port, "frontends, backends and other schedulers")?;
    let mut signals = Signals::new()?;
    let (node, mut store) = (draw_node(), Store::new(cluster)?);
    let (rank, schedulers) = tokio::select! {
        place = place(node, cluster, listener.local_addr()?, store.as_mut()) => place?,
        () = signals.end() => return Ok(()),
    };
    let (clock, metrics) = (Clock::start(), Arc::new(Metrics::new()?));
    let identity = identity(node, Role::Scheduler { rank }, cluster)?;
    let board = StatusBoard::new(node, &identity.name, identity.role, metrics.registry())?;
    let me = Me::of(&identity);
    let machine = scheduler_options(&options, rank, schedulers, store.is_some());
    let of_machine = board.clone();
    let autoscale =
        options.autoscale.as_ref().map(|options| AutoscaleWatch::new(options, 0)).transpose()?.map(Arc::new);
    let load = autoscale.clone().map(|watch| ClusterLoad::new(clock, watch, metrics.clone()));
    // Of two schedulers, the one of the higher rank connects to the other.
    let lower = cluster.schedulers.iter().take(rank as usize).cloned();
    let (known, dial) = watch::channel(lower.collect::<BTreeSet<_>>());
    let setup = Setup {
        identity,
        listener: Some(listener),
        dial,
        listed: cluster.schedulers.clone(),
        secrets,
        clock,
        most_bytes: SCHEDULER_BYTES,
        arena: None,
        ucx: None,
        board: board.clone(),
        busy_poll: cluster.busy_poll,
    };
    let (wants, mut wanted) = mpsc::unbounded_channel();
    let (asks, questions) = mpsc::unbounded_channel();
    let beside = (Some(wants).filter(|_| store.is_some()), asks);
    // A scheduler has no figures, and the leader asks it for none.
    let asking = Asks::new(mpsc::unbounded_channel().0);
    let rehearser = rehearsing::rehearser(&options);
    let counts = (load, rehearser.clone());
    let role = move || SchedulerRole::new(node, machine, clock.now(), of_machine, counts, beside, asking);
    let Started { events, event_loop, .. } = node::start(setup, role)?;
    let rehearsal = rehearser.map(|rehearser| (rehearser, Findings { clock, node: events.clone() }));
    if let Some((rehearser, findings)) = &rehearsal {
        rehearsing::start(rehearser, findings, &metrics)?;
    }
    ports.watch(node_part(event_loop));
    tokio::spawn(planner::plan(questions, clock, events.clone()));
    let (name, node) = (options.server_name.clone(), events.clone());
    let view = {
        let (server, board, node) = (name.clone(), board.clone(), events.clone());
        let send = Box::new(move |event| node.send(SchedulerEvent::View(event)).is_ok());
        View { server, clock, me, board, send, answerer: None, ledger: Mutex::default() }
    };
    let service =
        Arc::new(SchedulerService { name, board: board.clone(), autoscale, node, view, rehearsal: rehearsal.clone() });
    ports.answer_probes(&options, service, Arc::new(move || metrics.render()))?;
    let stored = async {
        let Some(store) = &mut store else { return std::future::pending().await };
        // A node that has ended needs no epoch.
        let give = |allotted| drop(events.send(SchedulerEvent::Allotted(allotted)));
        store.serve(&mut wanted, &board, give, Some(known).filter(|_| cluster.schedulers.is_empty())).await
    };
    let ended = tokio::select! {
        () = signals.end() => Ok(()),
        displaced = stored => displaced,
    };
    if let Some((rehearser, _)) = rehearsal {
        rehearser.stop();
    }
    if let Some(store) = store {
        store.leave().await;
    }
    tracing::info!("stopped");
    ended
}

/// The options of the state machine of the scheduler with this rank, of so many in the list.
fn scheduler_options(
    options: &ServerOptions,
    rank: u32,
    schedulers: u32,
    epochs_are_allotted: bool,
) -> SchedulerOptions {
    let cluster = &options.cluster;
    SchedulerOptions {
        rank,
        schedulers,
        heartbeat: cluster.heartbeat,
        takeover_after: cluster.takeover_after,
        peer_heartbeat: peer_heartbeat(cluster),
        lost_after: cluster.lost_after,
        wake_margin: WAKE_MARGIN,
        order: options.order.first(),
        is_rehearsed: options.rehearsal_cpu > 0.0,
        epochs_are_allotted,
        sub_clusters: sub_clusters(cluster),
    }
}

/// How models are divided among sub-clusters; `None`: each backend chooses its own models.
fn sub_clusters(cluster: &ClusterOptions) -> Option<SubClusterOptions> {
    let count = match cluster.sub_clusters {
        SubClusters::Number(0) => return None,
        SubClusters::Number(count) => SubClusterCount::Fixed(count),
        SubClusters::Auto => SubClusterCount::Least,
    };
    let moves = match (cluster.plan_moves, cluster.plan_load) {
        (_, Some(time)) => MoveLimit::LoadTime(time),
        (Some(models), None) => MoveLimit::Models(models),
        (None, None) => MoveLimit::Any,
    };
    Some(SubClusterOptions {
        count,
        plan_every: Some(cluster.plan_every).filter(|every| *every > Span::ZERO).unwrap_or(Span::MAX),
        moves,
        most_requests: cluster.plan_rate,
    })
}

/// The rank of a scheduler that listens at this address, and the number of possible ranks: from the
/// list, or from etcd.
async fn place(
    node: NodeId,
    options: &ClusterOptions,
    listens: SocketAddr,
    store: Option<&mut Store>,
) -> anyhow::Result<(u32, u32)> {
    let list = &options.schedulers;
    let (rank, schedulers) = match (options.rank, &store) {
        (rank, Some(_)) if list.is_empty() => (rank, MOST_SCHEDULERS),
        (rank, _) => (Some(rank.unwrap_or(0)), u32::try_from(list.len()).unwrap_or(u32::MAX).max(1)),
    };
    if let Some(rank) = rank {
        ensure!(
            rank < schedulers,
            "the rank of this scheduler is {rank}, and there are {schedulers} in the list (--schedulers): ranks are places in it, from 0"
        );
    }
    let Some(store) = store else { return Ok((rank.unwrap_or(0), schedulers)) };
    let listed = rank.and_then(|rank| list.get(rank as usize)).cloned();
    let here = (!listens.ip().is_unspecified()).then(|| listens.to_string());
    let address = options.advertise.clone().or(listed).or(here);
    store.sit(node, options.name.clone(), (address, listens.port()), rank);
    match rank {
        // The others find this scheduler by the list, so it need not wait for etcd.
        Some(rank) if !list.is_empty() => Ok((rank, schedulers)),
        _ => Ok((store.join().await?, schedulers)),
    }
}

/// Longest silence between a scheduler, its frontends and backends.
fn peer_heartbeat(options: &ClusterOptions) -> Span {
    Span::from_nanos(options.lost_after.as_nanos() / 10)
}

/// The backend part of a server of models in a cluster.
pub struct BackendProcess {
    events: Events<BackendRole>,
    event_loop: Handle,
    thread: std::thread::JoinHandle<()>,
}

impl BackendProcess {
    /// Offers the models of a registry to the schedulers of the options, and lets its slots run the
    /// granted batches.
    ///
    /// # Errors
    /// If the operating system has no thread left, or an option asks for UCX and UCX cannot be
    /// used.
    pub fn start(registry: &Registry, options: &Arc<ServerOptions>) -> anyhow::Result<Self> {
        let cluster = &options.cluster;
        let identity = identity(draw_node(), Role::Backend, cluster)?;
        let board = StatusBoard::new(identity.node, &identity.name, identity.role, registry.metrics_registry())?;
        let me = Me::of(&identity);
        let machine = BackendOptions {
            heartbeat: peer_heartbeat(cluster),
            lost_after: cluster.lost_after,
            fetch_within: cluster.fetch_within,
        };
        let (loader, told) = mpsc::unbounded_channel();
        let (slots, seats_done) = (Arc::new(SlotMap::default()), Arc::new(OnceLock::new()));
        let (clock, node, its) = (registry.driver.clock(), identity.node, (registry.clone(), loader));
        let seats = (slots.clone(), seats_done.clone());
        let (arena, ucx) = arena(registry.budget.limit(), node, cluster.ucx)?;
        let dial = schedulers(cluster, &board)?;
        let setup = Setup {
            identity,
            listener: None,
            dial,
            listed: Vec::new(),
            secrets: SecretFile::open(cluster)?,
            clock,
            most_bytes: registry.budget.limit(),
            arena: arena.clone(),
            ucx,
            board: board.clone(),
            busy_poll: cluster.busy_poll,
        };
        let (questions, asked) = mpsc::unbounded_channel();
        let (shown, asks) = (board.clone(), Asks::new(questions));
        let role = move || BackendRole::new(node, machine, clock.now(), its, seats, (board, arena), asks);
        let Started { events, event_loop, thread } = node::start(setup, role)?;
        let its = registry.clone();
        let answerer: Answerer = Arc::new(move |question| backend_figures::answer(&its, question));
        let node = events.clone();
        let send = move |event| node.send(BackendEvent::View(event)).is_ok();
        let view = View::answering((options.server_name.clone(), clock, me, shown), (asked, answerer), send);
        registry.join_cluster(Arc::new(view));
        let done = events.clone();
        // No batch comes before the first offer.
        let _ = seats_done.set(events.clone());
        // A node that has ended grants no slots.
        registry.driver.is_granted_from_afar(Box::new(move |slot| drop(done.send(BackendEvent::Ran(slot)))));
        let mut offers = OfferMaker::new(registry.clone(), options.clone(), slots);
        let offered = events.clone();
        // This thread reads files, which may block.
        let offer = move || {
            while !offered.is_closed() {
                if let Some(offer) = offers.next()
                    && offered.send(BackendEvent::Offer(offer)).is_err()
                {
                    return;
                }
                std::thread::park_timeout(LOOKS_EVERY);
            }
        };
        let offers = std::thread::Builder::new().name("offers".to_owned()).spawn(offer)?;
        let looks = offers.thread().clone();
        tokio::spawn(model_loader::follow(told, registry.clone(), events.clone(), move || looks.unpark()));
        Ok(BackendProcess { events, event_loop, thread })
    }

    /// The part of the process that talks with the cluster, for [`Ports::watch`].
    pub fn part(&self) -> Part {
        node_part(self.event_loop.clone())
    }

    /// Stops taking batches, and waits until the present ones are done, for at most `limit`.
    pub async fn drain(self, limit: Duration) {
        let _ = self.events.send(BackendEvent::Drain);
        let ended = async {
            while !self.thread.is_finished() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(limit, ended).await.is_err() {
            tracing::warn!("batches of the cluster have not ended, and are broken off");
        }
    }
}
