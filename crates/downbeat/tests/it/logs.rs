//! The log of a server: without a reader, under attack, and about a model in trouble.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::command_line::downbeat;
use crate::serve::{REQUEST, digits, http};

/// Longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(600);

/// A server whose standard error the test reads line by line, only as far as it asks.
struct Logged {
    child: Child,
    lines: mpsc::Receiver<String>,
    said: String,
    http: SocketAddr,
    grpc: SocketAddr,
    metrics: SocketAddr,
    _cache: tempfile::TempDir,
}

impl Logged {
    fn start(repository: &Path, flags: &[&str], environment: &[(&str, &str)]) -> Logged {
        let cache = tempfile::tempdir().unwrap();
        let mut command = downbeat(&["serve"]);
        command.arg(repository).args(["--host", "127.0.0.1", "--engine", "rten", "--profiling-budget", "0"]);
        command.args(["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]).args(flags);
        command.env("DOWNBEAT_SHUTDOWN_GRACE", "0").env("XDG_CACHE_HOME", cache.path()).envs(environment.to_vec());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        // The thread holds one line that the test has not read, and its reader a few more.
        let (sender, lines) = mpsc::sync_channel(0);
        let all = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || all.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let said = String::new();
        let mut server = Logged { child, lines, said, http: nowhere, grpc: nowhere, metrics: nowhere, _cache: cache };
        server.http = server.address("HTTP");
        server.grpc = server.address("gRPC");
        server.metrics = server.address("metrics");
        server.wait_for("repository");
        server
    }

    /// The next line with `text`.
    fn wait_for(&mut self, text: &str) -> String {
        loop {
            let Ok(line) = self.lines.recv_timeout(PATIENCE) else { panic!("never said {text}: {}", self.said) };
            self.said += &line;
            self.said += "\n";
            if line.contains(text) {
                return line;
            }
        }
    }

    fn address(&mut self, of: &str) -> SocketAddr {
        let line = self.wait_for(of);
        let address = &line[line.find("127.0.0.1:").unwrap()..];
        address.trim_end_matches(|c: char| !c.is_ascii_digit()).split('"').next().unwrap().parse().unwrap()
    }

    fn http(&self, path: &str, body: &str) -> (u16, String) {
        http(self.http, "POST", path, body)
    }

    fn infer(&self) -> u16 {
        self.http("/v2/models/digits/infer", &std::fs::read_to_string(REQUEST).unwrap()).0
    }

    fn metric(&self, name: &str) -> u64 {
        let metrics = http(self.metrics, "GET", "/metrics", "").1;
        let line = metrics.lines().find(|line| line.starts_with(name) && !line.starts_with('#'));
        line.unwrap_or_else(|| panic!("no {name}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Makes the log write a line after all lines so far.
    fn mark(&self) {
        assert_ne!(self.http("/v2/repository/models/marker/load", "").0, 200);
    }

    fn terminate(&mut self) -> Option<i32> {
        let id = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends so many PING frames with these flags to a gRPC port. Returns when the server has read all.
fn ping(address: SocketAddr, flags: u8, count: usize) {
    const AT_ONCE: usize = 100;
    let frame = |flags: u8, data: &[u8; 8]| [&[0, 0, 8, 6, flags, 0, 0, 0, 0], &data[..]].concat();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
    for _ in 0..count.div_ceil(AT_ONCE) {
        let mut frames = frame(flags, b"the ping").repeat(AT_ONCE);
        frames.extend(frame(0, b"last one"));
        stream.write_all(&frames).unwrap();
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).unwrap();
            let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
            stream.read_exact(&mut payload).unwrap();
            if head[3..5] == [6, 1] && payload == b"last one" {
                break;
            }
        }
    }
}

#[test]
fn a_server_whose_log_nobody_reads_answers_and_ends_on_sigterm() {
    let mut server = Logged::start(digits().path(), &["--log-level", "info,h2=trace"], &[]);
    let fill = |server: &Logged| {
        let before = server.metric("downbeat_log_lines_lost_total");
        while server.metric("downbeat_log_lines_lost_total") == before {
            ping(server.grpc, 0, 1_000);
        }
    };
    fill(&server);
    assert_eq!(server.infer(), 200);
    let line = server.wait_for("lines were lost");
    assert!(line.contains(" WARN "), "{line}");
    fill(&server);
    assert_eq!(server.infer(), 200);
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn the_name_of_a_model_forges_no_line_of_the_log() {
    const FORGED: &str = "x%0A2026-01-01T00:00:00Z%20%20INFO%20forged%1B%5B2J%C2%9B1m%E2%80%AE";
    for format in ["text", "json"] {
        let flags = ["--model-control-mode", "explicit", "--log-format", format];
        let mut server = Logged::start(digits().path(), &flags, &[]);
        let (status, answer) = server.http(&format!("/v2/repository/models/{FORGED}/load"), "");
        assert_ne!(status, 200, "{answer}");
        let line = server.wait_for("forged");
        assert!(line.contains("not loaded") && line.contains("\\n2026"), "{line}");
        server.mark();
        server.wait_for("marker");
        let is_harmful = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert!(!server.said.contains(is_harmful), "{:?}", server.said);
        let is_whole = |line: &str| line.starts_with(if format == "text" { "20" } else { "{\"timestamp\"" });
        assert!(
            server.said.lines().all(|line| is_whole(line) && !line.starts_with("2026-01-01T00:00:00Z")),
            "{}",
            server.said
        );
    }
}

#[test]
fn a_client_cannot_fill_the_log_with_warnings_of_a_library() {
    const SAYS: &str = "PING ack that we never sent";
    for (level, most) in [("info", 0), ("info,h2=warn", 20)] {
        let flags = ["--model-control-mode", "explicit", "--log-level", level];
        let mut server = Logged::start(digits().path(), &flags, &[]);
        ping(server.grpc, 1, 2_000);
        server.mark();
        server.wait_for("marker");
        let lines = server.said.matches(SAYS).count();
        assert!(lines <= most && (lines > 0) == (most > 0), "{lines} lines with {level}");
        let left_out = server.metric("downbeat_log_lines_left_out_total");
        assert_eq!(left_out, if most == 0 { 0 } else { 2_000 - lines as u64 });
    }
}

#[test]
fn a_model_that_drops_its_requests_is_in_trouble_and_then_out_of_it() {
    let mut server = Logged::start(digits().path(), &["--slo-ms", "digits=0.001"], &[]);
    for _ in 0..50 {
        server.infer();
    }
    // The server says so once a minute, or before it rests.
    let line = server.wait_for("in trouble");
    assert!(line.contains("WARN") && line.contains("model=digits") && line.contains("offered=50"), "{line}");
    assert!(line.contains("deadline_impossible") && line.contains("set slo_ms to"), "{line}");
    let line = server.wait_for("out of trouble");
    assert!(line.contains("model=digits"), "{line}");
}

#[test]
fn what_the_process_of_a_model_says_is_in_the_log() {
    let folder = digits();
    let config = folder.path().join("downbeat.toml");
    std::fs::write(&config, "[models.digits]\nisolation = \"process\"\n").unwrap();
    let flags = ["--config", config.to_str().unwrap()];
    // The dynamic linker writes a report to standard error in every process.
    let server = Logged::start(folder.path(), &flags, &[("LD_DEBUG", "statistics")]);
    let says = server.said.lines().find(|line| line.contains("an executor process says: "));
    assert!(says.is_some_and(|line| line.contains("model=")), "{}", server.said);
}
