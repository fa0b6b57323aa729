//! Requests that web pages send to a server, and the names and addresses of its ports.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;

use crate::command_line::{downbeat, run, stderr};
use crate::serve::{REQUEST, Server, digits};

const EVIL: &str = "origin: http://evil.example";
const LOAD: &str = "/v2/repository/models/digits/load";

/// Status and body of a request with exactly these headers, and its length.
fn ask(address: SocketAddr, line: &str, headers: &[&str], body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    let length = body.len();
    write!(stream, "{line} HTTP/1.1\r\n{headers}connection: close\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn explicit(flags: &[&str]) -> (tempfile::TempDir, Server) {
    let folder = digits();
    let flags = [&["--model-control-mode", "explicit", "--shared-memory"], flags].concat();
    let server = Server::start(folder.path(), &flags, "\"message\":\"ready\",\"models\":0");
    (folder, server)
}

#[test]
fn a_page_of_another_site_changes_nothing() {
    let (_folder, server) = explicit(&[]);
    let changes = [
        "POST /v2/repository/models/digits/load",
        "POST /v2/repository/models/digits/unload",
        "POST /v2/systemsharedmemory/region/r/register",
        "POST /v2/systemsharedmemory/unregister",
        "POST /v2/cudasharedmemory/region/r/register",
        "POST /v2/cudasharedmemory/region/r/unregister",
        "POST /v2/trace/setting",
        "POST /v2/models/digits/trace/setting",
        "POST /v2/logging",
        "PUT /v2/repository/models/digits/share",
        "DELETE /v2/repository/models/digits/share",
        "POST /v2/cluster/plan",
        "POST /v2/repository/models/digits/load/",
        "PATCH /v2/none/yet",
    ];
    for change in changes {
        let sites = ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site"];
        for header in [&[EVIL, "origin: null", "origin: http://localhost:3000"][..], &sites].concat() {
            for address in [server.address(), server.metrics_address()] {
                let (status, said) =
                    ask(address, change, &["host: localhost:8000", "content-type: text/plain", header], "{}");
                assert_eq!(status, 403, "{change}, {header}: {said}");
                assert!(said.contains("a web page of another origin"), "{said}");
            }
        }
    }
    assert_ne!(server.http("GET", "/v2/models/digits/ready", "").0, 200);
}

#[test]
fn programs_and_the_servers_own_pages_control_it() {
    let (_folder, server) = explicit(&[]);
    let load = format!("POST {LOAD}");
    // tritonclient sends no content type.
    let own = [
        &["host: localhost"][..],
        &["host: 127.0.0.1:8000", "origin: http://127.0.0.1:8000", "sec-fetch-site: same-origin"],
        &["host: [::1]:8000", "origin: http://[::1]:8000"],
        &["host: localhost", "sec-fetch-site: none"],
    ];
    for headers in own {
        let (status, said) = ask(server.address(), &load, headers, "");
        assert_eq!(status, 200, "{headers:?}: {said}");
    }
    // A request that changes nothing is answered. The browser keeps the answer from the page.
    let body = std::fs::read_to_string(REQUEST).unwrap();
    for (line, body) in [("GET /v2", ""), ("POST /v2/models/digits/infer", body.as_str())] {
        let (status, said) = ask(server.address(), line, &["host: localhost", EVIL], body);
        assert_eq!(status, 200, "{line}: {said}");
    }
}

#[test]
fn a_loopback_port_takes_only_names_that_are_its_own() {
    let (_folder, server) = explicit(&["--allow-host", "models.example.com", "--allow-host", "downbeat"]);
    let status = |address, line: &str, host: &str| ask(address, line, &[host], "").0;
    for address in [server.address(), server.metrics_address()] {
        for host in ["localhost", "127.0.0.1:8000", "[::1]", "Models.example.com:80", "downbeat"] {
            assert_eq!(status(address, "GET /v2/health/live", &format!("host: {host}")), 200, "{host}");
        }
        for host in ["evil.example", "models.example.com.evil.example", "evil.example:8000"] {
            for line in ["GET /v2/health/live", "POST /v2/models/digits/infer", "GET /metrics"] {
                let (status, said) = ask(address, line, &[&format!("host: {host}")], "");
                assert_eq!(status, 403, "{line}, {host}");
                assert!(said.contains(host) && said.contains("--allow-host"), "{said}");
            }
            // The whole target wins over the header.
            assert_eq!(status(address, &format!("GET http://{host}/v2/health/live"), "host: localhost"), 403);
        }
        let (status, said) = ask(address, "GET /v2/health/live", &["host: localhost", "host: localhost"], "");
        assert!(status == 400 && said.contains("several Host headers"), "{status}: {said}");
    }
}

#[test]
fn a_port_on_every_interface_says_so_and_takes_every_name() {
    let folder = digits();
    let ready = "\"message\":\"ready\",\"models\":1";
    let server = Server::start(folder.path(), &["--http-address", "0.0.0.0"], ready);
    let said: Vec<&str> = server.said().lines().filter(|line| line.contains("every interface")).collect();
    assert!(said.len() == 1 && said[0].contains("HTTP, metrics") && !said[0].contains("gRPC"), "{}", server.said());
    for host in ["downbeat-frontend.default.svc.cluster.local", "10.1.2.3:8002", "downbeat"] {
        for address in [server.address(), server.metrics_address()] {
            let (status, said) = ask(address, "GET /v2/health/ready", &[&format!("host: {host}")], "");
            assert_eq!(status, 200, "{host}: {said}");
        }
    }
    let two = ["host: downbeat", "host: downbeat"];
    assert_eq!(ask(server.address(), "GET /v2", &two, "").0, 400);
    assert_eq!(ask(server.address(), &format!("POST {LOAD}"), &["host: downbeat", EVIL], "").0, 403);
    drop(server);
    let flags = ["--http-address", "0.0.0.0", "--allow-host", "downbeat"];
    let server = Server::start(folder.path(), &flags, ready);
    for (host, status) in [("downbeat", 200), ("10.1.2.3", 200), ("evil.example", 403)] {
        assert_eq!(ask(server.address(), "GET /v2", &[&format!("host: {host}")], "").0, status, "{host}");
    }
}

#[test]
fn every_role_listens_on_the_loopback_interface_by_default() {
    let folder = digits();
    let schedulers = ["--schedulers", "127.0.0.1:1", "--listen", "127.0.0.1:0"];
    let elsewhere = ["--schedulers", "192.0.2.1:1", "--listen", "127.0.0.1:0"];
    let models = folder.path().to_str().unwrap();
    for (role, flags) in [
        ("serve", &["--engine", "rten", models][..]),
        ("backend", &["--engine", "rten", "--schedulers", "127.0.0.1:1", models]),
        ("frontend", &schedulers),
        ("frontend", &elsewhere),
        ("scheduler", &["--listen", "127.0.0.1:0"]),
    ] {
        let mut command = downbeat(&[role, "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]);
        let cache = tempfile::tempdir().unwrap();
        command.args(["--log-format", "json"]).args(flags).env("XDG_CACHE_HOME", cache.path());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let (mut addresses, mut warned) = (Vec::new(), false);
        for line in BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok) {
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            addresses.extend(line["fields"]["address"].as_str().map(str::to_owned));
            let message = line["fields"]["message"].as_str().unwrap_or_default();
            assert!(!message.contains("every interface"), "{line}");
            warned |= message.contains("only processes of this machine reach this port");
            if message == "metrics" {
                break;
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(addresses.len() >= 2, "{role}: {addresses:?}");
        assert_eq!(warned, flags == elsewhere, "{role} {flags:?}");
        assert!(addresses.iter().all(|address| address.starts_with("127.0.0.1:")), "{role}: {addresses:?}");
    }
}

#[test]
fn a_model_to_load_alone_does_not_open_model_control() {
    let folder = digits();
    let output = run(&["serve", folder.path().to_str().unwrap(), "--load-model", "digits"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("add --model-control-mode explicit"), "{}", stderr(&output));
}
