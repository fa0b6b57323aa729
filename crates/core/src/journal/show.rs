//! A log as people and programs read it.

use std::collections::BTreeMap;

use super::cluster::ClusterRecords;
use super::device::DeviceRecords;
use super::entry::json;
use super::machine::{MachineKind, Record, Records};
use super::pipelines::{PipelineRecords, StepOf};
use super::reader::{LogError, header, read};
use crate::ids::RequestId;
use crate::time::Time;

/// A form in which a log is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Lines for people: the number of the entry, milliseconds, an input, or an arrow and a
    /// decision.
    Text,
    /// Lines of JSON for programs: the time of the last input as `at`, in nanoseconds, and one of
    /// `begin`, `told`, `refused` and `decision`. A request that is a step of a pipeline has `step`.
    Json,
}

/// Lines, until the first error.
pub type Lines<'a> = Box<dyn Iterator<Item = Result<String, LogError>> + 'a>;

/// The log, entry by entry, under a line that names its machine.
///
/// # Errors
/// If it is no log, or of another version.
pub fn show(bytes: &[u8], form: Form) -> Result<Lines<'_>, LogError> {
    show_with(bytes, form, BTreeMap::new())
}

/// As [`show`]. The arrival and the drop of a request that is one of these `steps` name the step.
///
/// # Errors
/// As [`show`].
pub fn show_with(bytes: &[u8], form: Form, steps: BTreeMap<RequestId, StepOf>) -> Result<Lines<'_>, LogError> {
    match header(bytes)?.0 {
        MachineKind::Device(_) => lines::<DeviceRecords>(bytes, form, steps),
        MachineKind::Pipelines => lines::<PipelineRecords>(bytes, form, steps),
        _ => lines::<ClusterRecords>(bytes, form, steps),
    }
}

fn lines<R: Records>(bytes: &[u8], form: Form, steps: BTreeMap<RequestId, StepOf>) -> Result<Lines<'_>, LogError> {
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
        let request = match &entry.record {
            Record::Input(_, input) => R::request_in(input),
            Record::Decision(decision) => R::request_ended_by(decision),
            Record::Refused(_) => None,
        };
        let step = request.and_then(|request| steps.get(&request));
        Ok(match (form, step) {
            (Form::Text, None) => entry.text(now),
            (Form::Text, Some(step)) => format!("{}; {step}", entry.text(now)),
            (Form::Json, None) => entry.json(now, ""),
            (Form::Json, Some(step)) => entry.json(now, &format!(r#","step":{}"#, json(step))),
        })
    });
    Ok(Box::new(std::iter::once(Ok(head)).chain(lines)))
}
