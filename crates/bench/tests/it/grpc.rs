//! Every request that was due ends once, however a gRPC server behaves.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_bench::results::outcome::Failure;
use downbeat_bench::results::record::ModelRecord;
use downbeat_protocol::inference as proto;
use downbeat_protocol::inference::grpc_inference_service_server::GrpcInferenceServiceServer;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Code, Status};

use crate::servers::{Server, assert_accounted, bench, plan};
use crate::service::{Answers, Service};

/// The server's reaction to an inference.
#[derive(Clone, Copy)]
enum Behaviour {
    Answer,
    Fail(Code),
    Hang,
    /// Fails every second inference.
    Alternate,
}

struct Fake {
    behaviour: Behaviour,
    seen: Arc<AtomicU64>,
}

impl Answers for Fake {
    async fn infer(&self, request: proto::ModelInferRequest) -> Result<proto::ModelInferResponse, Status> {
        assert_eq!(request.raw_input_contents[0].len(), 16, "four FP32");
        let number = self.seen.fetch_add(1, Ordering::Relaxed);
        let good = proto::ModelInferResponse {
            model_name: request.model_name,
            raw_output_contents: request.raw_input_contents,
            ..Default::default()
        };
        match self.behaviour {
            Behaviour::Answer => Ok(good),
            Behaviour::Alternate if number.is_multiple_of(2) => Ok(good),
            Behaviour::Alternate => Err(Status::resource_exhausted("queue full: 100% \"of\" it")),
            Behaviour::Fail(code) => Err(Status::new(code, "as told")),
            Behaviour::Hang => std::future::pending().await,
        }
    }

    fn elements(&self) -> i64 {
        4
    }

    fn statistics(&self) -> Result<proto::ModelStatisticsResponse, Status> {
        let count = self.seen.load(Ordering::Relaxed);
        let model = proto::ModelStatistics { inference_count: count, execution_count: count, ..Default::default() };
        Ok(proto::ModelStatisticsResponse { model_stats: vec![model] })
    }
}

/// A server that ends with the test.
struct Grpc {
    url: String,
    seen: Arc<AtomicU64>,
    _runtime: tokio::runtime::Runtime,
}

fn serve(behaviour: Behaviour, streams: Option<u32>) -> Grpc {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let seen = Arc::new(AtomicU64::new(0));
    let fake = Fake { behaviour, seen: Arc::clone(&seen) };
    let listener =
        runtime.block_on(TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))).expect("a free port");
    let url = format!("grpc://{}", listener.local_addr().expect("an address"));
    runtime.spawn(
        tonic::transport::Server::builder()
            .max_concurrent_streams(streams)
            .add_service(GrpcInferenceServiceServer::new(Service(fake)))
            .serve_with_incoming(TcpListenerStream::new(listener)),
    );
    Grpc { url, seen, _runtime: runtime }
}

fn offer(url: &str, words: &[&str]) -> ModelRecord {
    offer_for("0.2", url, words)
}

fn offer_for(seconds: &str, url: &str, words: &[&str]) -> ModelRecord {
    let common = ["-m", "m", "--url", url, "--rate", "2000", "--warmup", "0", "--duration", seconds];
    let outcome = bench(&[&common[..], words].concat());
    let total = outcome.record.total();
    assert_accounted(&total);
    assert!(total.scheduled > 200, "{}", total.scheduled);
    total
}

fn count(record: &ModelRecord, failure: Failure) -> u64 {
    record.failures.get(&failure).map_or(0, |f| f.count)
}

#[test]
fn good_answers_count() {
    let server = serve(Behaviour::Answer, None);
    let total = offer(&server.url, &["--timeout-us", "1000000", "--header", "x-test: 1"]);
    assert_eq!(total.ok, total.scheduled, "{:?}", total.failures);
    assert_eq!(server.seen.load(Ordering::Relaxed), total.scheduled);
}

#[test]
fn streams_beyond_the_servers_bound_wait() {
    let server = serve(Behaviour::Answer, Some(2));
    let total = offer(&server.url, &["--grpc-connections", "1"]);
    assert_eq!(total.ok, total.scheduled, "{:?}", total.failures);
}

#[test]
fn statuses_are_counted_with_their_message() {
    let server = serve(Behaviour::Alternate, None);
    let total = offer(&server.url, &[]);
    let exhausted = Failure::Grpc(Code::ResourceExhausted as i32);
    assert!(total.ok > 0);
    assert_eq!(total.ok + count(&total, exhausted), total.scheduled, "{:?}", total.failures);
    assert_eq!(total.failures[&exhausted].example, "queue full: 100% \"of\" it");
    for code in [Code::DeadlineExceeded, Code::Unavailable, Code::InvalidArgument] {
        let server = serve(Behaviour::Fail(code), None);
        let total = offer(&server.url, &[]);
        assert_eq!(count(&total, Failure::Grpc(code as i32)), total.scheduled, "{:?}", total.failures);
    }
}

#[test]
fn a_server_that_hangs_costs_timeouts_and_its_streams_are_freed() {
    // The server sees more calls than streams that fit at once: cancelled calls made room. The run
    // is longer if the machine is so busy that calls time out before they are sent.
    let made_room = ["0.2", "1", "5"].into_iter().any(|seconds| {
        let server = serve(Behaviour::Hang, Some(50));
        let total = offer_for(seconds, &server.url, &["--request-timeout", "0.1", "--grpc-connections", "1"]);
        // HTTP/2 servers close connections on which many streams are reset (CVE-2023-44487), also
        // under calls that are being sent.
        let closed = count(&total, Failure::Closed) + count(&total, Failure::Connect);
        let ended = count(&total, Failure::Timeout) + closed;
        assert!(count(&total, Failure::Timeout) > 0 && ended == total.scheduled, "{:?}", total.failures);
        server.seen.load(Ordering::Relaxed) > 50
    });
    assert!(made_room, "only as many calls were seen as there are streams at once");
}

#[test]
fn a_closed_loop_ends_after_its_requests() {
    let server = serve(Behaviour::Answer, None);
    let url = server.url.as_str();
    let words = ["-m", "m", "--url", url, "--closed", "--connections", "7", "--requests", "1500", "--warmup", "0"];
    let outcome = bench(&words);
    let total = outcome.record.total();
    assert_accounted(&total);
    assert_eq!(total.ok, 1500, "{:?}", total.failures);
    let statistics = outcome.statistics[0].as_ref().expect("statistics");
    assert!(statistics.executions <= 1500);
}

#[test]
fn servers_that_speak_something_else_never_wedge_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("input.json");
    std::fs::write(&file, r#"{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}"#).expect("written");
    let input = file.to_str().expect("text");
    let answers: [&'static [u8]; 3] = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\0\0\x04\x08\0\0\0\0\0\0\0\0\0"];
    for answer in answers {
        let server = Server::raw(move |mut stream, _| {
            use std::io::{Read, Write};
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(answer);
        });
        let url = format!("grpc://{}", server.url());
        let total = offer(&url, &["--input", input, "--request-timeout", "0.3"]);
        assert_eq!(total.ok, 0, "{answer:?}");
    }
    let silent = Server::raw(|stream, _| {
        std::thread::park_timeout(std::time::Duration::from_secs(2));
        drop(stream);
    });
    let url = format!("grpc://{}", silent.url());
    let total = offer(&url, &["--input", input, "--request-timeout", "0.2"]);
    assert_eq!(count(&total, Failure::Timeout), total.scheduled, "{:?}", total.failures);
}

#[test]
fn a_model_the_server_does_not_tell_about_is_named() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("grpc://{}", listener.local_addr().expect("an address"));
    drop(listener);
    let error = format!("{:#}", plan(&["-m", "m", "--url", &url]).expect_err("nobody is there"));
    assert!(error.contains("model 'm'") && error.contains(&url), "{error}");
}
