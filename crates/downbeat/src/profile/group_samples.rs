//! A file of measured groups of operators, one line each, that grows with each measurement.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, bail, ensure};
use downbeat_core::device::overlap::{FeatureLayout, GroupPart};
use downbeat_host::groups::stored_predictor::PredictedModel;
use downbeat_training::GroupSample;
use serde::{Deserialize, Serialize};

use crate::options::options_file;

/// The name of the file format.
const FORMAT: &str = "downbeat-overlap-samples";
const FORMAT_VERSION: u32 = 1;
/// One in this many groups of a set is for the test: 20% (Abacus §5.5).
const TESTED: usize = 5;

/// The first line: the models and the conditions of the measurement.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SampledOn {
    format: String,
    format_version: u32,
    /// The device, as profiles name it.
    pub device: String,
    /// Threads inside a run.
    pub threads: usize,
    /// The models, by their numbers in groups.
    pub models: Vec<PredictedModel>,
}

/// A group, and its measured time.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MeasuredGroup {
    /// The group's operators.
    pub group: Vec<GroupPart>,
    /// Nanoseconds from the begin to the barrier: the median of several runs.
    pub takes_ns: u64,
}

impl SampledOn {
    /// The first line in the form of this version.
    pub fn new(device: String, threads: usize, models: Vec<PredictedModel>) -> Self {
        SampledOn { format: FORMAT.to_owned(), format_version: FORMAT_VERSION, device, threads, models }
    }

    /// Refuses samples of other models or under other conditions.
    fn ensure_like(&self, other: &SampledOn, path: &Path) -> anyhow::Result<()> {
        let path = path.display();
        let names = |of: &SampledOn| of.models.iter().map(|model| model.name.clone()).collect::<Vec<_>>().join(", ");
        let [had, asked] = [self, other].map(names);
        ensure!(
            had == asked,
            "{path} has samples of the models {had}, but the command asks for {asked}; name another file with --samples"
        );
        let places = [self, other].map(|on| format!("{}, {} threads", on.device, on.threads));
        ensure!(
            places[0] == places[1],
            "{path} has samples of {}, but this machine measures on {}; name another file with --samples",
            places[0],
            places[1]
        );
        for (had, asked) in self.models.iter().zip(&other.models) {
            let key = |model: &PredictedModel| (model.version, model.file.clone(), model.segments, model.cuts.clone());
            ensure!(
                key(had) == key(asked),
                "{path} has samples of another file, version or cut of model '{}'; name another file with --samples",
                had.name
            );
        }
        Ok(())
    }
}

/// The content of a file of samples.
pub struct GroupSamples {
    /// The conditions of the measurement.
    pub on: SampledOn,
    /// The groups.
    pub groups: Vec<MeasuredGroup>,
    /// Bytes of whole lines; the rest was not completely written.
    whole: u64,
}

impl GroupSamples {
    /// Reads a file; `None` if it does not exist yet.
    ///
    /// # Errors
    /// If the file cannot be read, or is no file of samples.
    pub fn read(path: &Path) -> anyhow::Result<Option<GroupSamples>> {
        let text = match options_file::read_text(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut lines = text[..whole].lines();
        let Some(first) = lines.next() else {
            ensure!(
                text.is_empty(),
                "{} is not a file of samples of operator groups; name another file",
                path.display()
            );
            return Ok(None);
        };
        let on: SampledOn = serde_json::from_str(first).with_context(|| {
            format!("{} is not a file of samples of operator groups; name another file", path.display())
        })?;
        if (&*on.format, on.format_version) != (FORMAT, FORMAT_VERSION) {
            bail!(
                "{} has samples of operator groups from another version of Downbeat; name another file",
                path.display()
            );
        }
        let group = |(number, line): (usize, &str)| {
            serde_json::from_str(line).with_context(|| format!("{}, line {}", path.display(), number + 2))
        };
        let groups = lines.enumerate().map(group).collect::<anyhow::Result<Vec<MeasuredGroup>>>()?;
        Ok(Some(GroupSamples { on, groups, whole: whole as u64 }))
    }

    /// Opens the file to add measurements under the conditions `on`.
    ///
    /// # Errors
    /// If the file has samples under other conditions, or it cannot be written.
    pub fn open(path: &Path, before: Option<&GroupSamples>, on: &SampledOn) -> anyhow::Result<SampleWriter> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        match before {
            Some(before) => {
                before.on.ensure_like(on, path)?;
                file.set_len(before.whole)?;
                std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0))?;
            }
            None => writeln!(file, "{}", serde_json::to_string(on)?)?,
        }
        Ok(SampleWriter(file))
    }
}

/// Adds groups to a file of samples.
pub struct SampleWriter(File);

impl SampleWriter {
    /// Adds a group.
    ///
    /// # Errors
    /// If the group cannot be written.
    pub fn add(&mut self, group: &MeasuredGroup) -> anyhow::Result<()> {
        // One write: if the process is killed, at most the last line is incomplete.
        let line = serde_json::to_string(group)? + "\n";
        self.0.write_all(line.as_bytes()).context("cannot write the samples")
    }
}

/// The groups as samples for a predictor, and their sets of models.
///
/// # Errors
/// If a group is of other models than the layout, or took no time.
pub fn samples_of(
    layout: &FeatureLayout,
    groups: &[MeasuredGroup],
) -> anyhow::Result<(Vec<Vec<usize>>, Vec<GroupSample>)> {
    let set_of = |measured: &MeasuredGroup| {
        let mut set: Vec<usize> = measured.group.iter().map(|part| part.model.0 as usize).collect();
        set.sort_unstable();
        set
    };
    let mut sets: Vec<Vec<usize>> = groups.iter().map(set_of).collect();
    sets.sort_unstable_by_key(|set| (set.len(), set.clone()));
    sets.dedup();
    let sample = |(number, measured): (usize, &MeasuredGroup)| {
        let mut features = Vec::new();
        ensure!(
            layout.extend(&mut features, &measured.group),
            "group {} of the samples does not fit the models and segments of the samples' first line",
            number + 1
        );
        ensure!(measured.takes_ns > 0, "group {} of the samples has a time of 0", number + 1);
        let set = set_of(measured);
        let set = sets.iter().position(|known| *known == set).unwrap_or_default();
        Ok(GroupSample { features, takes_ms: measured.takes_ns as f64 / 1e6, set })
    };
    let samples = groups.iter().enumerate().map(sample).collect::<anyhow::Result<_>>()?;
    Ok((sets, samples))
}

/// The samples for the training and for the test.
pub struct Split<'a> {
    /// The samples for the training.
    pub training: Vec<&'a GroupSample>,
    /// The samples for the test.
    pub test: Vec<&'a GroupSample>,
}

impl<'a> Split<'a> {
    /// Every fifth sample of each set is for the test.
    pub fn new(samples: &'a [GroupSample], sets: usize) -> Self {
        let mut split = Split { training: Vec::new(), test: Vec::new() };
        let mut seen = vec![0; sets];
        for sample in samples {
            let is_tested = (seen[sample.set] % TESTED) == TESTED - 1;
            seen[sample.set] += 1;
            if is_tested { split.test.push(sample) } else { split.training.push(sample) }
        }
        split
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(name: &str, device: &str) -> SampledOn {
        let model = PredictedModel {
            name: name.to_owned(),
            version: 1,
            file: "f".to_owned(),
            segments: 1,
            cuts: Vec::new(),
            most_rows: 1,
            longest: 0,
        };
        SampledOn::new(device.to_owned(), 1, vec![model])
    }

    #[test]
    fn samples_are_added_to_and_a_line_that_was_not_written_whole_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples");
        assert!(GroupSamples::read(&path).unwrap().is_none());
        let group = |takes_ns| MeasuredGroup { group: Vec::new(), takes_ns };
        let mut writer = GroupSamples::open(&path, None, &on("a", "here")).unwrap();
        writer.add(&group(1)).unwrap();
        writer.add(&group(2)).unwrap();
        let half = std::fs::read_to_string(&path).unwrap() + "{\"group\":[";
        std::fs::write(&path, half).unwrap();
        let before = GroupSamples::read(&path).unwrap().unwrap();
        assert_eq!(before.groups, [group(1), group(2)]);
        GroupSamples::open(&path, Some(&before), &on("a", "here")).unwrap().add(&group(3)).unwrap();
        assert_eq!(GroupSamples::read(&path).unwrap().unwrap().groups, [group(1), group(2), group(3)]);
    }

    #[test]
    fn samples_of_something_else_are_not_added_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples");
        drop(GroupSamples::open(&path, None, &on("a", "here")).unwrap());
        let before = GroupSamples::read(&path).unwrap();
        let refused = |on: &SampledOn| GroupSamples::open(&path, before.as_ref(), on).err().unwrap().to_string();
        assert!(refused(&on("b", "here")).contains("has samples of the models a, but the command asks for b"));
        assert!(
            refused(&on("a", "there")).contains("has samples of here, 1 threads, but this machine measures on there")
        );
        let mut changed = on("a", "here");
        changed.models[0].file = "g".to_owned();
        assert!(refused(&changed).contains("of another file, version or cut of model 'a'"));
        for wrong in ["hello\n", "{}\n", "no line"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(format!("{:#}", GroupSamples::read(&path).err().unwrap()).contains("is not a file of samples"));
        }
    }
}
