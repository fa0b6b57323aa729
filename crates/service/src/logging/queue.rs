//! The lines of the log that wait for standard error, and the thread that writes them.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Most bytes of lines that wait.
const MOST_BYTES: usize = 1 << 20;

/// The lines that wait for the writer thread. Their bound is [`MOST_BYTES`]. A line beyond it is
/// lost and counted, so that no thread of the server ever waits for the reader of the log.
///
/// The bound is in bytes and not in lines, as clients decide how long a line is.
pub struct LogQueue {
    state: Mutex<State>,
    /// Notified when a line has come.
    filled: Condvar,
    /// Notified when the writer has nothing left to write.
    emptied: Condvar,
    /// Lines lost since the start.
    lost: AtomicU64,
}

struct State {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Lost lines that the log has not reported yet.
    untold: u64,
    is_writing: bool,
    /// Makes the line that reports this many lost ones.
    tell: fn(u64) -> String,
}

impl State {
    fn put(&mut self, line: &[u8]) {
        self.bytes += line.len();
        self.lines.push_back(line.to_vec());
    }

    fn tell_of_lost(&mut self) {
        if self.untold > 0 {
            let line = (self.tell)(std::mem::take(&mut self.untold));
            self.put(line.as_bytes());
        }
    }
}

impl LogQueue {
    pub const fn new(tell: fn(u64) -> String) -> Self {
        let state = State { lines: VecDeque::new(), bytes: 0, untold: 0, is_writing: false, tell };
        LogQueue { state: Mutex::new(state), filled: Condvar::new(), emptied: Condvar::new(), lost: AtomicU64::new(0) }
    }

    /// Sets the function that reports lost lines.
    pub fn tell_by(&self, tell: fn(u64) -> String) {
        self.state.lock().tell = tell;
    }

    /// Hands a line to the writer, or loses it if there is no room.
    pub fn push(&self, line: &[u8]) {
        let mut state = self.state.lock();
        if state.bytes + line.len() > MOST_BYTES {
            state.untold += 1;
            self.lost.fetch_add(1, Relaxed);
            return;
        }
        state.tell_of_lost();
        state.put(line);
        self.filled.notify_one();
    }

    /// Lines lost since the start.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// The life of the writer thread: it writes one line after the other, and sleeps while there is
    /// none.
    pub fn write_all(&self, mut write: impl FnMut(&[u8]) -> io::Result<()>) -> ! {
        let mut state = self.state.lock();
        loop {
            if state.lines.is_empty() {
                state.tell_of_lost();
            }
            let Some(line) = state.lines.pop_front() else {
                self.emptied.notify_all();
                self.filled.wait(&mut state);
                continue;
            };
            state.bytes -= line.len();
            state.is_writing = true;
            drop(state);
            // The reader has closed its end: the line is lost as others are.
            let lost = write(&line).is_err();
            self.lost.fetch_add(u64::from(lost), Relaxed);
            state = self.state.lock();
            state.is_writing = false;
        }
    }

    /// Waits until all lines are written, at most `within`.
    pub fn flush(&self, within: Duration) {
        let mut state = self.state.lock();
        let is_busy = |state: &mut State| state.is_writing || !state.lines.is_empty();
        self.emptied.wait_while_for(&mut state, is_busy, within);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    fn tell(lost: u64) -> String {
        format!("{lost} lost")
    }

    /// A queue whose writer passes lines on one by one, each when the test takes it.
    fn slow() -> (Arc<LogQueue>, mpsc::Receiver<Vec<u8>>) {
        let (sender, lines) = mpsc::sync_channel(0);
        let queue = Arc::new(LogQueue::new(tell));
        let written = queue.clone();
        std::thread::spawn(move || {
            written.write_all(|line| sender.send(line.to_vec()).map_err(|_| io::ErrorKind::BrokenPipe.into()))
        });
        (queue, lines)
    }

    #[test]
    fn lines_without_room_are_lost_and_the_next_line_tells_how_many() {
        let (queue, lines) = slow();
        let large = vec![b'x'; MOST_BYTES / 2];
        queue.push(b"first");
        while !queue.state.lock().is_writing {
            std::thread::yield_now();
        }
        // Two of them have room.
        (0..5).for_each(|_| queue.push(&large));
        assert_eq!(queue.lost(), 3);
        for line in [b"first", &large[..], &large, b"3 lost"] {
            assert_eq!(lines.recv().unwrap(), line);
        }
        queue.push(b"next");
        assert_eq!((lines.recv().unwrap(), queue.lost()), (b"next".to_vec(), 3));
    }

    #[test]
    fn a_reader_that_never_comes_does_not_hold_the_end_up() {
        let (queue, lines) = slow();
        queue.push(b"one");
        queue.flush(Duration::from_millis(1));
        assert_eq!(lines.recv().unwrap(), b"one");
        queue.flush(Duration::MAX);
    }

    #[test]
    fn lines_for_a_reader_that_has_left_count_as_lost() {
        let (queue, lines) = slow();
        drop(lines);
        queue.push(b"one");
        queue.flush(Duration::MAX);
        assert_eq!(queue.lost(), 1);
    }
}
