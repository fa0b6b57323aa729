//! What is wrong with a body.

/// A body that does not follow the protocol. The message says what was found where, and what is expected.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct CodecError(pub(crate) String);

impl CodecError {
    /// The message.
    pub fn into_message(self) -> String {
        self.0
    }
}
