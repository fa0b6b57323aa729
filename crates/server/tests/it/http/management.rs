//! Everything but inference.

use std::sync::atomic::Ordering::SeqCst;

use downbeat_protocol::Parameter;
use downbeat_protocol::http::statistics_from_json;
use serde_json::json;

use super::{Server, json_request};
use crate::support::shared_object::SharedObject;

#[tokio::test]
async fn health_is_a_status_and_says_so_in_json() {
    let server = Server::start().await;
    let reply = server.get("/v2/health/live").await;
    assert_eq!((reply.status, reply.json()), (200, json!({"live": true})));
    let reply = server.get("/v2/health/ready").await;
    assert_eq!((reply.status, reply.json()), (200, json!({"ready": true})));
    server.service.ready.store(false, SeqCst);
    let reply = server.get("/v2/health/ready").await;
    assert_eq!((reply.status, reply.json()), (503, json!({"ready": false})));
    let reply = server.get("/v2/models/simple/ready").await;
    assert_eq!((reply.status, reply.json()), (200, json!({"name": "simple", "ready": true})));
    assert_eq!(server.get("/v2/models/simple/versions/1/ready").await.status, 200);
    let message = server.get("/v2/models/simple/versions/7/ready").await.error(404);
    assert!(message.contains("no version '7'"), "{message}");
    server.post("/v2/repository/models/simple/unload", "").await;
    let reply = server.get("/v2/models/simple/ready").await;
    assert_eq!((reply.status, reply.json()), (503, json!({"name": "simple", "ready": false})));
}

#[tokio::test]
async fn a_server_without_autoscale_advice_says_so() {
    let message = Server::start().await.get("/v2/autoscale").await.error(404);
    assert_eq!(message, "autoscale advice is switched off: autoscale.enabled is false");
}

#[tokio::test]
async fn a_server_without_a_scheduler_says_so() {
    let message = Server::start().await.get("/v2/scheduler").await.error(404);
    let place = "in a cluster, ask the leading scheduler (GET /v2/cluster names it)";
    assert_eq!(message, format!("this process has no scheduler; {place}"));
}

#[tokio::test]
async fn a_share_names_a_partition() {
    let server = Server::start().await;
    assert_eq!(server.get("/v2/devices").await.error(404), "this server has no devices");
    let share = "/v2/repository/models/simple/share";
    let send = async |method: &str, path: &str, body: &str| {
        let mut connection = server.connect().await;
        let length = body.len();
        connection
            .send(format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"))
            .await;
        connection.reply().await
    };
    let put = async |body: &str| send("PUT", share, body).await;
    for wrong in ["", "{}", r#"{"partition":-1}"#, r#"{"partition":1,"units":2}"#] {
        put(wrong).await.error(400);
    }
    assert_eq!(put(r#"{"partition":1}"#).await.error(501), "models of this server have no partitions");
    send("DELETE", share, "").await.error(501);
    send("DELETE", "/v2/repository/models/nobody/share", "").await.error(404);
}

#[tokio::test]
async fn a_timeline_is_of_some_seconds() {
    let server = Server::start().await;
    assert_eq!(server.get("/v2/timeline").await.error(404), "this server keeps no timeline");
    for wrong in ["seconds=0", "seconds=61", "seconds=NaN", "seconds", "seconds=-1"] {
        let message = server.get(&format!("/v2/timeline?{wrong}")).await.error(400);
        assert_eq!(message, "seconds must be a number above 0 and at most 60", "{wrong}");
    }
    assert!(server.get("/v2/timeline?minutes=1").await.error(400).contains("the parameters are seconds"));
}

#[tokio::test]
async fn metadata_names_what_there_is() {
    let server = Server::start().await;
    let body = server.get("/v2").await.json();
    assert_eq!(body["name"], "downbeat");
    assert!(body["extensions"].as_array().unwrap().contains(&json!("binary_tensor_data")));
    let body = server.get("/v2/models/scores").await.json();
    assert_eq!(
        body,
        json!({
            "name": "scores",
            "versions": ["1"],
            "platform": "onnxruntime_onnx",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 784]}],
            "outputs": [{"name": "scores", "datatype": "FP32", "shape": [-1, 10]}],
        })
    );
    assert_eq!(server.get("/v2/models/scores/versions/1").await.status, 200);
    let message = server.get("/v2/models/nobody").await.error(404);
    assert!(message.contains("unknown model 'nobody'"), "{message}");
    let message = server.get("/v2/models/%FF").await.error(400);
    assert!(message.contains("UTF-8"), "{message}");
}

#[tokio::test]
async fn the_configuration_is_json_as_triton_writes_it() {
    let server = Server::start().await;
    let body = server.get("/v2/models/scores/config").await.json();
    assert_eq!(body["max_batch_size"], 8);
    assert_eq!(body["input"][0]["data_type"], "TYPE_FP32");
    assert_eq!(body["input"][0]["dims"], json!([784]), "64-bit integers are numbers");
    assert_eq!(body["instance_group"], json!([]), "defaults are written");
    assert!(body.get("dynamic_batching").is_none() && body.get("ensemble_scheduling").is_none(), "{body}");
}

#[tokio::test]
async fn a_model_and_its_versions_say_which_policy_they_have() {
    let server = Server::start().await;
    for path in ["/v2/models/simple/policy", "/v2/models/simple/versions/1/policy"] {
        let body = server.get(path).await.json();
        assert_eq!(
            (&body["policy"], &body["asked"], &body["asked_for"]),
            (&json!("exclusive"), &json!("exclusive"), &json!("all"))
        );
        assert_eq!((&body["candidates"], &body["measured"], &body["guard"]), (&json!([]), &json!(null), &json!(null)));
    }
    server.get("/v2/models/nobody/policy").await.error(404);
}

/// As this service of the tests. `tests/clients/test_ui.py` asks processes that have lists.
#[tokio::test]
async fn a_service_without_lists_says_where_missed_requests_are_listed() {
    let server = Server::start().await;
    for path in ["/v2/models/simple/missed", "/v2/models/simple/versions/1/missed"] {
        let error = server.get(path).await.error(501);
        assert!(error.contains("`downbeat serve` and the frontends of a cluster keep one"), "{error}");
    }
}

#[tokio::test]
async fn a_what_if_has_a_right_setting_and_a_server_that_answers_it() {
    let server = Server::start().await;
    server.get("/v2/what-if?rate=0").await.error(400);
    server.get("/v2/what-if?speed=2").await.error(400);
    let error = server.get("/v2/what-if?rate=2").await.error(501);
    assert!(error.contains("`downbeat what-if` on the decision log"), "{error}");
}

#[tokio::test]
async fn statistics_can_be_read_back() {
    let server = Server::start().await;
    server.post("/v2/models/simple/infer", json_request().to_string()).await;
    let reply = server.get("/v2/models/simple/stats").await;
    let body = reply.json();
    assert_eq!(body["model_stats"][0]["inference_count"], 1);
    for phase in ["fail", "compute_input", "compute_infer", "compute_output"] {
        assert_eq!(body["model_stats"][0]["inference_stats"][phase], json!({"count": 0, "ns": 0}), "{phase}");
    }
    let statistics = statistics_from_json(&reply.body).unwrap();
    assert_eq!((statistics[0].name.as_str(), statistics[0].inference_count), ("simple", 1));
    let all = statistics_from_json(&server.get("/v2/models/stats").await.body).unwrap();
    assert!(all.len() > 3);
    server.get("/v2/models/nobody/stats").await.error(404);
}

#[tokio::test]
async fn models_are_loaded_and_unloaded() {
    let server = Server::start().await;
    let reply =
        server.post("/v2/repository/models/simple/unload", r#"{"parameters":{"unload_dependents":true}}"#).await;
    assert_eq!((reply.status, reply.json()), (200, json!({})));
    server.post("/v2/models/simple/infer", json_request().to_string()).await.error(503);
    let index = server.post("/v2/repository/index", "").await.json();
    let entry = index.as_array().unwrap().iter().find(|entry| entry["name"] == "simple").unwrap().clone();
    assert_eq!(entry, json!({"name": "simple", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}));
    let ready = server.post("/v2/repository/index", r#"{"ready":true}"#).await.json();
    assert!(ready.as_array().unwrap().iter().all(|entry| entry["name"] != "simple"));

    let body = json!({"parameters": {"config": "{}", "file:1/model.onnx": "b25ueA==", "other": 3}});
    let reply = server.post("/v2/repository/models/simple/load", body.to_string()).await;
    assert_eq!((reply.status, reply.json()), (200, json!({})));
    let (name, overrides) = server.service.loads.lock().pop().unwrap();
    assert_eq!((name.as_str(), overrides.config.as_deref()), ("simple", Some("{}")));
    assert_eq!(overrides.files["1/model.onnx"], "onnx");
    assert_eq!(overrides.parameters["other"], Parameter::Int64(3));
    assert_eq!(server.post("/v2/models/simple/infer", json_request().to_string()).await.status, 200);

    server.post("/v2/repository/models/nobody/load", "").await.error(404);
    let body = json!({"parameters": {"file:1/model.onnx": "!"}});
    let message = server.post("/v2/repository/models/simple/load", body.to_string()).await.error(400);
    assert!(message.contains("'file:1/model.onnx'") && message.contains("base64"), "{message}");
}

#[tokio::test]
async fn settings_can_be_read_and_say_what_cannot_change() {
    let server = Server::start().await;
    assert_eq!(server.get("/v2/trace/setting").await.json()["trace_level"], json!(["OFF"]));
    assert_eq!(server.get("/v2/models/simple/trace/setting").await.status, 200);
    server.get("/v2/models/nobody/trace/setting").await.error(404);
    assert!(server.get("/v2/logging").await.json()["log_info"].is_boolean());
    let same = server.get("/v2/logging").await.body;
    assert_eq!(server.post("/v2/logging", same).await.status, 200);
    let message = server.post("/v2/trace/setting", r#"{"trace_rate":"often"}"#).await.error(400);
    assert!(message.contains("trace_rate"), "{message}");
    let of_model = server.post("/v2/models/simple/trace/setting", r#"{"trace_rate":"5"}"#).await.json();
    let of_server = server.get("/v2/trace/setting").await.json();
    assert_eq!((&of_model["trace_rate"], &of_server["trace_rate"]), (&json!("5"), &json!("1000")));
    let message = server.post("/v2/logging", r#"{"log_colour":"red"}"#).await.error(400);
    assert!(message.contains("'log_colour'") && message.contains("log_verbose_level"), "{message}");
}

#[tokio::test]
async fn shared_memory_regions_are_registered_used_and_forgotten() {
    let server = Server::start().await;
    let object = SharedObject::new("http", 256);
    object.write(0, &(0..16).flat_map(i32::to_le_bytes).collect::<Vec<u8>>());
    object.write(64, &[1, 0, 0, 0].repeat(16));
    let region = json!({"key": object.key, "offset": 0, "byte_size": 256});
    let path = "/v2/systemsharedmemory/region/r";
    let reply = server.post(&format!("{path}/register"), region.to_string()).await;
    assert_eq!((reply.status, reply.json()), (200, json!({})), "{reply:?}");
    let status = json!([{"name": "r", "key": object.key, "offset": 0, "byte_size": 256}]);
    assert_eq!(server.get("/v2/systemsharedmemory/status").await.json(), status);
    assert_eq!(server.get(&format!("{path}/status")).await.json(), status);
    let message = server.post(&format!("{path}/register"), region.to_string()).await.error(409);
    assert!(message.contains("'r'"), "{message}");

    let place = |size: u64, offset: u64| json!({"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": offset});
    let request = json!({
        "inputs": [
            {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "parameters": place(64, 0)},
            {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "parameters": place(64, 64)},
        ],
        "outputs": [{"name": "OUTPUT0", "parameters": place(128, 128)}],
    });
    let reply = server.post("/v2/models/simple/infer", request.to_string()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.json()["outputs"], json!([{"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16]}]));
    assert_eq!(object.read(128, 64), (1..17).flat_map(i32::to_le_bytes).collect::<Vec<u8>>());

    assert_eq!(server.post(&format!("{path}/unregister"), "").await.json(), json!({}));
    server.get(&format!("{path}/status")).await.error(404);
    assert_eq!(server.post("/v2/systemsharedmemory/unregister", "").await.status, 200);
    let message = server.post(&format!("{path}/register"), "").await.error(400);
    assert!(message.contains("not the expected JSON"), "{message}");
    let message = server.post(&format!("{path}/register"), r#"{"key": "/x"}"#).await.error(400);
    assert!(message.contains("byte_size"), "{message}");
}

#[tokio::test]
async fn there_is_no_cuda_shared_memory() {
    let server = Server::start().await;
    assert_eq!(server.get("/v2/cudasharedmemory/status").await.json(), json!([]));
    server.get("/v2/cudasharedmemory/region/r/status").await.error(404);
    let path = "/v2/cudasharedmemory/region/r/register";
    let message = server.post(path, "{}").await.error(400);
    assert!(message.contains("raw_handle"), "{message}");
    let wrong = json!({"raw_handle": {"b64": "?"}, "device_id": 0, "byte_size": 64});
    let message = server.post(path, wrong.to_string()).await.error(400);
    assert_eq!(message, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t");
    let right = json!({"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64});
    let message = server.post(path, right.to_string()).await.error(400);
    assert!(message.starts_with("failed to register CUDA shared memory region: 'r', GPUs not supported"), "{message}");
    let extensions = server.get("/v2").await.json()["extensions"].clone();
    assert!(!extensions.as_array().unwrap().contains(&json!("cuda_shared_memory")), "{extensions}");
    assert_eq!(server.post("/v2/cudasharedmemory/unregister", "").await.status, 200);
}

#[tokio::test]
async fn classes_instead_of_values() {
    let server = Server::start().await;
    let data: Vec<i32> = (0..784).map(|i| i32::from(i == 3) * 2 + i32::from(i == 5)).collect();
    let request = json!({
        "inputs": [{"name": "x", "shape": [1, 784], "datatype": "FP32", "data": data}],
        "outputs": [{"name": "scores", "parameters": {"classification": 2}}],
    });
    let output = server.post("/v2/models/scores/infer", request.to_string()).await.json()["outputs"][0].clone();
    assert_eq!(output["datatype"], "BYTES");
    assert_eq!(output["data"], json!(["2.000000:3:digit 3", "1.000000:5:digit 5"]));
}

#[tokio::test]
async fn the_openapi_text_is_served() {
    let server = Server::start().await;
    let reply = server.get("/v2/openapi.yaml").await;
    assert_eq!(reply.status, 200);
    assert!(reply.body.starts_with(b"openapi: 3"));
}

#[tokio::test]
async fn the_page_of_the_api_takes_all_from_this_server() {
    let server = Server::start().await;
    for path in ["/docs", "/docs/"] {
        let page = server.get(path).await;
        assert_eq!(page.status, 200);
        let policy = &page.headers["content-security-policy"];
        assert!(policy.contains("default-src 'none'") && policy.contains("connect-src 'self'"), "{policy}");
        let text = String::from_utf8(page.body).unwrap();
        assert!(text.contains(r#"src="/docs/rapidoc.js""#) && text.contains(r#"spec-url="/v2/openapi.yaml""#));
        assert!(!text.contains("http://") && !text.contains("https://"), "{text}");
    }
    let script = server.get("/docs/rapidoc.js").await;
    assert_eq!((script.status, script.headers.get("content-encoding")), (200, None));
    assert!(script.body.len() > 500_000, "a client that takes no gzip gets the script unpacked");
}

/// Every path of the protocol, with names filled in.
fn every_path() -> Vec<String> {
    let text = include_str!("../../../../frontend/openapi.yaml");
    let paths = text.lines().filter_map(|line| line.strip_prefix("  /")?.strip_suffix(':'));
    let filled = |path: &str| {
        let path = path.replace("{model}", "simple").replace("{version}", "1").replace("{region}", "r");
        format!("/{path}")
    };
    paths.map(filled).collect()
}

#[tokio::test]
async fn no_path_lets_a_page_of_another_site_change_anything() {
    let server = Server::start().await;
    for path in every_path() {
        for method in ["POST", "PUT", "DELETE", "PATCH"] {
            let mut connection = server.connect().await;
            let head = "host: localhost\r\norigin: http://evil.example\r\ncontent-length: 0";
            connection.send(format!("{method} {path} HTTP/1.1\r\n{head}\r\n\r\n")).await;
            let reply = connection.reply().await;
            let runs_a_model = ["/infer", "/generate", "/generate_stream"].iter().any(|end| path.ends_with(end));
            if runs_a_model && method == "POST" {
                assert_ne!(reply.status, 403, "{path}: inferences change nothing");
            } else {
                assert!(reply.error(403).contains("evil.example"), "{method} {path}");
            }
        }
    }
}

#[tokio::test]
async fn a_path_may_end_in_slashes() {
    let server = Server::start().await;
    let paths = every_path();
    assert!(paths.contains(&"/v2".to_owned()) && paths.len() > 30, "{paths:?}");
    for path in &paths {
        for slashes in ["/", "//"] {
            let (exact, slashed) = (server.get(path).await, server.get(&format!("{path}{slashes}")).await);
            assert_eq!((exact.status, &exact.body), (slashed.status, &slashed.body), "GET {path}{slashes}");
        }
        let (exact, slashed) = (server.post(path, "").await, server.post(&format!("{path}/"), "").await);
        assert_eq!(exact.status, slashed.status, "POST {path}/");
    }
    assert_eq!(server.get("/v2/").await.json()["name"], "downbeat");
    let reply = Server::start().await.post("/v2/models/simple/infer/", json_request().to_string()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let message = server.get("/v2/timeline/?minutes=1").await.error(400);
    assert!(message.contains("the parameters are seconds"), "{message}");
    assert!(server.get("/v2/nowhere/").await.error(404).contains("no such path"));
    let mut connection = server.connect().await;
    connection.send("HEAD /v2/ HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await;
    assert!(connection.head().await.starts_with("HTTP/1.1 200"));
}
