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

/// Where in the JSON a value is that cannot be read as a `T`, as a prefix of the message; empty if it is the whole. For
/// errors only: it reads the text once more.
pub(super) fn place_of<'de, T: serde::Deserialize<'de>>(json: &'de [u8]) -> String {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    match serde_path_to_error::deserialize::<_, T>(&mut deserializer) {
        Err(error) if error.inner().is_data() && error.path().iter().len() > 0 => format!("`{}`: ", error.path()),
        _ => String::new(),
    }
}
