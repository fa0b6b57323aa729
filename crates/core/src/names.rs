//! The error for a name that is none of the known ones.

/// A name that is none of the choices.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown {what} '{found}'; expected one of: {}", expected.join(", "))]
pub struct UnknownName {
    /// The kind of choice.
    pub what: &'static str,
    /// The given name.
    pub found: String,
    /// The names of the choices.
    pub expected: Vec<&'static str>,
}

impl UnknownName {
    /// The error for a text, of which the message shows only the beginning.
    pub fn new(what: &'static str, found: &str, expected: impl IntoIterator<Item = &'static str>) -> Self {
        UnknownName { what, found: found.chars().take(64).collect(), expected: expected.into_iter().collect() }
    }
}
