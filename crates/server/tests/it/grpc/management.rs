//! Everything but inference.

use downbeat_protocol::Parameter;
use downbeat_protocol::inference as pb;
use pb::model_repository_parameter::ParameterChoice as Choice;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::server::{Server, check_good};

#[tokio::test]
async fn health_is_told() {
    let server = Server::start().await;
    let mut client = server.client().await;
    assert!(client.server_live(pb::ServerLiveRequest {}).await.unwrap().get_ref().live);
    assert!(client.server_ready(pb::ServerReadyRequest {}).await.unwrap().get_ref().ready);
    server.service.set_ready(false);
    assert!(client.server_live(pb::ServerLiveRequest {}).await.unwrap().get_ref().live);
    assert!(!client.server_ready(pb::ServerReadyRequest {}).await.unwrap().get_ref().ready);
    let mut ready = async |name: &str, version: &str| {
        let request = pb::ModelReadyRequest { name: name.into(), version: version.into() };
        client.model_ready(request).await.unwrap().get_ref().ready
    };
    assert!(ready("simple", "").await);
    assert!(ready("simple", "1").await);
    assert!(!ready("simple", "2").await);
    assert!(!ready("complicated", "").await);
}

#[tokio::test]
async fn grpc_health_follows_readiness() {
    let server = Server::start().await;
    let mut client = HealthClient::new(server.channel().await);
    let ask = |service: &str| HealthCheckRequest { service: service.into() };
    let mut watch = client.watch(ask("")).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    for name in ["", "inference.GRPCInferenceService"] {
        assert_eq!(client.check(ask(name)).await.unwrap().get_ref().status(), ServingStatus::Serving);
    }
    assert_eq!(client.check(ask("other")).await.unwrap_err().code(), Code::NotFound);
    let mut unknown = client.watch(ask("other")).await.unwrap().into_inner();
    assert_eq!(unknown.message().await.unwrap().unwrap().status(), ServingStatus::ServiceUnknown);
    server.service.set_ready(false);
    assert_eq!(client.check(ask("")).await.unwrap().get_ref().status(), ServingStatus::NotServing);
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
}

#[tokio::test]
async fn server_and_models_are_described() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let about = client.server_metadata(pb::ServerMetadataRequest {}).await.unwrap().into_inner();
    assert_eq!(about.name, "downbeat");
    assert!(about.extensions.iter().any(|extension| extension == "system_shared_memory"));
    let request = pb::ModelMetadataRequest { name: "simple".into(), version: String::new() };
    let model = client.model_metadata(request).await.unwrap().into_inner();
    assert_eq!((model.name.as_str(), model.versions, model.platform.as_str()), ("simple", vec!["1".into()], "echo"));
    let inputs: Vec<_> = model.inputs.iter().map(|i| (i.name.as_str(), i.datatype.as_str(), &i.shape[..])).collect();
    assert_eq!(inputs, [("INPUT0", "INT32", &[-1, 16][..]), ("INPUT1", "INT32", &[-1, 16][..])]);
    let request = pb::ModelConfigRequest { name: "simple".into(), version: "1".into() };
    let config = client.model_config(request).await.unwrap().into_inner().config.unwrap();
    assert_eq!((config.name.as_str(), config.max_batch_size), ("simple", 8));
    let request = pb::ModelMetadataRequest { name: "complicated".into(), version: String::new() };
    let error = client.model_metadata(request).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert_eq!(error.message(), "no model 'complicated'; the repository has simple, echo, batch_echo, repeat");
    check_good(&mut client).await;
}

#[tokio::test]
async fn statistics_are_told_of_one_model_or_all() {
    let server = Server::start().await;
    let mut client = server.client().await;
    check_good(&mut client).await;
    let one = pb::ModelStatisticsRequest { name: "simple".into(), version: String::new() };
    let one = client.model_statistics(one).await.unwrap().into_inner().model_stats;
    assert_eq!((one.len(), one[0].name.as_str(), one[0].inference_count), (1, "simple", 1));
    let all = client.model_statistics(pb::ModelStatisticsRequest::default()).await.unwrap().into_inner();
    assert_eq!(all.model_stats.len(), 4);
    let none = pb::ModelStatisticsRequest { name: "simple".into(), version: "7".into() };
    assert_eq!(client.model_statistics(none).await.unwrap_err().code(), Code::NotFound);
}

fn load(name: &str, parameters: &[(&str, Option<Choice>)]) -> pb::RepositoryModelLoadRequest {
    let parameter = |choice: &Option<Choice>| pb::ModelRepositoryParameter { parameter_choice: choice.clone() };
    pb::RepositoryModelLoadRequest {
        model_name: name.into(),
        parameters: parameters.iter().map(|(name, choice)| ((*name).to_owned(), parameter(choice))).collect(),
        ..Default::default()
    }
}

#[tokio::test]
async fn models_are_unloaded_and_loaded() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let unload = pb::RepositoryModelUnloadRequest { model_name: "simple".into(), ..Default::default() };
    client.repository_model_unload(unload).await.unwrap();
    assert_eq!(client.model_infer(super::server::simple("x").0).await.unwrap_err().code(), Code::Unavailable);
    let index = pb::RepositoryIndexRequest { ready: true, ..Default::default() };
    assert_eq!(client.repository_index(index).await.unwrap().get_ref().models.len(), 3);
    let index = client.repository_index(pb::RepositoryIndexRequest::default()).await.unwrap().into_inner();
    let simple = index.models.iter().find(|model| model.name == "simple").unwrap();
    assert_eq!(
        (simple.version.as_str(), simple.state.as_str(), simple.reason.as_str()),
        ("1", "UNAVAILABLE", "unloaded")
    );

    let request = load(
        "simple",
        &[
            ("config", Some(Choice::StringParam("{\"max_batch_size\": 2}".into()))),
            ("file:1/model.onnx", Some(Choice::BytesParam(b"model".to_vec().into()))),
            ("eager", Some(Choice::BoolParam(true))),
        ],
    );
    client.repository_model_load(request).await.unwrap();
    let (name, overrides) = server.service.loads().remove(0);
    assert_eq!(name, "simple");
    assert_eq!(overrides.config.as_deref(), Some("{\"max_batch_size\": 2}"));
    assert_eq!(&overrides.files["1/model.onnx"][..], b"model");
    assert_eq!(overrides.parameters, [("eager".to_owned(), Parameter::Bool(true))].into());
    check_good(&mut client).await;
}

#[tokio::test]
async fn wrong_loads_are_refused() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let cases = [
        (load("simple", &[("config", Some(Choice::BoolParam(true)))]), "'config' must be 'string_param'"),
        (
            load("simple", &[("file:1/model.onnx", Some(Choice::StringParam("x".into())))]),
            "'file:1/model.onnx' must be 'bytes_param'",
        ),
        (
            load("simple", &[("model", Some(Choice::BytesParam("x".into())))]),
            "which is only for 'file:PATH' parameters",
        ),
        (load("simple", &[("config", None)]), "'config' has no value"),
    ];
    for (request, expected) in cases {
        let status = client.repository_model_load(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(expected), "{} / {expected}", status.message());
    }
    assert_eq!(client.repository_model_load(load("none", &[])).await.unwrap_err().code(), Code::NotFound);
    let elsewhere = pb::RepositoryModelLoadRequest { repository_name: "elsewhere".into(), ..load("simple", &[]) };
    assert_eq!(client.repository_model_load(elsewhere).await.unwrap_err().code(), Code::Unimplemented);
    check_good(&mut client).await;
}

#[tokio::test]
async fn cuda_shared_memory_is_clearly_not_there() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let status = client.cuda_shared_memory_status(pb::CudaSharedMemoryStatusRequest::default()).await.unwrap();
    assert!(status.get_ref().regions.is_empty());
    let register = pb::CudaSharedMemoryRegisterRequest { name: "c".into(), ..Default::default() };
    let status = client.cuda_shared_memory_register(register).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with("failed to register CUDA shared memory region: 'c', GPUs not supported"));
    client.cuda_shared_memory_unregister(pb::CudaSharedMemoryUnregisterRequest::default()).await.unwrap();
    let one = pb::CudaSharedMemoryStatusRequest { name: "c".into() };
    assert_eq!(client.cuda_shared_memory_status(one).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn settings_are_told_and_impossible_changes_are_refused() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let trace = client.trace_setting(pb::TraceSettingRequest::default()).await.unwrap().into_inner();
    assert_eq!(trace.settings["trace_level"].value, ["OFF"]);
    let set = |name: &str, value: &str| {
        let value = pb::trace_setting_request::SettingValue { value: vec![value.into()] };
        pb::TraceSettingRequest { settings: [(name.to_owned(), value)].into(), ..Default::default() }
    };
    client.trace_setting(set("trace_level", "OFF")).await.unwrap();
    let nowhere = client.trace_setting(set("trace_level", "TIMESTAMPS")).await.unwrap_err();
    assert!(nowhere.code() == Code::InvalidArgument && nowhere.message().contains("--trace-file"), "{nowhere}");
    let rate = client.trace_setting(set("trace_rate", "5")).await.unwrap().into_inner();
    assert_eq!(rate.settings["trace_rate"].value, ["5"]);
    let of_model = |model: &str| pb::TraceSettingRequest { model_name: model.to_owned(), ..set("trace_rate", "7") };
    assert_eq!(client.trace_setting(of_model("nobody")).await.unwrap_err().code(), Code::NotFound);
    let rate = client.trace_setting(of_model("simple")).await.unwrap().into_inner();
    assert_eq!(rate.settings["trace_rate"].value, ["7"]);
    assert_eq!(client.trace_setting(set("level", "OFF")).await.unwrap_err().code(), Code::InvalidArgument);

    let log = client.log_settings(pb::LogSettingsRequest::default()).await.unwrap().into_inner();
    assert_eq!(log.settings.len(), 6);
    use pb::log_settings_request::setting_value::ParameterChoice as Asked;
    let set = |name: &str, value: Asked| {
        let value = pb::log_settings_request::SettingValue { parameter_choice: Some(value) };
        pb::LogSettingsRequest { settings: [(name.to_owned(), value)].into() }
    };
    client.log_settings(set("log_format", Asked::StringParam("default".into()))).await.unwrap();
    // The tests' own program has the log.
    let changed = client.log_settings(set("log_format", Asked::StringParam("ISO8601".into()))).await.unwrap_err();
    assert_eq!(changed.code(), Code::Unimplemented);
    let unknown = client.log_settings(set("log_colour", Asked::BoolParam(true))).await.unwrap_err();
    assert_eq!(unknown.code(), Code::InvalidArgument);
    assert!(unknown.message().contains("log_verbose_level"));
}

#[tokio::test]
async fn reflection_lists_the_services() {
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1::{ListServiceResponse, ServerReflectionRequest};

    let server = Server::start().await;
    let mut client = ServerReflectionClient::new(server.channel().await);
    let request = ServerReflectionRequest {
        message_request: Some(MessageRequest::ListServices(String::new())),
        ..Default::default()
    };
    let mut answers = client.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    let answer = answers.message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(ListServiceResponse { service }) = answer else { panic!("{answer:?}") };
    let names: Vec<_> = service.iter().map(|service| service.name.as_str()).collect();
    assert!(names.contains(&"inference.GRPCInferenceService"), "{names:?}");
    assert!(names.contains(&"grpc.health.v1.Health"), "{names:?}");
}
