//! Epochs out of a real etcd, which is killed and started again. Without `etcd` on the path nothing is tried, unless DOWNBEAT_REQUIRE_ETCD is set.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use crate::cluster::{Cluster, Member, until};
use crate::serve::{REQUEST, digits, http};

/// An etcd with a folder of its own. Killed when the test is over.
struct Etcd {
    child: Child,
    folder: tempfile::TempDir,
    clients: String,
    peers: String,
}

impl Etcd {
    /// `None`: there is no such program here.
    fn start() -> Option<Etcd> {
        let free: Vec<_> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let (folder, clients, peers) = (tempfile::tempdir().unwrap(), url(&free[0]), url(&free[1]));
        drop(free);
        match spawn(&folder, &clients, &peers) {
            Ok(child) => Some(Etcd { child, folder, clients, peers }),
            Err(error) => {
                assert!(std::env::var_os("DOWNBEAT_REQUIRE_ETCD").is_none(), "etcd: {error}");
                eprintln!("not tried: etcd: {error}");
                None
            }
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// With what it has on its disk.
    fn start_again(&mut self) {
        self.child = spawn(&self.folder, &self.clients, &self.peers).unwrap();
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(folder: &tempfile::TempDir, clients: &str, peers: &str) -> std::io::Result<Child> {
    let mut etcd = Command::new("etcd");
    etcd.args(["--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers]);
    etcd.args(["--initial-advertise-peer-urls", peers, "--initial-cluster", &format!("default={peers}"), "--data-dir"]);
    etcd.arg(folder.path()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

fn answers(member: &Member) -> bool {
    member.cluster()["etcd_answers"] == true
}

/// Schedulers that have all gone know no epoch when they come back, and without a store begin again at the first.
#[test]
fn epochs_go_on_rising_where_no_scheduler_is_left_that_knows_the_last() {
    let Some(mut etcd) = Etcd::start() else { return };
    let mut last = 0;
    for _ in 0..3 {
        let scheduler = Member::start("scheduler", &["--listen", "127.0.0.1:0", "--etcd", &etcd.clients]);
        until("it leads", || scheduler.leads());
        assert!(scheduler.epoch() > last, "{} after {last}", scheduler.epoch());
        last = scheduler.epoch();
        etcd.kill();
        until("it is missed", || !answers(&scheduler));
        assert!(scheduler.leads(), "whoever leads goes on");
        etcd.start_again();
        until("it is back", || answers(&scheduler));
    }
    let other = Member::start("scheduler", &["--listen", "127.0.0.1:0", "--etcd", &etcd.clients, "--etcd-prefix", "b"]);
    until("another cluster leads", || other.leads());
    assert_eq!(other.epoch(), 1, "it has keys of its own");
}

#[test]
fn without_etcd_requests_go_on_and_nobody_takes_over_until_it_is_back() {
    let Some(mut etcd) = Etcd::start() else { return };
    let mut cluster = Cluster::of(digits(), &[], &["--etcd", &etcd.clients]);
    let first = cluster.schedulers[0].epoch();
    assert!(first > 0);
    let statuses = cluster.under_load(|| etcd.kill());
    assert_eq!(statuses.iter().filter(|status| **status != 200).count(), 0, "{statuses:?}");
    let rank = cluster.leader();
    let leader = cluster.schedulers.remove(rank);
    let spare = &cluster.schedulers[0];
    until("the spare misses it too", || !answers(spare));
    leader.signal("-KILL");
    until("the frontend has one scheduler left", || cluster.frontend.peers("scheduler") == 1);
    // What comes meanwhile waits, and is answered.
    let (frontend, request) = (cluster.frontend.http, std::fs::read_to_string(REQUEST).unwrap());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| http(frontend, "POST", "/v2/models/digits/infer", &request).0);
        std::thread::park_timeout(std::time::Duration::from_millis(500));
        assert!(!spare.leads(), "without an epoch nobody leads");
        etcd.start_again();
        until("the spare leads", || spare.leads());
        assert_eq!(waiting.join().unwrap(), 200);
    });
    assert!(spare.epoch() > first);
}
