//! Traces in Triton's JSON files, which Triton's `trace_summary.py` reads.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use serde_json::{Value, json};

use super::record::{Part, TraceRecord, Wire};
use super::writer::Writes;

/// A file takes at most this many bytes of traces with `log_frequency`, even if more traces are
/// wanted.
const MOST_BYTES: usize = 16 << 20;

/// Writes traces into files. The file itself gets the traces without `log_frequency`, and is a valid
/// list after every write. With `log_frequency` the files `FILE.0`, `FILE.1` and so on get the traces.
pub struct TritonFiles {
    path: PathBuf,
    /// The file, and the place of its closing bracket.
    whole: Option<(File, u64)>,
    /// The number of the next file.
    next: u64,
    /// By scope, the traces that wait until their file is full.
    waiting: BTreeMap<Arc<str>, Waiting>,
}

#[derive(Default)]
struct Waiting {
    text: String,
    traces: u32,
}

impl TritonFiles {
    /// Writes to `path`, and beside it.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn open(path: &Path) -> anyhow::Result<TritonFiles> {
        let made = OpenOptions::new().append(true).create(true).open(path);
        made.with_context(|| {
            format!("cannot write traces to '{}' (--trace-file); name a file in a folder that exists", path.display())
        })?;
        Ok(TritonFiles { path: path.to_owned(), whole: None, next: 0, waiting: BTreeMap::new() })
    }

    /// Appends traces to the file itself. The first traces replace those of an earlier server.
    fn append(&mut self, text: &str) -> io::Result<()> {
        let (file, end) = match &mut self.whole {
            Some(whole) => whole,
            None => self.whole.insert((File::create(&self.path)?, 0)),
        };
        file.seek(SeekFrom::Start(*end))?;
        let before = if *end == 0 { "[" } else { ",\n" };
        file.write_all(format!("{before}{text}]").as_bytes())?;
        *end += (before.len() + text.len()) as u64;
        Ok(())
    }

    /// Writes the next numbered file.
    fn write_next(&mut self, text: &str) -> io::Result<()> {
        let mut path = self.path.clone().into_os_string();
        path.push(format!(".{}", self.next));
        self.next += 1;
        std::fs::write(path, format!("[{text}]"))
    }

    fn words(&self, error: &io::Error) -> String {
        format!("'{}' cannot be written: {error}", self.path.display())
    }
}

impl Writes for TritonFiles {
    fn write(&mut self, records: &[Arc<TraceRecord>]) -> Result<(), String> {
        let mut whole = String::new();
        for record in records {
            if record.log_frequency == 0 {
                join(&mut whole, &text(record));
                continue;
            }
            let waiting = self.waiting.entry(record.scope.clone()).or_default();
            join(&mut waiting.text, &text(record));
            waiting.traces += 1;
            if waiting.traces >= record.log_frequency || waiting.text.len() >= MOST_BYTES {
                let Waiting { text, .. } = std::mem::take(waiting);
                self.write_next(&text).map_err(|error| self.words(&error))?;
            }
        }
        if whole.is_empty() {
            return Ok(());
        }
        self.append(&whole).map_err(|error| self.words(&error))
    }

    fn flush(&mut self) -> Result<(), String> {
        for (_, Waiting { text, traces }) in std::mem::take(&mut self.waiting) {
            if traces > 0 {
                self.write_next(&text).map_err(|error| self.words(&error))?;
            }
        }
        Ok(())
    }
}

fn join(texts: &mut String, text: &str) {
    if !texts.is_empty() {
        texts.push_str(",\n");
    }
    texts.push_str(text);
}

/// The trace of a request: for each of its parts an object about the part, and an object with its
/// instants.
pub fn text(record: &TraceRecord) -> String {
    let mut objects = Vec::new();
    for (place, part) in record.parts.iter().enumerate() {
        let parent = part.parent.and_then(|parent| record.parts.get(parent)).map(|parent| parent.number);
        let stamps =
            if place == 0 { [of_frontend(record), of_part(record, part)].concat() } else { of_part(record, part) };
        objects.extend(about(record, part.number, (&part.model.0, &part.model.1), parent, stamps));
    }
    if record.parts.is_empty() {
        // The request never reached its model.
        objects.extend(about(record, record.number, (&record.model, ""), None, of_frontend(record)));
    }
    objects.iter().map(Value::to_string).collect::<Vec<_>>().join(",")
}

fn about(
    record: &TraceRecord,
    number: u64,
    (model, version): (&str, &str),
    parent: Option<u64>,
    stamps: Vec<Value>,
) -> [Value; 2] {
    // -1: the client named no version, and none was found.
    let version: i64 = version.parse().unwrap_or(-1);
    let mut about = json!({ "id": number, "model_name": model, "model_version": version });
    if !record.id.is_empty() {
        about["request_id"] = record.id.as_str().into();
    }
    if let Some(parent) = parent {
        about["parent_id"] = parent.into();
    }
    [about, json!({ "id": number, "timestamps": stamps })]
}

fn stamps(record: &TraceRecord, marks: &[(&str, Option<downbeat_core::Time>)]) -> Vec<Value> {
    let stamp = |(name, at): &(&str, Option<downbeat_core::Time>)| {
        at.map(|at| json!({ "name": name, "ns": record.unix_ns(at) }))
    };
    marks.iter().filter_map(stamp).collect()
}

fn of_frontend(record: &TraceRecord) -> Vec<Value> {
    let [begins, read, sends, sent] = match record.wire {
        Wire::Http => ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"],
        Wire::Grpc => ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"],
    };
    let marks = [
        (begins, Some(record.began)),
        (read, record.received),
        ("INFER_RESPONSE_COMPLETE", record.answered),
        (sends, record.answered),
        (sent, Some(record.ended).filter(|_| record.answered.is_some())),
    ];
    stamps(record, &marks)
}

fn of_part(record: &TraceRecord, part: &Part) -> Vec<Value> {
    let between = part.run.as_ref().map(|run| run.between());
    // An ensemble waits in no queue itself.
    let queued = part.run.is_some() || part.left.is_some() || part.unanswered.is_some();
    let marks = [
        ("REQUEST_START", Some(part.began)),
        ("QUEUE_START", Some(part.began).filter(|_| queued)),
        ("COMPUTE_START", part.run.as_ref().map(|run| run.began)),
        ("COMPUTE_INPUT_END", between.map(|[joined, _]| joined)),
        ("COMPUTE_OUTPUT_START", between.map(|[_, ran]| ran)),
        ("COMPUTE_END", part.run.as_ref().map(|run| run.ended)),
        ("REQUEST_END", part.ended),
    ];
    stamps(record, &marks)
}

#[cfg(test)]
mod tests {
    use super::super::tests::record;
    use super::*;

    fn read(path: &Path) -> Vec<Value> {
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn the_file_is_a_list_after_every_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        std::fs::write(&path, "the traces of an earlier server").unwrap();
        let mut files = TritonFiles::open(&path).unwrap();
        for traces in 1..4 {
            files.write(&[Arc::new(record("digits"))]).unwrap();
            assert_eq!(read(&path).len(), 2 * traces);
        }
        let [about, stamps] = &read(&path)[..2] else { panic!("two objects for each trace") };
        assert_eq!(*about, json!({"id": 1, "model_name": "digits", "model_version": 3, "request_id": "mine \"7\""}));
        let names: Vec<&str> =
            stamps["timestamps"].as_array().unwrap().iter().map(|stamp| stamp["name"].as_str().unwrap()).collect();
        let expected = "HTTP_RECV_START HTTP_RECV_END INFER_RESPONSE_COMPLETE HTTP_SEND_START HTTP_SEND_END REQUEST_START \
                        QUEUE_START COMPUTE_START COMPUTE_INPUT_END COMPUTE_OUTPUT_START COMPUTE_END REQUEST_END";
        assert_eq!(names.join(" "), expected);
        assert_eq!(stamps["timestamps"][0]["ns"], 1_000_000);
    }

    #[test]
    fn each_numbered_file_has_its_share_and_the_last_one_the_rest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let mut files = TritonFiles::open(&path).unwrap();
        let traces: Vec<_> = (0..5).map(|_| Arc::new(TraceRecord { log_frequency: 2, ..record("m") })).collect();
        files.write(&traces).unwrap();
        let lengths = || -> Vec<usize> {
            let paths = (0..4).map(|number| folder.path().join(format!("trace.json.{number}")));
            paths.filter(|path| path.exists()).map(|path| read(&path).len()).collect()
        };
        assert_eq!(lengths(), [4, 4]);
        files.flush().unwrap();
        files.flush().unwrap();
        assert_eq!(lengths(), [4, 4, 2]);
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error_at_the_start() {
        let error = TritonFiles::open(Path::new("/nowhere/trace.json")).map(drop).unwrap_err().to_string();
        assert!(error.contains("--trace-file") && error.contains("/nowhere/trace.json"), "{error}");
    }
}
