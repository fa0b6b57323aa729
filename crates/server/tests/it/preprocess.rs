//! Pictures and texts on their way to a model's queue: refused before they are decoded, queued in
//! order once they are, dropped when their client goes.

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_models::registry::Registry;
use downbeat_protocol::{InferRequest, InferTensor};
use downbeat_service::error::ServiceError;
use downbeat_service::options::{ModelOptions, ServerOptions, Step};
use downbeat_service::service::{LoadOverrides, Service};
use serde_json::json;

use crate::serving::{self, Models, metric, ms, send, until, with_timeout};

const PHOTO: &[u8] = include_bytes!("../../../../examples/preprocess/photo.jpg");
/// The header of the damaged picture is whole.
const DAMAGED: &[u8] = PHOTO.split_at(2_500).0;

/// A model of pictures of 2 x 2 pixels that takes `latency_ms` for each batch.
fn model(models: &Models, latency_ms: f64, config: &str) {
    models.add("m", 1, (0.01, latency_ms), 1, config);
    let file = models.path().join("m/1/model.emulated.toml");
    let text = std::fs::read_to_string(&file)
        .unwrap()
        .replace("dims = [-1, 1]\n[[outputs]]", "dims = [-1, 2, 2, 3]\n[[outputs]]");
    assert!(text.contains("[-1, 2, 2, 3]"), "{text}");
    std::fs::write(file, text).unwrap();
}

fn steps() -> Vec<Step> {
    serde_json::from_value(json!([{ "step": "decode" }, { "step": "resize", "size": [2, 2] }])).unwrap()
}

async fn serve(models: &Models, change: impl FnOnce(&mut ServerOptions)) -> Registry {
    models
        .serve(|options| {
            options.preprocess_threads = 1;
            options.models.insert("m".into(), ModelOptions { preprocess: Some(steps()), ..Default::default() });
            change(options);
        })
        .await
}

/// A request of tensors, without preprocessing.
fn tensors() -> InferRequest {
    let mut request = serving::request("m", 1, 12);
    request.inputs[0].shape = vec![1, 2, 2, 3];
    request
}

fn request(items: &[&[u8]]) -> InferRequest {
    let elements = items.iter().flat_map(|item| [&(item.len() as u32).to_le_bytes()[..], *item].concat());
    let data: Bytes = elements.collect::<Vec<u8>>().into();
    let shape = vec![items.len() as i64];
    let (name, datatype) = ("image".to_owned(), DataType::Bytes);
    let input = InferTensor { name, datatype, shape, parameters: Default::default(), data };
    InferRequest { model_name: "m".into(), inputs: vec![input], ..InferRequest::default() }
}

fn bomb() -> Vec<u8> {
    let mut header = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
    header.extend(100_000_u32.to_be_bytes());
    header.extend(100_000_u32.to_be_bytes());
    header
}

#[tokio::test]
async fn a_picture_is_an_item_and_a_bad_one_is_answered_alone() {
    let models = Models::new();
    model(&models, 1.0, "");
    let registry = serve(&models, |_| {}).await;
    let (one, two, bad, bombed) = tokio::join!(
        registry.infer(request(&[PHOTO])),
        registry.infer(request(&[PHOTO, PHOTO])),
        registry.infer(request(&[PHOTO, DAMAGED])),
        registry.infer(request(&[&bomb()])),
    );
    assert_eq!((&one.unwrap().outputs[0].shape[..], &two.unwrap().outputs[0].shape[..]), (&[1, 1][..], &[2, 1][..]));
    let Err(ServiceError::InvalidArgument(said)) = bad else { panic!("{bad:?}") };
    assert!(said.starts_with("model 'm': item 1 of input 'image'"), "{said}");
    let Err(ServiceError::InvalidArgument(said)) = bombed else { panic!("{bombed:?}") };
    assert!(said.contains("100000 x 100000") && said.contains("64000000"), "{said}");
    assert_eq!(registry.infer(request(&[PHOTO])).await.unwrap().outputs[0].shape, [1, 1]);
}

#[tokio::test]
async fn what_finds_no_place_in_the_queue_is_refused_before_it_is_decoded() {
    let models = Models::new();
    model(&models, 300.0, "");
    let registry = serve(&models, |options| options.max_queue_size = 3).await;
    let running = send(&registry, tensors()).await;
    // The request has its places in the queue while it is decoded, and while it waits.
    let two = send(&registry, request(&[PHOTO, PHOTO])).await;
    // These pictures could not be decoded, but the server refuses the request before it tries.
    let too_much = registry.infer(request(&[DAMAGED, DAMAGED])).await.unwrap_err();
    let one = send(&registry, tensors()).await;
    let full = registry.infer(request(&[DAMAGED])).await.unwrap_err();
    for error in [too_much, full] {
        let ServiceError::QueueFull { message, .. } = error else { panic!("{error:?}") };
        assert_eq!(message, "Exceeds maximum queue size: the queue of model 'm' holds at most 3; try again later");
    }
    for answer in [running, two, one] {
        answer.await.unwrap().unwrap();
    }
    assert_eq!(metric(&registry, "downbeat_requests_not_answered_total", "queue_full"), 2.0);
    registry.infer(request(&[PHOTO, PHOTO, PHOTO])).await.unwrap();
}

#[tokio::test]
async fn an_impossible_deadline_is_refused_before_decoding() {
    let models = Models::new();
    model(&models, 400.0, "");
    let registry = serve(&models, |_| {}).await;
    let running = send(&registry, tensors()).await;
    let answer = send(&registry, with_timeout(request(&[DAMAGED]), ms(500))).await;
    assert!(answer.is_finished(), "known at arrival, said at arrival");
    let error = answer.await.unwrap().unwrap_err();
    assert!(!running.is_finished());
    assert!(error.to_string().contains("because all devices are busy"), "{error}");
    running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_that_goes_away_gives_its_place_back() {
    let models = Models::new();
    model(&models, 200.0, "");
    let registry = serve(&models, |options| options.max_queue_size = 1).await;
    let running = send(&registry, tensors()).await;
    let gone = send(&registry, request(&[PHOTO])).await;
    gone.abort();
    until(|| metric(&registry, "downbeat_requests_not_answered_total", "cancelled") == 1.0).await;
    let next = send(&registry, request(&[PHOTO])).await;
    running.await.unwrap().unwrap();
    next.await.unwrap().unwrap();
    assert_eq!(registry.statistics("m", "").unwrap()[0].execution_count, 2);
}

#[tokio::test]
async fn pictures_of_one_batch_are_those_that_are_ready_when_it_leaves() {
    let models = Models::new();
    // Much longer than two pictures take to decode, also on a busy machine.
    model(&models, 3_000.0, "");
    let registry = serve(&models, |_| {}).await;
    let running = send(&registry, tensors()).await;
    let pictures = [send(&registry, request(&[PHOTO])).await, send(&registry, request(&[PHOTO])).await];
    running.await.unwrap().unwrap();
    for answer in pictures {
        answer.await.unwrap().unwrap();
    }
    assert_eq!(registry.statistics("m", "").unwrap()[0].execution_count, 2, "decoded while the first ran");
}

#[tokio::test]
async fn steps_that_do_not_fit_the_model_keep_it_out() {
    let models = Models::new();
    models.add("m", 1, (0.01, 1.0), 4, "");
    let options = ModelOptions { preprocess: Some(steps()), ..Default::default() };
    let registry = models
        .serve(|all| {
            all.models.insert("m".into(), options);
            all.model_control = downbeat_service::options::ModelControl::Explicit { load: Vec::new() };
        })
        .await;
    let error = registry.load("m", LoadOverrides::default()).await.unwrap_err().to_string();
    assert!(
        error.contains("[models.m] preprocess: the steps give [2, 2, 3], but the model's input 'x' is FP32 [4]"),
        "{error}"
    );
}
