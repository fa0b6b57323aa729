//! The place in a graph that decides about its rows.

/// The place in a graph that decides about its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The operator's type, such as `Softmax`; `input`, `output` or `model` where no operator is at
    /// fault.
    pub operator: String,
    /// The operator's name, or its first output's name if it has none.
    pub node: String,
    /// The reason, as a clause: "it normalises along axis 0, along which requests are joined".
    pub reason: String,
}
