//! The server's judgement on a loaded version: may its requests share batches?

use std::path::Path;

use downbeat_engine::{Cause, Rows, row_report};
use downbeat_repository::{RowDependence, RowVerdict, VerdictSource};

/// A verdict on a loaded version.
#[derive(Clone, Debug)]
pub struct RowJudgement {
    /// The verdict.
    pub verdict: RowVerdict,
    /// The key that a check's verdict is stored under; `None`: the verdict rests on no check.
    pub key: Option<String>,
    /// The largest batch that the user's configuration asks for, under any verdict; `None`: the
    /// server decides.
    pub asked: Option<u32>,
}

impl RowJudgement {
    /// Whether the server should look at answers of shared batches. The value says whether a wrong
    /// answer ends the sharing.
    ///
    /// A proof needs no look. The log has named a mixed model that the user batches all the same.
    pub fn watch(&self) -> Option<bool> {
        let RowVerdict { rows, source, .. } = self.verdict;
        let is_shared = rows == RowDependence::Independent || self.asked.is_some();
        let is_known = source == VerdictSource::Graph && rows != RowDependence::Unknown;
        let is_open = is_shared && !is_known && rows != RowDependence::Mixed;
        is_open.then_some(self.asked.is_none() && source != VerdictSource::Option)
    }

    /// Why requests run alone, or why they had better.
    pub fn complaint(&self) -> Option<String> {
        let RowVerdict { rows, source, reason } = &self.verdict;
        match (rows, self.asked) {
            (RowDependence::Independent, _) => None,
            (_, None) if *source == VerdictSource::Option => Some(format!("requests run alone: {reason}")),
            (_, None) => Some(format!("requests run alone, not in batches: {reason}")),
            (RowDependence::Mixed, Some(most)) => Some(format!(
                "requests share batches of up to {most}, as the configuration asks, and may change each other's answers: {reason}"
            )),
            (RowDependence::Unknown, Some(_)) => None,
        }
    }
}

/// The verdict that a model's graph allows, with the operators that draw random numbers.
pub fn by_graph(file: &Path) -> (RowVerdict, Vec<String>) {
    let said = |Cause { operator, node, reason }: Cause| format!("{operator} '{node}': {reason}");
    let (rows, reason, random) = match row_report(file) {
        Err(error) => (RowDependence::Unknown, format!("the model's graph cannot be followed: {error}"), Vec::new()),
        Ok(report) => match report.rows {
            Rows::Independent => (
                RowDependence::Independent,
                "the model's graph keeps the rows of a batch apart".to_owned(),
                report.random,
            ),
            Rows::Mixed(cause) => (RowDependence::Mixed, said(cause), report.random),
            Rows::Unknown(cause) => (RowDependence::Unknown, said(cause), report.random),
        },
    };
    (RowVerdict { rows, source: VerdictSource::Graph, reason }, random)
}
