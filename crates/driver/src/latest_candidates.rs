//! The place where a model leaves its newest candidates for the matchmaker.

use downbeat_core::cluster::Candidate;
use downbeat_core::{DeviceKind, Duration, Time};

use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};

/// Holds only a model's newest candidate for each kind of device (Symphony §5.5: the matchmaker
/// "only needs to pick up the latest candidate").
///
/// One thread at a time writes, one at a time reads, and neither ever waits. `told` prevents a
/// second announcement of the same model. However many requests come, there are at most as many
/// announcements under way as models.
pub struct LatestCandidates {
    /// By device kind.
    by_kind: Box<[Versioned]>,
    /// Whether the matchmaker has been told, and has not looked yet.
    told: AtomicBool,
}

/// Words of a candidate. All words are treated alike. loom tries every order of all accesses, and
/// so gets only the first few words.
const WORDS: usize = if cfg!(loom) { 4 } else { 7 };

/// One candidate, guarded by a version that is odd during a write. A reader that meets a write
/// gives up, because the writer will announce the new candidate afterwards. A candidate is one
/// cache line, so one line moves between the two threads.
#[derive(Default)]
#[repr(align(64))]
struct Versioned {
    version: AtomicU64,
    /// The candidate's words (see [`to_words`]).
    words: [AtomicU64; WORDS],
}

impl LatestCandidates {
    /// No candidates, for so many kinds of devices.
    pub fn new(kinds: usize) -> Self {
        LatestCandidates { by_kind: (0..kinds).map(|_| Versioned::default()).collect(), told: AtomicBool::new(false) }
    }

    /// Replaces the candidate of a kind. `true`: the caller must tell the matchmaker to look.
    pub fn put(&self, kind: DeviceKind, candidate: Option<Candidate>) -> bool {
        self.by_kind[kind.0 as usize].write(candidate);
        // One of the two swaps is later. If this one is later, the reader must be told again. If
        // the reader's is later, the reader sees the write above.
        !self.told.swap(true, Ordering::AcqRel)
    }

    /// Removes all candidates, without an announcement. The writer writes no more, and reports in
    /// another way that the model is gone.
    pub fn clear(&self) {
        self.by_kind.iter().for_each(|candidate| candidate.write(None));
    }

    /// Shows the newest candidates. `Err`: a newer one is being written, and its writer will tell
    /// the matchmaker.
    pub fn take(&self, mut show: impl FnMut(DeviceKind, Result<Option<Candidate>, BeingWritten>)) {
        self.told.swap(false, Ordering::AcqRel);
        for (kind, candidate) in (0..).map(DeviceKind).zip(&self.by_kind) {
            show(kind, candidate.read());
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
        self.version.store(version + 2, Ordering::Release);
    }

    fn read(&self) -> Result<Option<Candidate>, BeingWritten> {
        let version = self.version.load(Ordering::Acquire);
        let mut words = [0; 7];
        for (value, word) in words.iter_mut().zip(&self.words) {
            *value = word.load(Ordering::Relaxed);
        }
        fence(Ordering::Acquire);
        if !version.is_multiple_of(2) || version != self.version.load(Ordering::Relaxed) {
            return Err(BeingWritten);
        }
        Ok(from_words(words))
    }
}

/// The words of a candidate, its size first. A size of 0: no candidate.
fn to_words(candidate: Option<Candidate>) -> [u64; 7] {
    candidate.map_or([0; 7], |Candidate { size, exec, latest, since, delay, takes, pace }| {
        let spans = [delay, takes, pace].map(Duration::as_nanos);
        [u64::from(size), exec.as_nanos(), latest.as_nanos(), since.as_nanos(), spans[0], spans[1], spans[2]]
    })
}

fn from_words([size, exec, latest, since, delay, takes, pace]: [u64; 7]) -> Option<Candidate> {
    let (time, span) = (Time::from_nanos, Duration::from_nanos);
    let size = u32::try_from(size).unwrap_or(u32::MAX);
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

    const KIND: DeviceKind = DeviceKind(0);

    fn take(latest: &LatestCandidates) -> Vec<Result<Option<Candidate>, BeingWritten>> {
        let mut seen = Vec::new();
        latest.take(|_, candidate| seen.push(candidate));
        seen
    }

    #[test]
    fn the_newest_is_told_once_until_it_is_taken() {
        let latest = LatestCandidates::new(2);
        assert_eq!(take(&latest), [Ok(None), Ok(None)]);
        assert!(latest.put(KIND, candidate(1)));
        assert!(!latest.put(KIND, candidate(2)), "the matchmaker has not looked yet");
        assert!(!latest.put(DeviceKind(1), candidate(3)));
        assert_eq!(take(&latest), [Ok(candidate(2)), Ok(candidate(3))]);
        assert!(latest.put(KIND, None));
        assert_eq!(take(&latest), [Ok(None), Ok(candidate(3))]);
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
        from_words([n, n + 100, n + 200, n + 500, 0, 0, 0])
    }

    const KIND: DeviceKind = DeviceKind(0);

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
                        if latest.put(KIND, candidate(size)) {
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
