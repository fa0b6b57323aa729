//! The ways that requests take, whose cost is counted. Example: an inference over gRPC.

mod executor;
mod grpc_client;
mod http_client;
mod roles;
mod scheduler;
mod server;

use anyhow::Result;
use clap::ValueEnum;

use crate::gate::part::Plan;

/// A way that requests go.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, ValueEnum)]
pub enum Way {
    /// An inference over HTTP, its tensors in binary form.
    HttpBinary,
    /// An inference over HTTP, its tensors in JSON.
    HttpJson,
    /// An inference over gRPC.
    Grpc,
    /// A request posted to the scheduler, and its part of a grant and a completion: one model.
    Scheduler,
    /// The way of `Scheduler` with 1,000 models.
    Scheduler1000,
    /// A request between a frontend, a scheduler and a backend that are processes of their own,
    /// without sockets.
    Roles,
    /// A batch run by an executor process: both processes.
    Executor,
}

impl Way {
    /// Every way.
    pub fn all() -> &'static [Way] {
        Way::value_variants()
    }

    /// Its name on the command line and in the file.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Returns the number of requests of the first part.
    pub fn requests(self) -> u64 {
        match self {
            Way::HttpBinary | Way::HttpJson | Way::Grpc | Way::Executor => 500,
            Way::Roles => 4_000,
            Way::Scheduler | Way::Scheduler1000 => 20_000,
        }
    }

    /// Returns true if the first thread stands for a client, which is not counted.
    pub fn has_client(self) -> bool {
        matches!(self, Way::HttpBinary | Way::HttpJson | Way::Grpc)
    }

    /// Returns true if the way goes from process to process, so that the operating system's share
    /// varies.
    pub fn crosses(self) -> bool {
        self == Way::Executor
    }

    /// Runs requests on this way.
    ///
    /// # Errors
    /// If the way cannot be set up, or a request fails.
    pub fn run(self, plan: &Plan) -> Result<()> {
        match self {
            Way::HttpBinary => server::run_http(plan, &http_client::binary_request()),
            Way::HttpJson => server::run_http(plan, &http_client::json_request()),
            Way::Grpc => server::run_grpc(plan),
            Way::Scheduler => scheduler::run(plan, 1),
            Way::Scheduler1000 => scheduler::run(plan, 1_000),
            Way::Roles => roles::run(plan),
            Way::Executor => executor::run(plan),
        }
    }
}
