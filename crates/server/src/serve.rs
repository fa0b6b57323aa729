//! The server as a whole: models, and how it begins and ends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use downbeat_cluster::BackendProcess;
use downbeat_engine::scratch;
use downbeat_frontend::connections::Stage;
use downbeat_frontend::liveness::Part;
use downbeat_frontend::ports::{Answering, Ports, Signals, leave};
use downbeat_host::run::activity::{Awake, tick};
use downbeat_models::load::load_context::LoadProgress;
use downbeat_models::measure::profiler::NOISE;
use downbeat_models::measure::remeasuring::Remeasuring;
use downbeat_models::registry::Registry;
use downbeat_repository::Fingerprint;
use downbeat_service::metrics::trouble::{self, TroubleWatch};
use downbeat_service::options::{MOST_LOAD_THREADS, ModelControl, ServerOptions};
use downbeat_service::report::machine_load::LoadWatch;
use downbeat_service::service::{LoadOverrides, Service};
use downbeat_service::start::start;
use downbeat_service::{logging, memory};
use futures_util::StreamExt;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long loads may take to end once a server has stopped, so that they leave no files behind.
const LOADS_END_WITHIN: Duration = Duration::from_millis(1_000);
/// How often the server checks that it is live, if it ends otherwise.
const LOOKS_LIVE_EVERY: Duration = Duration::from_millis(200);
/// How long the disk may take for the rest of the decision log.
const LOG_ENDS_WITHIN: Duration = Duration::from_millis(2_000);

/// Serves until SIGTERM, SIGHUP, SIGQUIT or SIGINT, then drains. The option `exit_when_not_live`
/// ends the service too.
///
/// # Errors
/// If the options cannot be followed (no such repository, a port in use, no such engine), before
/// anything is served.
pub fn serve(options: ServerOptions) -> anyhow::Result<()> {
    start(options, |options| run(options, false))
}

/// Runs the models of its repositories for a cluster whose schedulers the options name, and
/// otherwise as [`serve`].
///
/// # Errors
/// The errors of [`serve`].
pub fn serve_backend(options: ServerOptions) -> anyhow::Result<()> {
    start(options, |options| run(options, true))
}

/// Opens the models of the repositories that the options name, without any port, and loads them. A
/// server that embeds the models answers requests by [`checked_router`](downbeat_frontend::http::checked_router).
/// Tasks on the caller's tokio runtime look after the models.
///
/// # Errors
/// If the options cannot be followed, or a model does not load.
pub async fn open_models(options: ServerOptions) -> anyhow::Result<Registry> {
    let options = Arc::new(options);
    let registry = Registry::open(options.clone())?;
    look_after(&registry);
    load_at_start(registry.clone(), options).await?;
    Ok(registry)
}

/// Starts the tasks that look after the models until the process ends.
fn look_after(registry: &Registry) {
    tokio::spawn(watch_load(registry.clone()));
    tokio::spawn(watch_trouble(registry.clone()));
    tokio::spawn(measure_again(registry.clone()));
    tokio::spawn(change_policies(registry.clone()));
    tokio::spawn(divide_devices(registry.clone()));
    tokio::spawn(release_memory(registry.watchdog().activity().awake()));
}

/// Why the server ends.
struct End {
    outcome: anyhow::Result<()>,
    /// How long the server goes on accepting.
    grace: Duration,
    is_live: bool,
}

/// Runs the server. Ends the process itself if a run or load still goes on at the end, as returning
/// would wait for it.
async fn run(options: ServerOptions, in_cluster: bool) -> anyhow::Result<()> {
    let options = Arc::new(options);
    // The ports first: a port in use should be said at once, not after the models are loaded.
    let mut ports = Ports::open(&options)?;
    let registry = Registry::open(options.clone())?;
    ports.count_in(registry.metrics_registry())?;
    let traces = registry.serving().traces().clone();
    downbeat_telemetry::start(&traces, &options.server_name, registry.metrics_registry())?;
    if let Some(folder) = &options.decision_log {
        tracing::info!(
            folder = %folder.display(),
            "the server writes decision logs here; ask them with downbeat log why ID, and read them with downbeat log show FOLDER"
        );
    }
    let backend = in_cluster.then(|| BackendProcess::start(&registry, &options)).transpose()?;
    let driver = registry.driver.clone();
    ports.watch(Part::locks("the scheduler", move || driver.visit()));
    if let Some(backend) = &backend {
        ports.watch(backend.part());
    }
    let scraped = registry.clone();
    let answering = Answering {
        budget: registry.budget.clone(),
        gpus: registry.gpus.iter().map(|gpu| gpu.ordinal).collect(),
        metrics: Arc::new(move || scraped.metrics()),
        traces,
    };
    let (stage, stages) = watch::channel(Stage::Serving);
    let frontends = ports.answer(&options, Arc::new(registry.clone()), answering, &stages)?;
    look_after(&registry);
    let mut signals = Signals::new()?;
    let End { outcome, grace, is_live } = until_stopped(&options, &registry, &mut signals).await?;
    if let Some(backend) = backend {
        backend.drain(options.drain_timeout.into()).await;
    }
    if stop(&options, &registry, &stage, frontends, &mut signals, grace).await && is_live {
        return outcome;
    }
    // The time to wait for the engine is over, and the engine's memory must not be freed under a
    // running call.
    if let Err(error) = &outcome {
        tracing::error!("{error:#}");
    }
    scratch::close();
    logging::flush();
    downbeat_engine::process::end(u8::from(outcome.is_err()))
}

/// Loads the models, and waits for a signal, or for another reason to end.
async fn until_stopped(
    options: &Arc<ServerOptions>,
    registry: &Registry,
    signals: &mut Signals,
) -> anyhow::Result<End> {
    // Fingerprints are read before loading, so that a later change is noticed.
    let seen = registry.fingerprints()?;
    let mut loading = tokio::spawn(load_at_start(registry.clone(), options.clone()));
    let (mut follower, mut loaded) = (None, false);
    // A server that was never ready has no clients, and a person at a terminal does not want to
    // wait.
    let at_once = |outcome| End { outcome, grace: Duration::ZERO, is_live: true };
    let end = loop {
        tokio::select! {
            result = &mut loading, if !loaded => {
                loaded = true;
                match result? {
                    Err(error) if options.exit_on_error => break at_once(Err(error)),
                    Err(error) => tracing::error!("{error:#}"),
                    Ok(()) => {}
                }
                if let ModelControl::Poll { every } = options.model_control
                    && every > downbeat_core::Duration::ZERO
                {
                    follower = Some(tokio::spawn(follow(registry.clone(), seen.clone(), every.into())));
                }
            }
            () = signals.terminate.recv() => {
                let grace = options.shutdown_grace.min(options.drain_timeout).into();
                break if loaded || registry.is_ready() { End { grace, ..at_once(Ok(())) } } else { at_once(Ok(())) };
            }
            _ = signals.interrupt.recv() => break at_once(Ok(())),
            reason = not_live(registry), if options.exit_when_not_live => {
                let reason = anyhow::anyhow!("{reason}; the server ends, as --exit-when-not-live asks");
                break End { is_live: false, ..at_once(Err(reason)) };
            }
        }
    };
    if let Some(follower) = follower {
        follower.abort();
    }
    Ok(end)
}

/// Drains and ends the server. Returns whether all its work has ended.
async fn stop(
    options: &ServerOptions,
    registry: &Registry,
    stage: &watch::Sender<Stage>,
    frontends: Vec<JoinHandle<()>>,
    signals: &mut Signals,
    grace: Duration,
) -> bool {
    tracing::info!(
        limit = %options.drain_timeout, ?grace,
        "stopping: the server is not ready any more, but still answers requests"
    );
    registry.serving().start_draining();
    registry.watchdog().end_loads();
    let finished =
        leave(stage, frontends, signals, grace, options.drain_timeout.into(), || registry.serving().is_idle()).await;
    // A disk that does not answer is no reason to go on either.
    let log = registry.clone();
    let closed = tokio::task::spawn_blocking(move || {
        log.close_decision_log();
        log.serving().traces().flush();
    });
    let closed = tokio::time::timeout(LOG_ENDS_WITHIN, closed).await.is_ok();
    let loads_ended = loads_end(registry).await;
    let is_idle = finished && registry.serving().is_idle();
    if is_idle {
        tracing::info!("stopped");
    } else {
        tracing::warn!("stopped with requests unfinished");
    }
    // A driver that has lost its GPU may hang when memory is given back, so a server that is not
    // live ends without it.
    is_idle && closed && loads_ended && !registry.watchdog().is_busy()
}

/// Waits until only a new process helps. Returns the reason.
async fn not_live(registry: &Registry) -> String {
    let mut awake = registry.watchdog().activity().awake();
    loop {
        if let Some(reason) = registry.watchdog().hopeless() {
            return reason;
        }
        tick(&mut awake, LOOKS_LIVE_EVERY).await;
    }
}

/// Waits a moment for loads that were told to end. Returns whether they have.
async fn loads_end(registry: &Registry) -> bool {
    let ended = async {
        while registry.watchdog().end_loads() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LOADS_END_WITHIN, ended).await.is_ok()
}

/// Loads the models to serve, some side by side, each with a progress bar on a terminal.
async fn load_at_start(registry: Registry, options: Arc<ServerOptions>) -> anyhow::Result<()> {
    let names = registry.wanted_at_start();
    let bars = logging::bars();
    let style = ProgressStyle::with_template("{prefix:>16} [{bar:30}] {msg}")?.progress_chars("=> ");
    let load = |name: String| {
        let (registry, style) = (registry.clone(), style.clone());
        async move {
            let bar = bars.add(ProgressBar::new(1000).with_style(style).with_prefix(name.clone()));
            let result = registry.load_model(&name, LoadOverrides::default(), Arc::new(Bar(bar.clone()))).await;
            bar.finish_and_clear();
            // Why has been said when it failed.
            result.err().map(|_| name)
        }
    };
    // The registry limits how many large and how many small models load side by side.
    let side_by_side = 2 * options.load_threads.clamp(1, MOST_LOAD_THREADS);
    let mut failed: Vec<String> = Vec::new();
    // An ensemble needs the models of its steps.
    for by_size in registry.in_load_order(registry.wanted_by_size()) {
        let loads = futures_util::stream::iter(by_size).map(load).buffer_unordered(side_by_side);
        failed.extend(loads.filter_map(std::future::ready).collect::<Vec<String>>().await);
    }
    failed.sort_unstable();
    registry.set_started();
    memory::release_loads();
    if let Some(said) = without_slo(&registry.names_without_slo()) {
        tracing::info!("{said}");
    }
    let ready = names.len() - failed.len();
    let repository = options.shown_repositories();
    if !failed.is_empty() {
        let otherwise = if options.exit_on_error {
            "the server ends, as --exit-on-error asks"
        } else if ready == 0 {
            "no model is served; with --exit-on-error true the server would end"
        } else {
            "the others are served; with --exit-on-error true the server would end"
        };
        anyhow::bail!("{ready} of {} models are ready; not loaded: {}; {otherwise}", names.len(), failed.join(", "));
    }
    if options.strict_readiness && registry.lacks_models() {
        tracing::warn!(
            %repository,
            "not ready: no model is served, because the repository has none; the server is ready once a model is \
             loaded, or now with --allow-empty"
        );
        return Ok(());
    }
    tracing::info!(models = ready, %repository, "ready");
    Ok(())
}

/// A machine must be idle for this long before a model is measured again.
const IDLE: std::time::Duration = std::time::Duration::from_secs(30);
/// How long a model that serves by guesses waits for its measurement, at most.
const MEASURES_SOON: std::time::Duration = std::time::Duration::from_millis(500);
/// How often the server checks whether a policy must change.
const LOOK_EVERY: std::time::Duration = std::time::Duration::from_secs(1);
/// How often the server checks whether models have come to shared devices.
const DIVIDES_EVERY: std::time::Duration = std::time::Duration::from_millis(100);

/// The notice about models without an SLO.
fn without_slo(models: &[String]) -> Option<String> {
    const NAMED: usize = 8;
    let (first, rest) = models.split_at(models.len().min(NAMED));
    let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
    (!first.is_empty()).then(|| {
        format!(
            "models without an SLO: {}{more}. Under overload their requests are answered late rather than given up, \
             until max_queue_wait; set the time that a request may take with --default-slo-ms MS for all, --slo-ms \
             MODEL=MS, or slo_ms in config.pbtxt or downbeat.toml",
            first.join(", ")
        )
    })
}

async fn follow(registry: Registry, mut seen: BTreeMap<String, Fingerprint>, every: Duration) {
    let progress: Arc<dyn LoadProgress> = Arc::new(());
    loop {
        tokio::time::sleep(every).await;
        seen = registry.follow(seen, &progress).await;
    }
}

/// Gives free memory back, each time that no model has run for a while.
async fn release_memory(mut awake: Awake) {
    while awake.wait_for(|awake| !*awake).await.is_ok() {
        memory::release();
        if awake.wait_for(|awake| *awake).await.is_err() {
            return;
        }
    }
}

/// Keeps the autoscale advice and the decision log up to date until the process ends.
async fn watch_load(registry: Registry) {
    let mut awake = registry.watchdog().activity().awake();
    loop {
        registry.watch_load();
        registry.weigh_steps();
        registry.driver.flush_log();
        tick(&mut awake, downbeat_service::report::autoscale::EVERY).await;
    }
}

/// Logs the models in trouble, once a minute and before the server rests, until the process ends.
async fn watch_trouble(registry: Registry) {
    let mut awake = registry.watchdog().activity().awake();
    let mut watch = TroubleWatch::default();
    loop {
        // An error: the server ends.
        let is_resting = tokio::time::timeout(trouble::EVERY, awake.wait_for(|awake| !*awake)).await.is_ok();
        watch.look(registry.driver.clock().now(), &registry.samples(), is_resting);
        if is_resting {
            if awake.wait_for(|awake| *awake).await.is_err() {
                return;
            }
            // The time of rest counts for nothing.
            watch.look(registry.driver.clock().now(), &registry.samples(), false);
        }
    }
}

/// Loads models anew by the evidence of service, until the process ends. A model that mixes the
/// rows of a batch gets no more batches. A model whose policy loses gets the policy `exclusive`.
async fn change_policies(registry: Registry) {
    let mut awake = registry.watchdog().activity().awake();
    loop {
        tick(&mut awake, LOOK_EVERY).await;
        registry.part_mixed_rows().await;
        registry.change_policies().await;
    }
}

/// Has devices divided among their models, until the process ends.
async fn divide_devices(registry: Registry) {
    let woken = registry.shares_woken.clone();
    while registry.has_shares() {
        // Woken where lanes are ready; models that come are seen soon.
        let _ = tokio::time::timeout(DIVIDES_EVERY, woken.notified()).await;
        registry.divide_devices();
    }
}

/// Measures the models that serve by guesses, behind the service. Repeats measurements that were
/// made on a busy machine, once the machine has been idle for a while.
async fn measure_again(registry: Registry) {
    let mut awake = registry.watchdog().activity().awake();
    let mut remeasuring = Remeasuring::default();
    'spells: loop {
        // One model at a time: the machine is not idle while a model loads.
        while let Some(name) = remeasuring.soon(&registry.served_by_guesses()) {
            tracing::debug!(model = %name, "the model serves by guesses: measuring it behind the service");
            registry.measure_again(&name).await;
            memory::release_loads();
        }
        if registry.to_measure_again().is_empty() {
            // Only a load can add a model to measure, and a load wakes the server.
            tick(&mut awake, MEASURES_SOON).await;
            continue;
        }
        let (watch, end) = (LoadWatch::start(), tokio::time::Instant::now() + IDLE);
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(end) => break,
                () = tick(&mut awake, MEASURES_SOON) => {
                    if remeasuring.is_due_soon(&registry.served_by_guesses()) {
                        continue 'spells;
                    }
                }
            }
        }
        if watch.all().is_some_and(|all| all <= NOISE)
            && let Some(name) = remeasuring.next(&registry.to_measure_again())
        {
            tracing::info!(model = %name, "the machine is idle: measuring the model again");
            registry.measure_again(&name).await;
        }
    }
}

/// A progress bar on a terminal; nothing elsewhere.
struct Bar(ProgressBar);

impl LoadProgress for Bar {
    fn step(&self, what: &str, fraction: f64) {
        self.0.set_position((fraction * 1000.0) as u64);
        self.0.set_message(what.to_owned());
    }
}
