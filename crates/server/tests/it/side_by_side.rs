//! Models that are loaded at the same time.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::Poll;
use std::time::Duration;

use downbeat_models::load::load_context::LoadProgress;
use downbeat_models::registry::Registry;
use downbeat_service::options::{EngineChoice, ModelControl};
use downbeat_service::service::{LoadOverrides, Service};
use tokio::task::JoinSet;

use crate::loading::{add, options};
use crate::model::{FLOAT, folder, identity};
use crate::serving::{Models, request};

/// A server of emulated models with these names, none loaded yet. It loads so many side by side.
fn open(models: &Models, names: &[&str], load_threads: usize) -> Registry {
    for name in names {
        models.add(name, 1, (0.0, 1.0), 4, "");
    }
    let mut options = models.options();
    options.load_threads = load_threads;
    options.model_control = ModelControl::Explicit { load: Vec::new() };
    Registry::open(Arc::new(options)).unwrap()
}

/// Loads these models at the same time. The test fails if they wait for each other for good.
async fn load_all(registry: &Registry, names: &[&str], progress: Arc<dyn LoadProgress>) -> BTreeMap<String, bool> {
    let mut loads = JoinSet::new();
    for name in names {
        let (registry, progress, name) = (registry.clone(), progress.clone(), (*name).to_owned());
        loads.spawn(async move {
            let loaded = registry.load_model(&name, LoadOverrides::default(), progress).await;
            (name, loaded.is_ok())
        });
    }
    let all = async {
        let mut done = BTreeMap::new();
        while let Some(loaded) = loads.join_next().await {
            done.extend(loaded);
        }
        done
    };
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("the loads wait for each other")
}

/// A load waits in its last step until the other loads are in the step, too.
struct Together(Barrier);

impl LoadProgress for Together {
    fn step(&self, what: &str, _fraction: f64) {
        if what == "warming up" {
            self.0.wait();
        }
    }
}

#[tokio::test]
async fn three_models_are_loaded_side_by_side() {
    let (models, names) = (Models::new(), ["a", "b", "c"]);
    let registry = open(&models, &names, 3);
    let loaded = load_all(&registry, &names, Arc::new(Together(Barrier::new(3)))).await;
    assert!(loaded.len() == 3 && loaded.values().all(|loaded| *loaded), "{loaded:?}");
    for name in names {
        registry.infer(request(name, 1, 4)).await.unwrap();
    }
}

/// Names of steps, in the order in which they began.
#[derive(Default)]
struct Steps(Mutex<Vec<String>>);

/// The steps of one load.
struct Named(&'static str, Arc<Steps>);

impl LoadProgress for Named {
    fn step(&self, what: &str, _fraction: f64) {
        self.1.0.lock().unwrap().push(format!("{}: {what}", self.0));
        // Time in which another load could come between.
        std::thread::yield_now();
    }
}

#[tokio::test]
async fn no_more_are_loaded_side_by_side_than_was_asked_for() {
    let (models, names) = (Models::new(), ["a", "b", "c", "d"]);
    let registry = open(&models, &names, 1);
    let steps = Arc::new(Steps::default());
    let loads =
        names.map(|name| registry.load_model(name, LoadOverrides::default(), Arc::new(Named(name, steps.clone()))));
    for loaded in futures_util::future::join_all(loads).await {
        loaded.unwrap();
    }
    let steps = steps.0.lock().unwrap();
    let mut of: Vec<&str> = steps.iter().filter_map(|step| step.split(':').next()).collect();
    assert_eq!(of.len(), 3 * names.len(), "{steps:?}");
    of.dedup();
    assert_eq!(of, names, "one after another: {steps:?}");
}

#[tokio::test]
async fn loads_and_unloads_of_one_model_keep_their_order() {
    let models = Models::new();
    let registry = open(&models, &["m"], 3);
    let steps = Arc::new(Steps::default());
    let load = async |name: &'static str| {
        let progress = Arc::new(Named(name, steps.clone()));
        registry.load_model("m", LoadOverrides::default(), progress).await.unwrap();
        steps.0.lock().unwrap().push(format!("{name}: loaded"));
    };
    let unload = async || {
        registry.unload_model("m").await.unwrap();
        steps.0.lock().unwrap().push("unloaded".to_owned());
    };
    tokio::join!(biased; load("first"), load("second"), unload(), load("third"), unload());
    let of = |load: &str| ["reading", "measuring", "warming up", "loaded"].map(|step| format!("{load}: {step}"));
    let unloaded = || ["unloaded".to_owned()];
    let expected: Vec<String> = [&of("first")[..], &of("second"), &unloaded(), &of("third"), &unloaded()].concat();
    assert_eq!(*steps.0.lock().unwrap(), expected);
    assert!(registry.infer(request("m", 1, 4)).await.is_err());
}

#[tokio::test]
async fn a_load_that_fails_disturbs_no_other() {
    let (models, names) = (Models::new(), ["a", "b", "bad", "c"]);
    let registry = open(&models, &names, 4);
    std::fs::write(models.path().join("bad/1/model.emulated.toml"), "alpha_ms = true").unwrap();
    let loaded = load_all(&registry, &names, Arc::new(Together(Barrier::new(3)))).await;
    let failed: Vec<&String> = loaded.iter().filter(|(_, loaded)| !**loaded).map(|(name, _)| name).collect();
    assert_eq!(failed, ["bad"]);
    let bad = registry.repository_index(false).into_iter().find(|entry| entry.name == "bad").unwrap();
    assert_eq!(bad.state, "UNAVAILABLE");
    registry.infer(request("c", 1, 4)).await.unwrap();
}

/// A load that reaches a step waits there until the test releases it.
struct Held(Barrier);

impl LoadProgress for Held {
    fn step(&self, what: &str, _fraction: f64) {
        if what == "reading" {
            self.0.wait();
            self.0.wait();
        }
    }
}

#[tokio::test]
async fn a_server_that_stops_begins_no_load_that_waits() {
    let (models, names) = (Models::new(), ["a", "b"]);
    let registry = open(&models, &names, 1);
    let held = Arc::new(Held(Barrier::new(2)));
    let first = tokio::spawn({
        let (registry, held) = (registry.clone(), held.clone());
        async move { registry.load_model("a", LoadOverrides::default(), held).await }
    });
    let waits = tokio::task::spawn_blocking({
        let held = held.clone();
        move || held.0.wait()
    });
    waits.await.unwrap();
    let mut second = Box::pin(registry.load_model("b", LoadOverrides::default(), Arc::new(())));
    let waits = std::future::poll_fn(|context| Poll::Ready(second.as_mut().poll(context).is_pending())).await;
    assert!(waits, "its turn has not come");
    let waiting = registry.repository_index(false).into_iter().find(|entry| entry.name == "b").unwrap();
    assert_eq!((waiting.state.as_str(), waiting.reason.as_str()), ("LOADING", "waiting to be loaded"));
    registry.serving().start_draining();
    registry.watchdog().end_loads();
    tokio::task::spawn_blocking(move || held.0.wait()).await.unwrap();
    assert!(first.await.unwrap().unwrap_err().to_string().contains("shutting down"));
    assert!(second.await.unwrap_err().to_string().contains("shutting down"));
}

/// A load waits once in the step with this beginning, until the test releases it.
struct HeldAt(&'static str, Barrier, AtomicBool);

impl LoadProgress for HeldAt {
    fn step(&self, what: &str, _fraction: f64) {
        if what.starts_with(self.0) && !self.2.swap(true, Ordering::Relaxed) {
            self.1.wait();
            self.1.wait();
        }
    }
}

/// Loads `large`, holds its load in a step, loads `small`, and lets `large` go on.
async fn small_beside_large(registry: &Registry, held_at: &'static str) {
    let held = Arc::new(HeldAt(held_at, Barrier::new(2), AtomicBool::new(false)));
    let wait = |held: &Arc<HeldAt>| {
        let held = held.clone();
        tokio::task::spawn_blocking(move || held.1.wait())
    };
    let large = tokio::spawn({
        let (registry, held) = (registry.clone(), held.clone());
        async move { registry.load_model("large", LoadOverrides::default(), held).await }
    });
    wait(&held).await.unwrap();
    let small = registry.load_model("small", LoadOverrides::default(), Arc::new(()));
    // Less time than a load once waited for another.
    tokio::time::timeout(Duration::from_secs(45), small).await.expect("it waits for the large one").unwrap();
    assert!(registry.is_model_ready("small", "") && !registry.is_model_ready("large", ""));
    wait(&held).await.unwrap();
    large.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_small_model_does_not_wait_while_a_large_one_is_measured() {
    let folder = folder();
    for name in ["large", "small"] {
        add(folder.path(), name, &identity(FLOAT, &[-1, 4]));
    }
    let mut options = options(folder.path(), EngineChoice::Rten);
    options.profiling.budget = downbeat_core::Duration::from_millis(1_000);
    let registry = Registry::open(Arc::new(options)).unwrap();
    registry.set_started();
    small_beside_large(&registry, "measured batch").await;
    let unsettled = registry.to_measure_again();
    assert!(unsettled.contains(&"small".to_owned()), "it was measured beside another: {unsettled:?}");
}

#[tokio::test]
async fn a_small_model_does_not_wait_until_a_large_one_is_read() {
    let models = Models::new();
    let registry = open(&models, &["large", "small"], 1);
    std::fs::File::create(models.path().join("large/1/weights")).unwrap().set_len(32 << 20).unwrap();
    small_beside_large(&registry, "reading").await;
}
