//! Open Inference Protocol v2: messages and their forms on the wire. Bytes in, values out: no
//! socket, no file.
//!
//! Both wire forms (HTTP JSON with binary tensors, gRPC) are read into and written from
//! [`InferRequest`] and [`InferResponse`], on the server and in clients.

pub mod grpc;
pub mod http;
pub mod infer;
pub mod pace;

pub use infer::{CodecError, InferRequest, InferResponse, InferTensor, Parameter, Parameters, RequestedOutput};

/// The protobuf messages and the gRPC service (`GRPCInferenceService`), generated from `proto/`.
#[allow(missing_docs, clippy::all, reason = "generated")]
pub mod inference {
    tonic::include_proto!("inference");
}

impl inference::ModelConfig {
    /// Whether the model may give any number of answers to a request.
    pub fn is_decoupled(&self) -> bool {
        self.model_transaction_policy.is_some_and(|policy| policy.decoupled)
    }
}

/// The compiled descriptors of `proto/`, for reflection and the protobuf text format.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The descriptor of a message of `proto/`, by its full name.
///
/// # Panics
/// If there is no message of this name.
pub fn descriptor(name: &str) -> prost_reflect::MessageDescriptor {
    static POOL: std::sync::LazyLock<prost_reflect::DescriptorPool> = std::sync::LazyLock::new(|| {
        prost_reflect::DescriptorPool::decode(FILE_DESCRIPTOR_SET)
            .expect("the build wrote the descriptors of its messages")
    });
    POOL.get_message_by_name(name).expect("the name is that of a message in proto/")
}
