//! Models whose operators run in groups (the device policy overlap): side by side with a predictor
//! that fits, one at a time with any other.

use std::future::Future;
use std::path::PathBuf;
use std::task::Poll;

use downbeat_core::device::overlap::{GroupOrder, Layer, LearnedPredictor, Mlp};
use downbeat_core::device::{DeviceOutput, Note};
use downbeat_core::journal::device::DeviceRecords;
use downbeat_core::journal::{Record, read, replay};
use downbeat_engine::Engine;
use downbeat_host::groups::stored_predictor::{PredictedModel, StoredPredictor, Training};
use downbeat_models::measure::profile_store::ProfileStore;
use downbeat_models::measure::profiler::Threads;
use downbeat_models::registry::Registry;
use downbeat_service::options::ServerOptions;
use downbeat_service::report::device_report::GroupsReport;
use downbeat_service::service::Service;

use crate::lanes::drained;
use crate::serving::{Models, metric, ms, request, send, with_timeout};

const OPERATORS: u16 = 4;

/// Two models of 6 ms.
fn models() -> Models {
    let models = Models::new();
    ["a", "b"].iter().for_each(|name| models.add(name, 1, (1.0, 5.0), 4, ""));
    models
}

/// A predictor which says that all groups of these models take 6 ms.
fn training(models: &Models, names: &[&str]) -> (Training, LearnedPredictor) {
    training_of(models, names, 6.0)
}

/// A predictor which says that all groups of these models take so long.
fn training_of(models: &Models, names: &[&str], takes_ms: f32) -> (Training, LearnedPredictor) {
    let known = |name: &&str| PredictedModel {
        name: (*name).to_owned(),
        version: 1,
        file: ProfileStore::file_key(&models.path().join(name).join("1/model.emulated.toml")).unwrap_or_default(),
        segments: OPERATORS,
        cuts: Vec::new(),
        most_rows: 8,
        longest: 0,
    };
    let known: Vec<PredictedModel> = names.iter().map(known).collect();
    let layout = StoredPredictor::layout(&known, 2);
    let layer = Layer { weights: vec![0.0; layout.len()], biases: vec![takes_ms.ln()] };
    let mlp = Mlp::new(vec![0.0; layout.len()], vec![1.0; layout.len()], vec![layer]).unwrap();
    let device = ProfileStore::place_key(&downbeat_engine::Emulated::new().info(), Threads::Chosen(1), None);
    let (error, mean_error, samples, tested) = (0.2, 0.05, 80, 20);
    let training = Training { device, threads: 1, models: known, error, mean_error, samples, tested };
    (training, LearnedPredictor::new(layout, mlp).unwrap())
}

fn save(models: &Models, (training, predictor): (Training, LearnedPredictor)) -> PathBuf {
    let path = models.path().join(".predictor.json");
    StoredPredictor::new(training, predictor).unwrap().save(&path).unwrap();
    path
}

async fn serve(models: &Models, predictor: Option<PathBuf>, change: impl FnOnce(&mut ServerOptions)) -> Registry {
    models
        .serve(|options| {
            options.device.policy = "overlap".parse().unwrap();
            options.device.predictor = predictor;
            change(options);
        })
        .await
}

fn groups(registry: &Registry) -> GroupsReport {
    registry.devices().unwrap().devices[0].groups.clone().unwrap()
}

/// Clients of both models. Each sends its next request when the one before is answered, and gives
/// up some. Returns how many were answered.
async fn clients(registry: &Registry) -> u32 {
    let client = |number: u64| {
        let registry = registry.clone();
        tokio::spawn(async move {
            let name = if number.is_multiple_of(2) { "a" } else { "b" };
            for round in 0..10 {
                let answer = registry.infer(request(name, 1 + (number % 3) as i64, 4)).await.unwrap();
                assert_eq!(answer.outputs[0].shape, [1 + (number % 3) as i64, 1]);
                let _ = tokio::time::timeout(ms(3 * round), registry.infer(request(name, 1, 4))).await;
            }
            10
        })
    };
    let clients: Vec<_> = (0..6).map(client).collect();
    let mut answered = 0;
    for client in clients {
        answered += client.await.unwrap();
    }
    drained(registry).await;
    answered
}

#[tokio::test]
async fn operators_of_two_models_overlap_and_each_request_ends_once() {
    let models = models();
    let predictor = save(&models, training(&models, &["a", "b"]));
    let folder = models.path().join(".decisions");
    let registry = serve(&models, Some(predictor), |options| options.decision_log = Some(folder.clone())).await;
    assert_eq!(clients(&registry).await, 60);
    let report = groups(&registry);
    assert!(report.together > 0 && report.together < report.groups, "{report:?}");
    assert_eq!(report.mean_error, Some(0.05));
    assert_eq!(report.retraining.is_some(), cfg!(feature = "retraining"));
    assert!(report.models.len() == 2 && report.models.iter().all(|model| model.alone.is_none()), "{report:?}");
    assert_eq!(metric(&registry, "downbeat_operator_groups_total", "several"), report.together as f64);
    assert!(metric(&registry, "downbeat_operator_group_seconds_total", "actual") > 0.0);
    assert_eq!(metric(&registry, "downbeat_batch_events_total", "prepare_failed"), 0.0);
    registry.close_decision_log();
    let log = std::fs::read(folder.join("device-0.log")).unwrap();
    assert_eq!(replay(&log).unwrap().divergence, None);
    let entries = read::<DeviceRecords>(&log).unwrap().1.map(|entry| entry.unwrap().record);
    let is_known = |record: &Record<DeviceRecords>| {
        matches!(record, Record::Decision(DeviceOutput::Note { note: Note::Group { predicted: Some(_), .. }, .. }))
    };
    assert_eq!(entries.filter(is_known).count() as u64, report.groups, "what each was predicted to take, and took");
}

#[tokio::test]
async fn without_a_fitting_predictor_requests_run_alone_and_the_log_says_why() {
    let models = models();
    let nan = || {
        let path = save(&models, training(&models, &["a", "b"]));
        let text = std::fs::read_to_string(&path).unwrap().replacen("\"weights\":[0.0", "\"weights\":[null", 1);
        std::fs::write(&path, text).unwrap();
        path
    };
    let elsewhere = || {
        let (training, predictor) = training(&models, &["a", "b"]);
        save(&models, (Training { device: "elsewhere".to_owned(), ..training }, predictor))
    };
    let cases: [(&str, &dyn Fn() -> Option<PathBuf>); 4] = [
        ("no predictor was named ([device] predictor)", &|| None),
        ("(a number that is NaN or infinite); train it again", &|| Some(nan())),
        ("does not know the model", &|| Some(save(&models, training(&models, &["c", "d"])))),
        ("was trained on elsewhere, and this is", &|| Some(elsewhere())),
    ];
    for (said, predictor) in cases {
        let registry = serve(&models, predictor(), |_| {}).await;
        assert_eq!(clients(&registry).await, 60);
        let report = groups(&registry);
        assert_eq!(report.together, 0, "{said}: {report:?}");
        assert_eq!(report.models.len(), 2);
        for model in &report.models {
            let alone = model.alone.as_deref().unwrap_or_default();
            assert!(alone.contains(said), "{alone}");
        }
    }
}

#[tokio::test]
async fn a_model_unknown_to_the_predictor_runs_alone() {
    let models = models();
    models.add("c", 1, (1.0, 5.0), 4, "");
    let predictor = save(&models, training(&models, &["a", "b"]));
    let registry = serve(&models, Some(predictor), |_| {}).await;
    let other = tokio::spawn({
        let registry = registry.clone();
        async move {
            for _ in 0..10 {
                registry.infer(request("c", 1, 4)).await.unwrap();
            }
        }
    });
    assert_eq!(clients(&registry).await, 60);
    other.await.unwrap();
    let report = groups(&registry);
    let alone: Vec<(&str, bool)> = report.models.iter().map(|m| (&*m.model, m.alone.is_some())).collect();
    assert_eq!((alone, report.together > 0), (vec![("a", false), ("b", false), ("c", true)], true));
}

#[tokio::test]
async fn eight_models_under_a_predictor_of_pairs_run_in_pairs() {
    let (models, names) = (Models::new(), ["a", "b", "c", "d", "e", "f", "g", "h"]);
    names.iter().for_each(|name| models.add(name, 1, (1.0, 5.0), 4, ""));
    let predictor = save(&models, training(&models, &names));
    let registry = serve(&models, Some(predictor), |_| {}).await;
    let client = |name: &'static str| {
        let registry = registry.clone();
        tokio::spawn(async move {
            for _ in 0..10 {
                registry.infer(request(name, 1, 4)).await.unwrap();
            }
        })
    };
    for client in names.map(client) {
        client.await.unwrap();
    }
    drained(&registry).await;
    let report = groups(&registry);
    assert!(report.models.len() == 8 && report.models.iter().all(|model| model.alone.is_none()), "{report:?}");
    // Operators of 80 requests in groups of two at most.
    assert!(report.together > 0 && report.groups >= 40, "{report:?}");
}

/// Tries until all requests come before the first run ends, which a busy machine may prevent.
const MOST_TRIES: usize = 100;

/// The order in which three models ran. Their requests came in the given order while another one
/// ran.
async fn order_of(order: GroupOrder) -> Vec<String> {
    let models = Models::new();
    for (name, takes_ms) in [("first", 300.0), ("long", 40.0), ("short", 5.0), ("urgent", 20.0)] {
        models.add(name, 1, (0.0, takes_ms), 4, "");
    }
    for _ in 0..MOST_TRIES {
        let registry = serve(&models, None, |options| options.device.order = order).await;
        let first = send(&registry, request("first", 1, 4)).await;
        let mut waiting = Vec::new();
        for (name, within) in [("long", 20_000), ("urgent", 10_000), ("short", 30_000)] {
            let registry = registry.clone();
            let mut answer =
                Box::pin(async move { registry.infer(with_timeout(request(name, 1, 4), ms(within))).await });
            // The request waits before the next one comes.
            let polled = std::future::poll_fn(|context| Poll::Ready(answer.as_mut().poll(context).is_pending())).await;
            assert!(polled);
            waiting.push(answer);
        }
        let all_wait_ns = registry.timeline(ms(0)).unwrap().now_ns;
        first.await.unwrap().unwrap();
        for answer in waiting {
            answer.await.unwrap();
        }
        drained(&registry).await;
        assert_eq!(groups(&registry).together, 0);
        // Answers of two runs may overtake each other on their way, so that the runs themselves are
        // looked at.
        let devices = registry.timeline(ms(600_000)).unwrap().devices;
        let runs =
            devices.into_iter().flat_map(|its| its.launches.into_iter().map(move |l| (l.end_ns, its.model.clone())));
        let mut runs: Vec<(u64, String)> = runs.collect();
        runs.sort_unstable();
        let mut ran: Vec<String> = Vec::new();
        let mut first_ended_ns = 0;
        for (end_ns, model) in runs {
            if model == "first" {
                first_ended_ns = end_ns;
            } else if !ran.contains(&model) {
                ran.push(model);
            }
        }
        // On a busy machine the first may have ended before all had come.
        if first_ended_ns > all_wait_ns {
            return ran;
        }
    }
    panic!("in none of {MOST_TRIES} tries had all requests come before the first run ended")
}

#[tokio::test]
async fn section_7_1_the_server_runs_the_baselines_in_their_order() {
    assert_eq!(order_of(GroupOrder::Fcfs).await, ["long", "urgent", "short"]);
    assert_eq!(order_of(GroupOrder::Sjf).await, ["short", "urgent", "long"]);
    assert_eq!(order_of(GroupOrder::Edf).await, ["urgent", "long", "short"]);
}

#[tokio::test]
#[cfg_attr(not(feature = "retraining"), ignore = "needs the feature retraining")]
async fn a_wrong_predictor_is_retrained_and_its_file_stays() {
    let models = models();
    let path = save(&models, training_of(&models, &["a", "b"], 60.0));
    let before = std::fs::read(&path).unwrap();
    let registry = serve(&models, Some(path.clone()), |options| options.rehearsal_cpu = 0.9).await;
    let mut rounds = 0;
    while groups(&registry).retraining.unwrap().adopted == 0 {
        clients(&registry).await;
        rounds += 1;
        // On a busy machine the thread that trains has hardly a turn.
        assert!(rounds < 3_000, "{:?}", groups(&registry));
    }
    let report = groups(&registry);
    let retraining = report.retraining.unwrap();
    assert!(retraining.held_out >= 48 && retraining.before.unwrap() > retraining.after.unwrap(), "{report:?}");
    assert!(report.mean_error.unwrap() < 5.0, "60 ms in place of 6 are off by 9: {report:?}");
    assert!(metric(&registry, "downbeat_predictor_adoptions_total", "") >= 1.0);
    assert_eq!(std::fs::read(path).unwrap(), before);
    // The running server goes on.
    clients(&registry).await;
    let without = serve(&models, None, |options| options.rehearsal_cpu = 0.9).await;
    clients(&without).await;
    assert_eq!(groups(&without).retraining, None);
}
