//! The headings of the user's pages that messages point to. Example: the error about a model for TorchScript ends with
//! `(see docs/guide/triton.md#models-other-than-onnx)`.
//!
//! `tools/book.py` checks that each heading exists, as it does for every page that a source file names.

use std::fmt;

/// The address in front of each page. Empty: a page is a file of the project.
const SITE: &str = "";

/// A heading of a page; the text of a pointer is `see PAGE#HEADING`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pointer(&'static str);

impl Pointer {
    /// Models other than ONNX files, and parts of configurations that only such models have.
    pub const OTHER_MODELS: Pointer = Pointer("docs/guide/triton.md#models-other-than-onnx");
    /// Models that keep state from request to request.
    pub const SEQUENCES: Pointer = Pointer("docs/guide/triton.md#sequences");
    /// Models that give no answer or several answers to a request.
    pub const DECOUPLED: Pointer = Pointer("docs/guide/triton.md#decoupled-models");
    /// Inputs and outputs that describe the batch.
    pub const BATCH_TENSORS: Pointer = Pointer("docs/guide/triton.md#batch-inputs-and-batch-outputs");
    /// Programs that check or change a model before it loads.
    pub const REPOSITORY_AGENTS: Pointer = Pointer("docs/guide/triton.md#repository-agents");
    /// Fields of a configuration that the server ignores.
    pub const IGNORED_FIELDS: Pointer = Pointer("docs/guide/triton.md#fields-without-effect");
    /// Places of instances: kinds and numbers of devices.
    pub const PLACEMENT: Pointer = Pointer("docs/guide/devices.md#placement");
    /// Options of TensorRT.
    pub const TENSORRT: Pointer = Pointer("docs/guide/gpus.md#tensorrt");
    /// Flags of Triton's server.
    pub const FLAGS: Pointer = Pointer("docs/guide/triton.md#tritons-command-line");
    /// Encryption and restricted access.
    pub const ACCESS: Pointer = Pointer("docs/guide/triton.md#tls-and-access");
    /// Traces, and settings of the log.
    pub const TRACES: Pointer = Pointer("docs/guide/triton.md#traces-and-log-settings");
    /// Load requests that name one of several repositories.
    pub const REPOSITORIES: Pointer = Pointer("docs/guide/triton.md#names-of-repositories");
    /// Shared memory.
    pub const SHARED_MEMORY: Pointer = Pointer("docs/guide/network.md#shared-memory");
    /// The checks of `Host` and `Origin`.
    pub const HOSTS: Pointer = Pointer("docs/guide/network.md#hosts-and-web-pages");
    /// TLS on the ports.
    pub const TLS: Pointer = Pointer("docs/guide/access.md#tls");
    /// The secret that processes of a cluster prove to each other.
    pub const CLUSTER_TRUST: Pointer = Pointer("docs/cluster.md#trust-between-processes");
    /// API keys.
    pub const KEYS: Pointer = Pointer("docs/guide/access.md#keys");
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "see {SITE}{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::Pointer;

    #[test]
    fn a_pointer_says_where_to_read() {
        assert_eq!(Pointer::SEQUENCES.to_string(), "see docs/guide/triton.md#sequences");
    }
}
