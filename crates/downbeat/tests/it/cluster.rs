//! Frontends, schedulers and backends as processes: the answers that clients get while processes
//! come and go.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use downbeat_roles::PROTOCOL;

use crate::command_line::downbeat;
use crate::ports::free_addresses;
use crate::serve::{REQUEST, Server, digits, http, try_http};

/// Longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(600);
/// An SLO that a slow machine keeps.
const SLO: [&str; 2] = ["--slo-ms", "digits=3600000"];
/// How long a peer that is refused may wait for its connection to be closed.
const CLOSES_WITHIN: Duration = Duration::from_secs(20);

/// A process of a cluster. Killed when the test is over.
pub struct Member {
    pub child: Child,
    pub http: SocketAddr,
    metrics: SocketAddr,
    log: mpsc::Receiver<String>,
    said: String,
    _cache: tempfile::TempDir,
}

impl Member {
    pub fn start(role: &str, flags: &[&str]) -> Member {
        Member::within(role, flags, &[])
    }

    /// Starts a process with these variables in its environment.
    pub fn within(role: &str, flags: &[&str], environment: &[(&str, &str)]) -> Member {
        let cache = tempfile::tempdir().unwrap();
        let mut command = downbeat(&[role]);
        command.args(["--host", "127.0.0.1", "--http-port", "0", "--metrics-port", "0", "--grpc-port", "off"]);
        command.args(["--log-format", "json"]).args(flags);
        command.env("DOWNBEAT_SHUTDOWN_GRACE", "0").env("XDG_CACHE_HOME", cache.path());
        command.envs(environment.iter().copied());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let (sender, log) = mpsc::channel();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut member = Member { child, http: nowhere, metrics: nowhere, log, said: String::new(), _cache: cache };
        member.http = member.address_of("HTTP");
        member.metrics = member.address_of("metrics");
        member
    }

    fn address_of(&mut self, what: &str) -> SocketAddr {
        let line = self.wait_for(&format!("\"message\":\"{what}\""));
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        line["fields"]["address"].as_str().unwrap().parse().unwrap()
    }

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

    /// The first line with this text, be it before a line that was waited for.
    pub fn line_with(&mut self, text: &str) -> String {
        match self.said.lines().find(|line| line.contains(text)) {
            Some(line) => line.to_owned(),
            None => self.wait_for(text),
        }
    }

    /// The lines of its log, up to the last line that a test waited for.
    pub fn said(&self) -> &str {
        &self.said
    }

    pub fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        try_http(self.http, "GET", path, "").unwrap_or_else(|error| {
            let log: Vec<String> = self.log.try_iter().collect();
            panic!("{path}: {error}; its log: {}{}", self.said, log.join("\n"))
        })
    }

    pub fn cluster(&self) -> serde_json::Value {
        let (status, body) = self.get("/v2/cluster");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// The epoch that the process follows.
    pub fn epoch(&self) -> u64 {
        self.cluster()["epoch"].as_u64().unwrap()
    }

    pub fn leads(&self) -> bool {
        self.cluster()["leads"] == true
    }

    /// The number of devices in the scheduler's autoscale advice.
    fn devices(&self) -> serde_json::Value {
        let (status, body) = self.get("/v2/autoscale");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str::<serde_json::Value>(&body).unwrap()["devices"].clone()
    }

    pub fn peers(&self, role: &str) -> usize {
        let cluster = self.cluster();
        cluster["peers"].as_array().unwrap().iter().filter(|peer| peer["role"] == role).count()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `is_so` returns true.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let tries = PATIENCE.as_millis() / 10;
    for _ in 0..tries {
        if is_so() {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
    panic!("never came to be: {what}");
}

/// Two schedulers, two backends with the model `digits`, and a frontend that serves it.
pub struct Cluster {
    pub schedulers: Vec<Member>,
    pub backends: Vec<Member>,
    pub frontend: Member,
    pub list: String,
    _repository: tempfile::TempDir,
}

impl Cluster {
    fn start() -> Cluster {
        Cluster::of(digits(), &[], &[])
    }

    /// A cluster of this repository. Its backends and schedulers have these flags, too.
    pub fn of(repository: tempfile::TempDir, flags: &[&str], of_schedulers: &[&str]) -> Cluster {
        Cluster::of_variables(repository, flags, of_schedulers, &[])
    }

    /// The same cluster, with these variables in the environment of its backends and its frontend.
    pub fn of_variables(
        repository: tempfile::TempDir,
        flags: &[&str],
        of_schedulers: &[&str],
        environment: &[(&str, &str)],
    ) -> Cluster {
        let addresses = free_addresses::<2>().map(|address| address.to_string());
        let list = addresses.join(",");
        let scheduler = |rank: usize| {
            let own = ["--schedulers", &list, "--rank", &rank.to_string(), "--listen", &addresses[rank]];
            Member::start("scheduler", &[&own, of_schedulers].concat())
        };
        let schedulers = (0..2).map(scheduler).collect();
        Cluster {
            list: list.clone(),
            ..Cluster::join(schedulers, &["--schedulers", &list], repository, flags, environment)
        }
    }

    /// A cluster of these schedulers, which the other processes find by the flags `found`.
    pub fn around(schedulers: Vec<Member>, found: &[&str], repository: tempfile::TempDir, flags: &[&str]) -> Cluster {
        Cluster::join(schedulers, found, repository, flags, &[])
    }

    fn join(
        schedulers: Vec<Member>,
        found: &[&str],
        repository: tempfile::TempDir,
        flags: &[&str],
        environment: &[(&str, &str)],
    ) -> Cluster {
        let models = repository.path().to_str().unwrap();
        let backend = |_| {
            let own = ["--engine", "rten", "--profiling-budget", "0", SLO[0], SLO[1]];
            Member::within("backend", &[found, &own, flags, &[models]].concat(), environment)
        };
        let cluster = Cluster {
            schedulers,
            backends: (0..2).map(backend).collect(),
            frontend: Member::within("frontend", &[found, &["--listen", "127.0.0.1:0"]].concat(), environment),
            list: String::new(),
            _repository: repository,
        };
        until("ready", || cluster.frontend.get("/v2/health/ready").0 == 200);
        for backend in &cluster.backends {
            until("a backend is ready", || backend.get("/v2/health/ready").0 == 200);
        }
        cluster
    }

    /// The rank of the leader, which on a busy machine need not be the first scheduler.
    pub fn leader(&self) -> usize {
        let mut leader = None;
        until("one leads", || {
            leader = self.schedulers.iter().position(Member::leads);
            leader.is_some()
        });
        leader.unwrap()
    }

    pub fn infer(&self) -> (u16, String) {
        http(self.frontend.http, "POST", "/v2/models/digits/infer", &std::fs::read_to_string(REQUEST).unwrap())
    }

    /// Runs `happens` under load. Returns the statuses of all requests, from before the call to
    /// after it.
    pub fn under_load(&self, happens: impl FnOnce()) -> Vec<u16> {
        self.under_load_of(&std::fs::read_to_string(REQUEST).unwrap(), 50, happens)
    }

    /// The same with requests of one kind, `some` of them before it and after it.
    pub fn under_load_of(&self, body: &str, some: usize, happens: impl FnOnce()) -> Vec<u16> {
        under_load(self.frontend.http, &["digits"], body, some, happens)
    }
}

/// Reports the end when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `happens` while clients ask a frontend for models in turn. Returns the statuses of all
/// requests. At least `some` come before the call and after it.
pub fn under_load(frontend: SocketAddr, models: &[&str], body: &str, some: usize, happens: impl FnOnce()) -> Vec<u16> {
    let (over, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let more = |count: usize| {
        let from = answered.load(Ordering::Relaxed);
        until("requests are answered", || answered.load(Ordering::Relaxed) >= from + count);
    };
    std::thread::scope(|scope| {
        let client = || {
            let mut statuses = Vec::new();
            let mut models = models.iter().cycle();
            while !over.load(Ordering::Relaxed) {
                let Some(model) = models.next() else { break };
                let (status, said) = http(frontend, "POST", &format!("/v2/models/{model}/infer"), body);
                if status != 200 {
                    eprintln!("{model}: {status} {said}");
                }
                statuses.push(status);
                answered.fetch_add(1, Ordering::Relaxed);
            }
            statuses
        };
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(client)).collect();
        // The flag is set also if a step fails: the scope waits for its clients.
        let ends = Ends(&over);
        more(some);
        happens();
        more(some);
        drop(ends);
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    })
}

#[test]
fn a_frontend_answers_as_one_server_does() {
    let cluster = Cluster::start();
    let server = Server::start(cluster._repository.path(), &SLO, "ready");
    until("it serves the model", || http(server.address(), "GET", "/v2/models/digits/ready", "").0 == 200);
    let body = std::fs::read_to_string(REQUEST).unwrap();
    let asked = |path: &str, body: &str| {
        let method = if body.is_empty() { "GET" } else { "POST" };
        // Parameters of a configuration stand in any order.
        let read = |(status, text): (u16, String)| {
            (status, serde_json::from_str(&text).unwrap_or(serde_json::Value::String(text)))
        };
        let ask = |address| read(http(address, method, path, body));
        (ask(cluster.frontend.http), ask(server.address()))
    };
    for (path, body) in [
        ("/v2/models/digits/infer", body.as_str()),
        ("/v2/models/digits", ""),
        ("/v2/models/digits/config", ""),
        ("/v2/models/digits/ready", ""),
        ("/v2/models/nothing/infer", body.as_str()),
        ("/v2/models/digits/versions/7/infer", body.as_str()),
        ("/v2/models/digits/infer", r#"{"inputs": []}"#),
        ("/v2/models/digits/infer", "nothing"),
    ] {
        let (apart, whole) = asked(path, body);
        assert_eq!(apart, whole, "{path}");
    }
    let (status, said) = http(cluster.frontend.http, "POST", "/v2/repository/models/digits/unload", "{}");
    assert_eq!(status, 400, "{said}");
    assert!(said.contains("start backends with --model-control-mode explicit"), "{said}");
    let (status, said) = http(cluster.backends[0].http, "POST", "/v2/models/digits/infer", &body);
    assert_eq!(status, 501, "{said}");
    // A busy machine may need the second backend, too.
    assert!((1..=2).contains(&cluster.frontend.peers("backend")));
    assert_eq!(cluster.frontend.peers("scheduler"), 2);
    assert_eq!(cluster.schedulers[0].peers("backend"), 2);
    let leads = || cluster.schedulers.iter().filter(|scheduler| scheduler.leads()).count();
    until("one leads", || leads() == 1);
    let leader = &cluster.schedulers[cluster.leader()];
    let budget = "downbeat_cluster_budget_seconds{model=\"digits\",part=\"control\",version=\"1\"} ";
    until("it is said what messages are planned with", || {
        let known = &leader.cluster()["budgets"][0];
        known["model"] == "digits" && known["control_us"].as_f64() > Some(0.0) && metric(leader, budget) > 0.0
    });
}

#[test]
fn a_scheduler_that_is_killed_costs_no_request() {
    // These schedulers poll before they sleep. A busy machine alone must not make a spare take the
    // lead.
    let (looks, patient) = (["--busy-poll-us", "200"], ["--takeover-after-ms", "2000"]);
    let mut cluster = Cluster::of(digits(), &looks, &[looks, patient].concat());
    let rank = cluster.leader();
    let first = cluster.schedulers.remove(rank);
    until("the leader advises for both backends", || first.devices() == 2);
    until("the other stands by", || cluster.schedulers[0].devices() == 0);
    let statuses = cluster.under_load(|| {
        first.signal("-KILL");
        until("the other leads", || cluster.schedulers[0].leads());
    });
    assert_eq!(statuses.iter().filter(|status| **status != 200).count(), 0, "{statuses:?}");
    assert_eq!(cluster.frontend.cluster()["leader"], 1 - rank);
    until("it advises for both backends", || cluster.schedulers[0].devices() == 2);
    // A killed process keeps its port until its last thread has run once more. On a busy machine
    // that takes seconds, for the thread of rehearsals has the lowest priority.
    drop(first);
    // A scheduler that starts again does not take the lead back.
    let own = cluster.list.split(',').nth(rank).unwrap();
    let rank = rank.to_string();
    let flags = ["--schedulers", &cluster.list, "--rank", &rank, "--listen", own];
    let again = Member::start("scheduler", &[&flags[..], &patient].concat());
    until("it stands by", || again.peers("backend") == 2 && again.peers("scheduler") == 1);
    assert_eq!((again.leads(), cluster.infer().0), (false, 200));
}

#[test]
fn a_scheduler_that_is_paused_costs_no_request_and_leads_no_more() {
    let cluster = Cluster::start();
    let rank = cluster.leader();
    let (first, other) = (&cluster.schedulers[rank], &cluster.schedulers[1 - rank]);
    let statuses = cluster.under_load(|| {
        first.signal("-STOP");
        until("the other leads", || other.leads());
        std::thread::park_timeout(Duration::from_millis(500));
        let epoch = other.epoch();
        first.signal("-CONT");
        until("it has heard that its epoch is over", || first.epoch() >= epoch);
    });
    assert_eq!(statuses.iter().filter(|status| **status != 200).count(), 0, "{statuses:?}");
}

#[test]
fn a_backend_that_is_killed_costs_no_request_that_may_run_again() {
    let mut cluster = Cluster::start();
    let statuses = cluster.under_load(|| cluster.backends[0].signal("-KILL"));
    assert_eq!(statuses.iter().filter(|status| **status != 200).count(), 0, "{statuses:?}");
    until("it is missed", || cluster.schedulers[0].peers("backend") == 1);
    // The last backend drains: its requests are answered, and then no backend runs the model.
    let mut last = cluster.backends.remove(1);
    last.signal("-TERM");
    assert!(last.child.wait().unwrap().success());
    until("nothing is served", || cluster.frontend.get("/v2/health/ready").0 == 503);
    assert_eq!(cluster.infer().0, 503);
}

#[test]
fn what_waits_for_a_model_that_nobody_has_any_more_is_refused() {
    let mut cluster = Cluster::of(digits(), &[], &["--lost-after-ms", "400"]);
    assert_eq!(cluster.infer().0, 200);
    cluster.backends.iter().for_each(|backend| backend.signal("-KILL"));
    let (status, body) = cluster.infer();
    assert!(status == 503 && body.contains("no backend has model 'digits' any more"), "{status}: {body}");
    until("nothing is served", || cluster.frontend.get("/v2/health/ready").0 == 503);
    assert_eq!(cluster.infer().0, 503);
    // Then a backend comes with the model.
    let models = cluster._repository.path().to_str().unwrap();
    let flags = ["--schedulers", &cluster.list, "--engine", "rten", "--profiling-budget", "0", models];
    cluster.backends = vec![Member::start("backend", &flags)];
    until("it is served again", || cluster.infer().0 == 200);
}

/// Items of a request whose inputs have 600 KB: each is a picture of 8 by 8 pixels of 4 bytes.
pub const MANY: usize = 2400;

/// A backend that measures `digits` on a busy machine may take a batch of [`MANY`] for one of an hour.
pub const UNMEASURED: &str = "--no-profiling";

/// The model `digits`, for batches of [`MANY`].
pub fn large_digits() -> tempfile::TempDir {
    let repository = digits();
    let config = repository.path().join("digits/config.pbtxt");
    let text = std::fs::read_to_string(&config).unwrap();
    assert!(text.contains("max_batch_size: 64"));
    std::fs::write(&config, text.replace("max_batch_size: 64", &format!("max_batch_size: {MANY}"))).unwrap();
    repository
}

/// A request with so many different pictures.
pub fn large_request() -> String {
    let mut request: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(REQUEST).unwrap()).unwrap();
    let pixels: Vec<_> = (0..MANY * 64).map(|pixel| serde_json::Value::from((pixel / 64 + pixel * 7) % 256)).collect();
    let input = &mut request["inputs"][0];
    (input["shape"][0], input["data"]) = (MANY.into(), pixels.into());
    request.to_string()
}

/// How many bytes of tensors a process has sent, by transport.
pub fn tensor_bytes(member: &Member, transport: &str) -> f64 {
    metric(member, &format!("downbeat_cluster_tensor_bytes_total{{transport=\"{transport}\"}} "))
}

/// The value of the metric whose line begins with this text, or 0 without such a line.
fn metric(member: &Member, name: &str) -> f64 {
    let metrics = http(member.metrics, "GET", "/metrics", "").1;
    metrics.lines().find_map(|line| line.strip_prefix(name)).map_or(0.0, |value| value.parse().unwrap())
}

/// The transport of tensors between a process and each backend or frontend that it knows.
pub fn transports(member: &Member) -> Vec<String> {
    let cluster = member.cluster();
    let peers = cluster["peers"].as_array().unwrap().iter().filter(|peer| peer["role"] != "scheduler");
    peers.map(|peer| peer["transport"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn large_tensors_of_processes_of_one_machine_go_by_shared_memory() {
    let cluster = Cluster::of(large_digits(), &[UNMEASURED], &[]);
    let server = Server::start(cluster._repository.path(), &SLO, "ready");
    let body = large_request();
    let small = cluster.infer().0;
    assert_eq!((small, tensor_bytes(&cluster.frontend, "shared_memory")), (200, 0.0), "what is small is in the frame");
    let apart = http(cluster.frontend.http, "POST", "/v2/models/digits/infer", &body);
    assert_eq!(apart.0, 200, "{}", apart.1);
    assert!(apart == http(server.address(), "POST", "/v2/models/digits/infer", &body), "another answer");
    let transports = transports(&cluster.frontend);
    assert!(
        !transports.is_empty() && transports.iter().all(|transport| transport == "shared_memory"),
        "{transports:?}"
    );
    // On a busy machine a frame may be sent again. Then its tensors count again, and
    // nothing else does.
    let are_whole = |bytes: f64, items: usize| bytes > 0.0 && bytes % (items * 4) as f64 == 0.0;
    let inputs = tensor_bytes(&cluster.frontend, "shared_memory");
    assert!(are_whole(inputs, MANY * 64), "{inputs}");
    assert!(tensor_bytes(&cluster.frontend, "tcp") < inputs / 10.0);
    let outputs: f64 = cluster.backends.iter().map(|backend| tensor_bytes(backend, "shared_memory")).sum();
    assert!(are_whole(outputs, MANY * 10), "{outputs}");
}

#[test]
fn a_process_killed_during_a_read_costs_the_others_nothing() {
    let mut cluster = Cluster::of(large_digits(), &[UNMEASURED], &[]);
    let body = large_request();
    let backend = cluster.backends.remove(0);
    let statuses = cluster.under_load_of(&body, 8, || backend.signal("-KILL"));
    assert_eq!(statuses.iter().filter(|status| **status != 200).count(), 0, "{statuses:?}");
    // A frontend goes in the midst of its requests. Another frontend is still served as before.
    let other = Member::start("frontend", &["--schedulers", &cluster.list, "--listen", "127.0.0.1:0"]);
    until("ready", || other.get("/v2/health/ready").0 == 200);
    let old = std::mem::replace(&mut cluster.frontend, other);
    let asking = old.http;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                // The request ends without an answer.
                let mut stream = TcpStream::connect(asking).unwrap();
                let length = body.len();
                let head = "POST /v2/models/digits/infer HTTP/1.1\r\nhost: localhost\r\n";
                let _ = write!(stream, "{head}content-length: {length}\r\n\r\n{body}");
                let _ = stream.read_to_end(&mut Vec::new());
            });
        }
        let statuses = cluster.under_load_of(&body, 8, || old.signal("-KILL"));
        assert_eq!(statuses.iter().filter(|status| **status != 200).count(), 0, "{statuses:?}");
    });
    assert!(tensor_bytes(&cluster.frontend, "shared_memory") > 0.0);
    until("the frontend is missed", || transports(&cluster.backends[0]) == ["shared_memory"]);
}

/// The scheduler hears of the unload only after it has sent some more batches to the backend.
#[test]
fn a_model_that_one_backend_unloads_costs_no_request() {
    let cluster = Cluster::of(digits(), &["--model-control-mode", "explicit", "--load-model", "*"], &[]);
    let [first, second] = &cluster.backends[..] else { panic!("two") };
    let asked = |backend: &Member, what: &str| {
        let (status, said) = http(backend.http, "POST", &format!("/v2/repository/models/digits/{what}"), "{}");
        assert_eq!(status, 200, "{said}");
    };
    let statuses = cluster.under_load(|| {
        for (stays, goes) in [(second, first), (first, second), (second, first)] {
            asked(stays, "load");
            until("it is there", || stays.get("/v2/models/digits/ready").0 == 200);
            // Longer than a backend takes to notice its loaded models.
            std::thread::park_timeout(Duration::from_millis(500));
            asked(goes, "unload");
            std::thread::park_timeout(Duration::from_millis(500));
        }
    });
    assert_eq!(statuses.iter().filter(|status| **status != 200).count(), 0, "{statuses:?}");
}

#[test]
fn strange_peers_are_refused_and_cost_nobody_anything() {
    let mut cluster = Cluster::start();
    let scheduler: SocketAddr = cluster.list.split(',').next().unwrap().parse().unwrap();
    let backends = cluster.schedulers[0].cluster()["peers"].clone();
    // The opening of a process without a secret, and its introduction.
    let hello = |protocol: u16, body: &[u8]| {
        let length = (body.len() as u16).to_le_bytes();
        [b"downbeat", &protocol.to_le_bytes()[..], &[0; 33], &length, body].concat()
    };
    // In postcard: the protocol, node 7, a backend, "x", no address. Then: it reads no memory, and
    // a head of 4 GiB.
    let backend =
        [hello(PROTOCOL, &[PROTOCOL as u8, 7, 2, 1, b'x', 0]), vec![0], u32::MAX.to_le_bytes().to_vec()].concat();
    let taken = hello(PROTOCOL, &[&[PROTOCOL as u8][..], &varint(node(&backends)), &[2, 1, b'x', 0]].concat());
    let taken = [taken, vec![0]].concat();
    // A backend, node 8, that sends one frame with this head and checksum.
    let sends = |head: &[u8], checksum: u32| {
        let hello = [hello(PROTOCOL, &[PROTOCOL as u8, 8, 2, 1, b'x', 0]), vec![0]].concat();
        let prefix = [(head.len() as u32).to_le_bytes(), checksum.to_le_bytes()].concat();
        [hello, prefix, head.to_vec()].concat()
    };
    // From node 8, sessions 1 and 2, first 0, and 8 MiB of messages of a byte each: `Leave`.
    let many = [&[8, 1, 2, 0][..], &varint(8 << 20), &[15; 8 << 20]].concat();
    let strange: [(&str, Vec<u8>); 7] = [
        ("8 MiB of small messages", sends(&many, crc32(&many))),
        ("a damaged frame", sends(&[8, 1, 2, 0, 0, 0, 0, 0], 1)),
        ("garbage", vec![b'x'; 4096]),
        ("another version", hello(PROTOCOL + 1, &[0; 40])),
        ("a hello of nothing", hello(PROTOCOL, &[0xff; 40])),
        ("a frame of 4 GiB", backend),
        ("a peer that is there", taken),
    ];
    for (what, bytes) in strange {
        let mut stream = TcpStream::connect(scheduler).unwrap();
        stream.set_read_timeout(Some(CLOSES_WITHIN)).unwrap();
        // The peer may close the connection before it has read all bytes.
        let _ = stream.write_all(&bytes);
        let mut said = Vec::new();
        // A connection closed with unread bytes is reset.
        let ended = stream.read_to_end(&mut said);
        assert!(!matches!(&ended, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock), "{what}: {ended:?}");
        assert_eq!(cluster.infer().0, 200, "{what}");
    }
    let first = &mut cluster.schedulers[0];
    for said in [
        "cannot be understood",
        "checksum is wrong",
        "does not speak",
        &format!("version {}", PROTOCOL + 1),
        "cannot be understood",
        "4294967295 bytes",
        "connected already",
    ] {
        first.wait_for(said);
    }
    assert_eq!(first.peers("backend"), 2);
}

/// The number of the first backend among peers.
fn node(peers: &serde_json::Value) -> u64 {
    let mut peers = peers.as_array().unwrap().iter();
    let backend = peers.find(|peer| peer["role"] == "backend").unwrap();
    u64::from_str_radix(backend["node"].as_str().unwrap(), 16).unwrap()
}

/// The CRC-32 of bytes.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg()))
    })
}

/// A number in postcard's form.
fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}
