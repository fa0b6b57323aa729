//! Models in processes of their own, in a running server: the loss when such a process ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::serve::{REQUEST, Server, copy, digits, http};

/// A repository with two models, of which one runs in a process of its own, and the server's flags.
fn repository() -> (tempfile::TempDir, String) {
    let folder = digits();
    copy(&folder.path().join("digits"), &folder.path().join("beside"));
    let config = folder.path().join("beside/config.pbtxt");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(config, text.replace("\"digits\"", "\"beside\"")).unwrap();
    let config = folder.path().join("downbeat.toml");
    std::fs::write(&config, "[models.digits]\nisolation = \"process\"\n").unwrap();
    let config = config.to_str().unwrap().to_owned();
    (folder, config)
}

/// The child processes of a process.
fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    children.flat_map(|text| text.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()).collect()
}

/// The one child of a process. On a busy machine the child may just be started again.
fn only_child(pid: u32) -> u32 {
    until("one model is in a process of its own", || children(pid).len() == 1);
    children(pid)[0]
}

fn signal(name: &str, pid: u32) {
    assert!(std::process::Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

/// The executor process of a model, as `GET /v2/devices` reports it.
pub fn executor(server: &Server, model: &str) -> serde_json::Value {
    let (status, body) = server.http("GET", "/v2/devices", "");
    assert_eq!(status, 200, "{body}");
    let report: serde_json::Value = serde_json::from_str(&body).unwrap();
    let models = report["devices"][0]["models"].as_array().unwrap();
    models.iter().find(|placed| placed["model"] == model).unwrap()["executor"].clone()
}

/// Waits until `is_so` returns true. The test fails after a long wait.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..6_000 {
        if is_so() {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
    panic!("never: {what}");
}

fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // An ended process is a zombie until its parent has waited for it.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn a_killed_process_costs_its_own_model_only_and_comes_back() {
    let (folder, config) = repository();
    let server = Server::start(folder.path(), &["--config", &config], "\"message\":\"ready\",\"models\":2");
    let request = std::fs::read_to_string(REQUEST).unwrap();
    let address = server.address();
    let infer = |model: &str| http(address, "POST", &format!("/v2/models/{model}/infer"), &request);
    let (status, expected) = infer("beside");
    assert_eq!(status, 200, "{expected}");
    let outputs = |body: &str| serde_json::from_str::<serde_json::Value>(body).unwrap()["outputs"].clone();
    let first = only_child(server.pid());
    assert_eq!(executor(&server, "digits"), serde_json::json!({"pid": first, "restarts": 0}));
    assert!(executor(&server, "beside").is_null());
    let [done, others, own] = [(); 3].map(|()| AtomicBool::new(false));
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| {
            let mut count = 0;
            while !done.load(Ordering::SeqCst) {
                let (status, body) = infer("beside");
                assert_eq!(status, 200, "{body}");
                count += 1;
                others.store(true, Ordering::SeqCst);
            }
            count
        });
        let load = scope.spawn(|| {
            let mut statuses = Vec::new();
            while !done.load(Ordering::SeqCst) {
                let (status, body) = infer("digits");
                match status {
                    200 => assert_eq!(outputs(&body), outputs(&expected)),
                    503 => assert!(body.contains("executor process has ended (signal 9 (SIGKILL))"), "{body}"),
                    _ => panic!("{status} {body}"),
                }
                own.store(true, Ordering::SeqCst);
                if statuses.last() != Some(&status) {
                    statuses.push(status);
                }
            }
            statuses
        });
        until("both serve", || others.load(Ordering::SeqCst) && own.load(Ordering::SeqCst));
        signal("-KILL", first);
        until("it is not ready", || server.http("GET", "/v2/models/digits/ready", "").0 != 200);
        assert_eq!(server.http("GET", "/v2/health/ready", "").0, 200, "the server is");
        until("it is ready again", || server.http("GET", "/v2/models/digits/ready", "").0 == 200);
        until("it answers again", || infer("digits").0 == 200);
        // The load's thread has seen the change, too, once it has asked again.
        std::thread::park_timeout(Duration::from_millis(50));
        done.store(true, Ordering::SeqCst);
        assert!(beside.join().unwrap() > 0);
        assert_eq!(load.join().unwrap(), [200, 503, 200]);
    });
    let now = children(server.pid());
    assert!(now.len() == 1 && now[0] != first, "{now:?} after {first}");
    assert_eq!(executor(&server, "digits"), serde_json::json!({"pid": now[0], "restarts": 1}));
    let metrics = server.metrics();
    assert!(metrics.contains("downbeat_executor_restarts_total{model=\"digits\",version=\"1\"} 1"), "{metrics}");
    assert_eq!(server.terminate().code(), Some(0));
    until("no process is left", || !is_running(now[0]));
}

#[test]
fn a_process_that_does_not_answer_is_ended_and_started_again() {
    let (folder, config) = repository();
    let limits = ["--config", &config, "--run-timeout", "2", "--run-timeout-factor", "1"];
    let server = Server::start(folder.path(), &limits, "\"message\":\"ready\",\"models\":2");
    let request = std::fs::read_to_string(REQUEST).unwrap();
    let infer = |model: &str| server.http("POST", &format!("/v2/models/{model}/infer"), &request);
    let first = only_child(server.pid());
    signal("-STOP", first);
    let (status, body) = infer("digits");
    assert_eq!(status, 503, "{body}");
    assert_eq!(infer("beside").0, 200);
    until("it answers again", || infer("digits").0 == 200);
    assert!(!is_running(first));
    assert_eq!(server.http("GET", "/v2/models/digits/ready", "").0, 200);
}

/// Both models in processes of their own, with the server's flags. Their operators run in groups by
/// a predictor that was sampled in this way.
fn side_by_side() -> (tempfile::TempDir, String) {
    let (folder, config) = repository();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let predictor = file("predictor.json");
    let models = [
        "profile",
        "digits",
        "--co-run",
        "beside",
        "--isolation",
        "process",
        "--repository",
        folder.path().to_str().unwrap(),
    ];
    let sampled = ["--engine", "rten", "--segments", "2", "--batch", "1", "--budget", "0.1", "--predictor", &predictor];
    let output = crate::command_line::run(&[&models[..], &sampled].concat());
    assert_eq!(output.status.code(), Some(0), "{}", crate::command_line::stderr(&output));
    let text = format!(
        "drop = \"none\"\nisolation = \"process\"\n[device]\npolicy = \"overlap\"\npredictor = {predictor:?}\n"
    );
    std::fs::write(&config, text).unwrap();
    (folder, config)
}

/// One of two models that run side by side gets this signal under load. It answers 503 and comes
/// back. The other answers all along, or late while it waits at the barrier of their group. Groups
/// go on.
fn costs_its_model_only(name: &str, more: &[&str], said: &str) {
    let (folder, config) = side_by_side();
    let flags = [&["--config", &config], more].concat();
    let server = Server::start(folder.path(), &flags, "\"message\":\"ready\",\"models\":2");
    let request = std::fs::read_to_string(REQUEST).unwrap();
    let address = server.address();
    let infer = |model: &str| http(address, "POST", &format!("/v2/models/{model}/infer"), &request);
    let groups = || {
        let (_, body) = server.http("GET", "/v2/devices", "");
        serde_json::from_str::<serde_json::Value>(&body).unwrap()["devices"][0]["groups"].clone()
    };
    let alone: Vec<_> = groups()["models"].as_array().unwrap().iter().map(|model| model["alone"].clone()).collect();
    assert!(alone.iter().all(serde_json::Value::is_null), "the predictor fits: {alone:?}");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| {
            let mut count = 0;
            while !done.load(Ordering::SeqCst) {
                let (status, body) = infer("beside");
                assert_eq!(status, 200, "{body}");
                count += 1;
            }
            count
        });
        let load = scope.spawn(|| {
            let mut statuses = Vec::new();
            while !done.load(Ordering::SeqCst) {
                let (status, body) = infer("digits");
                assert!(status == 200 || status == 503 && body.contains(said), "{status} {body}");
                if statuses.last() != Some(&status) {
                    statuses.push(status);
                }
            }
            statuses
        });
        until("groups run", || groups()["groups"].as_u64().unwrap() > 20);
        let pid = executor(&server, "digits")["pid"].as_u64().unwrap() as u32;
        signal(name, pid);
        until("it has ended", || !is_running(pid));
        until("it answers again", || infer("digits").0 == 200);
        let before = groups()["groups"].as_u64().unwrap();
        until("groups go on", || groups()["groups"].as_u64().unwrap() > before + 20);
        done.store(true, Ordering::SeqCst);
        assert!(beside.join().unwrap() > 0);
        assert_eq!(load.join().unwrap(), [200, 503, 200]);
    });
    assert_eq!(executor(&server, "digits")["restarts"], 1);
    assert_eq!(executor(&server, "beside")["restarts"], 0);
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_killed_process_among_models_side_by_side_costs_its_own() {
    costs_its_model_only("-KILL", &[], "executor process has ended (signal 9 (SIGKILL))");
}

#[test]
fn a_silent_process_among_models_side_by_side_costs_its_own() {
    costs_its_model_only("-STOP", &["--run-timeout", "0.5", "--run-timeout-factor", "1"], "digits");
}

#[test]
fn a_server_that_is_killed_leaves_no_process() {
    let (folder, config) = repository();
    let server = Server::start(folder.path(), &["--config", &config], "\"message\":\"ready\",\"models\":2");
    let executor = only_child(server.pid());
    // The process ended by SIGKILL.
    drop(server);
    until("no process is left", || !is_running(executor));
}

#[test]
fn a_process_that_has_no_server_says_so() {
    let output = crate::command_line::run(&["executor"]);
    let said = crate::command_line::stderr(&output);
    assert!(said.starts_with("downbeat: only a Downbeat server may start `downbeat executor`: "), "{said}");
}
