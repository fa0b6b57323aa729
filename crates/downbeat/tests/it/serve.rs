//! `downbeat serve` as a process: its messages, its answers and its end.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::cluster::until;
use crate::command_line::{downbeat, run, stderr, stdout};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models");
const PICTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/digit.png");
pub const REQUEST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/digit.json");

/// Longer than any step takes; a server that is not ready in this time fails the test.
const PATIENCE: Duration = Duration::from_secs(600);

/// A running server on free ports. Killed when the test is over.
pub struct Server {
    child: Child,
    http: SocketAddr,
    grpc: SocketAddr,
    metrics: SocketAddr,
    log: mpsc::Receiver<String>,
    said: String,
    /// A cache of the test's own: profiles of other runs would change the test.
    _cache: tempfile::TempDir,
}

impl Server {
    /// Starts a server and waits for the line that says `until`.
    pub fn start(repository: &Path, flags: &[&str], until: &str) -> Server {
        Server::within(downbeat(&["serve"]), repository, flags, until)
    }

    /// The same with a command that ends in the flags of `downbeat serve`.
    pub fn within(mut command: Command, repository: &Path, flags: &[&str], until: &str) -> Server {
        let cache = tempfile::tempdir().unwrap();
        command.arg(repository).args(["--host", "127.0.0.1", "--engine", "rten", "--profiling-budget", "0"]);
        command.args(["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--log-format", "json"]);
        command.env("DOWNBEAT_SHUTDOWN_GRACE", "0");
        let mut child = command.args(flags).env("XDG_CACHE_HOME", cache.path()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, log) = mpsc::channel();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let said = String::new();
        let mut server = Server { child, http: nowhere, grpc: nowhere, metrics: nowhere, log, said, _cache: cache };
        server.http = server.wait_for_address("HTTP");
        if !flags.contains(&"--allow-grpc=false") {
            server.grpc = server.wait_for_address("gRPC");
        }
        server.metrics = server.wait_for_address("metrics");
        server.wait_for(until);
        server
    }

    /// The next line with `text`.
    pub fn wait_for(&mut self, text: &str) -> String {
        loop {
            let Ok(line) = self.log.recv_timeout(PATIENCE) else { panic!("never said {text}: {}", self.said) };
            self.said += &line;
            self.said += "\n";
            if line.contains(text) {
                return line;
            }
        }
    }

    fn wait_for_address(&mut self, of: &str) -> SocketAddr {
        let line = self.wait_for(&format!("\"message\":\"{of}\""));
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        line["fields"]["address"].as_str().unwrap().parse().unwrap()
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn url(&self) -> String {
        format!("http://{}", self.http)
    }

    /// Status and body of a request.
    pub fn http(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        http(self.http, method, path, body)
    }

    /// The server's metrics, from /metrics.
    pub fn metrics(&self) -> String {
        http(self.metrics, "GET", "/metrics", "").1
    }

    /// The address at which the server answers HTTP.
    pub fn address(&self) -> SocketAddr {
        self.http
    }

    /// The address at which the server answers gRPC.
    pub fn grpc_address(&self) -> SocketAddr {
        self.grpc
    }

    /// The address at which the server answers scrapes and probes.
    pub fn metrics_address(&self) -> SocketAddr {
        self.metrics
    }

    /// The lines of its log, up to the last line that a test waited for.
    pub fn said(&self) -> &str {
        &self.said
    }

    /// Sends a signal, such as `-HUP`.
    pub fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// Waits for the server's end.
    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        until("the end of the server", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// Ends the server by a signal, and waits for its end.
    pub fn end(mut self, signal: &str) -> ExitStatus {
        self.signal(signal);
        self.wait()
    }

    pub fn terminate(self) -> ExitStatus {
        self.end("-TERM")
    }
}

/// Status and body of a server's answer at an address.
pub fn http(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    try_http(address, method, path, body).unwrap()
}

/// The same; an error if there is no answer.
pub fn try_http(address: SocketAddr, method: &str, path: &str, body: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    Ok((head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned()))
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to.join(entry.file_name()));
        } else {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

/// A repository with the example `digits` only, whose SLO a busy machine keeps too.
pub fn digits() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy(&Path::new(EXAMPLES).join("digits"), &folder.path().join("digits"));
    let config = folder.path().join("digits/config.pbtxt");
    let text = fs::read_to_string(&config).unwrap();
    let patient = text.replace("string_value: \"250\"", "string_value: \"60000\"");
    assert_ne!(text, patient);
    fs::write(config, patient).unwrap();
    folder
}

#[test]
fn the_digit_in_the_picture_is_told_and_sigterm_ends_it_well() {
    let server = Server::start(digits().path(), &[], "\"message\":\"ready\",\"models\":1");
    let output = run(&["infer", "digits", PICTURE, "--url", &server.url()]);
    assert!(
        stdout(&output).starts_with("probabilities: seven (probability 0."),
        "{}{}",
        stdout(&output),
        stderr(&output)
    );
    let from_json = run(&["infer", "digits", "--request", REQUEST, "--url", &server.url()]);
    assert_eq!(stdout(&from_json), stdout(&output), "the JSON example holds the same picture");
    let three = run(&["infer", "digits", PICTURE, "--top", "3", "--url", &server.url()]);
    assert_eq!(stdout(&three).lines().count(), 3);
    let missing = run(&["infer", "digitz", PICTURE, "--url", &server.url()]);
    assert!(stderr(&missing).starts_with("downbeat: the server answered 404 Not Found: "), "{}", stderr(&missing));
    assert_eq!(missing.status.code(), Some(1));
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_wrong_configuration_does_not_keep_other_models_out() {
    let folder = digits();
    copy(&Path::new(EXAMPLES).join("digits"), &folder.path().join("typo"));
    fs::write(folder.path().join("typo/config.pbtxt"), "max_batch_size: 8\ndynamic_batchin { }\n").unwrap();
    let server = Server::start(folder.path(), &[], "1 of 2 models are ready; not loaded: typo");
    assert!(
        server.said.contains("config.pbtxt:2:1: dynamic_batchin: ModelConfig has no field 'dynamic_batchin'; did you mean 'dynamic_batching'?"),
        "{}",
        server.said
    );
    let output = run(&["infer", "digits", PICTURE, "--url", &server.url()]);
    assert!(stdout(&output).contains("seven"), "{}", stderr(&output));
    let (_, index) = server.http("POST", "/v2/repository/index", "");
    assert!(index.contains("\"UNAVAILABLE\"") && index.contains("did you mean 'dynamic_batching'?"), "{index}");
    assert_eq!(server.http("GET", "/v2/health/live", "").0, 200);
    assert_ne!(server.http("GET", "/v2/health/ready", "").0, 200, "not all models are ready");
}

/// `--load-model` names a model of the repository. Another model may come later, also in mode
/// explicit.
#[test]
fn misspelled_models_and_misnamed_versions_are_said_at_start() {
    let folder = digits();
    let wrong = folder.path().join("wrong/01");
    fs::create_dir_all(&wrong).unwrap();
    fs::copy(folder.path().join("digits/1/model.onnx"), wrong.join("model.onnx")).unwrap();
    let flags = ["--slo-ms", "digitz=5"];
    let hint = "no model 'digitz'; did you mean 'digits'?";
    let server = Server::start(folder.path(), &flags, "1 of 2 models are ready; not loaded: wrong");
    assert!(server.said.contains(hint) && server.said.contains("01 is not a version"), "{}", server.said);
    assert_eq!(server.http("GET", "/v2/health/ready", "").0, 503);
    let flags = ["--slo-ms", "digitz=5", "--model-control-mode", "explicit", "--load-model", "digits"];
    let server = Server::start(folder.path(), &flags, "\"message\":\"ready\",\"models\":1");
    assert!(server.said.contains(hint), "{}", server.said);
}

#[test]
fn a_wrong_log_level_ends_the_command_with_the_levels() {
    let output = run(&["serve", EXAMPLES, "--log-level", "wran"]);
    let said = stderr(&output);
    assert!(said.contains("'wran' is no log level; levels are error, warn, info, debug, trace, off"), "{said}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_failing_model_ends_the_server_if_asked_to() {
    let folder = digits();
    fs::write(folder.path().join("digits/1/model.onnx"), "garbage").unwrap();
    let mut command =
        downbeat(&["serve", folder.path().to_str().unwrap(), "--engine", "rten", "--exit-on-error", "true"]);
    let output = command.args(["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    let last = said.lines().last().unwrap();
    let expected = "downbeat: 0 of 1 models are ready; not loaded: digits; the server ends, as --exit-on-error asks";
    assert_eq!(last, expected, "{said}");
    assert_eq!(said.matches("model.onnx: ").count(), 1, "the reason is said once: {said}");
}

#[test]
fn a_server_without_a_model_says_why_it_is_not_ready() {
    let folder = digits();
    let empty = tempfile::tempdir().unwrap();
    let server = Server::start(empty.path(), &[], "not ready: no model is served");
    assert!(server.said.contains("because the repository has none"), "{}", server.said);
    assert_eq!(server.http("GET", "/v2/health/ready", "").0, 503);
    assert_eq!(server.http("GET", "/v2/health/live", "").0, 200);
    drop(server);
    for (repository, flag) in [(empty.path(), "--allow-empty"), (folder.path(), "--model-control-mode=explicit")] {
        let server = Server::start(repository, &[flag], "\"message\":\"ready\",\"models\":0");
        assert_eq!(server.http("GET", "/v2/health/ready", "").0, 200, "{flag}");
    }
}

#[test]
fn a_command_line_of_triton_starts_the_server() {
    let (one, two) = (digits(), tempfile::tempdir().unwrap());
    copy(&Path::new(EXAMPLES).join("mlp"), &two.path().join("mlp"));
    let second = format!("--model-repository={}", two.path().display());
    let first = format!("--model-repository={}", one.path().display());
    let flags = [
        first.as_str(),
        second.as_str(),
        "--id=triton",
        "--allow-grpc=false",
        "--log-verbose=0",
        "--log-info=1",
        "--strict-readiness=true",
        "--exit-on-error=true",
        "--http-thread-count=8",
        "--backend-directory=/opt/tritonserver/backends",
        "--cuda-memory-pool-byte-size=0:0",
        "--allow-gpu-metrics=false",
        "--rate-limit=off",
        "--trace-config=rate=0",
    ];
    // The folder that the flag names counts, not the path beside it.
    let server = Server::start(Path::new("/nonexistent"), &flags, "\"message\":\"ready\",\"models\":2");
    let passed_over = server
        .said
        .lines()
        .filter(|line| line.contains("ignored, because this server has no counterpart"))
        .collect::<Vec<_>>();
    assert_eq!(passed_over.len(), 1, "{}", server.said);
    for flag in ["http-thread-count", "backend-directory", "cuda-memory-pool-byte-size", "rate-limit"] {
        assert!(passed_over[0].contains(&format!("--{flag}")), "{}", server.said);
    }
    assert!(server.http("GET", "/v2", "").1.contains("\"name\":\"triton\""));
    for model in ["digits", "mlp"] {
        assert_eq!(server.http("GET", &format!("/v2/models/{model}/ready"), "").0, 200);
    }
    assert!(!server.said.contains("\"message\":\"gRPC\""), "{}", server.said);
    let refused = run(&["serve", EXAMPLES, "--http-thread-count=8", "--strict-flags"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("without a counterpart here: --http-thread-count"), "{}", stderr(&refused));
}

#[test]
fn a_named_configuration_is_served_and_the_disk_need_not_be_polled() {
    let folder = digits();
    fs::create_dir(folder.path().join("digits/configs")).unwrap();
    fs::write(folder.path().join("digits/configs/h100.pbtxt"), "max_batch_size: 3").unwrap();
    let flags = ["--model-config-name=h100", "--model-control-mode=poll", "--repository-poll-secs=0"];
    let server = Server::start(folder.path(), &flags, "\"message\":\"ready\",\"models\":1");
    let config = server.http("GET", "/v2/models/digits/config", "").1;
    assert!(config.contains("\"max_batch_size\":3"), "{config}");
    assert_eq!(server.http("GET", "/v2/health/ready/", "").0, 200);
}

#[test]
fn the_options_file_beside_the_models_counts() {
    let folder = digits();
    fs::write(folder.path().join("downbeat.toml"), "[models.digits]\nslo_ms = 0.001\n").unwrap();
    let server = Server::start(folder.path(), &[], "\"message\":\"ready\",\"models\":1");
    // The scheduler lets single requests through to learn how long they take now.
    let answers: Vec<String> =
        (0..4).map(|_| stderr(&run(&["infer", "digits", PICTURE, "--url", &server.url()]))).collect();
    assert!(answers.iter().any(|a| a.contains("504")), "nothing is answered in a microsecond: {answers:?}");
    drop(server);
    let flags = ["--slo-ms", "digits=60000"];
    let server = Server::start(folder.path(), &flags, "\"message\":\"ready\",\"models\":1");
    assert!(stdout(&run(&["infer", "digits", PICTURE, "--url", &server.url()])).contains("seven"));
    // A file in the repository may set only options of models. Others are for the user who starts
    // the server.
    fs::write(folder.path().join("downbeat.toml"), "model_control.mode = 'explicit'\n").unwrap();
    let output = run(&["serve", folder.path().to_str().unwrap()]);
    assert!(stderr(&output).contains("set 'model_control' in a downbeat.toml of the folder"), "{output:?}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_port_in_use_is_named_with_the_flag_for_another() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for flag in ["--http-port", "--grpc-port", "--metrics-port"] {
        let mut arguments = vec!["serve", EXAMPLES, "--host", "127.0.0.1", "--engine", "rten"];
        for other in ["--http-port", "--grpc-port", "--metrics-port"] {
            arguments.extend([other, if other == flag { &port } else { "0" }]);
        }
        let output = run(&arguments);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let last = said.lines().last().unwrap();
        assert!(last.starts_with("downbeat: cannot listen on 127.0.0.1:") && last.contains(flag), "{said}");
    }
}

#[test]
fn a_missing_repository_is_named() {
    let output = run(&["serve", "/nonexistent"]);
    assert!(stderr(&output).contains("downbeat: model repository /nonexistent: no such file or folder"));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn what_a_server_decided_plays_again() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("decisions");
    let flags = ["--decision-log", log.to_str().unwrap(), "--scheduler-shards", "1"];
    let server = Server::start(digits().path(), &flags, "\"message\":\"ready\",\"models\":1");
    let body = fs::read_to_string(REQUEST).unwrap();
    for _ in 0..3 {
        assert_eq!(server.http("POST", "/v2/models/digits/infer", &body).0, 200);
    }
    assert!(server.terminate().success());
    for name in ["shard-0.log", "matchmaker.log", "device-0.log"] {
        let output = run(&["log", "replay", log.join(name).to_str().unwrap()]);
        assert!(output.status.success(), "{name}: {}{}", stdout(&output), stderr(&output));
    }
    let shown = stdout(&run(&["log", "show", log.join("shard-0.log").to_str().unwrap()]));
    assert_eq!(shown.matches("-> send ").count(), 3, "{shown}");
    let shown = stdout(&run(&["log", "show", "--json", log.join("device-0.log").to_str().unwrap()]));
    assert!(shown.starts_with("{\"at\":0,\"begin\":\"device 0\"}\n"), "{shown}");
    assert_eq!(shown.matches(r#""decision":{"Reply":"#).count(), 3, "{shown}");
}

/// An interrupted bench prints and writes its measurements up to Ctrl-C.
#[test]
fn an_interrupted_bench_reports_what_it_has() {
    let server = Server::start(digits().path(), &[], "\"message\":\"ready\",\"models\":1");
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("report.json");
    let mut bench =
        downbeat(&["bench", "--model", "digits", "--rate", "50", "--warmup", "0", "--duration", "600", "--url"]);
    bench.arg(server.http.to_string()).arg("--json").arg(&json);
    let bench = bench.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while !server.http("GET", "/v2/models/digits/stats", "").1.contains("\"batch_size\"") {
        std::thread::park_timeout(Duration::from_millis(20));
    }
    let interrupt = std::process::Command::new("kill").args(["-INT", &bench.id().to_string()]).status().unwrap();
    assert!(interrupt.success());
    let output = bench.wait_with_output().unwrap();
    assert!(
        stdout(&output).contains("warning: the run was interrupted: these are the figures until then"),
        "{output:?}"
    );
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    assert_eq!(report["interrupted"], true);
    assert!(report["total"]["ok"].as_u64().unwrap() > 0, "{report}");
    assert!(report["measured_s"].as_f64().unwrap() < 300.0, "{report}");
}
