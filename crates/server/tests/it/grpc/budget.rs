//! The memory that messages hold: bounded for all together, and zero for a model that does not
//! exist.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use downbeat_frontend::grpc::GrpcOptions;
use downbeat_protocol::inference as pb;
use downbeat_service::budget::ByteBudget;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Code;
use tonic::codec::CompressionEncoding;

use super::server::{Server, check_good, input};

const MIB: usize = 1 << 20;

type Parts = UnboundedReceiverStream<Result<Frame<Bytes>, Infallible>>;

async fn server(limit: usize) -> (Server, Arc<ByteBudget>) {
    let budget = ByteBudget::new(limit as u64);
    let options = GrpcOptions { budget: Arc::clone(&budget), ..Default::default() };
    (Server::with_options(options).await, budget)
}

async fn connect(server: &Server) -> SendRequest<StreamBody<Parts>> {
    let stream = TcpStream::connect(server.address).await.unwrap();
    let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// A message to `model` with a tensor of `size` bytes, framed.
fn message(model: &str, size: usize) -> Bytes {
    let request = pb::ModelInferRequest {
        model_name: model.into(),
        inputs: vec![input("x", "UINT8", &[size as i64])],
        raw_input_contents: vec![vec![7; size].into()],
        ..Default::default()
    };
    let message = request.encode_to_vec();
    [&[0][..], &(message.len() as u32).to_be_bytes(), &message].concat().into()
}

type Call = (mpsc::UnboundedSender<Result<Frame<Bytes>, Infallible>>, tokio::task::JoinHandle<(Code, String)>);

/// Begins a call with the first half of a message. Returns a sender for the second half, and the
/// answer.
fn begin(connection: &SendRequest<StreamBody<Parts>>, message: &Bytes, method: &str) -> Call {
    let (sender, parts) = mpsc::unbounded_channel();
    sender.send(Ok(Frame::data(message.slice(..message.len() / 2)))).unwrap();
    let request = hyper::Request::post(format!("http://test/inference.GRPCInferenceService/{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(StreamBody::new(UnboundedReceiverStream::new(parts)))
        .unwrap();
    let mut connection = connection.clone();
    let answer = tokio::spawn(async move {
        let response = connection.send_request(request).await.unwrap();
        let head = response.headers().clone();
        let trailers = response.into_body().collect().await.unwrap().trailers().cloned();
        let status = tonic::Status::from_header_map(&trailers.unwrap_or(head)).unwrap();
        (status.code(), status.message().to_owned())
    });
    (sender, answer)
}

async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn half_messages_on_one_connection_are_bounded_by_the_budget() {
    let (server, budget) = server(8 * MIB).await;
    let connection = connect(&server).await;
    let half = message("echo", 4 * MIB);
    let mut calls: Vec<Call> = (0..10).map(|_| begin(&connection, &half, "ModelInfer")).collect();
    until(|| calls.iter().filter(|(_, answer)| answer.is_finished()).count() >= 7).await;
    assert!(budget.in_flight() <= 7 * MIB as u64, "{}", budget.in_flight());
    assert!(budget.refused() >= 7);
    check_good(&mut server.client().await).await;
    let (mut refused, mut kept) = (0, Vec::new());
    for (sender, answer) in calls.drain(..) {
        if !answer.is_finished() {
            kept.push((sender, answer));
            continue;
        }
        let (code, message) = answer.await.unwrap();
        assert_eq!(code, Code::ResourceExhausted, "{message}");
        assert!(message.contains("8388608") && message.contains("--max-in-flight-bytes"), "{message}");
        refused += 1;
    }
    assert!(refused >= 7 && !kept.is_empty());
    // A message that was admitted is answered once it is whole, as soon as there is room for it.
    let (sender, answer) = kept.remove(0);
    for (sender, answer) in kept {
        answer.abort();
        drop(sender);
    }
    until(|| budget.in_flight() <= 3 * MIB as u64).await;
    sender.send(Ok(Frame::data(half.slice(half.len() / 2..)))).unwrap();
    drop(sender);
    assert_eq!(answer.await.unwrap().0, Code::Ok);
    until(|| budget.in_flight() == 0).await;
}

#[tokio::test]
async fn half_a_message_for_an_unknown_model_is_answered_for_free() {
    let (server, budget) = server(64 * MIB).await;
    let connection = connect(&server).await;
    for _ in 0..5 {
        let (_sender, answer) = begin(&connection, &message("nope", 4 * MIB), "ModelInfer");
        let (code, message) = answer.await.unwrap();
        assert_eq!(code, Code::NotFound, "{message}");
        assert!(message.contains("nope"), "{message}");
        assert_eq!(budget.in_flight(), 0);
    }
    check_good(&mut server.client().await).await;
}

#[tokio::test]
async fn a_stream_goes_on_after_a_message_without_room() {
    let (server, budget) = server(MIB).await;
    let mut client = server.client().await;
    let (sender, requests) = mpsc::channel(8);
    let requests = tokio_stream::wrappers::ReceiverStream::new(requests);
    let mut answers = client.model_stream_infer(requests).await.unwrap().into_inner();
    let large = pb::ModelInferRequest {
        model_name: "echo".into(),
        inputs: vec![input("x", "UINT8", &[2 * MIB as i64])],
        raw_input_contents: vec![vec![0; 2 * MIB].into()],
        ..Default::default()
    };
    for request in [super::server::simple("first").0, large, super::server::simple("last").0] {
        sender.send(request).await.unwrap();
    }
    let mut next = async || answers.message().await.unwrap().unwrap();
    assert_eq!(next().await.infer_response.unwrap().id, "first");
    let refused = next().await.error_message;
    assert!(refused.contains("--max-in-flight-bytes"), "{refused}");
    assert_eq!(next().await.infer_response.unwrap().id, "last");
    until(|| budget.in_flight() == 0).await;
}

#[tokio::test]
async fn compressed_messages_count_by_their_unpacked_size() {
    let (server, budget) = server(8 * MIB).await;
    let channel = server.channel().await;
    let mut client = super::server::Client::new(channel).send_compressed(CompressionEncoding::Gzip);
    let load = |size: usize| {
        let file = pb::ModelRepositoryParameter {
            parameter_choice: Some(pb::model_repository_parameter::ParameterChoice::BytesParam(vec![0; size].into())),
        };
        pb::RepositoryModelLoadRequest {
            model_name: "echo".into(),
            parameters: [("file:1/model.onnx".to_owned(), file)].into(),
            ..Default::default()
        }
    };
    let infer = |size: usize| pb::ModelInferRequest {
        model_name: "echo".into(),
        inputs: vec![input("x", "UINT8", &[size as i64])],
        raw_input_contents: vec![vec![0; size].into()],
        ..Default::default()
    };
    client.repository_model_load(load(MIB)).await.unwrap();
    client.model_infer(infer(MIB)).await.unwrap();
    for refused in [
        client.repository_model_load(load(16 * MIB)).await.unwrap_err(),
        client.model_infer(infer(16 * MIB)).await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        assert!(refused.message().contains("--max-in-flight-bytes"), "{refused}");
    }
    assert_eq!(server.service.loads().len(), 1);
    until(|| budget.in_flight() == 0).await;
}

#[tokio::test]
async fn a_message_of_empty_tensors_is_refused_before_it_is_read() {
    let (server, budget) = server(64 * MIB).await;
    let connection = connect(&server).await;
    // 8 MiB that would become 1.2 GB of tensors.
    let body = [&b"\x0a\x04echo"[..], &[0x2a, 0].repeat(4 * MIB)].concat();
    let framed: Bytes = [&[0][..], &(body.len() as u32).to_be_bytes(), &body].concat().into();
    let (sender, answer) = begin(&connection, &framed, "ModelInfer");
    sender.send(Ok(Frame::data(framed.slice(framed.len() / 2..)))).unwrap();
    drop(sender);
    let (code, message) = answer.await.unwrap();
    assert_eq!(code, Code::ResourceExhausted, "{message}");
    until(|| budget.in_flight() == 0).await;
}
