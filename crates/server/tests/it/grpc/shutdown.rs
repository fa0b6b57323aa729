//! How the frontend stops.

use downbeat_frontend::connections::Stage;
use downbeat_protocol::inference::infer_parameter::ParameterChoice;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use super::server::{Client, Server, check_good, parameter, simple};

#[tokio::test]
async fn what_is_under_way_is_finished() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let held = |id: &str| {
        let (mut request, sums) = simple(id);
        request.parameters.insert("hold".into(), parameter(ParameterChoice::BoolParam(true)));
        (request, sums)
    };
    let call = tokio::spawn({
        let mut client = client.clone();
        let (request, _) = held("unary");
        async move { client.model_infer(request).await }
    });
    // A stream that its client does not end.
    let (sender, receiver) = tokio::sync::mpsc::channel(4);
    let mut answers = client.model_stream_infer(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    sender.send(held("stream").0).await.unwrap();
    // A connection without calls.
    let idle = server.channel().await;
    server.service.wait_for_started(2).await;

    server.stage.send(Stage::Draining).unwrap();
    // The server accepts no new connection.
    while let Ok(channel) =
        tonic::transport::Channel::from_shared(format!("http://{}", server.address)).unwrap().connect().await
    {
        if Client::new(channel).model_infer(simple("late").0).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    server.service.release();
    assert_eq!(call.await.unwrap().unwrap().into_inner().id, "unary");
    assert_eq!(answers.message().await.unwrap().unwrap().infer_response.unwrap().id, "stream");
    let end = answers.message().await.unwrap_err();
    assert_eq!((end.code(), end.message()), (Code::Unavailable, "the server is shutting down"));
    server.task.await.unwrap();
    drop((idle, sender));
}

#[tokio::test]
async fn what_does_not_finish_is_broken_off() {
    let server = Server::start().await;
    let mut client = server.client().await;
    check_good(&mut client).await;
    let (mut request, _) = simple("held");
    request.parameters.insert("hold".into(), parameter(ParameterChoice::BoolParam(true)));
    let call = tokio::spawn(async move { client.model_infer(request).await });
    server.service.wait_for_started(2).await;
    server.stage.send(Stage::Draining).unwrap();
    server.stage.send(Stage::Stopped).unwrap();
    server.task.await.unwrap();
    assert!(call.await.unwrap().is_err());
    server.service.wait_for_cancelled(1).await;
}

#[tokio::test]
async fn a_silent_connection_does_not_hold_the_drain() {
    let server = Server::start().await;
    let _silent = tokio::net::TcpStream::connect(server.address).await.unwrap();
    check_good(&mut server.client().await).await;
    server.stage.send(Stage::Draining).unwrap();
    // Far below any drain timeout; only a hang is longer.
    tokio::time::timeout(std::time::Duration::from_secs(20), server.task).await.unwrap().unwrap();
}
