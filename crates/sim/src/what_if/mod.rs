//! What-if: replays the requests of a recorded decision log under other settings.
//!
//! [`Recorded`] is the content of a decision log: models, requests, devices, and the requests'
//! outcome. [`Setting`] holds the changes, and [`Recorded::run`] runs the requests in the
//! simulator. [`advise`] searches the cheapest setting under which the requests meet a target.

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
