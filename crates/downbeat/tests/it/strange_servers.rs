//! `downbeat infer` against servers with wrong answers: a message, never a panic.

use std::io::{Read, Write};
use std::net::TcpListener;

use crate::command_line::{run, stderr};

const REQUEST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/digit.json");

/// The command's message and exit status, for a server that answers `answer` and closes.
fn asked(answer: &'static [u8]) -> (String, Option<i32>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = listener.local_addr().unwrap().to_string();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // The server reads the whole request, so that closing does not reset the connection.
        let mut request = Vec::new();
        let mut chunk = [0; 4096];
        while !request.ends_with(b"]}") && !request.ends_with(b"]}\n") {
            match stream.read(&mut chunk) {
                Ok(read @ 1..) => request.extend_from_slice(&chunk[..read]),
                _ => break,
            }
        }
        let _ = stream.write_all(answer);
    });
    let output = run(&["infer", "digits", "--request", REQUEST, "--url", &url, "--timeout", "20"]);
    server.join().unwrap();
    (stderr(&output), output.status.code())
}

#[test]
fn each_strange_answer_has_its_message() {
    let answers: [(&[u8], &str); 7] = [
        (b"", "the connection broke off"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "answers, but not in HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}", "the answer broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", "the response is not the JSON of an inference response"),
        (
            b"HTTP/1.1 500 Oops\r\ncontent-length: 5\r\n\r\nhello",
            "the server answered 500 Internal Server Error: hello",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ninference-header-content-length: 999\r\n\r\n{}",
            "inference-header-content-length",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ninference-header-content-length: -1\r\n\r\n{}",
            "the answer's inference-header-content-length is not a number",
        ),
    ];
    for (answer, expected) in answers {
        let (said, status) = asked(answer);
        let sent = String::from_utf8_lossy(answer);
        assert!(said.to_lowercase().contains(expected.to_lowercase().as_str()), "{sent}: {said}");
        assert!(!said.contains("panicked") && said.lines().count() == 1, "{sent}: {said}");
        assert_eq!(status, Some(1), "{sent}: {said}");
    }
}
