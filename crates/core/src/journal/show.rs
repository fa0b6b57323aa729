//! A log as people and programs read it.

use std::collections::BTreeMap;

use super::cluster::ClusterRecords;
use super::device::DeviceRecords;
use super::entry::json;
use super::machine::{MachineKind, Record, Records};
use super::names::{Names, QueueName};
use super::pipelines::{PipelineRecords, StepOf};
use super::reader::{LogError, machine_of, read};
use super::requests::RequestRecords;
use crate::ids::{ModelId, RequestId};
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

/// An entry as it is shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shown {
    /// The time of the last input, this one included.
    pub at: Time,
    /// The same in nanoseconds since the Unix epoch; `None`: the log has no wall clock.
    pub unix_ns: Option<u64>,
    /// The model that the entry is about, if it is about one.
    pub model: Option<ModelId>,
    /// The name of that model, if the log has it.
    pub name: Option<QueueName>,
    /// Whether the entry names a model, or adds a model or a device.
    pub is_setup: bool,
    /// The entry in the wanted form.
    pub line: String,
}

/// Lines, until the first error.
pub type Lines<'a> = Box<dyn Iterator<Item = Result<String, LogError>> + 'a>;

/// Entries, until the first error.
pub type ShownEntries<'a> = Box<dyn Iterator<Item = Result<Shown, LogError>> + 'a>;

/// The log, entry by entry, under a line that names its machine.
///
/// # Errors
/// If it is no log, or of another version.
pub fn show(bytes: &[u8], form: Form) -> Result<Lines<'_>, LogError> {
    let head = heading(machine_of(bytes)?.0, form);
    let entries = show_entries(bytes, form, BTreeMap::new())?;
    Ok(Box::new(std::iter::once(Ok(head)).chain(entries.map(|entry| Ok(entry?.line)))))
}

/// The line above the entries of a machine.
pub fn heading(machine: MachineKind, form: Form) -> String {
    match form {
        Form::Text => format!("decision log of {machine}: entry, milliseconds, event, -> decision"),
        Form::Json => format!(r#"{{"at":0,"begin":{}}}"#, json(&machine.to_string())),
    }
}

/// The entries of a log. The arrival and the drop of a request that is one of these `steps` name the
/// step.
///
/// # Errors
/// As [`show`].
pub fn show_entries(
    bytes: &[u8],
    form: Form,
    steps: BTreeMap<RequestId, StepOf>,
) -> Result<ShownEntries<'_>, LogError> {
    match machine_of(bytes)?.0 {
        MachineKind::Device(_) => shown::<DeviceRecords>(bytes, form, steps),
        MachineKind::Pipelines => shown::<PipelineRecords>(bytes, form, steps),
        MachineKind::Requests => shown::<RequestRecords>(bytes, form, steps),
        _ => shown::<ClusterRecords>(bytes, form, steps),
    }
}

fn shown<R: Records>(
    bytes: &[u8],
    form: Form,
    steps: BTreeMap<RequestId, StepOf>,
) -> Result<ShownEntries<'_>, LogError> {
    let (_, entries) = read::<R>(bytes)?;
    let (mut now, mut names) = (Time::ZERO, Names::default());
    Ok(Box::new(entries.map(move |entry| {
        let entry = entry?;
        entry.record.name_model(&mut names);
        if let Record::Input(at, _) = &entry.record {
            now = *at;
        }
        let (request, is_setup) = match &entry.record {
            Record::Input(_, input) => (R::request_in(input), R::is_setup(input)),
            Record::Decision(decision) => (R::request_ended_by(decision), false),
            Record::Refused(_) => (None, false),
        };
        let step = request.and_then(|request| steps.get(&request));
        let model = R::model_of(&entry.record);
        let line = match (form, step) {
            (Form::Text, None) => entry.text(now, &names),
            (Form::Text, Some(step)) => format!("{}; {step}", entry.text(now, &names)),
            (Form::Json, step) => {
                let name = model.and_then(|model| names.get(model));
                let mut more = name.map_or(String::new(), |name| format!(r#","model":{}"#, json(&name.to_string())));
                if let Some(step) = step {
                    more += &format!(r#","step":{}"#, json(step));
                }
                entry.json(now, &more)
            }
        };
        let unix_ns = entry.unix_ns(now);
        let name = model.and_then(|model| names.get(model)).cloned();
        Ok(Shown { at: now, unix_ns, model, name, is_setup, line })
    })))
}
