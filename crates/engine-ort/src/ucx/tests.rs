//! Each test runs in processes of its own, as UCX reads its environment once. The transports are
//! those of Debian's library, except tcp. Without the library these tests are ignored, unless
//! DOWNBEAT_REQUIRE_UCX is set.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command as Process, Stdio};
use std::time::Duration;

use super::library::Library;
use super::*;

/// Longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(60);
const LEN: usize = 4 << 20;
/// Makes glibc fill allocated memory with 0x42, and freed memory with 0xbd. A defect of UCX that
/// depends on unset memory then appears every time: 0x42 is a kind of data with a pointer.
const PERTURB: &str = "189";
/// The number of peers that are killed while they read.
const KILLED: usize = 5;

/// Runs an otherwise ignored test, with this transport.
fn process(test: &str, transport: &str) -> Process {
    let mut process = Process::new(std::env::current_exe().unwrap());
    process.args(["--ignored", "--exact", "--nocapture", "--test-threads", "1", &format!("ucx::tests::{test}")]);
    process.envs([("UCX_TLS", transport), ("UCX_MM_ERROR_HANDLING", "y"), ("UCX_WARN_UNUSED_ENV_VARS", "n")]);
    process.env("MALLOC_PERTURB_", PERTURB);
    process
}

fn by_all_transports(test: &str) {
    if let Err(error) = Library::load() {
        panic!("{error}");
    }
    // CMA carries no messages, by which workers meet, and 1.13 ignores it for reads. The fourth
    // transport, tcp, is refused.
    for transport in ["posix,self", "sysv,self", "cma,posix"] {
        let output = process(test, transport).output().unwrap();
        let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && out.contains("1 passed"), "{transport}: {out}\n{errors}");
    }
}

#[test]
#[cfg_attr(not(has_ucx), ignore = "needs libucp.so.0")]
fn regions_are_read_by_each_transport() {
    by_all_transports("two_workers");
}

#[test]
#[cfg_attr(not(has_ucx), ignore = "needs libucp.so.0")]
fn a_silent_or_dead_peer_ends_its_own_reads_only() {
    by_all_transports("a_reader");
}

/// A region with bytes that differ for each `seed`, and UCX for the region.
fn region(seed: u64) -> (OwnRegion, Vec<u8>, Ucx) {
    let region = OwnRegion::create("test", LEN).unwrap();
    let bytes: Vec<u8> = (0..LEN as u64 / 8)
        .flat_map(|place| (place + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    // SAFETY: it is the only call.
    drop(unsafe { region.put(0, &bytes) });
    let ucx = Ucx::start(&region).unwrap();
    (region, bytes, ucx)
}

fn meet(ucx: &Ucx) -> UcxMeeting {
    let (sender, receiver) = mpsc::channel();
    ucx.meet(move |met| sender.send(met).unwrap());
    receiver.recv_timeout(PATIENCE).unwrap().unwrap()
}

fn connect(meeting: UcxMeeting, offer: Offer) -> Result<UcxPeer, UcxError> {
    let (sender, receiver) = mpsc::channel();
    meeting.connect(offer, LEN, move |made| sender.send(made).unwrap());
    receiver.recv_timeout(PATIENCE).unwrap()
}

/// The way from each to the other.
fn both(one: &Ucx, two: &Ucx) -> (UcxPeer, UcxPeer) {
    let (one, two) = (meet(one), meet(two));
    let (of_one, of_two) = (one.offer().clone(), two.offer().clone());
    (connect(one, of_two).unwrap(), connect(two, of_one).unwrap())
}

fn begin(peer: &UcxPeer, begin: usize, len: usize) -> mpsc::Receiver<Result<Bytes, UcxError>> {
    let (sender, receiver) = mpsc::channel();
    assert!(peer.read(begin, len, move |read| sender.send(read).unwrap()));
    receiver
}

fn read(peer: &UcxPeer, from: usize, len: usize) -> Bytes {
    begin(peer, from, len).recv_timeout(PATIENCE).unwrap().unwrap()
}

#[test]
#[ignore = "run by the tests above"]
fn two_workers() {
    let (one, two) = (region(1), region(2));
    let (to_two, to_one) = both(&one.2, &two.2);
    for (from, len) in [(0, 8), (1, 1), (LEN - 1, 1), (4096, 100_000), (0, LEN)] {
        assert!(read(&to_two, from, len) == two.1[from..from + len], "{from} {len}");
        assert!(read(&to_one, from, len) == one.1[from..from + len], "{from} {len}");
    }
    // Side by side, in both directions.
    let reads: Vec<_> =
        (0..64).map(|n| (n, begin(&to_two, n * 4096, 60_000), begin(&to_one, n * 4096, 60_000))).collect();
    for (n, of_two, of_one) in reads {
        let all = n * 4096..n * 4096 + 60_000;
        assert!(of_two.recv_timeout(PATIENCE).unwrap().unwrap() == two.1[all.clone()]);
        assert!(of_one.recv_timeout(PATIENCE).unwrap().unwrap() == one.1[all]);
    }
    // SAFETY: no thread holds bytes of the region.
    let kept = unsafe { two.0.put(8192, b"something else") };
    assert_eq!(read(&to_two, 8192, kept.len()), kept);
    for (from, len) in [(LEN, 1), (LEN - 1, 2), (usize::MAX, 2), (0, 0)] {
        assert!(!to_two.read(from, len, |_| panic!("it is not there")), "{from} {len}");
    }
    // Either end may give up a read at any time, and new connections must work afterwards.
    drop(to_one);
    for turn in 0..20 {
        let (to_two, to_one) = both(&one.2, &two.2);
        // Some give up before the two have found each other.
        if turn % 4 < 2 {
            assert!(read(&to_two, 0, 8) == two.1[..8]);
        }
        let given_up = [begin(&to_two, 0, LEN), begin(&to_one, 0, LEN)];
        if turn % 2 == 0 {
            drop(to_two);
            drop(to_one);
        } else {
            drop(to_one);
            drop(to_two);
        }
        for read in given_up {
            // The read ended with bytes or an error.
            let _ = read.recv_timeout(PATIENCE).unwrap();
        }
    }
    // The same for a peer that was never told of the other.
    for _ in 0..5 {
        let (of_one, of_two) = (meet(&one.2), meet(&two.2));
        let to_two = connect(of_one, of_two.offer().clone()).unwrap();
        assert!(read(&to_two, 0, 8) == two.1[..8]);
        let given_up = begin(&to_two, 0, LEN);
        drop(of_two);
        drop(to_two);
        let _ = given_up.recv_timeout(PATIENCE).unwrap();
    }
    // An end lives as long as the other one, even if only one of them reads.
    let (to_two, to_one) = both(&one.2, &two.2);
    assert!(read(&to_one, 0, LEN) == one.1);
    drop((to_two, to_one));
}

#[test]
fn an_offer_that_is_garbled_of_another_version_or_too_long_is_refused() {
    let version = (1, 13);
    let offer = Offer { version, address: vec![1; 80], key: vec![2; 12], begin: 4096, len: 8192, checksum: 0 }.sealed();
    assert_eq!(offer.check(version, 8192), Ok(8192));
    let refused = |offer: Offer| offer.check(version, 8192).unwrap_err().to_string();
    for garbled in [
        Offer { address: vec![1; 79], ..offer.clone() },
        Offer { key: vec![3; 12], ..offer.clone() },
        Offer { begin: 4097, ..offer.clone() },
        Offer { len: 8191, ..offer.clone() },
        Offer { address: vec![1; 81], key: vec![2; 11], ..offer.clone() },
    ] {
        assert_eq!(refused(garbled), "the peer's description of its memory is garbled");
    }
    let sealed = |offer: Offer| refused(offer.sealed());
    let said = sealed(Offer { version: (1, 19), ..offer.clone() });
    assert_eq!(said, "it has UCX 1.19, and this process 1.13: they must be the same");
    assert_eq!(sealed(Offer { len: 8193, ..offer.clone() }), "its memory has 8193 bytes, and 1 to 8192 are taken");
    assert!(sealed(Offer { len: 0, ..offer.clone() }).contains("0 bytes"));
    assert!(sealed(Offer { begin: u64::MAX - 1, ..offer }).contains("8192 bytes"));
}

/// A process that is read, and may read. It is killed when the test is over.
struct Target {
    child: Child,
    offer: Offer,
    says: Box<dyn Iterator<Item = String>>,
}

impl Target {
    fn start() -> Target {
        let transport = std::env::var("UCX_TLS").unwrap();
        let mut target = process("a_target", &transport);
        let mut child = target.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut says = Box::new(lines.map_while(Result::ok));
        let offer = says.find_map(|line| serde_json::from_str(line.split_once("offer ")?.1).ok()).unwrap();
        Target { child, offer, says }
    }

    /// Makes the process read a region for ever, and waits until it does.
    fn reads(&mut self, offer: &Offer) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{}", serde_json::to_string(offer).unwrap()).unwrap();
        assert!(self.says.by_ref().filter(|line| line == "read").take(4).count() == 4);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "run by the tests above"]
fn a_target() {
    let (_region, _, ucx) = region(7);
    let meeting = meet(&ucx);
    println!("offer {}", serde_json::to_string(meeting.offer()).unwrap());
    let mut line = String::new();
    // Waits until the reader has gone, or sends an offer that this process must read.
    let _ = std::io::stdin().read_line(&mut line);
    let Ok(offer) = serde_json::from_str(&line) else { return };
    let peer = connect(meeting, offer).unwrap();
    let mut reads: VecDeque<_> = (0..8).map(|_| begin(&peer, 0, LEN)).collect();
    while let Some(read) = reads.pop_front() {
        read.recv_timeout(PATIENCE).unwrap().unwrap();
        println!("read");
        reads.push_back(begin(&peer, 0, LEN));
    }
}

#[test]
#[ignore = "run by the tests above"]
fn a_reader() {
    use rustix::process::Signal;
    let (_region, _, ucx) = region(1);
    let expected = region(7).1;
    let lives = Target::start();
    let to_living = connect(meet(&ucx), lives.offer.clone()).unwrap();
    for signal in [Signal::STOP, Signal::KILL] {
        let target = Target::start();
        let to_target = connect(meet(&ucx), target.offer.clone()).unwrap();
        assert!(read(&to_target, 0, LEN) == expected);
        // Stopped first, so that no read ends early.
        target.signal(Signal::STOP);
        let reads: Vec<_> = (0..16).map(|_| begin(&to_target, 0, LEN)).collect();
        target.signal(signal);
        assert!(read(&to_living, 0, LEN) == expected, "others are read meanwhile");
        drop(to_target);
        for read in reads {
            // The process may have sent all bytes before it ended.
            let _ = read.recv_timeout(PATIENCE).unwrap();
        }
        assert!(read(&to_living, 0, LEN) == expected, "and after it");
        // A peer that is already gone.
        drop(target);
    }
    // Killed while it reads this process.
    for _ in 0..KILLED {
        let (meeting, mut target) = (meet(&ucx), Target::start());
        let its = meeting.offer().clone();
        let to_target = connect(meeting, target.offer.clone()).unwrap();
        target.reads(&its);
        target.signal(Signal::KILL);
        assert!(read(&to_living, 0, LEN) == expected);
        drop(to_target);
    }
    assert!(read(&to_living, 0, LEN) == expected);
    let gone = Target::start();
    let (offer, mut child) = (gone.offer.clone(), gone);
    child.child.kill().unwrap();
    child.child.wait().unwrap();
    if let Ok(to_gone) = connect(meet(&ucx), offer) {
        let reads: Vec<_> = (0..4).map(|_| begin(&to_gone, 0, 8)).collect();
        assert!(read(&to_living, 0, LEN) == expected);
        drop(to_gone);
        assert!(reads.into_iter().all(|read| read.recv_timeout(PATIENCE).unwrap().is_err()), "nobody is there");
    }
}
