//! A row of the results.

use std::io::Write;

use serde::Serialize;

#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    pub step: String,
    pub model: String,
    /// The measured thing, or the runtime that ran.
    pub what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// The median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_ms: Option<f64>,
    /// Items a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_s: Option<f64>,
    pub note: String,
}

impl Row {
    pub fn new(step: &str, model: &str, what: impl Into<String>) -> Row {
        Row { step: step.into(), model: model.into(), what: what.into(), ..Row::default() }
    }

    pub fn note(self, note: impl Into<String>) -> Row {
        Row { note: note.into(), ..self }
    }

    /// Adds words to the note.
    pub fn and(self, more: impl AsRef<str>) -> Row {
        let note = format!("{}; {}", self.note, more.as_ref());
        Row { note, ..self }
    }

    /// Adds the times of runs of `batch` items, of which `at_once` ran beside each other.
    pub fn runs(self, batch: usize, at_once: usize, millis: &mut [f64]) -> Row {
        let median = quantile(millis, 0.5);
        let per_s = median.map(|ms| (batch * at_once) as f64 / ms * 1e3);
        Row { batch: Some(batch), ms: median, p99_ms: quantile(millis, 0.99), per_s, ..self }
    }

    /// Prints the row at once: a step may be stopped at any time.
    pub fn print(&self) {
        let mut out = std::io::stdout().lock();
        let _ = serde_json::to_writer(&mut out, self).map(|()| out.write_all(b"\n").and_then(|()| out.flush()));
    }
}

/// The quantile: the smallest value with at least this share of the values at or below.
pub fn quantile(values: &mut [f64], q: f64) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    values.get((last as f64 * q).round() as usize).copied()
}
