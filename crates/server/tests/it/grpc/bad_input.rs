//! Requests that no client should send. Each test checks the status and the message, and that a
//! good request is answered.

use bytes::{Buf, BufMut, Bytes};
use downbeat_frontend::grpc::GrpcOptions;
use downbeat_protocol::inference as pb;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Code, Request, Status};

use super::server::{Server, check_good, input, parameter, simple};

/// Sends bytes as they are.
#[derive(Clone, Copy, Default)]
struct RawCodec;

impl Codec for RawCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = RawCodec;
    type Decoder = RawCodec;

    fn encoder(&mut self) -> RawCodec {
        RawCodec
    }

    fn decoder(&mut self) -> RawCodec {
        RawCodec
    }
}

impl Encoder for RawCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for RawCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

async fn call(server: &Server, path: &'static str, message: Vec<u8>) -> Result<Bytes, Status> {
    let mut client = tonic::client::Grpc::new(server.channel().await);
    client.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static(path);
    client.unary(Request::new(Bytes::from(message)), path, RawCodec).await.map(tonic::Response::into_inner)
}

const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

#[tokio::test]
async fn requests_that_do_not_fit() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let change = |change: fn(&mut pb::ModelInferRequest)| {
        let mut request = simple("bad").0;
        change(&mut request);
        request
    };
    let cases = [
        (change(|r| r.model_name = "complicated".into()), Code::NotFound, "no model 'complicated'; the repository has"),
        (change(|r| r.model_version = "9".into()), Code::NotFound, "has no version '9'; it has 1"),
        (change(|r| r.inputs[0].name = "INPUT7".into()), Code::InvalidArgument, "unexpected input 'INPUT7'; expected"),
        (
            change(|r| {
                r.inputs.pop();
                r.raw_input_contents.pop();
            }),
            Code::InvalidArgument,
            "input 'INPUT1' is missing",
        ),
        (
            change(|r| r.inputs[0].datatype = "FP32".into()),
            Code::InvalidArgument,
            "input 'INPUT0': datatype is FP32, expected INT32",
        ),
        (
            change(|r| r.inputs[0].datatype = "FLOAT".into()),
            Code::InvalidArgument,
            "input 'INPUT0': unknown datatype 'FLOAT'; expected BOOL",
        ),
        (
            change(|r| r.inputs[0].shape = vec![4, 4]),
            Code::InvalidArgument,
            "input 'INPUT0': shape is [4, 4], expected [1 to 8, 16]",
        ),
        (
            change(|r| r.inputs[0].shape = vec![-1, 16]),
            Code::InvalidArgument,
            "input 'INPUT0': shape [-1, 16] has the negative size -1",
        ),
        (
            change(|r| r.inputs[0].shape = vec![i64::MAX, 16]),
            Code::InvalidArgument,
            "causes total element count to exceed maximum size of",
        ),
        (
            change(|r| r.raw_input_contents[0].truncate(63)),
            Code::InvalidArgument,
            "input 'INPUT0': INT32 of shape [1, 16] is 64 bytes, got 63 bytes",
        ),
        (
            change(|r| r.raw_input_contents.clear()),
            Code::InvalidArgument,
            "input 'INPUT0': has no data; expected 'contents', 'raw_input_contents' or 'shared_memory_region'",
        ),
        (
            change(|r| r.inputs[0].contents = Some(pb::InferTensorContents::default())),
            Code::InvalidArgument,
            "input 'INPUT0': contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'simple'",
        ),
        (
            change(|r| r.raw_input_contents.push(Bytes::new())),
            Code::InvalidArgument,
            "'raw_input_contents' has 3 tensors, expected one for each of the 2 inputs",
        ),
        (
            change(|r| {
                r.parameters.insert("priority".into(), pb::InferParameter::default());
            }),
            Code::InvalidArgument,
            "parameter 'priority' of the request has no value",
        ),
        (
            change(|r| {
                let number = parameter(pb::infer_parameter::ParameterChoice::DoubleParam(0.5));
                r.inputs[0].parameters.insert("shared_memory_region".into(), number);
                r.raw_input_contents.pop();
            }),
            Code::InvalidArgument,
            "input 'INPUT0': 'shared_memory_region' is 0.5, expected a string",
        ),
        (
            change(|r| {
                r.outputs = vec![pb::model_infer_request::InferRequestedOutputTensor {
                    name: "OUTPUT7".into(),
                    ..Default::default()
                }];
            }),
            Code::InvalidArgument,
            "unexpected output 'OUTPUT7'",
        ),
    ];
    for (request, code, expected) in cases {
        let status = client.model_infer(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(expected), "{} / {expected}", status.message());
        check_good(&mut client).await;
    }
}

#[tokio::test]
async fn strings_that_are_cut_off() {
    let server = Server::start().await;
    let mut client = server.client().await;
    for (data, expected) in [
        (vec![9, 0, 0, 0, b'a'], "input 'x': BYTES element 0 has a length of 9 bytes, but only 1 are left"),
        (vec![1, 0, 0, 0, b'a', 1, 0], "2 bytes are left after BYTES element 1"),
        (vec![1, 0, 0, 0, b'a', 0, 0, 0, 0], "BYTES of shape [1] has 1 elements, got 2"),
    ] {
        let request = pb::ModelInferRequest {
            model_name: "echo".into(),
            inputs: vec![input("x", "BYTES", &[1])],
            raw_input_contents: vec![data.into()],
            ..Default::default()
        };
        let status = client.model_infer(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(expected), "{} / {expected}", status.message());
        check_good(&mut client).await;
    }
}

#[tokio::test]
async fn garbage_protobuf() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let good = prost::Message::encode_to_vec(&simple("x").0);
    let half = good[..good.len() / 2].to_vec();
    // A group inside a group inside a group: protobuf's own way to nest without end.
    let nested = vec![0x0b; 100_000];
    for message in [vec![0xff; 100], b"{\"inputs\": []}".to_vec(), half, nested] {
        let status = call(&server, INFER, message).await.unwrap_err();
        assert!(matches!(status.code(), Code::Internal | Code::InvalidArgument), "{status}");
        assert!(status.message().contains("decode"), "{}", status.message());
        check_good(&mut client).await;
    }
}

#[tokio::test]
async fn unknown_methods_and_services() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let status = call(&server, "/inference.GRPCInferenceService/ModelTrain", vec![]).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    let status = call(&server, "/inference.OtherService/ModelInfer", vec![]).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    assert!(status.message().contains("'inference.OtherService'; expected 'inference.GRPCInferenceService'"));
    assert_eq!(call(&server, "/", vec![]).await.unwrap_err().code(), Code::Unimplemented);
    check_good(&mut client).await;
}

#[tokio::test]
async fn a_message_over_the_limit() {
    let server = Server::with_options(GrpcOptions { max_message_bytes: 10_000, ..Default::default() }).await;
    let mut client = server.client().await;
    let sized = |size: usize| pb::ModelInferRequest {
        model_name: "echo".into(),
        inputs: vec![input("x", "UINT8", &[size as i64])],
        raw_input_contents: vec![vec![0; size].into()],
        ..Default::default()
    };
    client.model_infer(sized(9_900)).await.unwrap();
    let expected = "the limit is 10000 bytes";
    let status = client.model_infer(sized(10_001)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains(expected), "{}", status.message());
    check_good(&mut client).await;
    // The message is small only on the wire.
    for encoding in [CompressionEncoding::Gzip, CompressionEncoding::Deflate] {
        let status = client.clone().send_compressed(encoding).model_infer(sized(5_000_000)).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("10000 bytes"), "{}", status.message());
        check_good(&mut client).await;
    }
}

/// A call as bytes on a connection: HTTP/2 preface and settings, headers of a ModelInfer, then a
/// message.
fn call_on_the_wire(message: &[u8]) -> Vec<u8> {
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        frame
    };
    // HPACK: POST, http, then literals without indexing.
    let mut headers = vec![0x83, 0x86];
    let mut literal = |name: &str, value: &str| {
        headers.push(0);
        headers.push(name.len() as u8);
        headers.extend(name.bytes());
        headers.push(value.len() as u8);
        headers.extend(value.bytes());
    };
    literal(":path", INFER);
    literal(":authority", "test");
    literal("content-type", "application/grpc");
    literal("te", "trailers");
    let mut wire = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    wire.extend(frame(4, 0, 0, &[]));
    wire.extend(frame(1, 0x4, 1, &headers));
    wire.extend(frame(0, 0, 1, message));
    wire
}

#[tokio::test]
async fn connections_that_break() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let good = prost::Message::encode_to_vec(&simple("x").0);
    let mut message = vec![0];
    message.extend((good.len() as u32).to_be_bytes());
    message.extend(&good);
    let whole = call_on_the_wire(&message);
    let openings: [&[u8]; 7] = [
        b"",
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nXX",
        &[0xff; 4096],
        &whole[..30],
        &whole[..whole.len() - 40],
        // The prefix says that 4 GiB follow.
        &call_on_the_wire(&[0, 0xff, 0xff, 0xff, 0xff, 1, 2, 3]),
    ];
    for opening in openings {
        let mut socket = TcpStream::connect(server.address).await.unwrap();
        socket.write_all(opening).await.unwrap();
        socket.shutdown().await.unwrap();
        let mut answer = Vec::new();
        // The server may close the connection in any manner.
        let _ = socket.read_to_end(&mut answer).await;
        check_good(&mut client).await;
    }
    assert_eq!(server.service.answered(), openings.len(), "no half request was run");
}
