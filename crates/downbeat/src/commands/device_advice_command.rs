//! `downbeat advise --device-policies`: compares device policies on a recorded log, and writes the
//! better ones into `downbeat.toml`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use clap::Args;
use downbeat_report::{note, write};
use downbeat_sim::device_replay::Candidate;
use downbeat_sim::what_if::{DeviceAdvice, DeviceLog};
use serde_json::Value;

use crate::options::options_file;
use crate::run_output::{RunOutput, waiting};

/// The header of a group in `downbeat.toml`.
const HEADER: &str = "[[device.groups]]";

/// Flags of `downbeat advise` for device policies.
#[derive(Args, Debug)]
pub struct DeviceAdviceArgs {
    /// Compare device policies with their parameters instead. The first half of the log's requests
    /// chooses, and the second half judges
    #[arg(long, conflicts_with_all = ["target", "max_devices", "policies", "slos", "rate", "no_rehearsal", "by", "price"])]
    pub device_policies: bool,

    /// The work of two lanes of a model side by side, as a multiple of the work of one lane, where
    /// the log does not show it. Repeatable, or separated by commas
    #[arg(long, value_name = "MODEL=FACTOR", value_delimiter = ',', requires = "device_policies")]
    together: Vec<Together>,

    /// Write the better policies into this `downbeat.toml`, as groups of their models. The file is
    /// made if it is not there
    #[arg(long, value_name = "FILE", requires = "device_policies")]
    write: Option<PathBuf>,
}

/// `MODEL=FACTOR`.
#[derive(Clone, Debug)]
struct Together {
    model: String,
    factor: f64,
}

impl FromStr for Together {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (model, factor) = text
            .split_once('=')
            .ok_or_else(|| format!("'{text}' is no factor; expected MODEL=FACTOR, such as m=1.4"))?;
        let factor = factor.trim().parse().ok().filter(|factor| (0.1..=2.0).contains(factor));
        let factor = factor.ok_or_else(|| format!("the factor in '{text}' has to be from 0.1 to 2"))?;
        Ok(Together { model: model.trim().to_owned(), factor })
    }
}

/// Compares the device policies of a log's models.
///
/// # Errors
/// If the log cannot be replayed, or a result cannot be written.
pub fn run(args: &DeviceAdviceArgs, logs: &[PathBuf], output: &RunOutput) -> anyhow::Result<()> {
    let [folder] = logs else {
        bail!("--device-policies needs one folder, as `downbeat serve --decision-log` writes it")
    };
    let log = waiting(output.quiet, "reading the log", || DeviceLog::read(folder))?;
    let together: BTreeMap<String, f64> =
        args.together.iter().map(|together| (together.model.clone(), together.factor)).collect();
    let progress = output.progress()?;
    let goes_on = |done, total| progress.goes_on(done, total);
    let advice = log.advise(&together, output.threads(), &goes_on);
    progress.end();
    let advice = advice?;
    output.html.write(|| advice.page())?;
    output.json.print(&advice)?;
    let changes = changes(&advice);
    match &args.write {
        Some(file) if changes.is_empty() => note(format_args!("{} is left as it was.", file.display())),
        None if changes.is_empty() => {}
        None => note(format_args!("For downbeat.toml (--write FILE writes it):\n\n{}", groups(&changes))),
        Some(file) => {
            write_groups(file, &changes)?;
            note(format_args!("{} has the new policies; start the server with it again.", file.display()));
        }
    }
    Ok(())
}

/// The policies that are worth a change, by the names of their models.
fn changes(advice: &DeviceAdvice) -> Vec<(&str, &Candidate)> {
    advice.models.iter().filter_map(|model| Some((&*model.model, model.change.as_ref()?))).collect()
}

/// The group of a model, as text.
fn group(model: &str, candidate: &Candidate) -> String {
    let settings = candidate.settings.iter().map(|(key, value)| format!("{key} = {}\n", inline(value)));
    let (model, policy) = (inline(&model.into()), inline(&candidate.policy.name().into()));
    format!("{HEADER}\nmodels = [{model}]\npolicy = {policy}\n{}", settings.collect::<String>())
}

fn groups(changes: &[(&str, &Candidate)]) -> String {
    changes.iter().map(|(model, candidate)| group(model, candidate)).collect::<Vec<_>>().join("\n")
}

/// A setting as TOML in one line. JSON and TOML write numbers, flags and texts alike.
fn inline(value: &Value) -> String {
    match value {
        Value::Object(table) => {
            let entries = table.iter().map(|(key, value)| format!("{} = {}", Value::from(&**key), inline(value)));
            format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
        }
        Value::Array(list) => format!("[{}]", list.iter().map(inline).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

/// Writes the groups of these models into a `downbeat.toml`. The group of a single model is
/// replaced; all other lines stay as they are.
///
/// # Errors
/// If the file cannot be read or written, or names a model together with others.
fn write_groups(file: &Path, changes: &[(&str, &Candidate)]) -> anyhow::Result<()> {
    let name = || file.display().to_string();
    let mut text = match file.exists() {
        true => options_file::text(file, options_file::MAX_BYTES).with_context(name)?,
        false => String::new(),
    };
    for (model, candidate) in changes {
        text = with_group(&text, model, candidate).with_context(|| {
            format!("{} is left as it was; put this group into it by hand:\n\n{}", name(), group(model, candidate))
        })?;
    }
    write(file, &text)
}

/// The text of a `downbeat.toml` with this group of a model.
fn with_group(text: &str, model: &str, candidate: &Candidate) -> anyhow::Result<String> {
    let own = group(model, candidate);
    let mut expected: toml::Table = toml::from_str(text)?;
    let device = expected.entry("device").or_insert_with(|| toml::Table::new().into());
    let device = device.as_table_mut().context("`device` is no table")?;
    let groups = device.entry("groups").or_insert_with(|| toml::Value::Array(Vec::new()));
    let groups = groups.as_array_mut().context("`device.groups` is no list")?;
    let of = |group: &toml::Value| group.get("models").and_then(toml::Value::as_array).cloned().unwrap_or_default();
    let names = |group: &toml::Value| of(group).iter().any(|name| name.as_str() == Some(model));
    let new: toml::Table = toml::from_str(&own)?;
    let new = new["device"]["groups"][0].clone();
    let text = match groups.iter().position(names) {
        None => {
            groups.push(new);
            let gap = if text.is_empty() { "" } else { "\n" };
            format!(
                "{}{gap}{own}",
                if text.is_empty() || text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") }
            )
        }
        Some(index) => {
            ensure!(of(&groups[index]).len() == 1, "a group has '{model}' and other models");
            groups[index] = new;
            replaced(text, index, &own)
        }
    };
    // Text that a table does not begin with `[[device.groups]]`, or that is nested, reads as
    // something else now.
    let read = toml::from_str::<toml::Table>(&text).ok();
    ensure!(read.as_ref() == Some(&expected), "its groups are not written as {HEADER} with one line for each setting");
    Ok(text)
}

/// The text with this group in place of the group of this index.
fn replaced(text: &str, index: usize, own: &str) -> String {
    let (mut new, mut seen, mut is_left_out) = (String::new(), 0, false);
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with('[') {
            let is_header = line.trim().starts_with(HEADER);
            is_left_out = is_header && seen == index;
            seen += usize::from(is_header);
            if is_left_out {
                new.push_str(own);
            }
        }
        let is_kept = !is_left_out || line.trim().is_empty() || line.trim_start().starts_with('#');
        if is_kept {
            new.push_str(line);
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(policy: &str, settings: Value) -> Candidate {
        Candidate { policy: policy.parse().unwrap(), settings: serde_json::from_value(settings).unwrap() }
    }

    #[test]
    fn a_group_comes_into_the_file_and_other_lines_stay() {
        let elastic = candidate("elastic", serde_json::json!({ "mixes": { "1": "8,8" } }));
        let expected = "[[device.groups]]\nmodels = [\"m\"]\npolicy = \"elastic\"\nmixes = { \"1\" = \"8,8\" }\n";
        assert_eq!(with_group("", "m", &elastic).unwrap(), expected);
        let before = "# mine\nhttp_port = 80\n\n[device]\npolicy = \"auto\" # measured";
        assert_eq!(with_group(before, "m", &elastic).unwrap(), format!("{before}\n\n{expected}"));
        let other = "[[device.groups]]\nmodels = [\"n\"]\npolicy = \"staged\"\nstages = 2\n";
        let windowed = candidate("windowed", serde_json::json!({ "window_ms": 2.5 }));
        let both = format!("{other}\n{expected}# end\n[profiling]\nenabled = true\n");
        let changed = with_group(&both, "m", &windowed).unwrap();
        let group = "[[device.groups]]\nmodels = [\"m\"]\npolicy = \"windowed\"\nwindow_ms = 2.5\n";
        assert_eq!(changed, format!("{other}\n{group}# end\n[profiling]\nenabled = true\n"));
    }

    #[test]
    fn a_file_in_another_form_is_left_alone() {
        let windowed = candidate("windowed", serde_json::json!({}));
        for (text, expected) in [
            ("[[device.groups]]\nmodels = [\"m\", \"n\"]\npolicy = \"staged\"\n", "a group has 'm' and other models"),
            ("device.groups = [{ models = [\"m\"], policy = \"staged\" }]\n", "its groups are not written as"),
            ("device.groups = [{ models = [\"n\"], policy = \"staged\" }]\n", "its groups are not written as"),
            (
                "[[device.groups]]\nmodels = [\n\"m\",\n]\nmixes.1 = \"\"\"\n[x]\"\"\"\n",
                "its groups are not written as",
            ),
            ("[device\n", "TOML parse error"),
        ] {
            let error = with_group(text, "m", &windowed).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn factors_are_read() {
        let read: Together = "m = 1.4".parse().unwrap();
        assert_eq!((&*read.model, read.factor), ("m", 1.4));
        for (text, expected) in [("m", "expected MODEL=FACTOR"), ("m=3", "from 0.1 to 2"), ("m=nan", "from 0.1 to 2")] {
            assert!(text.parse::<Together>().unwrap_err().contains(expected), "{text}");
        }
    }
}
