//! Divisions of a pipeline's deadline, side by side on random workloads.
//!
//! A [`PipelineWorkload`] follows from its seed and number. A [`Rule`] says how the time of a
//! request is divided among its steps. [`Figures`] compares all rules by their capacity, and by the
//! requests in time below and above it.

mod division;
mod figures;
mod nexus;
mod oracle;
mod pard;
mod rule;
mod run;
mod workload;

pub use division::{Instants, NoDeadline, StepSlos, WholeDeadline};
pub use figures::{Figures, Row, Settings, Summary};
pub use nexus::nexus_budgets;
pub use oracle::{BestFixed, Oracle};
pub use pard::Pard;
pub use rule::{Batches, Rule};
pub use run::Run;
pub use workload::PipelineWorkload;
