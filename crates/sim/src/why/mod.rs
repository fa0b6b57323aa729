//! Why a request was dropped, late or in time, by the decision log.
//!
//! [`LogFolder`] is a folder of logs, of which a question reads only the blocks that it needs.
//! [`LogFolder::why`] finds a request by its client's id, its trace or a time, and tells its
//! [`Story`]. [`Window`] has all requests of a span, with their batches and ends.

mod arrival;
mod changes;
mod cluster;
mod find;
mod folder;
mod outcome;
mod saved;
mod story;
mod text;
mod window;
mod words;

pub use arrival::Arrival;
pub use changes::{Changes, Figures, ModelChange};
pub use cluster::{ClusterBatch, ClusterStory};
pub use find::{Asked, NotFound};
pub use folder::{BadFolder, LogFile, LogFolder, Span};
pub use outcome::{Outcome, UnknownOutcome};
pub use saved::{MoreDevices, Remedy};
pub use story::{Ahead, BatchStory, Story};
pub use window::{LoggedBatch, LoggedRequest, Window};
