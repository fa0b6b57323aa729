//! The needs of calls over gRPC, by service and method.

use downbeat_service::options::Api;

use crate::access::{Models, Need, Scope};

const OURS: &str = "/inference.GRPCInferenceService/";
const HEALTH: &str = "/grpc.health.v1.Health/";
const REFLECTION: &str = "/grpc.reflection.";

/// The need of an inference. The model is checked once its message is read.
pub(super) const INFERENCE: Need<'static> = Need { scope: Scope::Infer, api: Api::Inference, models: Models::Checked };

/// The need of a call that is no inference. A call that is not named here needs the scope `manage`.
pub(super) fn need(path: &str) -> Need<'static> {
    let (scope, api, models) = match path.strip_prefix(OURS) {
        None if path.starts_with(HEALTH) => (Scope::Open, Api::Health, Models::Checked),
        None if path.starts_with(REFLECTION) => (Scope::Read, Api::Metadata, Models::Checked),
        Some("ServerLive" | "ServerReady") => (Scope::Open, Api::Health, Models::Checked),
        // Their handlers check the model that the message names.
        Some("ModelReady") => (Scope::Read, Api::Health, Models::Checked),
        Some("ServerMetadata" | "ModelMetadata") => (Scope::Read, Api::Metadata, Models::Checked),
        Some("ModelConfig") => (Scope::Read, Api::ModelConfig, Models::Checked),
        Some("ModelStatistics") => (Scope::Read, Api::Statistics, Models::Checked),
        Some("RepositoryIndex") => (Scope::Read, Api::ModelRepository, Models::Checked),
        Some("RepositoryModelLoad" | "RepositoryModelUnload") => (Scope::Manage, Api::ModelRepository, Models::Checked),
        Some("SystemSharedMemoryStatus" | "CudaSharedMemoryStatus") => (Scope::Read, Api::SharedMemory, Models::All),
        Some(method) if method.contains("SharedMemory") => (Scope::Manage, Api::SharedMemory, Models::All),
        // The same call reads and changes.
        Some("TraceSetting") => (Scope::Manage, Api::Trace, Models::All),
        Some("LogSettings") => (Scope::Manage, Api::Logging, Models::All),
        _ => (Scope::Manage, Api::Statistics, Models::All),
    };
    Need { scope, api, models }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The methods of the service that do not need the scope `manage`.
    const NOT_MANAGING: [&str; 10] = [
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
        "SystemSharedMemoryStatus",
        "CudaSharedMemoryStatus",
    ];

    #[test]
    fn every_method_that_changes_something_is_for_managers() {
        let pool = downbeat_protocol::descriptor("inference.ModelInferRequest").parent_pool().clone();
        let methods: Vec<String> = pool
            .services()
            .flat_map(|service| service.methods().map(|method| method.name().to_owned()).collect::<Vec<_>>())
            .collect();
        assert!(methods.len() >= 20, "{methods:?}");
        for method in methods.into_iter().filter(|method| !method.ends_with("Infer")) {
            let expected = !NOT_MANAGING.contains(&method.as_str());
            assert_eq!(need(&format!("{OURS}{method}")).scope == Scope::Manage, expected, "{method}");
        }
        for path in ["/other.Service/Method", "", "/inference.GRPCInferenceService/New"] {
            assert_eq!(need(path).scope, Scope::Manage, "{path}");
        }
    }
}
