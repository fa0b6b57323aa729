//! The state machines of frontends, schedulers and backends as separate processes. Each one copes
//! with peers that are late, silent or gone.
//!
//! Symphony §4.3 separates the metadata of requests, which go through the scheduler, from their
//! tensors, which go directly between frontends and backends. In this module each role is a state
//! machine without a clock and without a wire. Time and frames come in; frames and decisions go
//! out. A process brings sockets and memory. The simulator brings a network that loses, doubles,
//! reorders and cuts.
//!
//! ```text
//! client --request--> FrontendNode --Requests--> SchedulerNode --Plan--> BackendNode
//!                          ^                          |                      |
//!                          |                    other SchedulerNodes         |
//!                          +---- Claim, Inputs, Answers ---------------------+
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
//! | `delay.rs`, `budgets.rs` | measured delays of messages (Symphony appendix D); the budgets that models are planned with |
//! | `epoch.rs`, `election.rs` | the choice of the leader |
//! | `assignment.rs`, `assigner.rs`, `loading.rs` | the models of backends (Symphony §4.4): the messages, the decisions, and how a backend carries them out |
//! | `frontend_node.rs`, `scheduler_node.rs`, `backend_node.rs` | the roles |

mod assigner;
mod assignment;
mod backend_node;
mod budgets;
mod cluster_map;
mod delay;
mod election;
mod epoch;
mod expiries;
mod following;
mod frontend_node;
mod gathering;
mod known_backend;
mod lead;
mod link;
mod links;
mod load_count;
mod loading;
mod message;
mod model_rates;
mod numbered;
mod open_requests;
mod orphans;
mod queue_names;
mod scheduler_node;
mod served_models;
mod under_way;
mod waiting;

pub use assigner::SubClusterOptions;
pub use assignment::{Assignment, PlanWanted, PlannedModel, Stamp, SubClusterPlan};
pub use backend_node::{BackendNode, BackendOptions, BackendOutput};
pub use budgets::ModelBudget;
pub use delay::{DelayEstimate, FetchEstimate, Least};
pub use epoch::Epoch;
pub use frontend_node::{FrontendNode, FrontendOptions, FrontendOutput, RequestEnd};
pub use gathering::Member;
pub use lead::SubCluster;
pub use link::{Frame, LinkTiming, MOST_UNACKED};
pub use links::{LinkEvent, Links};
pub use loading::Doing;
pub use message::{
    BatchKey, Delays, HandedIn, Hello, Loadable, Message, NodeId, Offer, OfferedModel, Outcome, PROTOCOL, Plan,
    QueueAlias, QueueKey, Refusal, RequestKey, Role, Running, ServedModel, Slot,
};
pub use open_requests::NewRequest;
pub use scheduler_node::{SchedulerNode, SchedulerOptions, SchedulerOutput};
