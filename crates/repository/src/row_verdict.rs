//! Whether the rows of a model's batch depend on each other, and how the server knows.
//!
//! Example: `Softmax(axis=0)` normalises across the rows of a batch. Two clients whose requests
//! share a batch would change each other's answers, so each request of such a model runs alone.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The verdict on a model version: whether its requests may share a batch, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowVerdict {
    /// Whether the rows depend on each other.
    pub rows: RowDependence,
    /// The source of the verdict.
    pub source: VerdictSource,
    /// The evidence, in words: "Softmax 'scores' normalises along the batch axis".
    pub reason: String,
}

/// Whether the rows of a batch depend on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowDependence {
    /// Each row of the outputs depends on the same row of the inputs alone.
    Independent,
    /// An answer depends on the other rows of its batch.
    Mixed,
    /// Neither the graph nor a check decided.
    Unknown,
}

/// The source of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VerdictSource {
    /// The operators of the graph decide.
    Graph,
    /// The model answered requests alone and together when it was loaded.
    Check,
    /// A request of a client was run once more alone.
    Service,
    /// The user decided: `[models.NAME] batching`.
    Option,
}

impl RowVerdict {
    /// The user's decision: requests share batches if `shares`, and run alone if not.
    pub fn chosen(shares: bool) -> Self {
        let (rows, choice) = match shares {
            true => (RowDependence::Independent, "always"),
            false => (RowDependence::Mixed, "never"),
        };
        RowVerdict { rows, source: VerdictSource::Option, reason: format!("batching is \"{choice}\"") }
    }

    /// Whether requests may share a batch.
    pub fn may_share(&self) -> bool {
        self.rows == RowDependence::Independent
    }

    /// Whether the user forbade shared batches, which wins over a `max_batch_size` of
    /// `config.pbtxt`.
    pub(crate) fn is_forbidden(&self) -> bool {
        !self.may_share() && self.source == VerdictSource::Option
    }
}

impl fmt::Display for RowVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.source == VerdictSource::Option {
            return f.write_str(&self.reason);
        }
        let rows = match self.rows {
            RowDependence::Independent => "independent",
            RowDependence::Mixed => "mixed",
            RowDependence::Unknown => "unknown",
        };
        write!(f, "{rows}: {}", self.reason)
    }
}
