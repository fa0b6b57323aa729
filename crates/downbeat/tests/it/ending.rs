//! How a server ends: by which signals, and with clients that stopped in the middle of a request.

use std::io::Write;
use std::net::TcpStream;

use crate::command_line::downbeat;
use crate::serve::{Server, digits};

const READY: &str = "\"message\":\"ready\",\"models\":1";
/// Longer than the patience of a test: only a test that fails waits for one of these.
const LONG: [&str; 4] = ["--drain-timeout", "3600", "--transfer-timeout", "3600"];

#[test]
fn half_a_head_or_body_does_not_hold_the_end_up() {
    let server = Server::start(digits().path(), &LONG, READY);
    let halves = [
        "GET /v2/health/li",
        "POST /v2/models/digits/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{\"inputs\":",
        "POST /v2/logging HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n400\r\n{",
        // The answer is there before the body is.
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
    // They have come when a later request is answered.
    assert_eq!(server.http("GET", "/v2/health/live", "").0, 200);
    assert_eq!(server.end("-TERM").code(), Some(0));
    drop((streams, grpc));
}

#[test]
fn hangup_and_quit_drain_as_terminate_does() {
    for signal in ["-HUP", "-QUIT", "-TERM"] {
        let mut server = Server::start(digits().path(), &LONG, READY);
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
