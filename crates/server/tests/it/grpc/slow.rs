//! Clients that take their time.

use std::time::Duration;

use bytes::Bytes;
use downbeat_frontend::connections::{ConnectionOptions, Stage};
use downbeat_frontend::grpc::GrpcOptions;
use downbeat_protocol::inference::infer_parameter::ParameterChoice;
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tower_service::Service;

use super::server::{Client, Server, check_good, parameter, simple};

const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
const STREAM: &str = "/inference.GRPCInferenceService/ModelStreamInfer";
const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
/// A prefix that announces a message of 100 bytes, and the first three bytes of the message.
const HALF: &[u8] = &[0, 0, 0, 0, 100, 1, 2, 3];

async fn server() -> Server {
    let transfer_timeout = Some(Duration::from_millis(200));
    let options = ConnectionOptions { transfer_timeout, ..ConnectionOptions::default() };
    Server::with_connections(GrpcOptions::default(), options).await
}

/// A call whose bytes are sent one by one, and its status.
fn call(
    mut channel: Channel,
    path: &str,
) -> (mpsc::Sender<Result<Frame<Bytes>, Status>>, impl Future<Output = Status> + use<>) {
    let (sender, receiver) = mpsc::channel(1);
    let request = http::Request::post(path)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(tonic::body::Body::new(StreamBody::new(ReceiverStream::new(receiver))))
        .unwrap();
    let status = async move {
        std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
        let response = match channel.call(request).await {
            Ok(response) => response,
            Err(error) => return Status::from_error(error.into()),
        };
        if let Some(status) = Status::from_header_map(response.headers()) {
            return status;
        }
        match http_body_util::BodyExt::collect(response.into_body()).await {
            Ok(body) => Status::from_header_map(body.trailers().unwrap()).unwrap(),
            Err(status) => status,
        }
    };
    (sender, status)
}

fn data(bytes: &'static [u8]) -> Result<Frame<Bytes>, Status> {
    Ok(Frame::data(Bytes::from_static(bytes)))
}

#[tokio::test]
async fn half_a_message_is_not_waited_for() {
    let server = server().await;
    for path in [INFER, STREAM] {
        for beginning in [HALF, &HALF[..2]] {
            let (sender, status) = call(server.channel().await, path);
            sender.send(data(beginning)).await.unwrap();
            let status = status.await;
            assert_eq!(status.code(), Code::DeadlineExceeded, "{path}: {status}");
            assert!(status.message().contains("expected at least 100 (--transfer-timeout, --min-rate)"), "{status}");
        }
    }
    // A call that never says anything.
    let (_sender, status) = call(server.channel().await, INFER);
    assert_eq!(status.await.code(), Code::DeadlineExceeded);
    check_good(&mut server.client().await).await;
}

/// A drain that waits for no client takes far less than this.
const PATIENCE: Duration = Duration::from_secs(120);

#[tokio::test]
async fn clients_that_stopped_do_not_hold_the_drain() {
    // No other limit ends these calls.
    let options = ConnectionOptions { transfer_timeout: None, ..ConnectionOptions::default() };
    let server = Server::with_connections(GrpcOptions::default(), options).await;
    let mut held = Vec::new();
    let paths = [INFER, STREAM, "/inference.GRPCInferenceService/RepositoryModelLoad", REFLECTION];
    for (path, beginning) in paths.into_iter().flat_map(|path| [(path, Some(HALF)), (path, None)]) {
        let (sender, status) = call(server.channel().await, path);
        let status = tokio::spawn(status);
        if let Some(beginning) = beginning {
            sender.send(data(beginning)).await.unwrap();
        }
        held.push((sender, status));
    }
    // Each call is under way when a later one on its connection could be.
    check_good(&mut server.client().await).await;
    server.stage.send(Stage::Draining).unwrap();
    tokio::time::timeout(PATIENCE, server.task).await.expect("the drain has an end").unwrap();
}

#[tokio::test]
async fn a_call_beside_a_half_message_is_answered_in_a_drain() {
    let server = Server::start().await;
    let channel = server.channel().await;
    let (sender, half) = call(channel.clone(), INFER);
    let half = tokio::spawn(half);
    sender.send(data(HALF)).await.unwrap();
    let (mut request, _) = simple("held");
    request.parameters.insert("hold".into(), parameter(ParameterChoice::BoolParam(true)));
    let held = tokio::spawn(async move { Client::new(channel).model_infer(request).await });
    server.service.wait_for_started(1).await;
    server.stage.send(Stage::Draining).unwrap();
    // Longer than a client may be silent.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    server.service.release();
    assert_eq!(held.await.unwrap().unwrap().into_inner().id, "held");
    tokio::time::timeout(PATIENCE, server.task).await.expect("the drain has an end").unwrap();
    assert_ne!(half.await.unwrap().code(), Code::Ok);
}

#[tokio::test]
async fn a_message_that_trickles_in_is_not_waited_for() {
    let server = server().await;
    let (sender, status) = call(server.channel().await, INFER);
    let trickling = tokio::spawn(async move {
        sender.send(data(&[0, 0, 0, 16, 0])).await.unwrap();
        while sender.send(data(&[1])).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert_eq!(status.await.code(), Code::DeadlineExceeded);
    trickling.abort();
    check_good(&mut server.client().await).await;
}

#[tokio::test]
async fn a_stream_may_rest_between_its_messages() {
    let server = server().await;
    let mut client: Client = server.client().await;
    let (sender, receiver) = mpsc::channel(1);
    let mut answers = client.model_stream_infer(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    for id in ["first", "second"] {
        tokio::time::sleep(Duration::from_millis(500)).await;
        sender.send(simple(id).0).await.unwrap();
        assert_eq!(answers.message().await.unwrap().unwrap().infer_response.unwrap().id, id);
    }
}

#[tokio::test]
async fn an_idle_connection_is_told_to_go_and_one_with_an_open_stream_is_not() {
    let idle_timeout = Some(Duration::from_millis(100));
    let options = ConnectionOptions { idle_timeout, ..ConnectionOptions::default() };
    let server = Server::with_connections(GrpcOptions::default(), options).await;
    let mut client: Client = server.client().await;
    let (sender, receiver) = mpsc::channel(1);
    let mut answers = client.model_stream_infer(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    tokio::time::sleep(Duration::from_millis(500)).await;
    sender.send(simple("late").0).await.unwrap();
    assert_eq!(answers.message().await.unwrap().unwrap().infer_response.unwrap().id, "late");
    drop((sender, answers));
    // The client's connection ends meanwhile, and the client makes another.
    tokio::time::sleep(Duration::from_millis(500)).await;
    check_good(&mut client).await;
}

#[tokio::test]
async fn a_client_without_room_is_told_why() {
    let options = ConnectionOptions { max: 0, ..ConnectionOptions::default() };
    let server = Server::with_connections(GrpcOptions::default(), options).await;
    let mut connection = tokio::net::TcpStream::connect(server.address).await.unwrap();
    let mut told = Vec::new();
    tokio::io::AsyncReadExt::read_to_end(&mut connection, &mut told).await.unwrap();
    let text = String::from_utf8_lossy(&told);
    assert!(text.contains("as many connections as it takes (0, --max-connections)"), "{text}");
}
