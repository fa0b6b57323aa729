//! What if: the requests of a recorded decision log under other settings.
//!
//! [`Recorded`] is what a decision log says: models, requests, devices, and what came of them. [`Setting`] is what is changed; [`Recorded::run`] plays the
//! requests to the simulator. [`advise`] searches the cheapest setting that holds a target.

mod advice;
mod comparison;
mod figures;
mod part;
mod recorded;
mod setting;

pub use advice::{Advice, Candidate, NoAdvice, Wanted, advise};
pub use comparison::{Comparison, Row};
pub use figures::{Figures, ModelFigures};
pub use recorded::{BadLog, Recorded, RecordedModel};
pub use setting::{BadSetting, Setting};
