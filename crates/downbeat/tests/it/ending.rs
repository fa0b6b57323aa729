//! How a server ends: the signals that end it, and clients that stopped in the middle of a request.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::cluster::until;
use crate::command_line::downbeat;
use crate::serve::{REQUEST, Server, digits, http};

const READY: &str = "\"message\":\"ready\",\"models\":1";
/// Longer than the patience of a test: only a failing test waits so long.
const LONG: [&str; 4] = ["--drain-timeout", "3600", "--transfer-timeout", "3600"];

#[test]
fn half_a_head_or_body_does_not_hold_the_end_up() {
    let server = Server::start(digits().path(), &LONG, READY);
    let halves = [
        "GET /v2/health/li",
        "POST /v2/models/digits/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{\"inputs\":",
        "POST /v2/logging HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n400\r\n{",
        // The answer comes before the whole body has come.
        "POST /v2/models/none/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{\"inputs\":",
    ];
    let send = |half: &&str| {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(half.as_bytes()).unwrap();
        stream
    };
    let streams: Vec<TcpStream> = halves.iter().map(send).collect();
    let mut grpc = TcpStream::connect(server.grpc_address()).unwrap();
    // The preface of HTTP/2, an empty SETTINGS frame, and the beginning of a HEADERS frame.
    grpc.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x40\x01\x04\0\0\0\x01ab").unwrap();
    // The server has all of these connections once it answers a later request.
    assert_eq!(server.http("GET", "/v2/health/live", "").0, 200);
    assert_eq!(server.end("-TERM").code(), Some(0));
    drop((streams, grpc));
}

/// The resident memory of a server, bytes.
fn memory(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB")).unwrap();
    1024 * kilobytes.trim().parse::<u64>().unwrap()
}

#[test]
fn closed_connections_give_their_memory_back_while_others_are_at_work() {
    const HALF: usize = 8 << 20;
    let server = Server::start(digits().path(), &[], READY);
    let body = std::fs::read_to_string(REQUEST).unwrap();
    let (address, done) = (server.address(), Arc::new(AtomicBool::new(false)));
    let ended = Arc::clone(&done);
    // The thread ends also if the test fails, as its server is gone then.
    let at_work = std::thread::spawn(move || {
        while !ended.load(Relaxed) {
            assert_eq!(http(address, "POST", "/v2/models/digits/infer", &body).0, 200);
        }
    });
    let before = memory(&server);
    let head = "POST /v2/models/digits/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20000000\r\n\r\n";
    let send = |_| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&vec![b' '; HALF]).unwrap();
        stream
    };
    let streams: Vec<TcpStream> = (0..16).map(send).collect();
    until("the bodies are held", || memory(&server) > before + 12 * HALF as u64);
    drop(streams);
    until("the memory is given back", || memory(&server) < before + 6 * HALF as u64);
    done.store(true, Relaxed);
    at_work.join().unwrap();
}

#[test]
fn hangup_and_quit_drain_as_terminate_does() {
    for signal in ["-HUP", "-QUIT", "-TERM"] {
        // The tests may run under nohup themselves.
        let mut command = std::process::Command::new("env");
        command.args(["--default-signal=HUP", "--"]).arg(downbeat(&[]).get_program()).arg("serve");
        let mut server = Server::within(command, digits().path(), &LONG, READY);
        server.signal(signal);
        server.wait_for("\"message\":\"stopping:");
        server.wait_for("\"message\":\"stopped\"");
        assert_eq!(server.wait().code(), Some(0), "{signal}");
    }
}

#[test]
fn a_server_started_by_nohup_outlives_its_terminal() {
    let mut command = std::process::Command::new("nohup");
    command.arg(downbeat(&[]).get_program()).arg("serve");
    let server = Server::within(command, digits().path(), &LONG, READY);
    server.signal("-HUP");
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap() & 1, 1, "SIGHUP is ignored still");
    assert_eq!(server.http("GET", "/v2/health/ready", "").0, 200);
    assert_eq!(server.end("-TERM").code(), Some(0));
}
