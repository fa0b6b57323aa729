//! A server of HTTP for tests, and the sources that it plays.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use downbeat_fetch::FetchOptions;
use downbeat_repository::{ModelRepository, Supply};

/// A request, with lower-case names of headers.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

/// An answer.
#[derive(Clone, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// The connection ends after this many bytes of the body.
    pub(crate) cut: Option<usize>,
    /// The connection stays silent after the cut, in place of ending.
    pub(crate) hangs: bool,
}

pub(crate) fn reply(status: u16, body: impl Into<Vec<u8>>) -> Reply {
    Reply { status, body: body.into(), ..Reply::default() }
}

/// A server of HTTP.
pub(crate) struct Server {
    port: u16,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub(crate) fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, seen) = (listener.local_addr().unwrap().port(), Arc::<Mutex<Vec<Request>>>::default());
        let (answer, log) = (Arc::new(answer), seen.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, log) = (answer.clone(), log.clone());
                std::thread::spawn(move || converse(&stream, &*answer, &log));
            }
        });
        Server { port, seen }
    }

    pub(crate) fn at(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// The requests so far whose path has this part.
    pub(crate) fn seen(&self, part: &str) -> Vec<Request> {
        self.seen.lock().unwrap().iter().filter(|request| request.path.contains(part)).cloned().collect()
    }

    /// The number of downloads (GET) so far of paths with this part.
    pub(crate) fn downloads(&self, part: &str) -> usize {
        self.seen(part).iter().filter(|request| request.method == "GET").count()
    }
}

fn converse(stream: &TcpStream, answer: &dyn Fn(&Request) -> Reply, log: &Mutex<Vec<Request>>) {
    let mut lines = BufReader::new(stream).lines();
    while let Some(Ok(first)) = lines.next() {
        let mut words = first.split(' ').map(str::to_owned);
        let (Some(method), Some(path)) = (words.next(), words.next()) else { return };
        let mut headers = BTreeMap::new();
        for line in lines.by_ref().map_while(Result::ok).take_while(|line| !line.is_empty()) {
            if let Some((name, value)) = line.split_once(':') {
                headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
            }
        }
        let request = Request { method, path, headers };
        log.lock().unwrap().push(request.clone());
        let Reply { status, headers, body, cut, hangs } = answer(&request);
        let mut head = format!("HTTP/1.1 {status} Status\r\n");
        if !headers.iter().any(|(name, _)| *name == "content-length") {
            let _ = write!(head, "content-length: {}\r\n", body.len());
        }
        for (name, value) in headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        let body = if request.method == "HEAD" { &[] } else { &body[..cut.unwrap_or(body.len()).min(body.len())] };
        let mut stream = stream;
        let sent = stream.write_all(format!("{head}\r\n").as_bytes()).and_then(|()| stream.write_all(body));
        if hangs {
            std::thread::park();
        }
        if sent.is_err() || cut.is_some() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return;
        }
    }
}

/// The answer with a file: the whole of it, or the part that the request asks for.
pub(crate) fn file(request: &Request, content: &[u8], tag: &str) -> Reply {
    let mut reply = reply(200, content);
    reply.headers.push(("etag", tag.to_owned()));
    let start = request.header("range").strip_prefix("bytes=").and_then(|range| range.split('-').next()?.parse().ok());
    let is_same = matches!(request.header("if-range"), "" | "*") || request.header("if-range") == tag;
    if let Some(start) = start.filter(|start: &usize| is_same && *start < content.len()) {
        reply.status = 206;
        reply.headers.push(("content-range", format!("bytes {start}-{}/{}", content.len() - 1, content.len())));
        reply.body = content[start..].to_vec();
    }
    if request.method == "HEAD" {
        reply.headers.push(("content-length", content.len().to_string()));
    }
    reply
}

/// The description of a hub's repository: files with SHA-256 (LFS), or without any digest.
pub(crate) fn description(commit: &str, files: &[(&str, u64, Option<&str>)]) -> Vec<u8> {
    let sibling = |(name, size, sha256): &(&str, u64, Option<&str>)| {
        let lfs = sha256.map_or_else(String::new, |sha256| format!(r#","lfs":{{"sha256":"{sha256}","size":{size}}}"#));
        format!(r#"{{"rfilename":"{name}","size":{size}{lfs}}}"#)
    };
    let siblings: Vec<String> = files.iter().map(sibling).collect();
    format!(r#"{{"sha":"{commit}","siblings":[{}]}}"#, siblings.join(",")).into_bytes()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    ring::digest::digest(&ring::digest::SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes that begin like an ONNX file and are none.
pub(crate) fn model(size: usize) -> Vec<u8> {
    (0..size).map(|at| if at == 0 { 8 } else { (at % 251) as u8 }).collect()
}

/// An ONNX file whose only tensor lies in the file `location`.
pub(crate) fn model_with_weights_in(location: &str) -> Vec<u8> {
    let field = |number: u8, bytes: &[u8]| [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat();
    let entry = [field(1, b"location"), field(2, location.as_bytes())].concat();
    // name, external_data, data_location: EXTERNAL
    let tensor = [field(8, b"w"), field(13, &entry), vec![14 << 3, 1]].concat();
    let graph = field(5, &tensor);
    [vec![8, 8], field(7, &graph)].concat()
}

/// Settings with a cache in `folder`, and these variables.
pub(crate) fn options(folder: &Path, variables: &[(&str, &str)]) -> FetchOptions {
    FetchOptions {
        cache: Some(folder.join("cache")),
        offline: false,
        timeout: Duration::from_secs(30),
        bars: indicatif::MultiProgress::with_draw_target(indicatif::ProgressDrawTarget::hidden()),
        variables: variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
    }
}

/// The folder that an address brings, or the error.
pub(crate) fn bring(address: &str, options: &FetchOptions) -> Result<PathBuf, String> {
    let supply: Arc<dyn Supply> = downbeat_fetch::open(address, options.clone()).map_err(|error| error.to_string())?;
    supply.bring().map_err(|error| error.to_string())
}

/// The names of the models in a folder.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    ModelRepository::open(folder).unwrap().scan().unwrap().names
}

/// The names of all files below a folder, relative to it, sorted.
pub(crate) fn files_below(folder: &Path) -> Vec<String> {
    let (mut files, mut pending) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = pending.pop() {
        for entry in std::fs::read_dir(next).into_iter().flatten().flatten() {
            match entry.path() {
                path if path.is_dir() => pending.push(path),
                path => files.push(path.strip_prefix(folder).unwrap().display().to_string()),
            }
        }
    }
    files.sort();
    files
}
