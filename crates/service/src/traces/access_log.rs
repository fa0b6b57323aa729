//! The access log: a line of JSON for each inference request.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context;
use serde::Serialize;

use super::record::{Outcome, TraceRecord, Wire};
use super::writer::Writes;

/// The path that stands for standard output.
const STDOUT: &str = "-";

/// Writes the access log. The file is opened anew for each group of lines, so that a program such as
/// logrotate may move it away.
pub struct AccessLog {
    path: PathBuf,
}

/// A line of the access log. Times are in microseconds.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    client: Option<String>,
    protocol: &'static str,
    model: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    version: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    id: &'a str,
    /// The status of HTTP or the code of gRPC.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    outcome: &'static str,
    took_us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    run_us: Option<u64>,
    /// Items of its batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    trace: String,
}

impl AccessLog {
    /// Writes to `path`; `-`: to standard output.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn open(path: &Path) -> anyhow::Result<AccessLog> {
        let log = AccessLog { path: path.to_owned() };
        if !log.is_stdout() {
            log.file().with_context(|| {
                format!(
                    "cannot write the access log to '{}' (--access-log); name a file in a folder that exists, or - for \
                     standard output",
                    path.display()
                )
            })?;
        }
        Ok(log)
    }

    fn is_stdout(&self) -> bool {
        // In a file of options, the path is relative to the file's folder.
        self.path.file_name().is_some_and(|name| name == STDOUT)
    }

    fn file(&self) -> io::Result<File> {
        OpenOptions::new().append(true).create(true).open(&self.path)
    }
}

impl Writes for AccessLog {
    fn write(&mut self, records: &[Arc<TraceRecord>]) -> Result<(), String> {
        let mut lines = String::new();
        for record in records {
            lines += &serde_json::to_string(&line(record)).map_err(|error| error.to_string())?;
            lines.push('\n');
        }
        let written = match self.is_stdout() {
            true => io::stdout().write_all(lines.as_bytes()),
            false => self.file().and_then(|mut file| file.write_all(lines.as_bytes())),
        };
        written.map_err(|error| format!("'{}' cannot be written: {error}", self.path.display()))
    }
}

fn micros(duration: downbeat_core::Duration) -> u64 {
    duration.as_nanos() / 1000
}

fn line(record: &TraceRecord) -> Line<'_> {
    let at = UNIX_EPOCH + Duration::from_nanos(record.unix_ns(record.began));
    let part = record.parts.first();
    let run = part.and_then(|part| part.run.as_ref());
    let (status, outcome, error) = match &record.outcome {
        Outcome::Answered(status) => (Some(*status), "answered", None),
        Outcome::Failed(status, error) => (Some(*status), "failed", Some(error.as_str())),
        Outcome::Cancelled => (None, "cancelled", None),
    };
    Line {
        time: humantime::format_rfc3339_micros(at).to_string(),
        client: record.client.address().map(|address| address.to_string()),
        protocol: match record.wire {
            Wire::Http => "http",
            Wire::Grpc => "grpc",
        },
        model: &record.model,
        version: part.map_or("", |part| &part.model.1),
        id: &record.id,
        status,
        outcome,
        took_us: micros(record.took()),
        queue_us: part.zip(run).map(|(part, run)| micros(run.began.since(part.began))),
        run_us: run.map(|run| micros(run.ended.since(run.began))),
        batch: run.map(|run| run.batch.rows),
        reason: part.and_then(|part| part.unanswered).map(|reason| reason.label()),
        error,
        trace: record.place.trace.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::record;
    use super::*;
    use crate::unanswered::Unanswered;

    #[test]
    fn a_line_says_who_asked_what_and_how_it_ended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.jsonl");
        let mut log = AccessLog::open(&path).unwrap();
        let mut dropped = record("cat");
        dropped.outcome = Outcome::Failed(504, "too late".to_owned());
        (dropped.parts[0].run, dropped.parts[0].unanswered) = (None, Some(Unanswered::Hopeless));
        log.write(&[Arc::new(record("digits")), Arc::new(dropped)]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let [answered, dropped] = &text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
        let expected = r#"{"time":"1970-01-01T00:00:00.001000Z","protocol":"http","model":"digits","version":"3","id":"mine \"7\"","status":200,"outcome":"answered","took_us":9000,"queue_us":2000,"run_us":4000,"batch":8,"trace":"#;
        assert!(answered.starts_with(expected), "{answered}");
        assert!(
            dropped.contains(
                r#""status":504,"outcome":"failed","took_us":9000,"reason":"deadline_hopeless","error":"too late""#
            ),
            "{dropped}"
        );
        // A program moves the file away. The next line begins a new file.
        std::fs::rename(&path, folder.path().join("old")).unwrap();
        log.write(&[Arc::new(record("digits"))]).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 1);
    }
}
