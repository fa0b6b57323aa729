//! Errors and ignored settings in a model's configuration.

use std::fmt;

/// A message about a place in a configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The file as it was named to the repository, or `configuration of the load request`.
    pub file: String,
    /// Line and column, from 1; `None` if the file does not contain the field.
    pub position: Option<Position>,
    /// The field's path (`input[0].dims`, `parameters["slo_ms"]`); empty if the finding is about
    /// the whole model.
    pub field: String,
    /// The error, and the expected content.
    pub message: String,
}

impl Finding {
    /// A finding about a whole file.
    pub(crate) fn of(file: impl Into<String>, message: impl Into<String>) -> Self {
        Finding { file: file.into(), position: None, field: String::new(), message: message.into() }
    }
}

/// A place in a text: line and column, from 1; columns count characters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Position {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(Position { line, column }) = self.position {
            write!(f, ":{line}:{column}")?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        write!(f, ": {}", self.message)
    }
}

/// The errors of a configuration: at least one finding, each on a line.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub struct ConfigError {
    /// The errors, in the order of the checks.
    pub findings: Vec<Finding>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, finding) in self.findings.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            fmt::Display::fmt(finding, f)?;
        }
        Ok(())
    }
}

/// Sorts findings by place, the ones without a place last.
pub(crate) fn sorted(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.sort_by_key(|f| (f.position.is_none(), f.position));
    findings
}

impl From<Finding> for ConfigError {
    fn from(finding: Finding) -> Self {
        ConfigError { findings: vec![finding] }
    }
}

/// The candidate that `found` most likely means, if one is near enough.
pub fn nearest<'a>(found: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Longer than every name. A comparison costs the product of both lengths.
    if found.len() > 128 {
        return None;
    }
    let lower = found.to_ascii_lowercase();
    let candidates: Vec<&str> = candidates.into_iter().collect();
    // `max_queue_delay` for `max_queue_delay_microseconds`: the beginning is right, the unit is
    // missing.
    if lower.len() >= 3
        && let [whole] = candidates.iter().filter(|c| c.starts_with(&lower)).collect::<Vec<_>>()[..]
    {
        return Some(whole);
    }
    candidates
        .into_iter()
        .map(|c| (strsim::damerau_levenshtein(&lower, &c.to_ascii_lowercase()), c))
        .filter(|(distance, c)| *distance <= 2.max(c.len().max(found.len()) / 3) && *distance < c.len())
        .min()
        .map(|(_, c)| c)
}

/// `; did you mean 'x'?`, or nothing.
pub fn did_you_mean<'a>(found: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    nearest(found, candidates).map_or_else(String::new, |c| format!("; did you mean '{c}'?"))
}
