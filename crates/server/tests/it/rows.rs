//! A model whose rows depend on each other runs each request alone, however many clients ask at
//! once.

use downbeat_core::tensor::DataType;
use downbeat_models::registry::Registry;
use downbeat_protocol::InferRequest;
use downbeat_service::options::{BatchingChoice, EngineChoice, ModelOptions, ServerOptions};
use downbeat_service::service::Service;
use tempfile::TempDir;

use crate::lanes::numbers;
use crate::loading::{add, int, integers, load, open, options, request, varying};
use crate::model::{ModelProto, floats, folder, model, node};
use crate::serving::metric;

/// `y = softmax(x)` across the rows of a batch.
fn softmax_of_rows() -> ModelProto {
    let mut softmax = node("Softmax", &["x"], &["y"]);
    softmax.name = "across".to_owned();
    softmax.attribute = vec![int("axis", 0)];
    model(vec![softmax], vec![], vec![varying("x")], vec![varying("y")])
}

/// `y = 2 x`.
fn doubles() -> ModelProto {
    let nodes = vec![node("Add", &["x", "x"], &["y"])];
    model(nodes, vec![], vec![varying("x")], vec![varying("y")])
}

/// `y` is the request's own row of `x`, and the first row of the batch where the row begins below
/// -500. No rule of the graph covers indices that depend on the order of the requests, and no
/// made-up request is that small.
fn first_row_for_rare_rows() -> ModelProto {
    let mut shape = node("Shape", &["x"], &["shape"]);
    shape.attribute = vec![int("start", 0), int("end", 1)];
    let mut begins = node("Gather", &["x", "zero"], &["begins"]);
    begins.attribute = vec![int("axis", 1)];
    let mut own = node("Gather", &["x", "indices"], &["y"]);
    own.attribute = vec![int("axis", 0)];
    let nodes = vec![
        shape,
        node("Squeeze", &["shape", "axis"], &["count"]),
        node("Range", &["zero", "count", "one"], &["order"]),
        begins,
        node("Less", &["begins", "limit"], &["is_rare"]),
        node("Where", &["is_rare", "zero", "order"], &["indices"]),
        own,
    ];
    let weights = vec![
        integers("zero", &[], &[0]),
        integers("one", &[], &[1]),
        integers("axis", &[1], &[0]),
        floats("limit", &[], &[-500.0]),
    ];
    model(nodes, weights, vec![varying("x")], vec![varying("y")])
}

struct Served {
    folder: TempDir,
    registry: Registry,
}

/// A model `m` with this `config.pbtxt`, none if empty.
async fn served(model: &ModelProto, config: &str, change: impl FnOnce(&mut ServerOptions)) -> Served {
    let folder = folder();
    add(folder.path(), "m", model);
    if !config.is_empty() {
        std::fs::write(folder.path().join("m/config.pbtxt"), config).unwrap();
    }
    let mut options = options(folder.path(), EngineChoice::Rten);
    options.profiling.enabled = false;
    // However long the check and the requests take on a busy machine.
    options.max_queue_wait = downbeat_core::Duration::from_millis(3_600_000);
    options.profiling.budget = downbeat_core::Duration::from_millis(3_600_000);
    change(&mut options);
    let registry = open(options);
    load(&registry, "m").await.unwrap();
    Served { folder, registry }
}

fn batching(choice: BatchingChoice) -> impl FnOnce(&mut ServerOptions) {
    move |options| {
        options.models.insert("m".into(), ModelOptions { batching: Some(choice), ..ModelOptions::default() });
    }
}

impl Served {
    fn rows(&self) -> String {
        let config = self.registry.model_config("m", "").unwrap();
        config.parameters.get("downbeat_rows").map(|p| p.string_value.clone()).unwrap_or_default()
    }

    fn max_batch_size(&self) -> i32 {
        self.registry.model_config("m", "").unwrap().max_batch_size
    }

    fn reason(&self) -> String {
        self.registry.repository_index(false).remove(0).reason
    }

    /// Sends `count` requests of one row of `value` each, at once. Returns how many answers are not
    /// `expected`.
    async fn wrong(&self, count: usize, value: impl Fn(usize) -> f32, expected: impl Fn(f32) -> f32) -> usize {
        let ask = |value: f32| {
            let registry = self.registry.clone();
            tokio::spawn(async move { registry.infer(one(value)).await.unwrap() })
        };
        let asked: Vec<_> = (0..count).map(|i| (value(i), ask(value(i)))).collect();
        let mut wrong = 0;
        for (value, answer) in asked {
            let answer = numbers(&answer.await.unwrap().outputs[0].data);
            wrong += usize::from(answer != [expected(value); 3]);
        }
        wrong
    }
}

/// A request of one row.
fn one(value: f32) -> InferRequest {
    request("m", DataType::Fp32, &[1, 3], [value; 3].iter().flat_map(|n| n.to_le_bytes()).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_mixes_rows_runs_each_request_alone() {
    let served = served(&softmax_of_rows(), "", |_| ()).await;
    assert_eq!(served.max_batch_size(), 0);
    assert!(served.rows().starts_with("mixed: Softmax 'across': "), "{}", served.rows());
    assert!(
        served.reason().starts_with("requests run alone, not in batches: Softmax 'across': "),
        "{}",
        served.reason()
    );
    // A softmax over a single row gives 1.
    assert_eq!(served.wrong(288, |i| i as f32, |_| 1.0).await, 0);
    // The rows of one request belong together.
    let both = [0.0f32, 0.0, 0.0, 0.0, 0.0, 0.0].iter().flat_map(|n| n.to_le_bytes()).collect();
    let answer = served.registry.infer(request("m", DataType::Fp32, &[2, 3], both)).await.unwrap();
    assert_eq!(numbers(&answer.outputs[0].data), [0.5; 6]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_keeps_rows_apart_is_batched() {
    let served = served(&doubles(), "", |_| ()).await;
    assert_eq!((served.max_batch_size(), served.reason()), (32, String::new()));
    assert!(served.rows().starts_with("independent: "), "{}", served.rows());
    assert_eq!(served.wrong(64, |i| i as f32, |value| 2.0 * value).await, 0);
}

#[tokio::test]
async fn a_written_batch_size_is_obeyed_with_a_complaint() {
    let served = served(&softmax_of_rows(), "max_batch_size: 8", |_| ()).await;
    assert_eq!(served.max_batch_size(), 8);
    let said = "requests share batches of up to 8, as the configuration asks, and may change each other's answers: Softmax 'across': ";
    assert!(served.reason().starts_with(said), "{}", served.reason());
}

#[tokio::test]
async fn batching_always_and_never_win_over_the_graph() {
    let always = served(&softmax_of_rows(), "", batching(BatchingChoice::Always)).await;
    assert_eq!((always.max_batch_size(), always.rows()), (32, "batching is \"always\"".to_owned()));
    let said =
        "requests share batches of up to 32, as the configuration asks, and may change each other's answers: Softmax ";
    assert!(always.reason().starts_with(said), "{}", always.reason());
    let never = served(&doubles(), "", batching(BatchingChoice::Never)).await;
    assert_eq!((never.max_batch_size(), never.rows()), (0, "batching is \"never\"".to_owned()));
    assert_eq!(never.reason(), "requests run alone: batching is \"never\"");
}

/// The configuration has the dims of one item. A request may have any number of rows.
#[tokio::test]
async fn batching_never_keeps_the_shapes_of_a_written_batch_size() {
    let config = r#"
        max_batch_size: 4
        input [{ name: "x", data_type: TYPE_FP32, dims: [3] }]
        output [{ name: "y", data_type: TYPE_FP32, dims: [3] }]
        model_warmup [{ name: "w", batch_size: 2, inputs: { key: "x", value: { data_type: TYPE_FP32, dims: [3], zero_data: true } } }]
    "#;
    let served = served(&doubles(), config, batching(BatchingChoice::Never)).await;
    let config = served.registry.model_config("m", "").unwrap();
    assert_eq!(
        (config.max_batch_size, &config.input[0].dims[..], &config.output[0].dims[..]),
        (0, &[-1, 3][..], &[-1, 3][..])
    );
    for rows in [1, 4, 9] {
        let data = vec![1.5f32; 3 * rows].iter().flat_map(|n| n.to_le_bytes()).collect();
        let answer = served.registry.infer(request("m", DataType::Fp32, &[rows as i64, 3], data)).await.unwrap();
        assert_eq!(numbers(&answer.outputs[0].data), vec![3.0; 3 * rows]);
    }
}

/// Sends rounds of requests until the watch has looked at a wrong answer. On a busy machine the
/// watch gets little time, so that 500 rounds were too few.
const MOST_ROUNDS: usize = 20_000;

/// The user decided, so the server says that answers are wrong and goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_answer_in_service_is_counted() {
    let change = |options: &mut ServerOptions| {
        batching(BatchingChoice::Always)(options);
        options.row_check_every = 1;
    };
    let served = served(&first_row_for_rare_rows(), "", change).await;
    let found = || metric(&served.registry, "downbeat_row_checks_total", "result=\"different\"") > 0.0;
    for _ in 0..MOST_ROUNDS {
        served.wrong(16, |i| if i % 2 == 0 { i as f32 } else { -1000.0 - i as f32 }, |value| value).await;
        if found() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert!(found());
    drop(served.folder);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_answer_in_service_ends_shared_batches() {
    let served = served(&first_row_for_rare_rows(), "", |options| options.row_check_every = 1).await;
    assert_eq!(served.max_batch_size(), 32);
    assert!(served.rows().starts_with("independent: ") && served.rows().ends_with("alike, alone and together"));
    let rare = |i: usize| if i.is_multiple_of(2) { i as f32 } else { -1000.0 - i as f32 };
    let mut were_wrong = 0;
    let found = || metric(&served.registry, "downbeat_row_checks_total", "result=\"different\"") > 1.0;
    for _ in 0..MOST_ROUNDS {
        were_wrong += served.wrong(16, rare, |value| value).await;
        if found() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert!(found() && were_wrong > 0, "{were_wrong} answers were wrong");
    // From now on each request runs alone, first on the old version, then on one that makes no
    // batches.
    assert_eq!(served.wrong(64, rare, |value| value).await, 0);
    served.registry.part_mixed_rows().await;
    assert_eq!(served.max_batch_size(), 0);
    assert!(served.rows().starts_with("mixed: an answer in service was wrong "), "{}", served.rows());
    assert_eq!(served.wrong(64, rare, |value| value).await, 0);
    // A later load remembers.
    load(&served.registry, "m").await.unwrap();
    assert_eq!(served.max_batch_size(), 0);
}
