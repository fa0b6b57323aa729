//! The rollout of a new version: its share of requests, its faults, its copies, and its end.

use std::path::Path;

use downbeat_core::rollout::{RolloutChange, RolloutState};
use downbeat_core::tensor::DataType;
use downbeat_models::registry::Registry;
use downbeat_protocol::{InferRequest, Parameter};
use downbeat_service::error::ServiceError;
use downbeat_service::options::EngineChoice;
use downbeat_service::report::rollout::{ASKS_FOR_NEW, RolloutReport};
use downbeat_service::service::{LoadOverrides, Service};

use crate::loading::{engines, load, open, options, request};
use crate::model::{
    FLOAT, ModelProto, TensorProto, ValueInfoProto, floats, folder, identity, int, model, node, value, write,
};
use crate::serving::{Models, metric, ms, until, with_timeout};

const INT64: i32 = 7;

/// Writes a version of the model `m`.
fn add(repository: &Path, version: u64, model: &ModelProto) {
    let folder = repository.join("m").join(version.to_string());
    std::fs::create_dir_all(&folder).unwrap();
    write(&folder, "model.onnx", model);
}

/// The configuration of a rollout by these terms.
fn config(terms: &str) -> String {
    format!("parameters {{ key: \"rollout\" value {{ string_value: '{terms}' }} }}")
}

fn configure(repository: &Path, terms: &str) {
    std::fs::write(repository.join("m/config.pbtxt"), config(terms)).unwrap();
}

/// `y = f(x)` of `[-1, 4]`.
fn changed(op: &str, factor: f32) -> ModelProto {
    let (input, output) = (value("x", FLOAT, &[-1, 4]), value("y", FLOAT, &[-1, 4]));
    model(vec![node(op, &["x", "factor"], &["y"])], vec![floats("factor", &[], &[factor])], vec![input], vec![output])
}

/// `y` is the element `x` of a table with so many elements. A larger `x` fails.
fn table(elements: &[f32]) -> ModelProto {
    let weights: Vec<TensorProto> = vec![floats("table", &[elements.len() as i64], elements)];
    let (input, output): (ValueInfoProto, _) = (value("x", INT64, &[-1, 1]), value("y", FLOAT, &[-1, 1]));
    model(vec![node("Gather", &["table", "x"], &["y"])], weights, vec![input], vec![output])
}

/// `y` of `[-1, 8]`.
fn twice() -> ModelProto {
    let mut join = node("Concat", &["x", "x"], &["y"]);
    join.attribute.push(int("axis", 1));
    let (input, output) = (value("x", FLOAT, &[-1, 4]), value("y", FLOAT, &[-1, 8]));
    model(vec![join], vec![], vec![input], vec![output])
}

fn of_floats() -> InferRequest {
    let data = [1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|number| number.to_le_bytes()).collect();
    request("m", DataType::Fp32, &[1, 4], data)
}

fn of_index(index: i64) -> InferRequest {
    request("m", DataType::Int64, &[1, 1], index.to_le_bytes().to_vec())
}

async fn answered_by(registry: &Registry, request: InferRequest) -> String {
    registry.infer(request).await.unwrap().model_version
}

fn report(registry: &Registry) -> RolloutReport {
    registry.rollout("m").unwrap()
}

fn change_state(registry: &Registry, state: RolloutState) -> RolloutReport {
    registry.change_rollout("m", &RolloutChange { state: Some(state), ..RolloutChange::default() }).unwrap()
}

#[tokio::test]
async fn the_new_version_takes_its_share_and_the_requests_that_ask_for_it() {
    let folder = folder();
    add(folder.path(), 1, &identity(FLOAT, &[-1, 4]));
    add(folder.path(), 2, &changed("Mul", 2.0));
    configure(folder.path(), r#"{"share": 0.25, "header": "X-Canary"}"#);
    let registry = open(options(folder.path(), EngineChoice::Rten));
    load(&registry, "m").await.unwrap();
    let mut by_new = 0;
    for _ in 0..40 {
        by_new += usize::from(answered_by(&registry, of_floats()).await == "2");
    }
    assert!((8..=12).contains(&by_new), "{by_new} of 40");
    let mut asks = of_floats();
    asks.parameters.insert(ASKS_FOR_NEW.to_owned(), Parameter::Bool(true));
    assert_eq!(answered_by(&registry, asks).await, "2");
    for version in ["1", "2"] {
        let named = InferRequest { model_version: version.to_owned(), ..of_floats() };
        assert_eq!(answered_by(&registry, named).await, version, "a named version is no part of the rollout");
    }
    assert_eq!(registry.rollout_header("m").as_deref(), Some("X-Canary"));
    let seen = report(&registry);
    assert_eq!((seen.state, seen.old.version.as_str(), seen.new.version.as_str()), (RolloutState::Running, "1", "2"));
    assert_eq!(seen.new.requests.in_time, by_new as u64 + 1);
    assert_eq!(metric(&registry, "downbeat_rollout_requests_total", "version=\"1\""), (40 - by_new) as f64);
    assert_eq!(metric(&registry, "downbeat_rollout_state", "state=\"running\""), 1.0);

    let ids = async |share: f64| {
        let change = RolloutChange { share: Some(share), ..RolloutChange::default() };
        registry.change_rollout("m", &change).unwrap();
        let mut new = Vec::new();
        for number in 0..20 {
            let request = InferRequest { id: format!("user-{number}"), ..of_floats() };
            if answered_by(&registry, request).await == "2" {
                new.push(number);
            }
        }
        new
    };
    let few = ids(0.3).await;
    assert_eq!(few, ids(0.3).await, "a request with the same id goes the same way");
    let more = ids(0.8).await;
    assert!(few.len() < more.len() && few.iter().all(|number| more.contains(number)));
    let wrong = registry.change_rollout("m", &RolloutChange { share: Some(-1.0), ..RolloutChange::default() });
    assert!(wrong.unwrap_err().to_string().contains("share is -1; must be from 0 to 1"));
}

#[tokio::test]
async fn a_request_that_the_new_version_fails_is_answered_by_the_old_one() {
    for engine in engines() {
        let folder = folder();
        add(folder.path(), 1, &table(&[5.0, 6.0]));
        add(folder.path(), 2, &table(&[5.0]));
        configure(folder.path(), r#"{"share": 1}"#);
        let registry = open(options(folder.path(), engine));
        load(&registry, "m").await.unwrap();
        assert_eq!(answered_by(&registry, of_index(0)).await, "2");
        let answer = registry.infer(of_index(1)).await.unwrap();
        assert_eq!((answer.model_version.as_str(), &answer.outputs[0].data[..]), ("1", &6.0_f32.to_le_bytes()[..]));
        // Both versions fail: that is the request's fault.
        registry.infer(of_index(9)).await.unwrap_err();
        let wrong = request("m", DataType::Fp32, &[1, 4], vec![0; 16]);
        assert!(matches!(registry.infer(wrong).await, Err(ServiceError::InvalidArgument(_))));
        let counts = report(&registry).new.requests;
        assert_eq!((counts.in_time, counts.failed), (1, 1), "{counts:?}");
        for _ in 0..98 {
            assert_eq!(answered_by(&registry, of_index(1)).await, "1");
        }
        let seen = report(&registry);
        assert_eq!(seen.state, RolloutState::RolledBack);
        assert!(seen.reason.contains("of the new version's requests were answered in time"), "{}", seen.reason);
        assert_eq!(answered_by(&registry, of_index(0)).await, "1");
        assert_eq!(metric(&registry, "downbeat_rollout_state", "state=\"rolled_back\""), 1.0);
        assert_eq!(metric(&registry, "downbeat_rollout_requests_total", "failed"), 99.0);
    }
}

#[tokio::test]
async fn a_client_never_sees_an_answer_of_another_shape() {
    for engine in engines() {
        let folder = folder();
        add(folder.path(), 1, &identity(FLOAT, &[-1, 4]));
        add(folder.path(), 2, &twice());
        configure(folder.path(), r#"{"share": 1}"#);
        let registry = open(options(folder.path(), engine));
        load(&registry, "m").await.unwrap();
        let answer = registry.infer(of_floats()).await.unwrap();
        assert_eq!((answer.model_version.as_str(), &answer.outputs[0].shape[..]), ("1", &[1_i64, 4][..]));
        assert_eq!(report(&registry).new.requests.failed, 1);
    }
}

#[tokio::test]
async fn a_new_version_that_is_too_slow_for_the_deadline_is_rolled_back() {
    let models = Models::new();
    models.add("m", 1, (0.0, 0.01), 4, "");
    models.add("m", 2, (0.0, 3_000.0), 4, &config(r#"{"share": 1, "roll_back": {"least_requests": 20}}"#));
    let registry = models.serve(|options| options.profiling.budget = downbeat_core::Duration::ZERO).await;
    for _ in 0..20 {
        // Version 2 takes longer than that, so its queue refuses the request at once.
        let _ = registry.infer(with_timeout(crate::serving::request("m", 1, 4), ms(2_000))).await;
    }
    let seen = report(&registry);
    assert_eq!((seen.state, seen.new.requests.failed), (RolloutState::RolledBack, 20), "{seen:?}");
    assert_eq!(answered_by(&registry, crate::serving::request("m", 1, 4)).await, "1");
}

#[tokio::test]
async fn copies_are_compared_and_never_sent() {
    for (factor, outcome) in [(1.0001, "in_time"), (2.0, "differed")] {
        let folder = folder();
        add(folder.path(), 1, &identity(FLOAT, &[-1, 4]));
        add(folder.path(), 2, &changed("Mul", factor));
        configure(folder.path(), r#"{"share": 1, "shadow": true, "roll_back": {"least_requests": 10}}"#);
        let registry = open(options(folder.path(), EngineChoice::Rten));
        load(&registry, "m").await.unwrap();
        for number in 1..=10 {
            let answer = registry.infer(of_floats()).await.unwrap();
            assert_eq!(
                (answer.model_version.as_str(), &answer.outputs[0].data[..4]),
                ("1", &1.0_f32.to_le_bytes()[..])
            );
            let copies = || metric(&registry, "downbeat_rollout_requests_total", "version=\"2\"");
            until(|| copies() >= f64::from(number)).await;
        }
        assert_eq!(metric(&registry, "downbeat_rollout_requests_total", outcome) as u64 % 10, 0);
        let seen = report(&registry);
        let is_alike = outcome == "in_time";
        assert_eq!(seen.state, if is_alike { RolloutState::Running } else { RolloutState::RolledBack }, "{seen:?}");
        assert_eq!(seen.new.requests.differed, if is_alike { 0 } else { 10 });
    }
}

#[tokio::test]
async fn a_rollout_ends_by_request_and_its_state_outlives_loads_of_the_same_files() {
    let folder = folder();
    add(folder.path(), 1, &identity(FLOAT, &[-1, 4]));
    add(folder.path(), 2, &changed("Mul", 2.0));
    configure(folder.path(), r#"{"header": "x-canary"}"#);
    let registry = open(options(folder.path(), EngineChoice::Rten));
    load(&registry, "m").await.unwrap();
    assert_eq!(answered_by(&registry, of_floats()).await, "1");
    change_state(&registry, RolloutState::Finished);
    assert_eq!(answered_by(&registry, of_floats()).await, "2");
    registry.load_again("m").await;
    assert_eq!(
        (report(&registry).state, answered_by(&registry, of_floats()).await),
        (RolloutState::Finished, "2".into())
    );
    change_state(&registry, RolloutState::RolledBack);
    load(&registry, "m").await.unwrap();
    assert_eq!((report(&registry).state, report(&registry).reason), (RolloutState::RolledBack, "by request".into()));
    // A third version begins a rollout of its own.
    add(folder.path(), 3, &changed("Mul", 3.0));
    load(&registry, "m").await.unwrap();
    let seen = report(&registry);
    assert_eq!((seen.state, seen.old.version.as_str(), seen.new.version.as_str()), (RolloutState::Running, "2", "3"));
}

#[tokio::test]
async fn the_old_version_serves_until_the_new_one_is_ready() {
    let folder = folder();
    add(folder.path(), 1, &identity(FLOAT, &[-1, 4]));
    let registry = open(options(folder.path(), EngineChoice::Rten));
    load(&registry, "m").await.unwrap();
    let message = registry.rollout("m").unwrap_err().to_string();
    assert!(message.contains("model 'm' has no rollout"), "{message}");
    std::fs::create_dir_all(folder.path().join("m/2")).unwrap();
    std::fs::write(folder.path().join("m/2/model.onnx"), "no model").unwrap();
    configure(folder.path(), r#"{"share": 1}"#);
    load(&registry, "m").await.unwrap_err();
    assert_eq!(answered_by(&registry, of_floats()).await, "1", "a broken version changes nothing");
    // The configuration may come with the load request.
    add(folder.path(), 2, &changed("Mul", 2.0));
    let json = r#"{"parameters": {"rollout": {"string_value": "{\"share\": 1}"}}}"#;
    let overrides = LoadOverrides { config: Some(json.to_owned()), ..LoadOverrides::default() };
    let mut loaded = std::pin::pin!(registry.load("m", overrides));
    let mut versions = Vec::new();
    loop {
        tokio::select! {
            biased;
            done = &mut loaded => break done.unwrap(),
            version = answered_by(&registry, of_floats()) => versions.push(version),
        }
    }
    assert!(versions.is_sorted(), "{versions:?}");
    assert_eq!(answered_by(&registry, of_floats()).await, "2");
}

#[tokio::test]
async fn a_rollout_without_an_older_version_serves_the_only_one() {
    let folder = folder();
    add(folder.path(), 1, &identity(FLOAT, &[-1, 4]));
    configure(folder.path(), r#"{"share": 1}"#);
    let registry = open(options(folder.path(), EngineChoice::Rten));
    load(&registry, "m").await.unwrap();
    assert_eq!(answered_by(&registry, of_floats()).await, "1");
    assert!(registry.rollout("m").unwrap_err().to_string().contains("load two versions"));
}
