//! The state machines of frontends, schedulers and backends as separate processes. Each one copes
//! with peers that are late, silent or gone.
//!
//! Symphony §4.3 separates the metadata of requests, which go through the scheduler, from their
//! tensors, which go directly between frontends and backends. In this crate each role is a state
//! machine without a clock and without a wire. Time and frames come in; frames and decisions go
//! out. A process brings sockets and memory. The simulator brings a network that loses, doubles,
//! reorders and cuts.
//!
//! ```text
//! client --request--> FrontendNode <--Requests, Claim--> SchedulerNode --Plan--> BackendNode
//!                          ^                                  |                      |
//!                          |                         other SchedulerNodes            |
//!                          +------------------ Inputs, Answers ----------------------+
//! ```
//!
//! **Ownership.** A [`FrontendNode`] has every request of its clients, with its tensors, until it
//! is answered. The frontend alone decides which batch may run a request and which answer counts. A
//! [`SchedulerNode`] has metadata only, and may be lost with all of it: frontends hand their
//! unclaimed requests in to the next leader. A [`BackendNode`] has the batches under way.
//!
//! **Time** does not travel. Messages carry the time left of a budget, and no node adds to it on
//! the way. Instants are each node's own.
//!
//! **Links.** A link between two nodes ([`Links`]) brings messages in order and once, or reports
//! that the other node is lost. State machines behind a link never see a message doubled or out of
//! order. Each one must cope with a peer that goes, and with one that comes anew.
//!
//! **Epochs.** Each leader has an [`Epoch`]. Backends and frontends follow the highest epoch that
//! they have heard of, and do nothing that a lower one asks for.
//!
//! | file | contents |
//! |---|---|
//! | `message.rs` | the messages |
//! | `link.rs`, `links.rs` | messages in order and once between two nodes; all links of one node |
//! | `own_pauses.rs` | the times in which the process itself stood still, which nobody else is blamed for |
//! | `delay.rs`, `scheduler/budgets.rs` | measured delays of messages (Symphony appendix D); the budgets that models are planned with |
//! | `ids.rs` | the names of processes, requests and batches |
//! | `epoch.rs`, `scheduler/election.rs` | the choice of the leader |
//! | `assignment.rs`, `scheduler/assigner.rs`, `backend/loading.rs` | the models of backends (Symphony §4.4): the messages, the decisions, and how a backend carries them out |
//! | `frontend/frontend_node.rs`, `scheduler/scheduler_node.rs`, `backend/backend_node.rs` | the roles |
//! | `backend/streams.rs` | requests with any number of answers, until the last answer |
//! | `asking.rs`, `scheduler/questions.rs` | questions about the whole cluster, from any process to all others |
//! | `rollouts.rs` | the decisions about rollouts that all frontends share |
//! | `role_node.rs`, `following.rs` | the inputs that all roles have; the leader that a frontend or a backend follows |

mod asking;
mod assignment;
mod at_most;
mod backend;
mod delay;
mod epoch;
mod following;
mod frontend;
mod ids;
mod link;
mod links;
mod message;
mod own_pauses;
mod queue_names;
mod role_node;
mod rollouts;
mod scheduler;

pub use assignment::{Assignment, Divided, MoveLimit, PlanWanted, PlannedModel, Stamp, SubClusterPlan};
pub use backend::{BackendNode, BackendOptions, BackendOutput, Member};
pub use delay::{DelayEstimate, FetchEstimate, Least};
pub use epoch::Epoch;
pub use frontend::{FrontendNode, FrontendOptions, FrontendOutput, NewRequest, OrderFailure, RequestEnd, Way};
pub use link::{Frame, LinkTiming, MOST_UNACKED};
pub use links::{LinkEvent, Links};
pub use message::{
    BatchKey, BatchRun, ClockLead, Delays, Doing, HandedIn, Hello, Loadable, MOST_ANSWER, MOST_STREAMED, Message,
    NodeId, Offer, OfferedModel, Outcome, PROTOCOL, Plan, QueueAlias, QueueKey, Refusal, RequestKey, Role, Running,
    ServedModel, Slot, Told,
};
pub use role_node::RoleNode;
pub use scheduler::{
    ModelBudget, RehearsalEvent, SchedulerNode, SchedulerOptions, SchedulerOutput, SubCluster, SubClusterCount,
    SubClusterOptions,
};
