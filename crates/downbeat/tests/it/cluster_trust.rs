//! Processes of a cluster that prove a secret to each other: who is refused, how the secret is
//! changed, and what strangers cost.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::cluster::{Cluster, Member, under_load, until};
use crate::command_line::downbeat;
use crate::ports::free_addresses;
use crate::serve::{REQUEST, digits};

/// The connections of a stranger who keeps silent.
const SILENT: usize = 200;
/// Flags of a process that listens for nobody else.
const PORTS: [&str; 6] = ["--http-port", "0", "--metrics-port", "0", "--grpc-port", "off"];

/// A folder with files of secrets.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    /// A file with a new secret.
    fn made(&self, name: &str) -> String {
        let file = self.path(name);
        let done = downbeat(&["key", "secret", &file]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        file
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }
}

/// A cluster with one scheduler, whose processes have these flags.
fn cluster(flags: &[&str]) -> (Cluster, String) {
    let [address] = free_addresses().map(|address| address.to_string());
    let scheduler = Member::start("scheduler", &[&["--schedulers", &address, "--listen", &address], flags].concat());
    let found = [&["--schedulers", &address], flags].concat();
    (Cluster::around(vec![scheduler], &found, digits(), &[]), address)
}

fn frontend(scheduler: &str, flags: &[&str]) -> Member {
    Member::start("frontend", &[&["--schedulers", scheduler, "--listen", "127.0.0.1:0"], flags].concat())
}

fn is_ready(member: &Member) -> bool {
    member.get("/v2/health/ready").0 == 200
}

#[test]
fn only_peers_that_prove_the_secret_are_of_the_cluster() {
    let files = Files::new();
    let (secret, other) = (files.made("secret"), files.made("other"));
    let (mut cluster, scheduler) = cluster(&["--cluster-secret", &secret]);
    assert_eq!(cluster.infer().0, 200);
    let mut stranger = frontend(&scheduler, &["--cluster-secret", &other]);
    stranger.wait_for("the peer has another cluster secret than this process");
    cluster.schedulers[0].wait_for("the peer has another cluster secret than this process");
    let mut without = frontend(&scheduler, &[]);
    without.wait_for("the peer has a cluster secret, and this process has none");
    cluster.schedulers[0].wait_for("the peer has no cluster secret, and this process has one");
    assert_eq!(cluster.schedulers[0].peers("frontend"), 1);
    assert!(!is_ready(&stranger) && !is_ready(&without));
    assert_eq!(cluster.infer().0, 200);
    // A process with the secret finds a scheduler without it.
    let [open] = free_addresses().map(|address| address.to_string());
    let mut scheduler = Member::start("scheduler", &["--schedulers", &open, "--listen", &open]);
    let mut asks = frontend(&open, &["--cluster-secret", &secret]);
    asks.wait_for("the peer has no cluster secret, and this process has one");
    scheduler.wait_for("the peer has a cluster secret, and this process has none");
    assert_eq!(scheduler.peers("frontend"), 0);
}

#[test]
fn the_secret_is_changed_without_a_lost_request_or_connection() {
    let files = Files::new();
    let secret = files.made("secret");
    let (mut cluster, scheduler) = cluster(&["--cluster-secret", &secret]);
    let old = std::fs::read_to_string(&secret).unwrap();
    let new = std::fs::read_to_string(files.made("new")).unwrap();
    let body = std::fs::read_to_string(REQUEST).unwrap();
    let address = cluster.frontend.http;
    let statuses = under_load(address, &["digits"], &body, 20, || {
        for text in [format!("{old}{new}"), format!("{new}{old}"), new.clone()] {
            std::fs::write(&secret, text).unwrap();
            let of_backends = cluster.backends.iter_mut();
            for member in of_backends.chain(&mut cluster.schedulers).chain([&mut cluster.frontend]) {
                member.wait_for("cluster secrets were read again");
            }
            let joins = frontend(&scheduler, &["--cluster-secret", &secret]);
            until("a new frontend is one of them", || is_ready(&joins) && joins.peers("scheduler") == 1);
        }
    });
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    assert_eq!(cluster.schedulers[0].peers("backend"), 2);
    let mut late = frontend(&scheduler, &["--cluster-secret", &files.made("late")]);
    late.wait_for("another cluster secret");
}

/// Connections that keep silent, or that stop within the greeting. A connection that is closed is
/// opened again.
fn crowd(at: &[SocketAddr], over: &AtomicBool) {
    let mut streams = Vec::new();
    while !over.load(Ordering::Relaxed) {
        streams.clear();
        for number in 0..SILENT {
            let Ok(mut stream) = TcpStream::connect(at[number % at.len()]) else { continue };
            let _ = stream.write_all(&b"downbeat\x07\0\x01"[..number % 12]);
            streams.push(stream);
        }
        std::thread::park_timeout(Duration::from_millis(1000));
    }
}

#[test]
fn silent_strangers_shut_nobody_out() {
    let files = Files::new();
    let secret = files.made("secret");
    let flags = ["--cluster-secret", &secret];
    let (cluster, scheduler) = cluster(&flags);
    let listens = cluster.schedulers[0].cluster();
    let peers = listens["peers"].as_array().unwrap();
    let address = peers.iter().find(|peer| peer["role"] == "frontend").unwrap()["address"].as_str().unwrap();
    let at: [SocketAddr; 2] = [scheduler.parse().unwrap(), address.parse().unwrap()];
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| crowd(&at, &over));
        let statuses = cluster.under_load(|| {
            for _ in 0..3 {
                let joins = frontend(&scheduler, &flags);
                until("a frontend joins", || is_ready(&joins) && joins.peers("scheduler") == 1);
            }
        });
        over.store(true, Ordering::Relaxed);
        assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    });
    assert_eq!(cluster.schedulers[0].peers("backend"), 2);
}

fn ends_with(flags: &[&str]) -> String {
    let output = downbeat(flags).args(PORTS).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{flags:?}: {said}");
    said
}

#[test]
fn without_a_secret_nothing_listens_for_peers_on_other_addresses_than_loopback_ones() {
    let files = Files::new();
    let secret = files.made("secret");
    for flags in [
        &["scheduler", "--host", "0.0.0.0"][..],
        &["scheduler", "--listen", "0.0.0.0:0"],
        &["scheduler", "--listen", "[::]:0"],
        &["frontend", "--schedulers", "127.0.0.1:1", "--host", "0.0.0.0"],
    ] {
        let said = ends_with(flags);
        assert!(said.contains("--cluster-secret") && said.contains("--insecure-cluster"), "{said}");
    }
    let mut insecure = Member::start("scheduler", &["--listen", "0.0.0.0:0", "--insecure-cluster"]);
    until("it leads", || insecure.leads());
    assert!(insecure.get("/v2/health/ready").0 == 200);
    insecure.signal("-TERM");
    insecure.wait_for("stopped");
    assert!(insecure.said().contains("peers prove nothing"), "{}", insecure.said());
    let mut secure = Member::start("scheduler", &["--listen", "0.0.0.0:0", "--cluster-secret", &secret]);
    secure.signal("-TERM");
    secure.wait_for("stopped");
    assert!(!secure.said().contains("prove nothing") && !secure.said().contains("may read"), "{}", secure.said());
}

#[test]
fn a_file_without_a_good_secret_is_an_error_and_an_open_one_a_warning() {
    let files = Files::new();
    let listens = ["scheduler", "--listen", "127.0.0.1:0", "--cluster-secret"];
    let short = files.path("short");
    std::fs::write(&short, "hunter2").unwrap();
    for (file, said) in [(files.path("none"), "cannot read"), (short, "has 7 characters, and needs 43")] {
        let error = ends_with(&[&listens[..], &[&file]].concat());
        assert!(error.contains(said) && error.contains(&file) && error.contains("downbeat key secret"), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
    let secret = files.made("secret");
    let mode = |path: &str| std::fs::metadata(Path::new(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&secret), 0o600);
    std::fs::set_permissions(PathBuf::from(&secret), std::fs::Permissions::from_mode(0o644)).unwrap();
    let mut open = Member::start("scheduler", &["--listen", "127.0.0.1:0", "--cluster-secret", &secret]);
    open.signal("-TERM");
    open.wait_for("stopped");
    assert!(open.said().contains("chmod 600"), "{}", open.said());
    let printed = downbeat(&["key", "secret"]).output().unwrap().stdout;
    assert_eq!(String::from_utf8(printed).unwrap().trim_end().len(), 43);
}
