//! Cluster scheduling: when a batch leaves, and which device takes it (Symphony §3-4).
//!
//! Two state machines, as in Symphony §4.2, that talk in messages only:
//!
//! | machine | there is | knows | Symphony's name |
//! |---|---|---|---|
//! | [`ModelQueue`] | one a model | the queue, the drop policy, the candidate | ModelThread |
//! | [`Matchmaker`] | one | which candidate may start when, which device is free | RankThread |
//!
//! A queue tells the matchmaker its newest [`Candidate`]; the matchmaker answers with a grant of a
//! device; the queue then takes the batch. A [`Shard`] is the queues of some models, on which one
//! thread at a time works. A [`Scheduler`] is one shard and the matchmaker. How a candidate is made ([`DropPolicy`]) and when
//! it may start ([`DispatchPolicy`]) are separate choices.

mod autoscale;
mod batch_policy;
mod batcher;
mod behaviour;
mod busy_times;
mod demand;
mod device_state;
mod dispatch_policy;
mod id_set;
mod in_flight;
mod indexed_heap;
mod item_cost;
mod kind_plan;
mod kind_state;
mod load_regime;
mod matchmaker;
mod messages;
mod model_demand;
mod model_options;
mod model_queue;
mod network;
mod order;
mod output;
mod rate_meter;
mod ready_tree;
mod reason;
mod rehearsal;
mod request;
mod request_queue;
mod scheduler;
mod shard;
mod update_elision;

pub use autoscale::{
    Advice, AdviceReason, Autoscale, AutoscaleOptions, AutoscaleSample, BadAutoscaleOptions, BadSample,
};
pub use batch_policy::{DropPolicy, staggered_batch};
pub use behaviour::Behaviour;
pub use demand::Demand;
pub use dispatch_policy::{Deferral, DispatchPolicy};
pub use indexed_heap::IndexedHeap;
pub use item_cost::ItemCost;
pub use load_regime::LoadRegime;
pub use matchmaker::Matchmaker;
pub use messages::{Answer, Candidate, Grant};
pub use model_options::{ModelOptions, PATIENCE};
pub use model_queue::ModelQueue;
pub use network::NetworkBudget;
pub use order::{Order, OrderPolicy};
pub use output::{Departure, DropReason, Dropped, Output, Reject};
pub use rate_meter::RateMeter;
pub use reason::{DispatchReason, DropDetail, StartBound};
pub(crate) use rehearsal::RATES;
pub use rehearsal::{Decision as RehearsalDecision, Ground, PastArrival, Rehearsal, Tried};
pub use rehearsal::{ExecutionNoise, Random};
pub use request::{PriorityLevel, Request, TimeoutAction};
pub use request_queue::Ticket;
pub use scheduler::{Scheduler, Stats, TimeoutReason};
pub use shard::Shard;
