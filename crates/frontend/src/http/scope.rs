//! The parameter `scope`: whether a client asks about the whole cluster or about one process.

use downbeat_service::report::cluster_report::ClusterView;
use downbeat_service::service::Service;

/// The extent of a report.
#[derive(Clone, Copy, Default, Debug)]
pub(super) enum Scope {
    /// The whole cluster, if the process is in one.
    #[default]
    Cluster,
    /// The process alone.
    Process,
}

impl Scope {
    /// The scope that a parameter asks for; `None`: it is another parameter, or asks for no scope.
    pub fn of(pair: &str) -> Option<Self> {
        match pair {
            "scope=cluster" => Some(Scope::Cluster),
            "scope=process" => Some(Scope::Process),
            _ => None,
        }
    }

    /// The view to ask; `None`: the process itself answers.
    pub fn view<S: Service>(self, service: &S) -> Option<&dyn ClusterView> {
        match self {
            Scope::Cluster => service.cluster(),
            Scope::Process => None,
        }
    }
}
