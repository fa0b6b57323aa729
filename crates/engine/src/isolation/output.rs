//! The lines that an executor process writes, on their way to the log. A process that writes
//! without end costs no more than these bounds.

use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes that make one line of the log.
const MOST_OF_A_LINE: u64 = 8 << 10;
/// Most lines of a process's stream in a [`PERIOD`]; more are counted and left out.
const MOST_LINES: u32 = 500;
/// Most bytes of a stream that are read in a [`PERIOD`]; a process that writes more waits.
const MOST_BYTES: usize = 4 << 20;
const PERIOD: Duration = Duration::from_secs(5);
/// The mark before a line's level, in lines of a model's own logger.
const MARK: char = '\u{1}';

/// The last line that a process wrote, for the message of its end.
#[derive(Clone, Default)]
pub(super) struct LastLine(Arc<Mutex<String>>);

impl LastLine {
    /// `; its last line was: ...`, or nothing.
    pub fn words(&self) -> String {
        match &**self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            "" => String::new(),
            line => format!("; its last line was: {line}"),
        }
    }

    fn set(&self, line: &str) {
        if !line.trim().is_empty() {
            line.trim().clone_into(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

/// A stream of an executor process, which goes to the log line by line.
pub(super) struct Output {
    /// The model's name or file.
    pub model: String,
    pub pid: u32,
    /// Whether the lines are errors: those of standard error.
    pub is_error: bool,
    /// The words in front of lines that have no level of their own.
    pub prefix: &'static str,
    pub last: LastLine,
}

/// The count of a stream's lines and bytes in the present period.
struct Meter {
    begin: Instant,
    lines: u32,
    bytes: usize,
}

impl Output {
    /// Copies the stream to the log until the stream ends. A long line is copied in parts.
    pub fn copy(&self, stream: impl Read) {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        let mut meter = Meter { begin: now(), lines: 0, bytes: 0 };
        while matches!(reader.by_ref().take(MOST_OF_A_LINE).read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end();
            self.last_line(text);
            self.begin_period(&mut meter);
            meter.lines += 1;
            meter.bytes += line.len();
            if meter.lines <= MOST_LINES {
                self.log(text);
            }
            if meter.bytes > MOST_BYTES {
                pause(PERIOD.saturating_sub(now().duration_since(meter.begin)));
            }
            line.clear();
        }
        self.tell_left_out(&meter);
    }

    fn last_line(&self, text: &str) {
        if self.is_error && !text.starts_with(MARK) {
            self.last.set(text);
        }
    }

    fn begin_period(&self, meter: &mut Meter) {
        if now().duration_since(meter.begin) >= PERIOD {
            self.tell_left_out(meter);
            *meter = Meter { begin: now(), lines: 0, bytes: 0 };
        }
    }

    fn tell_left_out(&self, meter: &Meter) {
        let left_out = meter.lines.saturating_sub(MOST_LINES);
        if left_out > 0 {
            tracing::warn!(
                model = %self.model, pid = self.pid, lines = left_out,
                "the log leaves out lines of an executor process, which writes more than {MOST_LINES} in {} s",
                PERIOD.as_secs()
            );
        }
    }

    fn log(&self, text: &str) {
        let Output { model, pid, is_error, prefix, .. } = self;
        let (level, text) = match text.strip_prefix(MARK).and_then(|text| text.split_at_checked(1)) {
            Some(marked) => marked,
            None if *is_error => ("-", text),
            None => ("I", text),
        };
        match level {
            "E" => tracing::error!(%model, pid, "{text}"),
            "W" => tracing::warn!(%model, pid, "{text}"),
            "V" => tracing::debug!(%model, pid, "{text}"),
            "I" => tracing::info!(%model, pid, "{text}"),
            _ => tracing::warn!(%model, pid, "{prefix}{text}"),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the writer of a flood of lines waits, on a thread of its own")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

#[expect(
    clippy::disallowed_methods,
    reason = "how long a process has lived decides only how soon the next one is started"
)]
pub(super) fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_standard_error_is_kept_and_marked_lines_are_not() {
        let last = LastLine::default();
        let output = |is_error| Output { model: "m".into(), pid: 1, is_error, prefix: "", last: last.clone() };
        output(false).copy(&b"out\n"[..]);
        assert_eq!(last.words(), "");
        output(true).copy(&b"Traceback\nValueError: no\n\n\x01Inews\n"[..]);
        assert_eq!(last.words(), "; its last line was: ValueError: no");
    }
}
