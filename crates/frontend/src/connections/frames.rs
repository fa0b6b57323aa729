//! How many HTTP/2 frames a peer sends beside its requests.
//!
//! For example, a peer sends acknowledgements of PINGs that the server never sent. Each
//! acknowledgement takes 17 bytes and a microsecond of a thread that connections share, and `h2`
//! sets no limit. Therefore each connection has an account of frames. Requests, bodies and answers
//! fill the account, and each frame costs one unit. The server does not read from a connection with
//! an empty account for the rest of a second. SETTINGS, PRIORITY, WINDOW_UPDATE, RST_STREAM and
//! empty DATA frames count alike.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// Frames for nothing that a connection may send each second.
const FREE: u32 = 64;
/// Most frames on an account.
const MOST: u32 = 1_000;
/// Frames that a request puts on the account: windows for its answer, a PING to measure the way,
/// its end.
const BY_REQUEST: u32 = 16;
/// Bytes of a body or of answers that put one more frame on the account.
const BYTES: u64 = 32;
/// Most bytes that are read at once while the account is low: about 120 of the smallest frames.
pub(super) const FEW_BYTES: usize = 2 << 10;

/// Bytes that a client sends before its first frame (RFC 9113 §3.4).
const PREFACE: u32 = 24;
/// Bytes before the payload of a frame (RFC 9113 §4.1).
const HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;

/// The account of one connection.
pub(super) struct Frames {
    /// Frames that the peer may still send.
    left: u32,
    /// The head of a frame, of which `begun` bytes have been read.
    head: [u8; HEAD],
    begun: usize,
    /// Bytes before the next head.
    skip: u32,
    /// Bytes of answers that have been counted.
    sent: u64,
    /// When the account may next be given [`FREE`] frames.
    refill: Option<Instant>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Frames {
    /// The account of a connection that begins.
    pub fn new() -> Self {
        Frames { left: FREE, head: [0; HEAD], begun: 0, skip: PREFACE, sent: 0, refill: None, pause: None }
    }

    /// Whether the connection reads at most [`FEW_BYTES`] at once.
    pub fn is_low(&self) -> bool {
        self.left <= FREE
    }

    /// Counts the frames in bytes that were read, at a time when `sent` bytes of answers have been
    /// written.
    pub fn count(&mut self, mut bytes: &[u8], sent: u64) {
        let (mut spent, mut earned) = (0u32, 0u64);
        loop {
            let skipped = (self.skip as usize).min(bytes.len());
            self.skip -= skipped as u32;
            bytes = bytes.get(skipped..).unwrap_or_default();
            let taken = (HEAD - self.begun).min(bytes.len());
            if taken == 0 {
                break;
            }
            let (begin, rest) = bytes.split_at(taken);
            if let Some(head) = self.head.get_mut(self.begun..self.begun + taken) {
                head.copy_from_slice(begin);
            }
            self.begun += taken;
            bytes = rest;
            if self.begun == HEAD {
                let [high, middle, low, kind, ..] = self.head;
                (self.begun, self.skip) = (0, u32::from_be_bytes([0, high, middle, low]));
                spent += 1;
                earned += match kind {
                    DATA => u64::from(self.skip) / BYTES,
                    HEADERS => u64::from(BY_REQUEST),
                    _ => 0,
                };
            }
        }
        earned += (sent - self.sent) / BYTES;
        // A remainder of fewer bytes counts next time.
        self.sent = sent - (sent - self.sent) % BYTES;
        let most = u64::from(MOST);
        self.left = (u64::from(self.left) + earned.min(most)).min(most) as u32;
        self.left = self.left.saturating_sub(spent);
    }

    /// Ready if the connection may be read.
    pub fn poll_may_read(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.left > 0 {
            return Poll::Ready(());
        }
        let now = Instant::now();
        if let Some(refill) = self.refill.filter(|refill| *refill > now) {
            let pause = self.pause.get_or_insert_with(|| Box::pin(sleep_until(refill)));
            ready!(pause.as_mut().poll(cx));
        }
        (self.left, self.pause, self.refill) = (FREE, None, Some(now + Duration::from_secs(1)));
        Poll::Ready(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let length = (payload as u32).to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, 0, 0, 0, 0, 1];
        frame.resize(HEAD + payload, 0);
        frame
    }

    fn began() -> Frames {
        let mut frames = Frames::new();
        frames.count(&[0; PREFACE as usize], 0);
        frames
    }

    #[test]
    fn frames_without_requests_empty_the_account() {
        // PING, SETTINGS, WINDOW_UPDATE, PRIORITY, empty DATA.
        for (kind, payload) in [(6, 8), (4, 0), (8, 4), (2, 5), (DATA, 0)] {
            let mut frames = began();
            for left in (0..FREE).rev() {
                frames.count(&frame(kind, payload), 0);
                assert_eq!(frames.left, left);
            }
        }
    }

    /// Each PING is answered with as many bytes. That does not pay for the next.
    #[test]
    fn answers_to_pings_do_not_pay_for_pings() {
        let mut frames = began();
        for sent in (0..3 * u64::from(FREE)).map(|pings| 17 * pings) {
            frames.count(&frame(6, 8), sent);
        }
        assert_eq!(frames.left, 0);
    }

    #[test]
    fn requests_with_bodies_and_answers_never_empty_the_account() {
        let mut frames = began();
        let window = frame(8, 4);
        for round in 1..=5_000u64 {
            frames.count(&[frame(HEADERS, 200), frame(DATA, 20), window.clone(), window.clone()].concat(), round * 60);
            assert!(frames.left > 0, "{round}");
        }
        assert!(!frames.is_low());
    }

    /// A stream of small messages: one frame there, one frame and two windows back.
    #[test]
    fn a_stream_of_small_messages_never_empties_the_account() {
        let mut frames = began();
        for round in 1..=5_000u64 {
            frames.count(&[frame(DATA, 60), frame(8, 4), frame(8, 4)].concat(), round * 70);
            assert!(frames.left > 0, "{round}");
        }
    }

    #[test]
    fn frames_in_pieces_count_as_whole_ones() {
        let bytes = [vec![0; PREFACE as usize], frame(HEADERS, 300), frame(DATA, 1_000), frame(6, 8)].concat();
        let mut whole = Frames::new();
        whole.count(&bytes, 0);
        for size in 1..50 {
            let mut pieces = Frames::new();
            bytes.chunks(size).for_each(|piece| pieces.count(piece, 0));
            assert_eq!((pieces.left, pieces.skip, pieces.begun), (whole.left, 0, 0), "pieces of {size}");
        }
    }

    #[test]
    fn a_large_frame_fills_the_account_and_no_more() {
        let mut frames = began();
        frames.count(&frame(DATA, 1 << 20)[..HEAD], 0);
        assert_eq!((frames.left, frames.skip), (MOST - 1, 1 << 20));
    }
}
