//! A log as people and programs read it.

use super::cluster::ClusterRecords;
use super::device::DeviceRecords;
use super::entry::json;
use super::machine::{MachineKind, Record, Records};
use super::pipelines::PipelineRecords;
use super::reader::{LogError, header, read};
use crate::time::Time;

/// A form in which a log is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Lines for people: the number of the entry, milliseconds, an input, or an arrow and a
    /// decision.
    Text,
    /// Lines of JSON for programs: the time of the last input as `at`, in nanoseconds, and one of
    /// `begin`, `told`, `refused` and `decision`.
    Json,
}

/// Lines, until the first error.
pub type Lines<'a> = Box<dyn Iterator<Item = Result<String, LogError>> + 'a>;

/// The log, entry by entry, under a line that names its machine.
///
/// # Errors
/// If it is no log, or of another version.
pub fn show(bytes: &[u8], form: Form) -> Result<Lines<'_>, LogError> {
    match header(bytes)?.0 {
        MachineKind::Device(_) => lines::<DeviceRecords>(bytes, form),
        MachineKind::Pipelines => lines::<PipelineRecords>(bytes, form),
        _ => lines::<ClusterRecords>(bytes, form),
    }
}

fn lines<R: Records>(bytes: &[u8], form: Form) -> Result<Lines<'_>, LogError> {
    let (machine, entries) = read::<R>(bytes)?;
    let head = match form {
        Form::Text => format!("decision log of {machine}: entry, milliseconds, event, -> decision"),
        Form::Json => format!(r#"{{"at":0,"begin":{}}}"#, json(&machine.to_string())),
    };
    let mut now = Time::ZERO;
    let lines = entries.map(move |entry| {
        let entry = entry?;
        if let Record::Input(at, _) = &entry.record {
            now = *at;
        }
        Ok(match form {
            Form::Text => entry.text(now),
            Form::Json => entry.json(now),
        })
    });
    Ok(Box::new(std::iter::once(Ok(head)).chain(lines)))
}
