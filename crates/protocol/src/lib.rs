//! Open Inference Protocol v2: messages and their forms on the wire. Bytes in, values out: no socket, no file.
//!
//! [`InferRequest`] and [`InferResponse`] are what both wire forms (HTTP JSON with binary tensors, gRPC) are read into
//! and written from, on the server and in clients.

pub mod grpc;
pub mod http;
pub mod infer;

pub use infer::{InferInput, InferOutput, InferRequest, InferResponse, Parameter, Parameters, RequestedOutput};

/// The protobuf messages and the gRPC service (`GRPCInferenceService`), generated from `proto/`.
#[allow(missing_docs, clippy::all, reason = "generated")]
pub mod inference {
    tonic::include_proto!("inference");
}

/// The compiled descriptors of `proto/`, for reflection and the protobuf text format.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
