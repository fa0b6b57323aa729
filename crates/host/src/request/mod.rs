//! A request on its way: the call, its tensors in a batch, its queue, its place in a
//! pipeline, and the right to cancel it.

pub mod batch_codec;
pub mod call;
pub mod queue;
pub mod reply;
pub mod step_mark;
pub mod ticket;
pub mod version_record;
