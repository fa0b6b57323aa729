//! `ModelStreamInfer`.

use downbeat_frontend::grpc::GrpcOptions;
use downbeat_protocol::inference as pb;
use downbeat_protocol::inference::infer_parameter::ParameterChoice;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use super::server::{Client, Server, bytes, check_good, int64, parameter, simple, string};

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
