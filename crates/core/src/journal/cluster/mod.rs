//! The records of a cluster's machines.

mod machine;
mod record;
mod short;
mod text;
mod trial;

pub use record::{Decision, Input, Reply};
pub use short::ClusterRecords;
pub use trial::{CandidateRecord, TrialRecord};
