//! A request on its way: the call, its tensors in a batch, its queue, and the right to cancel it.

pub mod batch_codec;
pub mod call;
pub mod queue;
pub mod reply;
pub mod ticket;
pub mod version_record;
