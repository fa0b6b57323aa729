//! Schedulers that take epochs and each other's addresses from a real etcd, which is killed and
//! started again. Without `etcd` on the path its tests are ignored, unless DOWNBEAT_REQUIRE_ETCD is
//! set.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::cluster::{Cluster, Member, until};
use crate::ports::free_addresses;
use crate::serve::{REQUEST, digits, http, try_http};

/// An etcd with a folder of its own. Killed when the test is over.
pub struct Etcd {
    child: Child,
    folder: tempfile::TempDir,
    pub clients: String,
    peers: String,
}

impl Etcd {
    pub fn start() -> Etcd {
        let [clients, peers] = free_addresses().map(|address| format!("http://{address}"));
        let folder = tempfile::tempdir().unwrap();
        let child = spawn(&folder, &clients, &peers).unwrap_or_else(|error| panic!("etcd: {error}"));
        Etcd { child, folder, clients, peers }
    }

    /// An etcd that answers with TLS, too.
    fn with_tls() -> Etcd {
        let [clients, peers, secured] = free_addresses();
        let [clients, peers] = [clients, peers].map(|address| format!("http://{address}"));
        let folder = tempfile::tempdir().unwrap();
        let child = spawn(&folder, &format!("{clients},https://{secured}"), &peers).unwrap();
        let etcd = Etcd { child, folder, clients: format!("{clients},https://{secured}"), peers };
        until("etcd answers", || etcd.ask("maintenance/status", "{}").is_some());
        etcd
    }

    /// Sends a request without TLS. Returns the answer, if it is one.
    fn ask(&self, what: &str, body: &str) -> Option<String> {
        let address = self.clients.split(',').next().unwrap().strip_prefix("http://").unwrap().parse().unwrap();
        let (status, said) = try_http(address, "POST", &format!("/v3/{what}"), body).ok()?;
        (status == 200).then_some(said)
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts the member again with the data on its disk.
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
    etcd.arg(folder.path()).args(["--cert-file", &tls("etcd.crt"), "--key-file", &tls("etcd.key")]);
    etcd.stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

/// A file for TLS. The certificates `etcd.crt` and `other.crt` were made by
///
/// ```text
/// openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj /CN=etcd \
///     -addext basicConstraints=critical,CA:FALSE -addext subjectAltName=IP:127.0.0.1 -keyout etcd.key -out etcd.crt
/// ```
///
/// The certificates that etcd makes by itself have a curve that `ring` does not know (P-521).
fn tls(name: &str) -> String {
    format!("{}/tests/it/etcd/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn answers(member: &Member) -> bool {
    member.cluster()["etcd_answers"] == true
}

/// If all schedulers end, the next ones know no epoch. Without a store they begin again at the
/// first.
#[test]
#[cfg_attr(not(has_etcd), ignore = "needs etcd on the path")]
fn epochs_go_on_rising_where_no_scheduler_is_left_that_knows_the_last() {
    let mut etcd = Etcd::start();
    let mut last = 0;
    for _ in 0..3 {
        let scheduler = scheduler(&etcd.clients, &[]);
        until("it leads", || scheduler.leads());
        assert!(scheduler.epoch() > last, "{} after {last}", scheduler.epoch());
        last = scheduler.epoch();
        etcd.kill();
        until("it is missed", || !answers(&scheduler));
        assert!(scheduler.leads(), "the leader goes on");
        etcd.start_again();
        until("it is back", || answers(&scheduler));
    }
    let other = scheduler(&etcd.clients, &["--etcd-prefix", "b"]);
    until("another cluster leads", || other.leads());
    assert_eq!(other.epoch(), 1, "it has keys of its own");
}

#[test]
#[cfg_attr(not(has_etcd), ignore = "needs etcd on the path")]
fn without_etcd_requests_go_on_and_nobody_takes_over_until_it_is_back() {
    let mut etcd = Etcd::start();
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
    // A request that comes meanwhile waits, and is answered.
    let (frontend, request) = (cluster.frontend.http, std::fs::read_to_string(REQUEST).unwrap());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| http(frontend, "POST", "/v2/models/digits/infer", &request).0);
        std::thread::park_timeout(Duration::from_millis(500));
        assert!(!spare.leads(), "without an epoch nobody leads");
        etcd.start_again();
        until("the spare leads", || spare.leads());
        assert_eq!(waiting.join().unwrap(), 200);
    });
    assert!(spare.epoch() > first);
}

/// A scheduler that finds others only by etcd, and takes the lowest free rank. Its takeover time is
/// so long that a scheduler loses the lead only if its process is gone.
fn scheduler(etcd: &str, flags: &[&str]) -> Member {
    let own = ["--listen", "127.0.0.1:0", "--takeover-after-ms", "500", "--etcd", etcd];
    Member::start("scheduler", &[&own, flags].concat())
}

fn rank(member: &Member) -> u64 {
    let name = member.cluster()["name"].as_str().unwrap().to_owned();
    name.strip_prefix("scheduler ").unwrap().parse().unwrap()
}

fn all_answered(statuses: &[u16]) {
    assert_eq!(statuses.iter().filter(|status| **status != 200).count(), 0, "{statuses:?}");
}

#[test]
#[cfg_attr(not(has_etcd), ignore = "needs etcd on the path")]
fn schedulers_that_etcd_has_come_and_go_and_nobody_needs_a_list() {
    let mut etcd = Etcd::start();
    let found = ["--etcd", &etcd.clients.clone()];
    let schedulers = vec![scheduler(found[1], &[]), scheduler(found[1], &[])];
    assert_eq!(schedulers.iter().map(rank).collect::<Vec<_>>(), [0, 1]);
    let mut cluster = Cluster::around(schedulers, &found, digits(), &[]);
    cluster.leader();
    let third = scheduler(found[1], &[]);
    assert_eq!(rank(&third), 2);
    until("the third is one of them", || third.peers("scheduler") == 2 && third.peers("backend") == 2);
    all_answered(&cluster.under_load(|| {
        for gone in &cluster.schedulers {
            gone.signal("-KILL");
        }
        until("the third leads", || third.leads());
    }));
    // The ranks of the others are free again when their leases have ended.
    cluster.schedulers.clear();
    cluster.schedulers = vec![third, scheduler(found[1], &["--rank", "0"])];
    until("a rank is taken again", || cluster.schedulers[1].peers("backend") == 2);
    until("it is connected", || {
        cluster.schedulers[1].peers("scheduler") == 1 && cluster.frontend.peers("scheduler") == 2
    });
    assert!(!cluster.schedulers[1].leads(), "who comes does not take the lead");
    all_answered(&cluster.under_load(|| {
        etcd.kill();
        until("all miss it", || cluster.schedulers.iter().chain([&cluster.frontend]).all(|member| !answers(member)));
        assert_eq!(cluster.frontend.peers("scheduler"), 2, "who is known stays known");
        etcd.start_again();
        until("it is back", || cluster.schedulers.iter().chain([&cluster.frontend]).all(answers));
        cluster.schedulers[0].signal("-KILL");
        until("the other leads", || cluster.schedulers[1].leads());
    }));
}

#[test]
#[cfg_attr(not(has_etcd), ignore = "needs etcd on the path")]
fn a_scheduler_whose_rank_is_that_of_one_that_lives_says_so_and_ends() {
    let etcd = Etcd::start();
    let first = scheduler(&etcd.clients, &["--rank", "5", "--node-name", "the first"]);
    let mut second = Command::new(env!("CARGO_BIN_EXE_downbeat"));
    second.args([
        "scheduler",
        "--listen",
        "127.0.0.1:0",
        "--http-port",
        "0",
        "--metrics-port",
        "0",
        "--grpc-port",
        "off",
    ]);
    let output = second.args(["--etcd", &etcd.clients, "--rank", "5"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("rank 5 is that of the scheduler 'the first'") && said.contains("--rank"), "{said}");
    assert!(first.leads() && answers(&first));
    // A scheduler that ends in good order leaves its rank at once.
    first.signal("-TERM");
    let next = scheduler(&etcd.clients, &["--rank", "5"]);
    until("the next leads", || next.leads());
}

/// Forwards connections to a server until the test cuts them.
struct Proxy {
    address: SocketAddr,
    is_cut: Arc<AtomicBool>,
}

impl Proxy {
    fn to(server: SocketAddr) -> Proxy {
        let (listener, is_cut) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::new(AtomicBool::new(false)));
        let (address, cut) = (listener.local_addr().unwrap(), is_cut.clone());
        let copy = |mut from: TcpStream, mut to: TcpStream| {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(std::net::Shutdown::Write);
        };
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server = (!cut.load(Ordering::Relaxed)).then(|| TcpStream::connect(server));
                let Some(Ok(server)) = server else { continue };
                let (Ok(from_client), Ok(from_server)) = (client.try_clone(), server.try_clone()) else { continue };
                std::thread::spawn(move || copy(from_client, server));
                std::thread::spawn(move || copy(from_server, client));
            }
        });
        Proxy { address, is_cut }
    }
}

#[test]
#[cfg_attr(not(has_etcd), ignore = "needs etcd on the path")]
fn a_scheduler_that_is_cut_off_from_etcd_takes_no_lead() {
    let etcd = Etcd::start();
    let proxy = Proxy::to(etcd.clients.strip_prefix("http://").unwrap().parse().unwrap());
    let first = scheduler(&etcd.clients, &[]);
    until("the first leads", || first.leads());
    let cut_off = scheduler(&format!("http://{}", proxy.address), &[]);
    until("they are connected", || cut_off.peers("scheduler") == 1);
    let cluster = Cluster::around(vec![first, cut_off], &["--etcd", &etcd.clients], digits(), &[]);
    let [first, cut_off] = &cluster.schedulers[..] else { panic!("two") };
    until("both are known", || cluster.frontend.peers("scheduler") == 2);
    assert!(first.leads());
    proxy.is_cut.store(true, Ordering::Relaxed);
    until("it misses etcd", || !answers(cut_off));
    let epoch = first.epoch();
    let (frontend, request) = (cluster.frontend.http, std::fs::read_to_string(REQUEST).unwrap());
    let infer = move || http(frontend, "POST", "/v2/models/digits/infer", &request).0;
    assert_eq!(infer(), 200);
    first.signal("-KILL");
    until("the frontend has lost it", || cluster.frontend.peers("scheduler") == 1);
    let waiting = std::thread::spawn(infer);
    // Longer than the scheduler's lease.
    std::thread::park_timeout(Duration::from_secs(7));
    assert_eq!((cut_off.leads(), cut_off.epoch()), (false, epoch));
    let third = scheduler(&etcd.clients, &[]);
    until("one that reaches etcd leads", || third.leads());
    assert_eq!(waiting.join().unwrap(), 200);
    assert!(third.epoch() > epoch && !cut_off.leads());
}

/// Lets etcd have two users: `root`, and `downbeat` with the keys of a cluster alone.
fn close_to_strangers(etcd: &Etcd) {
    // In base64: "downbeat/", and the end of the keys that begin so, "downbeat0".
    let permission = r#"{"permType": "READWRITE", "key": "ZG93bmJlYXQv", "range_end": "ZG93bmJlYXQw"}"#;
    for (what, body) in [
        ("auth/user/add", r#"{"name": "root", "password": "root"}"#),
        ("auth/user/add", r#"{"name": "downbeat", "password": "open sesame"}"#),
        ("auth/user/grant", r#"{"user": "root", "role": "root"}"#),
        ("auth/role/add", r#"{"name": "cluster"}"#),
        ("auth/role/grant", &format!(r#"{{"name": "cluster", "perm": {permission}}}"#)),
        ("auth/user/grant", r#"{"user": "downbeat", "role": "cluster"}"#),
        ("auth/enable", "{}"),
    ] {
        assert!(etcd.ask(what, body).is_some(), "{what} {body}");
    }
}

#[test]
#[cfg_attr(not(has_etcd), ignore = "needs etcd on the path")]
fn an_etcd_with_tls_and_users_is_asked_as_one_of_them() {
    let mut etcd = Etcd::with_tls();
    close_to_strangers(&etcd);
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let file = folder.path().join(name);
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (file("right", "open sesame\n"), file("wrong", "guessed"));
    let (clients, certificate, unknown) = (etcd.clients.clone(), tls("etcd.crt"), tls("other.crt"));
    let (plain, secured) = clients.split_once(',').unwrap();
    let login = ["--listen", "127.0.0.1:0", "--etcd-user", "downbeat", "--etcd-password"];
    for (flags, said) in [
        (&["--etcd", plain][..], "give --etcd-user and --etcd-password"),
        (
            &["--etcd", secured, "--etcd-ca", &certificate, login[2], login[3], login[4], &wrong],
            "the login as 'downbeat' failed",
        ),
        (&["--etcd", secured, "--etcd-ca", &unknown, login[2], login[3], login[4], &right], "--etcd-ca"),
    ] {
        let mut frontend = Member::start("frontend", &[&login[..2], flags].concat());
        let line = frontend.line_with("etcd cannot be used now");
        assert!(line.contains(said) && !line.contains("guessed"), "{said}: {line}");
    }
    // The authorities of the machine, without an option.
    let flags = [&login[..], &[right.as_str(), "--etcd", secured]].concat();
    let mut frontend = Member::within("frontend", &flags, &[("SSL_CERT_FILE", certificate.as_str())]);
    frontend.line_with("etcd answers");
    drop(frontend);
    let found = ["--etcd", secured, "--etcd-ca", &certificate, login[2], login[3], login[4], &right];
    let schedulers = vec![scheduler(secured, &found[2..]), scheduler(secured, &found[2..])];
    let cluster = Cluster::around(schedulers, &found, digits(), &[]);
    assert_eq!(cluster.schedulers.iter().map(rank).collect::<Vec<_>>(), [0, 1]);
    assert!(cluster.leader() < 2 && cluster.infer().0 == 200);
    // An etcd that starts again has forgotten all logins.
    etcd.kill();
    until("all miss it", || !answers(&cluster.schedulers[0]) && !answers(&cluster.frontend));
    etcd.start_again();
    until("they have logged in again", || answers(&cluster.schedulers[0]) && answers(&cluster.frontend));
}
