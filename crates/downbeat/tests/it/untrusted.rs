//! Model files and requests that end the process that runs them. The server goes on, and says why a
//! model does not serve.

use std::fs;
use std::path::Path;

use base64::Engine;
use prost::Message;

use crate::command_line::{run, stdout};
use crate::isolation::{executor, until};
use crate::model::{
    AttributeProto, BOOL, FLOAT, GraphProto, INT32, INT64, ModelProto, NodeProto, bytes, identity, int, model, node,
    value,
};
use crate::serve::{REQUEST, Server, digits};

/// More operators in a row than a stack of any thread has room for.
const TOO_MANY: usize = 100_000;

/// `y = -(-(...x))`.
fn chain() -> ModelProto {
    let name = |at: usize| if at == TOO_MANY { "y".to_owned() } else { format!("x{at}") };
    let nodes = (0..TOO_MANY).map(|at| node("Neg", &[&name(at)], &[&name(at + 1)])).collect();
    model(nodes, vec![], vec![value("x0", FLOAT, &[4])], vec![value("y", FLOAT, &[4])])
}

/// The smallest integer divided by -1, for every `x`.
fn overflow() -> ModelProto {
    let number = |name: &str, n: i32| bytes(name, INT32, &[], &n.to_le_bytes());
    let nodes = vec![
        node("Mul", &["x", "zero"], &["none"]),
        node("Add", &["none", "least"], &["first"]),
        node("Div", &["first", "minus"], &["z"]),
    ];
    let weights = vec![number("zero", 0), number("least", i32::MIN), number("minus", -1)];
    model(nodes, weights, vec![value("x", INT32, &[2])], vec![value("z", INT32, &[2])])
}

/// `z = x / y` of integers.
fn quotient() -> ModelProto {
    let inputs = vec![value("x", INT32, &[2]), value("y", INT32, &[2])];
    model(vec![node("Div", &["x", "y"], &["z"])], vec![], inputs, vec![value("z", INT32, &[2])])
}

/// Zeros of as many rows and columns as the sum of `x`.
fn zeros() -> ModelProto {
    let both = NodeProto { attribute: vec![int("axis", 0)], ..node("Concat", &["flat", "flat"], &["shape"]) };
    let nodes = vec![
        node("ReduceSum", &["x"], &["sum"]),
        node("Reshape", &["sum", "one"], &["flat"]),
        both,
        node("ConstantOfShape", &["shape"], &["y"]),
    ];
    let one = bytes("one", INT64, &[1], &1_i64.to_le_bytes());
    model(nodes, vec![one], vec![value("x", INT64, &[2000])], vec![value("y", FLOAT, &[-1, -1])])
}

/// `count` copies of `x`, one from each turn of a loop.
fn repeated() -> ModelProto {
    let body = GraphProto {
        name: "body".into(),
        node: vec![node("Identity", &["go"], &["on"]), node("Identity", &["x"], &["copy"])],
        input: vec![value("turn", INT64, &[]), value("go", BOOL, &[])],
        output: vec![value("on", BOOL, &[]), value("copy", FLOAT, &[4])],
        ..GraphProto::default()
    };
    let turns = NodeProto { attribute: vec![graph("body", body)], ..node("Loop", &["count", ""], &["y"]) };
    let inputs = vec![value("count", INT64, &[]), value("x", FLOAT, &[4])];
    model(vec![turns], vec![], inputs, vec![value("y", FLOAT, &[-1, 4])])
}

/// A loop of more turns than a test waits for, for every `x`.
fn endless() -> ModelProto {
    let body = GraphProto {
        name: "body".into(),
        node: vec![node("Identity", &["go"], &["on"]), node("Neg", &["before"], &["behind"])],
        input: vec![value("turn", INT64, &[]), value("go", BOOL, &[]), value("before", FLOAT, &[4])],
        output: vec![value("on", BOOL, &[]), value("behind", FLOAT, &[4])],
        ..GraphProto::default()
    };
    let count = bytes("count", INT64, &[], &i64::from(i32::MAX).to_le_bytes());
    let turns = NodeProto { attribute: vec![graph("body", body)], ..node("Loop", &["count", "", "x"], &["y"]) };
    model(vec![turns], vec![count], vec![value("x", FLOAT, &[4])], vec![value("y", FLOAT, &[4])])
}

fn graph(name: &str, graph: GraphProto) -> AttributeProto {
    const GRAPH: i32 = 5;
    AttributeProto { name: name.into(), g: Some(graph), r#type: GRAPH, ..AttributeProto::default() }
}

fn add(repository: &Path, name: &str, model: &ModelProto) {
    let folder = repository.join(name).join("1");
    fs::create_dir_all(&folder).unwrap();
    crate::model::write(&folder, "model.onnx", model);
}

/// A server of the digits and of one more model, with these options.
fn beside(name: &str, model: &ModelProto, options: &str, until: &str) -> (tempfile::TempDir, Server) {
    let folder = digits();
    add(folder.path(), name, model);
    let config = folder.path().join("downbeat.toml");
    fs::write(&config, format!("[models.{name}]\n{options}\n")).unwrap();
    let config = config.to_str().unwrap();
    // No run takes too long here, however busy the machine is.
    let flags = [
        "--config",
        config,
        "--model-control-mode",
        "explicit",
        "--load-model",
        "*",
        "--run-timeout",
        "600",
        "--load-run-timeout",
        "0",
    ];
    let server = Server::start(folder.path(), &flags, until);
    (folder, server)
}

fn digits_are_answered(server: &Server) {
    let request = fs::read_to_string(REQUEST).unwrap();
    let (status, body) = server.http("POST", "/v2/models/digits/infer", &request);
    assert_eq!(status, 200, "{body}");
}

/// The file ends the process that tries it. At start, on request and in a check, the reason has
/// these words.
fn is_refused(name: &str, model: &ModelProto, options: &str, words: &[&str]) {
    let until = format!("1 of 2 models are ready; not loaded: {name}");
    let (folder, server) = beside(name, model, options, &until);
    let has_words = |said: &str| assert!(words.iter().all(|word| said.contains(word)), "{words:?}: {said}");
    has_words(&server.http("POST", "/v2/repository/index", "").1);
    let (status, body) = server.http("POST", &format!("/v2/repository/models/{name}/load"), "");
    assert_eq!(status, 400, "{body}");
    has_words(&body);
    digits_are_answered(&server);
    let config = folder.path().join("downbeat.toml");
    let check = ["config", "check", folder.path().to_str().unwrap(), "--config", config.to_str().unwrap()];
    let output = run(&[&check[..], &["--engine", "rten"]].concat());
    let said = stdout(&output);
    has_words(&said);
    assert!(said.contains("2 models, 1 in error"), "{said}");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_chain_of_operators_that_overflows_the_stack_is_refused() {
    let options = "isolation = \"none\"\nengine = \"rten\"";
    is_refused("chain", &chain(), options, &["the model's trial process has ended", "SIGABRT"]);
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_file_that_ends_the_process_of_its_trial_is_refused() {
    let options = "isolation = \"none\"\nengine = \"onnxruntime\"";
    is_refused("overflow", &overflow(), options, &["the model's trial process has ended", "SIGFPE"]);
}

#[test]
fn a_file_that_runs_for_too_long_in_its_trial_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    add(folder.path(), "endless", &endless());
    let repository = folder.path().to_str().unwrap();
    let flags = ["--engine", "rten", "--isolation", "none", "--trial-timeout", "2"];
    let output = run(&[&["config", "check", repository][..], &flags].concat());
    let said = stdout(&output);
    assert!(said.contains("SIGALRM") && said.contains("the trial took more than 2 s (trial_timeout_s)"), "{said}");
    assert_eq!(output.status.code(), Some(1));
}

/// A request ends only the process of its model, and the server starts the model again.
fn ends_its_process_only(name: &str, model: &ModelProto, options: &str, [harmless, fatal]: [&str; 2]) {
    let (_folder, server) = beside(name, model, options, "\"message\":\"ready\",\"models\":2");
    let infer = |request: &str| server.http("POST", &format!("/v2/models/{name}/infer"), request);
    let (status, body) = infer(harmless);
    assert_eq!(status, 200, "{body}");
    assert!(executor(&server, "digits").is_null(), "nothing speaks against the server's own process");
    let first = executor(&server, name)["pid"].clone();
    assert!(first.is_u64(), "{first}");
    let (status, body) = infer(fatal);
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("executor process has ended"), "{body}");
    digits_are_answered(&server);
    until("it answers again", || infer(harmless).0 == 200);
    assert_ne!(executor(&server, name)["pid"], first);
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_request_that_overflows_a_division_of_integers_ends_its_process_only() {
    let request = |x: i32, y: i32| {
        format!(
            r#"{{"inputs":[{{"name":"x","datatype":"INT32","shape":[2],"data":[{x},4]}},{{"name":"y","datatype":"INT32","shape":[2],"data":[{y},2]}}]}}"#
        )
    };
    let requests = [request(7, 3), request(i32::MIN, -1)];
    ends_its_process_only("quotient", &quotient(), "engine = \"onnxruntime\"", [&requests[0], &requests[1]]);
}

/// The request asks for a petabyte. A smaller one would take all memory of the machine first, and the
/// system would end processes of other tests.
#[test]
fn a_request_for_more_memory_than_there_is_ends_its_process_only() {
    let request = |sum: i64| {
        let rest = ",0".repeat(1999);
        format!(r#"{{"inputs":[{{"name":"x","datatype":"INT64","shape":[2000],"data":[{sum}{rest}]}}]}}"#)
    };
    let requests = [request(2), request(1 << 24)];
    ends_its_process_only("zeros", &zeros(), "engine = \"rten\"", [&requests[0], &requests[1]]);
}

#[test]
fn a_loop_as_long_as_a_request_says_runs_in_a_process() {
    let (_folder, server) = beside("repeated", &repeated(), "engine = \"rten\"", "\"message\":\"ready\",\"models\":2");
    let request = r#"{"inputs":[{"name":"count","datatype":"INT64","shape":[],"data":[3]},{"name":"x","datatype":"FP32","shape":[4],"data":[1,2,3,4]}]}"#;
    let (status, body) = server.http("POST", "/v2/models/repeated/infer", request);
    assert_eq!(status, 200, "{body}");
    assert!(body.contains("[3,4]"), "{body}");
    assert!(executor(&server, "repeated")["pid"].is_u64());
    assert!(executor(&server, "digits").is_null());
}

#[test]
fn a_model_that_comes_with_a_load_request_runs_in_a_process() {
    let folder = digits();
    let config = folder.path().join("downbeat.toml");
    fs::write(&config, "[models.other]\nengine = \"rten\"\n").unwrap();
    let config = config.to_str().unwrap();
    let flags = ["--config", config, "--model-control-mode", "explicit", "--load-model", "*"];
    let server = Server::start(folder.path(), &flags, "\"message\":\"ready\",\"models\":1");
    let file = base64::engine::general_purpose::STANDARD.encode(identity(FLOAT, &[4]).encode_to_vec());
    let load = format!(r#"{{"parameters":{{"config":"{{}}","file:1/model.onnx":"{file}"}}}}"#);
    let (status, body) = server.http("POST", "/v2/repository/models/guest/load", &load);
    assert_eq!(status, 200, "{body}");
    assert!(executor(&server, "guest")["pid"].is_u64());
    let request = r#"{"inputs":[{"name":"x","datatype":"FP32","shape":[4],"data":[1,2,3,4]}]}"#;
    let (status, body) = server.http("POST", "/v2/models/guest/infer", request);
    assert_eq!(status, 200, "{body}");
    // A file that ends its process does not harm the server or the other models.
    let file = base64::engine::general_purpose::STANDARD.encode(chain().encode_to_vec());
    let load = format!(r#"{{"parameters":{{"config":"{{}}","file:1/model.onnx":"{file}"}}}}"#);
    let (status, body) = server.http("POST", "/v2/repository/models/other/load", &load);
    assert!(status == 400 && body.contains("executor process has ended during the load"), "{status} {body}");
    digits_are_answered(&server);
}

/// The verdict of the first start holds for the second, which starts no process.
#[test]
fn a_file_is_tried_once() {
    let folder = digits();
    let cache = folder.path().join("profiles");
    let flags = ["--profile-cache", cache.to_str().unwrap(), "--log-level", "info,downbeat_models=debug"];
    let start = || {
        let server = Server::start(folder.path(), &flags, "\"message\":\"ready\",\"models\":1");
        let tried = server.said().contains("was tried in a process");
        assert_eq!(server.terminate().code(), Some(0));
        tried
    };
    assert_eq!([start(), start()], [true, false]);
    let config = folder.path().join("digits/1/model.onnx");
    crate::model::write(config.parent().unwrap(), "model.onnx", &crate::model::product());
    fs::remove_file(folder.path().join("digits/config.pbtxt")).unwrap();
    assert!(start(), "another file");
}
