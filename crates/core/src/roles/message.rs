//! What frontends, schedulers and backends say to each other.
//!
//! `P` is what a request's tensors are to whoever carries them: bytes in a process, nothing in most tests. Machines hand it on and never look at it.

use serde::{Deserialize, Serialize};

use super::assignment::Assignment;
use super::epoch::Epoch;
use crate::cluster::{DispatchPolicy, DropPolicy, DropReason, PriorityLevel, Reject};
use crate::ids::BatchId;
use crate::profile::LatencyProfile;
use crate::time::Duration;

/// Which protocol this is. Peers of another one are told so and left alone.
pub const PROTOCOL: u16 = 5;

/// A process: drawn at random when it starts, so that one that starts again is another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u64);

/// What a process is in the cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Role {
    /// Has the clients.
    Frontend,
    /// Decides, or stands by. `rank`: its place in the list of schedulers that all have, from 0.
    Scheduler {
        /// Its place in the list.
        rank: u32,
    },
    /// Has the devices.
    Backend,
}

/// Who somebody is: the first thing on a connection, before any frame.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`].
    pub protocol: u16,
    /// Who.
    pub node: NodeId,
    /// As what.
    pub role: Role,
    /// What people call it, for logs and metrics.
    pub name: String,
    /// Where others may connect to it, `host:port`; empty: nowhere.
    pub address: String,
}

/// A request, wherever it is: the frontend that has it, and that one's number for it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct RequestKey {
    /// Whose it is.
    pub frontend: NodeId,
    /// From 0, in the order of arrival there, never used again.
    pub number: u64,
}

/// A batch, wherever it is: who planned it, and that one's name for it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct BatchKey {
    /// Under whose lead it was planned.
    pub epoch: Epoch,
    /// Unique within it.
    pub batch: BatchId,
}

/// Requests that may share a batch: of one version of a model, and of one shape.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct QueueKey {
    /// Name of the model.
    pub model: String,
    /// Version.
    pub version: u64,
    /// The dimensions that vary from request to request, in the order of the inputs, without the batch dimension; empty where none does.
    pub shape: Vec<i64>,
}

/// A frontend's, or a scheduler's, short name for a [`QueueKey`] on one link: given once, by [`Message::Queue`], before it is used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct QueueAlias(pub u32);

/// A request as a scheduler is handed it: no tensor, only what decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HandedIn {
    /// The frontend's number for it.
    pub number: u64,
    /// Whose queue it joins.
    pub queue: QueueAlias,
    /// What is left until its deadline; `Duration::MAX`: it has none.
    pub left: Duration,
    /// How long it may still wait in a queue; `Duration::MAX`: for any time.
    pub queue_left: Duration,
    /// Its priority level, 0 the highest.
    pub level: u32,
    /// Items.
    pub size: u32,
    /// How often a backend that had it was lost before.
    pub tried: u8,
}

/// Why a scheduler gives a request back without a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// It was not taken in.
    Rejected(Reject),
    /// It was given up while it waited.
    Dropped(DropReason),
    /// Its batch was sent to a backend that is lost, or could not be brought together there: if nobody has claimed it, it may be handed in again.
    Lost,
}

/// A batch for a backend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Which.
    pub batch: BatchKey,
    /// Which of the backend's slots runs it.
    pub slot: u32,
    /// Of which queue.
    pub queue: QueueAlias,
    /// In their order.
    pub members: Vec<RequestKey>,
    /// Items.
    pub size: u32,
    /// In how long it is to start; inputs have to be there by then.
    pub starts_in: Duration,
    /// `l(size)` as it was planned with.
    pub expected: Duration,
}

/// A slot: what a batch runs on, one after another.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Slot {
    /// What it is: slots of equal hardware run a model alike (`cpu 2 threads rten`, `NVIDIA H100 50%`).
    pub hardware: String,
    /// Which of the backend's devices it is a part of, from 0: what busy time and advice of how many there should be are counted by.
    pub device: u32,
}

/// A model as a backend serves it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OfferedModel {
    /// Name of the model.
    pub model: String,
    /// Version.
    pub version: u64,
    /// Of its files and configuration: backends that offer the same have the same.
    pub fingerprint: String,
    /// What frontends need to read and check requests. Schedulers hand it on and never look at it.
    pub definition: Vec<u8>,
    /// The largest batch, in items.
    pub max_batch: u32,
    /// What is given up for deadlines.
    pub drop: DropPolicy,
    /// When a batch may start.
    pub dispatch: DispatchPolicy,
    /// How long a request without a deadline may wait.
    pub max_wait: Duration,
    /// Priority levels, the highest first.
    pub levels: Vec<PriorityLevel>,
    /// Batches of it that one backend may run at once.
    pub at_once: u32,
    /// Bytes of an item's inputs.
    pub item_bytes: u64,
    /// Whether a request that may have run may run again.
    pub may_repeat: bool,
    /// The shape that the profiles are of (see [`QueueKey::shape`]).
    pub shape: Vec<i64>,
    /// `l(b)` by slot; a slot that is not here does not run it.
    pub profiles: Vec<(u32, LatencyProfile)>,
}

/// A model that a backend could load if it were told to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Loadable {
    /// Name of the model.
    pub model: String,
    /// Bytes that it takes on a device as long as it is loaded, as far as that is known beforehand: those of its files.
    pub memory: u64,
    /// Why it could not be loaded when it was told to last.
    pub failed: Option<String>,
}

/// What a backend has.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Offer {
    /// In their order; never fewer than before.
    pub slots: Vec<Slot>,
    /// All of them.
    pub models: Vec<OfferedModel>,
    /// What schedulers may have it load and unload; empty: which models it has is its own affair.
    pub repository: Vec<Loadable>,
    /// Bytes for models that the smallest of its devices has; `None`: not known.
    pub memory: Option<u64>,
    /// What it was told last to have; what it is not to have any more is not among its models.
    pub assigned: Option<Assignment>,
}

impl Offer {
    /// What a scheduler may have it load and unload of a model, if it is one of these.
    pub(super) fn loadable(&self, model: &str) -> Option<&Loadable> {
        self.repository.iter().find(|loadable| loadable.model == model)
    }

    /// Whether it could load a model, as far as is known.
    pub(super) fn can_load(&self, model: &str) -> bool {
        self.loadable(model).is_some_and(|loadable| loadable.failed.is_none())
    }
}

/// A batch that a backend has, as it says to whoever begins to lead.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Running {
    /// Which.
    pub batch: BatchKey,
    /// Where.
    pub slot: u32,
    /// When it is expected to be done.
    pub ends_in: Duration,
}

/// A model as frontends hear of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ServedModel {
    /// Name of the model.
    pub model: String,
    /// Version.
    pub version: u64,
    /// [`OfferedModel::definition`].
    pub definition: Vec<u8>,
    /// [`OfferedModel::may_repeat`].
    pub may_repeat: bool,
}

/// What messages take, as a backend has measured it (Symphony appendix D): high percentiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Delays {
    /// A message without tensors to or from a frontend, the worst of them.
    pub control: Duration,
    /// Fetching inputs: what is there however small they are.
    pub fetch: Duration,
    /// Fetching inputs: what a KiB more takes, in nanoseconds.
    pub fetch_per_kib: u64,
}

/// What happened to a request on a backend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Outcome<P> {
    /// Its outputs.
    Outputs(P),
    /// It failed, by itself: running it again would not help. A code of whoever runs models, and text for the client.
    Failed {
        /// The kind of error, for the status that the client sees.
        code: u16,
        /// For the client.
        message: String,
    },
}

/// Anything that is said on a link.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Message<P> {
    /// Frontend to scheduler, scheduler to backend: from now on `alias` is this queue.
    Queue {
        /// The short name.
        alias: QueueAlias,
        /// What it stands for.
        key: QueueKey,
    },
    /// Frontend to scheduler: these requests wait with me. One that the scheduler has waiting already stays as it is; one that it has in a batch is in none any more, and
    /// waits again.
    Requests(Vec<HandedIn>),
    /// Frontend to scheduler: their clients have gone.
    Cancel(Vec<u64>),
    /// Scheduler to frontend: these requests have no batch, and why.
    Refused(Vec<(u64, Refusal)>),
    /// Scheduler to frontend: what may be asked for, all of it.
    Models(Vec<ServedModel>),
    /// Scheduler to all: I lead.
    Leads(Epoch),
    /// Scheduler to scheduler: the highest epoch that I have heard of, and whether it is mine. Frontend or backend to a scheduler whose [`Message::Leads`] it does not follow
    /// (`leads` is false): the least epoch that it would follow is above this one.
    Standing {
        /// The highest that it has heard of.
        epoch: Epoch,
        /// Whether it leads.
        leads: bool,
    },
    /// Scheduler to backend: a frontend, and where it is.
    Meet {
        /// Who.
        frontend: NodeId,
        /// `host:port`.
        address: String,
    },
    /// Scheduler to backend: run this.
    Plan(Plan),
    /// Backend to scheduler: what I have, in place of what I said before.
    Offer(Offer),
    /// Scheduler to backend: the models that you are to have, in place of what I said before.
    Assign(Assignment),
    /// Backend to scheduler: what I have measured of the network.
    Delays(Delays),
    /// Backend to scheduler that leads from now on: what I have under way.
    UnderWay(Vec<Running>),
    /// Backend to scheduler: the slot is done with this batch.
    Completed {
        /// Which.
        batch: BatchKey,
        /// Items that ran, and how long they took; `None`: nothing ran.
        ran: Option<(u32, Duration)>,
        /// Members whose inputs did not come.
        missed: Vec<RequestKey>,
    },
    /// Backend to scheduler: I am to go. It goes once it is [let go](Message::LetGo) and what it has is done.
    Leave,
    /// Scheduler to backend that leaves: there are no more batches for you.
    LetGo,
    /// Backend to frontend: these requests are in a batch of mine; let me have their inputs.
    Claim {
        /// The batch.
        batch: BatchKey,
        /// The frontend's numbers.
        numbers: Vec<u64>,
    },
    /// Frontend to backend: the inputs of those that are yours, with what is left of their deadlines; the others are not to be had any more.
    Inputs {
        /// The batch that claimed them.
        batch: BatchKey,
        /// Theirs.
        granted: Vec<(u64, Duration, P)>,
        /// Answered, cancelled, or somebody else's.
        gone: Vec<u64>,
    },
    /// Backend to frontend: these came too late for their batch, or nothing was done with them: they are not run here.
    Release {
        /// The batch that claimed them.
        batch: BatchKey,
        /// The frontend's numbers.
        numbers: Vec<u64>,
    },
    /// Backend to frontend: what came of requests.
    Answers(Vec<(u64, Outcome<P>)>),
}

/// What is left of a budget after this; of one without an end, all.
fn left_after(left: Duration, spent: Duration) -> Duration {
    if left == Duration::MAX { left } else { left.saturating_sub(spent) }
}

impl<P> Message<P> {
    /// Whether it may be large.
    pub fn has_tensors(&self) -> bool {
        matches!(self, Message::Inputs { .. } | Message::Answers(_))
    }

    /// Takes what it has waited, or was on its way, off the budgets in it.
    pub fn spend(&mut self, spent: Duration) {
        match self {
            Message::Requests(requests) => {
                for request in requests {
                    request.left = left_after(request.left, spent);
                    request.queue_left = left_after(request.queue_left, spent);
                }
            }
            Message::Plan(plan) => plan.starts_in = left_after(plan.starts_in, spent),
            Message::UnderWay(running) => {
                for batch in running {
                    batch.ends_in = left_after(batch.ends_in, spent);
                }
            }
            Message::Inputs { granted, .. } => {
                for (_, left, _) in granted {
                    *left = left_after(*left, spent);
                }
            }
            Message::Queue { .. }
            | Message::Cancel(_)
            | Message::Refused(_)
            | Message::Models(_)
            | Message::Leads(_)
            | Message::Standing { .. }
            | Message::Meet { .. }
            | Message::Offer(_)
            | Message::Assign(_)
            | Message::Delays(_)
            | Message::Completed { .. }
            | Message::Leave
            | Message::LetGo
            | Message::Claim { .. }
            | Message::Release { .. }
            | Message::Answers(_) => {}
        }
    }
}
