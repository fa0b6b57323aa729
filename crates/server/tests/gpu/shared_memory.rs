//! Tensors in a client's memory on GPUs, over HTTP and gRPC.

use std::net::SocketAddr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use cudarc::driver::{result, sys};
use downbeat_core::tensor::DataType;
use downbeat_frontend::connections::{ConnectionOptions, Connections, Stage, bind};
use downbeat_frontend::grpc::{self, GrpcOptions};
use downbeat_frontend::http::{self, HttpOptions, HttpState};
use downbeat_frontend::shared_memory::SharedMemory;
use downbeat_models::registry::Registry;
use downbeat_protocol::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use downbeat_protocol::inference::infer_parameter::ParameterChoice;
use downbeat_protocol::{InferRequest, inference as pb};
use downbeat_service::options::EngineChoice;
use downbeat_service::service::Service;
use serde_json::{Value, json};
use tokio::sync::watch;
use tonic::Code;
use tonic::transport::Channel;

use crate::http::send;
use crate::{gpus, input, serve};

/// A client's memory on a GPU. The stand-in opens it in the same process, too.
struct Memory {
    gpu: i32,
    context: sys::CUcontext,
    address: u64,
    handle: Vec<u8>,
}

// SAFETY: the context may be used from any thread.
unsafe impl Send for Memory {}

impl Memory {
    fn new(gpu: i32, len: usize) -> Memory {
        // SAFETY: the stand-in has the GPU; context and memory are given back when this is dropped.
        unsafe {
            let context = result::primary_ctx::retain(gpu).unwrap();
            result::ctx::set_current(context).unwrap();
            let address = result::malloc_sync(len).unwrap();
            let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
            sys::cuIpcGetMemHandle(&raw mut handle, address).result().unwrap();
            Memory { gpu, context, address, handle: handle.reserved.map(|byte| byte as u8).to_vec() }
        }
    }

    fn write(&self, offset: u64, floats: &[f32]) {
        let bytes: Vec<u8> = floats.iter().flat_map(|float| float.to_le_bytes()).collect();
        // SAFETY: the memory is this one's.
        unsafe {
            result::ctx::set_current(self.context).unwrap();
            result::memcpy_htod_sync(self.address + offset, &bytes).unwrap();
        }
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: as above.
        unsafe {
            result::ctx::set_current(self.context).unwrap();
            result::memcpy_dtoh_sync(&mut bytes, self.address + offset).unwrap();
        }
        bytes
    }

    fn registration(&self, byte_size: u64) -> Value {
        json!({"raw_handle": {"b64": BASE64.encode(&self.handle)}, "device_id": self.gpu, "byte_size": byte_size})
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: taken in `new`, given back once.
        unsafe {
            result::ctx::set_current(self.context).unwrap();
            result::free_sync(self.address).unwrap();
            result::primary_ctx::release(self.gpu).unwrap();
        }
    }
}

struct Server {
    http: SocketAddr,
    grpc: GrpcInferenceServiceClient<Channel>,
    stage: watch::Sender<Stage>,
    tasks: [tokio::task::JoinHandle<()>; 2],
}

/// Both frontends to the models, with the same shared memory.
async fn frontends(registry: &Registry, memory: SharedMemory) -> Server {
    let (stage, stages) = watch::channel(Stage::Serving);
    let (service, memory) = (Arc::new(registry.clone()), Arc::new(memory));
    let [first, second] = [(); 2].map(|()| bind("127.0.0.1:0".parse().unwrap()).unwrap());
    let (http, address) = (first.local_addr().unwrap(), second.local_addr().unwrap());
    let connections = Connections::new(ConnectionOptions::default());
    let state = HttpState::new(service.clone(), memory.clone(), HttpOptions::default());
    let tasks = [
        tokio::spawn(http::serve(first, connections.clone(), state, stages.clone())),
        tokio::spawn(grpc::serve(second, connections, service, memory, GrpcOptions::default(), stages)),
    ];
    let grpc = GrpcInferenceServiceClient::connect(format!("http://{address}")).await.unwrap();
    Server { http, grpc, stage, tasks }
}

impl Server {
    async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = send(self.http, "POST", path, &body.to_string()).await;
        (status, serde_json::from_str(&body).unwrap_or_default())
    }

    async fn register(&self, name: &str, body: &Value) -> (u16, String) {
        let (status, body) = self.post(&format!("/v2/cudasharedmemory/region/{name}/register"), body).await;
        (status, body["error"].as_str().unwrap_or_default().to_owned())
    }

    async fn stop(self) {
        drop(self.grpc);
        self.stage.send(Stage::Stopped).unwrap();
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}

fn place(region: &str, offset: i64, byte_size: i64) -> Value {
    json!({"shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": byte_size})
}

#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn tensors_are_read_from_and_written_to_a_clients_gpu_memory() {
    let stand_in = gpus(2);
    let registry = serve(EngineChoice::Cuda, &["digits"], "exclusive", json!({})).await;
    let mut server = frontends(&registry, SharedMemory::new().with_gpus([0, 1]).unwrap()).await;
    let (_, metadata) = send(server.http, "GET", "/v2", "").await;
    assert!(metadata.contains("\"cuda_shared_memory\""), "{metadata}");
    let metadata = server.grpc.server_metadata(pb::ServerMetadataRequest::default()).await.unwrap().into_inner();
    assert!(metadata.extensions.iter().any(|name| name == "cuda_shared_memory"));

    // Inputs are on one GPU, outputs on the other.
    let (inputs, outputs) = (Memory::new(0, 4096), Memory::new(1, 4096));
    let images: Vec<f32> = (0..128).map(|i| (i * 7 % 256) as f32).collect();
    inputs.write(512, &images);
    outputs.write(0, &[0.25; 1024]);
    let beside = outputs.read(0, 16);
    let bytes = images.iter().flat_map(|float| float.to_le_bytes()).collect();
    let plain = InferRequest {
        model_name: "digits".into(),
        inputs: vec![input("image", DataType::Fp32, &[2, 8, 8], bytes)],
        ..InferRequest::default()
    };
    let expected = registry.infer(plain).await.unwrap().outputs[0].data.to_vec();
    assert_eq!(expected.len(), 80);

    assert_eq!(server.register("in", &inputs.registration(4096)).await, (200, String::new()));
    let (raw_handle, name) = (outputs.handle.clone().into(), "out".to_owned());
    let register = pb::CudaSharedMemoryRegisterRequest { name, raw_handle, device_id: 1, byte_size: 2048 };
    server.grpc.cuda_shared_memory_register(register).await.unwrap();
    // Both connections have one address, so they are one client: each frontend sees the regions of
    // the other.
    let (_, status) = send(server.http, "GET", "/v2/cudasharedmemory/status", "").await;
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(
        status,
        json!([{"name": "in", "device_id": 0, "byte_size": 4096}, {"name": "out", "device_id": 1, "byte_size": 2048}])
    );
    let one = pb::CudaSharedMemoryStatusRequest { name: "in".into() };
    let status = server.grpc.cuda_shared_memory_status(one).await.unwrap().into_inner();
    assert_eq!((status.regions.len(), status.regions["in"].byte_size), (1, 4096));
    let (_, status) = send(server.http, "GET", "/v2/systemsharedmemory/status", "").await;
    assert_eq!(status, "[]", "those of the system are others");

    let request = json!({
        "inputs": [{"name": "image", "shape": [2, 8, 8], "datatype": "FP32", "parameters": place("in", 512, 512)}],
        "outputs": [{"name": "probabilities", "parameters": place("out", 64, 80)}],
    });
    let (status, answer) = server.post("/v2/models/digits/infer", &request).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["outputs"], json!([{"name": "probabilities", "datatype": "FP32", "shape": [2, 10]}]));
    assert_eq!(outputs.read(64, 80), expected);
    assert_eq!(outputs.read(48, 16), beside, "nothing beside it is written");
    assert_eq!(outputs.read(144, 16), beside, "nothing beside it is written");

    let parameters = |region: &str, offset, byte_size| {
        let of = |choice| pb::InferParameter { parameter_choice: Some(choice) };
        [
            ("shared_memory_region".to_owned(), of(ParameterChoice::StringParam(region.into()))),
            ("shared_memory_offset".to_owned(), of(ParameterChoice::Int64Param(offset))),
            ("shared_memory_byte_size".to_owned(), of(ParameterChoice::Int64Param(byte_size))),
        ]
        .into()
    };
    let asked = |offset| pb::ModelInferRequest {
        model_name: "digits".into(),
        inputs: vec![pb::model_infer_request::InferInputTensor {
            name: "image".into(),
            datatype: "FP32".into(),
            shape: vec![2, 8, 8],
            parameters: parameters("in", offset, 512),
            ..Default::default()
        }],
        outputs: vec![pb::model_infer_request::InferRequestedOutputTensor {
            name: "probabilities".into(),
            parameters: parameters("out", 1024, 128),
        }],
        ..Default::default()
    };
    server.grpc.model_infer(asked(512)).await.unwrap();
    assert_eq!(outputs.read(1024, 80), expected);
    let beyond = server.grpc.model_infer(asked(4096 - 511)).await.unwrap_err();
    assert_eq!(beyond.code(), Code::InvalidArgument);
    assert!(beyond.message().contains("is beyond its 4096 bytes"), "{beyond}");

    // Handles that are no region, and a region that no longer belongs to this client.
    for (body, expected) in [
        (
            json!({"raw_handle": {"b64": BASE64.encode([1; 64])}, "device_id": 0, "byte_size": 64}),
            "GPU 0: opening memory",
        ),
        (
            json!({"raw_handle": {"b64": BASE64.encode([1; 63])}, "device_id": 0, "byte_size": 64}),
            "63 bytes, expected 64",
        ),
        (inputs.registration(4097), "byte_size is 4097, but the memory has 4096 bytes"),
        (json!({"raw_handle": {"b64": BASE64.encode([1; 64])}, "device_id": 2, "byte_size": 64}), "device_id is 2"),
    ] {
        let (status, message) = server.register("wrong", &body).await;
        assert_eq!(status, 400, "{message}");
        let begin = "failed to register shared memory region 'wrong': invalid args: ";
        assert!(message.starts_with(begin) && message.contains(expected), "{message}");
    }
    let (status, message) = server.register("in", &inputs.registration(64)).await;
    assert_eq!(status, 409, "{message}");
    // As in Triton, a region of the other kind with that name is passed over.
    assert_eq!(server.post("/v2/systemsharedmemory/region/in/unregister", &json!({})).await.0, 200);
    server.grpc.model_infer(asked(512)).await.unwrap();
    assert_eq!(server.post("/v2/cudasharedmemory/region/in/unregister", &json!({})).await.0, 200);
    assert_eq!(server.grpc.model_infer(asked(512)).await.unwrap_err().code(), Code::NotFound);
    let (status, message) = send(server.http, "GET", "/v2/cudasharedmemory/region/in/status", "").await;
    assert_eq!(status, 404);
    assert!(message.contains("Unable to find cuda shared memory region: 'in'"), "{message}");
    server.grpc.cuda_shared_memory_unregister(pb::CudaSharedMemoryUnregisterRequest::default()).await.unwrap();
    assert!(!stand_in.leaks().iter().any(|leak| leak.contains("opened by its handle")), "{:?}", stand_in.leaks());
    assert_eq!(stand_in.mistakes(), Vec::<String>::new());

    // With memory of a lost GPU, a request gets the same answer as other inferences on this GPU.
    assert_eq!(server.register("in", &inputs.registration(4096)).await.0, 200);
    assert_eq!(server.register("out", &outputs.registration(4096)).await.0, 200);
    stand_in.lose_device(1, 46);
    let (status, answer) = server.post("/v2/models/digits/infer", &request).await;
    assert_eq!(status, 503, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("GPU 1 is lost"), "{answer}");
    stand_in.revive_device(1);
    server.stop().await;
    drop(registry);
    drop((inputs, outputs));
    crate::has_ended(&stand_in).await;
}

#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn without_leave_there_is_no_shared_memory_of_gpus() {
    let stand_in = gpus(1);
    let registry = serve(EngineChoice::Cuda, &["digits"], "exclusive", json!({})).await;
    let server = frontends(&registry, SharedMemory::disabled().with_gpus([0]).unwrap()).await;
    let memory = Memory::new(0, 64);
    let (status, message) = server.register("in", &memory.registration(64)).await;
    assert_eq!(status, 501);
    assert!(message.contains("Client shared memory is disabled"), "{message}");
    let (_, metadata) = send(server.http, "GET", "/v2", "").await;
    assert!(!metadata.contains("cuda_shared_memory"), "{metadata}");
    assert_eq!(stand_in.calls("cuIpcOpenMemHandle_v2"), 0);
    server.stop().await;
    drop((registry, memory));
    crate::has_ended(&stand_in).await;
}
