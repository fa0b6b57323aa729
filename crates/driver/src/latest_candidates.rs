//! The place where a model leaves its newest candidates for the matchmaker.

use downbeat_core::cluster::Candidate;
use downbeat_core::{DeviceKind, Duration, Time};

use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// Holds only a model's newest candidate for each kind of device (Symphony §5.5: the matchmaker
/// "only needs to pick up the latest candidate").
///
/// One thread at a time writes, one at a time reads, and neither ever waits. `told` prevents a
/// second announcement of the same model. However many requests come, there are at most as many
/// announcements under way as models.
///
/// While `told` is set, the candidates are the newest. A thread that is in the shard and in the
/// matchmaker at once hands a candidate over without this place. It writes here only if `told` is
/// set ([`LatestCandidates::follow`]).
pub struct LatestCandidates {
    /// By device kind, at least one. The first has `told` for all: with one kind an announcement
    /// moves one cache line.
    by_kind: Box<[Versioned]>,
}

/// Words of a candidate beside its size. All words are treated alike. loom tries every order of all
/// accesses, and so gets only the first few words.
const WORDS: usize = if cfg!(loom) { 3 } else { 6 };

/// One candidate, guarded by a version that is odd during a write. A reader that meets a write
/// gives up, because the writer will announce the new candidate afterwards. A candidate is one
/// cache line, so one line moves between the two threads.
#[derive(Default)]
#[repr(align(64))]
struct Versioned {
    version: AtomicU64,
    /// The candidate's words (see [`to_words`]).
    words: [AtomicU64; WORDS],
    /// Items of the candidate; 0: no candidate.
    size: AtomicU32,
    /// Whether the matchmaker has been told, and has not looked yet.
    told: AtomicBool,
}

impl LatestCandidates {
    /// No candidates, for so many kinds of devices.
    pub fn new(kinds: usize) -> Self {
        LatestCandidates { by_kind: (0..kinds.max(1)).map(|_| Versioned::default()).collect() }
    }

    fn told(&self) -> &AtomicBool {
        &self.by_kind[0].told
    }

    /// Replaces the candidates. `true`: the caller must tell the matchmaker to look.
    pub fn put(&self, newest: impl Fn(DeviceKind) -> Option<Candidate>) -> bool {
        self.write(newest);
        // One of the two swaps is later. If this one is later, the reader must be told again. If
        // the reader's is later, the reader sees the write above.
        !self.told().swap(true, Ordering::AcqRel)
    }

    /// Replaces the candidates if the matchmaker will look here. The caller is in the matchmaker, and
    /// tells it the candidates itself.
    pub fn follow(&self, newest: impl Fn(DeviceKind) -> Option<Candidate>) {
        if self.is_told() {
            self.write(newest);
        }
    }

    /// Removes all candidates, without an announcement. The matchmaker sees this when it handles the
    /// next answer of the model. The writer writes no more, and reports in another way that the
    /// model is gone.
    pub fn clear(&self) {
        self.put(|_| None);
    }

    /// Whether the matchmaker has been told, and has not looked yet. Asked by a thread in the
    /// matchmaker.
    pub fn is_told(&self) -> bool {
        self.told().load(Ordering::Acquire)
    }

    /// Shows the newest candidates, if the matchmaker was told of any since the last call. `Err`: a
    /// newer one is being written, and its writer will tell the matchmaker.
    pub fn take(&self, mut show: impl FnMut(DeviceKind, Result<Option<Candidate>, BeingWritten>)) {
        if self.told().swap(false, Ordering::AcqRel) {
            for (kind, candidate) in (0..).map(DeviceKind).zip(&self.by_kind) {
                show(kind, candidate.read());
            }
        }
    }

    fn write(&self, newest: impl Fn(DeviceKind) -> Option<Candidate>) {
        for (kind, candidate) in (0..).map(DeviceKind).zip(&self.by_kind) {
            candidate.write(newest(kind));
        }
    }
}

impl Versioned {
    fn write(&self, candidate: Option<Candidate>) {
        // The writer is alone: no other thread changes the version.
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        // A reader that sees one of the words below also sees the odd version.
        fence(Ordering::Release);
        for (word, value) in self.words.iter().zip(to_words(candidate)) {
            word.store(value, Ordering::Relaxed);
        }
        self.size.store(candidate.map_or(0, |candidate| candidate.size), Ordering::Relaxed);
        self.version.store(version + 2, Ordering::Release);
    }

    fn read(&self) -> Result<Option<Candidate>, BeingWritten> {
        let version = self.version.load(Ordering::Acquire);
        let mut words = [0; 6];
        for (value, word) in words.iter_mut().zip(&self.words) {
            *value = word.load(Ordering::Relaxed);
        }
        let size = self.size.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        if !version.is_multiple_of(2) || version != self.version.load(Ordering::Relaxed) {
            return Err(BeingWritten);
        }
        Ok(from_words(size, words))
    }
}

/// The words of a candidate beside its size.
fn to_words(candidate: Option<Candidate>) -> [u64; 6] {
    candidate.map_or([0; 6], |Candidate { size: _, exec, latest, since, delay, takes, pace }| {
        let spans = [delay, takes, pace].map(Duration::as_nanos);
        [exec.as_nanos(), latest.as_nanos(), since.as_nanos(), spans[0], spans[1], spans[2]]
    })
}

fn from_words(size: u32, [exec, latest, since, delay, takes, pace]: [u64; 6]) -> Option<Candidate> {
    let (time, span) = (Time::from_nanos, Duration::from_nanos);
    let (exec, latest, since) = (time(exec), time(latest), time(since));
    let (delay, takes, pace) = (span(delay), span(takes), span(pace));
    (size > 0).then_some(Candidate { size, exec, latest, since, delay, takes, pace })
}

/// The error of reading a candidate during its replacement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BeingWritten;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn candidate(size: u32) -> Option<Candidate> {
        let (n, ns) = (u64::from(size), Duration::from_nanos);
        let (exec, latest) = (Time::from_nanos(n + 100), Time::from_nanos(n + 200));
        let (since, delay, takes, pace) = (Time::from_nanos(n + 500), ns(n + 300), ns(n + 600), ns(n + 400));
        Some(Candidate { size, exec, latest, since, delay, takes, pace })
    }

    fn take(latest: &LatestCandidates) -> Vec<Result<Option<Candidate>, BeingWritten>> {
        let mut seen = Vec::new();
        latest.take(|_, candidate| seen.push(candidate));
        seen
    }

    /// The first kind has a candidate of this size, the second one of the next.
    fn sizes(size: u32) -> impl Fn(DeviceKind) -> Option<Candidate> {
        move |kind| candidate(size + kind.0)
    }

    #[test]
    fn the_newest_is_told_once_until_it_is_taken() {
        let latest = LatestCandidates::new(2);
        assert_eq!(take(&latest), []);
        assert!(latest.put(sizes(1)));
        assert!(!latest.put(sizes(3)), "the matchmaker has not looked yet");
        assert_eq!(take(&latest), [Ok(candidate(3)), Ok(candidate(4))]);
        assert_eq!(take(&latest), [], "nothing newer has come");
        assert!(latest.put(|kind| sizes(5)(kind).filter(|_| kind.0 == 1)));
        assert_eq!(take(&latest), [Ok(None), Ok(candidate(6))]);
    }

    /// The matchmaker that was told of a candidate looks later, and must not see an older one than
    /// it was handed meanwhile.
    #[test]
    fn a_place_that_is_looked_at_follows_what_was_handed_over() {
        let latest = LatestCandidates::new(1);
        latest.follow(sizes(1));
        assert_eq!(take(&latest), [], "nobody looks");
        assert!(latest.put(sizes(2)));
        latest.follow(sizes(3));
        assert_eq!(take(&latest), [Ok(candidate(3))]);
        latest.clear();
        assert!(latest.is_told(), "the next answer looks");
        assert_eq!(take(&latest), [Ok(None)]);
    }
}

/// Run with `cargo test -p downbeat-loom`.
#[cfg(all(test, loom))]
mod modelled {
    use loom::sync::Arc;

    use super::*;
    use crate::sync::SegQueue;

    /// A candidate with the words that loom gets.
    fn candidate(size: u32) -> Option<Candidate> {
        let n = u64::from(size);
        from_words(size, [n + 100, n + 200, n + 500, 0, 0, 0])
    }

    /// In every order of accesses, three things hold. A read candidate was written whole.
    /// Candidates never get older. A reader that looks only when told ends with the last candidate.
    #[test]
    fn a_candidate_is_never_torn_and_the_last_is_never_lost() {
        loom::model(|| {
            let latest = Arc::new(LatestCandidates::new(1));
            let announcements = Arc::new(SegQueue::new());
            let writer = {
                let (latest, announcements) = (latest.clone(), announcements.clone());
                loom::thread::spawn(move || {
                    for size in [1, 2] {
                        if latest.put(|_| candidate(size)) {
                            announcements.push(());
                        }
                    }
                })
            };
            let mut last = 0;
            let mut follow = || {
                while announcements.pop().is_some() {
                    latest.take(|_, seen| {
                        let Ok(seen) = seen else { return };
                        let size = seen.map_or(0, |candidate| candidate.size);
                        assert!(size == 0 || seen == candidate(size), "torn: {seen:?}");
                        assert!(size >= last, "older than before");
                        last = size;
                    });
                }
            };
            follow();
            writer.join().unwrap();
            follow();
            assert_eq!(last, 2, "the newest was lost");
        });
    }
}
