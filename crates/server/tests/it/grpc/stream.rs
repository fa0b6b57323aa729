//! `ModelStreamInfer`.

use downbeat_frontend::grpc::GrpcOptions;
use downbeat_protocol::inference as pb;
use downbeat_protocol::inference::infer_parameter::ParameterChoice;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use super::server::{Client, Server, bytes, check_good, input, int64, parameter, simple, string};

async fn open(client: &mut Client) -> (mpsc::Sender<pb::ModelInferRequest>, Streaming<pb::ModelStreamInferResponse>) {
    let (sender, receiver) = mpsc::channel(10_000);
    let answers = client.model_stream_infer(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    (sender, answers)
}

fn held(id: &str) -> pb::ModelInferRequest {
    let (mut request, _) = simple(id);
    request.parameters.insert("hold".into(), parameter(ParameterChoice::BoolParam(true)));
    request
}

#[tokio::test]
async fn answers_come_in_the_order_of_the_requests() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let (sender, mut answers) = open(&mut client).await;
    // Earlier requests take longer.
    for i in 0..50 {
        let (mut request, _) = simple(&i.to_string());
        request.parameters.insert("delay_ms".into(), int64(50 - i));
        sender.send(request).await.unwrap();
    }
    drop(sender);
    for i in 0..50 {
        let answer = answers.message().await.unwrap().unwrap();
        assert_eq!(answer.error_message, "");
        let response = answer.infer_response.unwrap();
        assert_eq!(response.id, i.to_string());
        assert_eq!(response.raw_output_contents[0], bytes(&simple(&response.id).1));
        assert_eq!(response.parameters["triton_final_response"], parameter(ParameterChoice::BoolParam(true)));
    }
    assert!(answers.message().await.unwrap().is_none());
    assert!(server.service.most_running() > 1, "they run side by side");
}

#[tokio::test]
async fn an_error_is_the_answer_to_one_request() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let (sender, mut answers) = open(&mut client).await;
    let mut failing = simple("failing").0;
    failing.parameters.insert("fail".into(), string("queue_full"));
    let mut truncated = simple("truncated").0;
    truncated.raw_input_contents[1].truncate(7);
    for request in [simple("first").0, failing, truncated, simple("last").0] {
        sender.send(request).await.unwrap();
    }
    let mut next = async || answers.message().await.unwrap().unwrap();
    assert_eq!(next().await.infer_response.unwrap().id, "first");
    let failed = next().await;
    assert_eq!(failed.error_message, "asked to fail with queue_full");
    assert_eq!(failed.infer_response.unwrap().id, "failing");
    let truncated = next().await;
    assert_eq!(truncated.error_message, "input 'INPUT1': INT32 of shape [1, 16] is 64 bytes, got 7 bytes");
    assert_eq!(truncated.infer_response.unwrap().id, "truncated");
    assert_eq!(next().await.infer_response.unwrap().id, "last");
}

#[tokio::test]
async fn a_stream_that_is_dropped_cancels_its_requests() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let (sender, answers) = open(&mut client).await;
    for i in 0..20 {
        sender.send(held(&i.to_string())).await.unwrap();
    }
    server.service.wait_for_started(20).await;
    drop((sender, answers));
    server.service.wait_for_cancelled(20).await;
    check_good(&mut client).await;
}

#[tokio::test]
async fn no_more_than_the_bound_are_under_way() {
    let options = GrpcOptions { max_stream_requests: 4, ..Default::default() };
    let server = Server::with_options(options).await;
    let mut client = server.client().await;
    let (sender, mut answers) = open(&mut client).await;
    for i in 0..100 {
        sender.send(held(&i.to_string())).await.unwrap();
    }
    drop(sender);
    server.service.wait_for_started(4).await;
    // The stream holds up neither another stream nor a single call.
    let (other, mut other_answers) = open(&mut client).await;
    other.send(simple("other").0).await.unwrap();
    assert_eq!(other_answers.message().await.unwrap().unwrap().infer_response.unwrap().id, "other");
    drop((other, other_answers));
    check_good(&mut client).await;
    server.service.release();
    for i in 0..100 {
        assert_eq!(answers.message().await.unwrap().unwrap().infer_response.unwrap().id, i.to_string());
    }
    // Four requests of this stream, and one of another.
    assert!(server.service.most_running() <= 5, "{}", server.service.most_running());
}

#[tokio::test]
async fn a_message_over_the_limit_ends_the_stream_after_the_answers_before_it() {
    let options = GrpcOptions { max_message_bytes: 4096, ..Default::default() };
    let server = Server::with_options(options).await;
    let mut client = server.client().await;
    let (sender, mut answers) = open(&mut client).await;
    sender.send(simple("small").0).await.unwrap();
    let mut large = simple("large").0;
    large.raw_input_contents[0] = vec![0; 5000].into();
    sender.send(large).await.unwrap();
    assert_eq!(answers.message().await.unwrap().unwrap().infer_response.unwrap().id, "small");
    let status = answers.message().await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("the limit is 4096 bytes"), "{}", status.message());
    check_good(&mut client).await;
}

/// A request to the decoupled model, with one answer for each value.
fn repeat(id: &str, values: &[i32]) -> pb::ModelInferRequest {
    pb::ModelInferRequest {
        model_name: "repeat".into(),
        id: id.into(),
        inputs: vec![input("IN", "INT32", &[values.len() as i64])],
        raw_input_contents: vec![bytes(values).into()],
        ..Default::default()
    }
}

fn with(mut request: pb::ModelInferRequest, name: &str, value: pb::InferParameter) -> pb::ModelInferRequest {
    request.parameters.insert(name.into(), value);
    request
}

fn yes() -> pb::InferParameter {
    parameter(ParameterChoice::BoolParam(true))
}

/// An answer as its id, the values of `OUT`, the error and the mark of the end.
fn short(answer: pb::ModelStreamInferResponse) -> (String, Vec<u8>, String, Option<bool>) {
    let response = answer.infer_response.unwrap();
    let mark = response.parameters.get("triton_final_response").map(|mark| *mark == yes());
    let out = response.raw_output_contents.first().map(|data| data.to_vec()).unwrap_or_default();
    (response.id, out, answer.error_message, mark)
}

/// All answers of a stream of these requests.
async fn answers(
    client: &mut Client,
    requests: Vec<pb::ModelInferRequest>,
) -> Vec<(String, Vec<u8>, String, Option<bool>)> {
    let (sender, mut answers) = open(client).await;
    for request in requests {
        sender.send(request).await.unwrap();
    }
    drop(sender);
    let mut all = Vec::new();
    while let Some(answer) = answers.message().await.unwrap() {
        all.push(short(answer));
    }
    all
}

fn value(id: &str, value: i32, mark: bool) -> (String, Vec<u8>, String, Option<bool>) {
    (id.to_owned(), bytes(&[value]), String::new(), Some(mark))
}

#[tokio::test]
async fn a_decoupled_model_gives_any_number_of_answers() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let three = [value("3", 5, false), value("3", 6, false), value("3", 7, false)];
    assert_eq!(answers(&mut client, vec![repeat("3", &[5, 6, 7])]).await, three);
    let with_last = with(repeat("3", &[5, 6, 7]), "end", string("with_last"));
    assert_eq!(
        answers(&mut client, vec![with_last]).await,
        [value("3", 5, false), value("3", 6, false), value("3", 7, true)]
    );
    assert_eq!(answers(&mut client, vec![repeat("0", &[])]).await, []);
    check_good(&mut client).await;
}

#[tokio::test]
async fn the_end_is_an_answer_of_its_own_if_the_client_asks() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let asks = |request| with(request, "triton_enable_empty_final_response", yes());
    let end = |id: &str| (id.to_owned(), Vec::new(), String::new(), Some(true));
    assert_eq!(answers(&mut client, vec![asks(repeat("0", &[]))]).await, [end("0")]);
    assert_eq!(answers(&mut client, vec![asks(repeat("1", &[5]))]).await, [value("1", 5, false), end("1")]);
    // The last answer has the mark already.
    let with_last = with(asks(repeat("1", &[5])), "end", string("with_last"));
    assert_eq!(answers(&mut client, vec![with_last]).await, [value("1", 5, true)]);
    // A model with one answer does not see the parameter.
    let one = answers(&mut client, vec![asks(simple("one").0)]).await;
    assert_eq!((one.len(), one[0].3), (1, Some(true)));
    let wrong = with(repeat("w", &[5]), "triton_enable_empty_final_response", int64(1));
    let wrong = answers(&mut client, vec![wrong]).await;
    assert!(wrong[0].2.contains("expected bool_param"), "{wrong:?}");
}

#[tokio::test]
async fn errors_are_among_the_answers_of_a_decoupled_model() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let failed = with(repeat("f", &[5, 6, 7]), "fail_at", int64(1));
    let failure = ("f".to_owned(), Vec::new(), "answer 1 was asked to fail".to_owned(), Some(false));
    assert_eq!(answers(&mut client, vec![failed]).await, [value("f", 5, false), failure, value("f", 7, false)]);
    let never = answers(&mut client, vec![with(repeat("n", &[5]), "end", string("never"))]).await;
    assert_eq!(never[0], value("n", 5, false));
    assert_eq!(
        (never[1].2.as_str(), never[1].3),
        ("the model stopped before the last answer of this request", Some(true))
    );
    let mut early = repeat("e", &[5]);
    early.inputs.clear();
    early.raw_input_contents.clear();
    let early = answers(&mut client, vec![early, repeat("later", &[5])]).await;
    assert_eq!((early[0].0.as_str(), early[0].2.as_str()), ("e", "model 'repeat' has one input, 'IN'"));
    assert_eq!(early[1], value("later", 5, false));
}

#[tokio::test]
async fn answers_of_a_decoupled_model_do_not_wait_for_other_requests() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let (sender, mut answers) = open(&mut client).await;
    sender.send(held("held")).await.unwrap();
    for id in ["a", "b"] {
        sender.send(repeat(id, &[1, 2, 3])).await.unwrap();
    }
    let mut seen = [Vec::new(), Vec::new()];
    for _ in 0..6 {
        let (id, out, ..) = short(answers.message().await.unwrap().unwrap());
        seen[usize::from(id == "b")].push(out[0]);
    }
    assert_eq!(seen, [[1, 2, 3], [1, 2, 3]]);
    server.service.release();
    assert_eq!(short(answers.message().await.unwrap().unwrap()).0, "held");
}

#[tokio::test]
async fn decoupled_requests_count_for_the_bound_until_their_end() {
    let options = GrpcOptions { max_stream_requests: 1, ..Default::default() };
    let server = Server::with_options(options).await;
    let mut client = server.client().await;
    // Some requests have no answer at all, and still make room for the next.
    let ids: Vec<String> = (0..50).map(|i| i.to_string()).collect();
    let requests = ids.iter().map(|id| repeat(id, if id.ends_with('7') { &[1, 2] } else { &[] })).collect();
    let seen: Vec<String> = answers(&mut client, requests).await.into_iter().map(|answer| answer.0).collect();
    assert_eq!(seen, ["7", "7", "17", "17", "27", "27", "37", "37", "47", "47"]);
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_work_of_a_decoupled_model() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let (sender, mut answers) = open(&mut client).await;
    for id in ["a", "b", "c"] {
        sender.send(with(repeat(id, &[1; 100_000]), "delay_ms", int64(1))).await.unwrap();
    }
    answers.message().await.unwrap().unwrap();
    drop((sender, answers));
    server.service.repeat.wait_for_left(3).await;
    check_good(&mut client).await;
}

#[tokio::test]
async fn a_slow_reader_holds_up_its_request_and_ends_it() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let (sender, mut answers) = open(&mut client).await;
    let many = with(repeat("slow", &[1; 10_000]), "bytes", int64(1 << 20));
    sender.send(with(many, "patience_ms", int64(50))).await.unwrap();
    // Nobody reads: the model waits, and then its request ends.
    server.service.repeat.wait_for_left(1).await;
    let sent = *server.service.repeat.sent.borrow();
    assert!(sent < 200, "{sent} answers of 1 MiB are somewhere");
    check_good(&mut client).await;
    let last = loop {
        let (_, _, error, mark) = short(answers.message().await.unwrap().unwrap());
        if mark == Some(true) {
            break error;
        }
    };
    assert!(last.starts_with("the client took no answer for 50ms"), "{last}");
}

#[tokio::test]
async fn one_answer_of_a_decoupled_model_is_refused() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let status = client.model_infer(repeat("one", &[1])).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    assert_eq!(
        status.message(),
        "ModelInfer RPC doesn't support models with decoupled transaction policy; send requests for model 'repeat' by \
         ModelStreamInfer"
    );
}
