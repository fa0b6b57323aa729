//! The messages that frontends, schedulers and backends send to each other.
//!
//! `P` is the type of a request's tensors: bytes in a process, nothing in most tests. State
//! machines hand tensors on and never look into them.

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};

use crate::assignment::Assignment;
use crate::at_most::at_most;
use crate::delay::class_of;
use crate::epoch::Epoch;
pub use crate::ids::{BatchKey, NodeId, RequestKey};
use downbeat_core::cluster::{DispatchPolicy, DropPolicy, DropReason, PriorityLevel, Reject};
use downbeat_core::profile::LatencyProfile;
use downbeat_core::time::Duration;

/// The version of this protocol. A node closes connections to peers of another version.
pub const PROTOCOL: u16 = 12;

/// The most requests that a frontend names in one message.
pub(super) const A_MESSAGE: usize = 512;

/// The most bytes of a [`Message::Ask`].
const MOST_QUESTION: usize = 4096;
/// The most bytes of a decision about a rollout.
pub(super) const MOST_DECISION: usize = 4096;
/// The most bytes of an answer to a question about the whole cluster. A frame may have 128 answers.
pub const MOST_ANSWER: usize = 256 << 10;
/// The most answers of one request that a backend has sent, and that the client has not taken.
pub const MOST_STREAMED: usize = 64;
/// The most bytes of a model's name in a [`QueueKey`]. A peer may name 65,536 queues, which stay as
/// long as its link.
const MOST_NAME: usize = 1024;
/// The most dimensions of a [`QueueKey`].
const MOST_VARYING: usize = 256;

/// Decodes a text of at most [`MOST_NAME`] bytes.
fn short_text<'de, D: Deserializer<'de>>(decoder: D) -> Result<String, D::Error> {
    let text = String::deserialize(decoder)?;
    if text.len() > MOST_NAME {
        return Err(D::Error::custom("the name of a model is too long"));
    }
    Ok(text)
}

/// The role of a process in the cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Role {
    /// A frontend has the clients.
    Frontend,
    /// A scheduler leads, or stands by.
    Scheduler {
        /// The scheduler's place, from 0, in the list that all schedulers share.
        rank: u32,
    },
    /// A backend has the devices.
    Backend,
}

/// Identifies a process: the first message on a connection, before any frame.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The sender's [`PROTOCOL`].
    pub protocol: u16,
    /// The sender's id.
    pub node: NodeId,
    /// The sender's role.
    pub role: Role,
    /// The sender's name for people, in logs and metrics.
    pub name: String,
    /// Where other nodes may connect to the sender, `host:port`; empty: nowhere.
    pub address: String,
}

/// Requests that may share a batch: of one version of a model, and of one shape.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct QueueKey {
    /// Name of the model.
    #[serde(deserialize_with = "short_text")]
    pub model: String,
    /// Version.
    pub version: u64,
    /// The dimensions that vary from request to request, in the order of the inputs, without the
    /// batch dimension. Empty if no dimension varies.
    #[serde(deserialize_with = "at_most::<_, _, MOST_VARYING>")]
    pub shape: Vec<i64>,
}

/// A short name for a [`QueueKey`] on one link. A frontend or a scheduler gives the name once, by
/// [`Message::Queue`], before its first use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct QueueAlias(pub u32);

/// A request as a frontend hands it in to a scheduler: metadata, no tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HandedIn {
    /// The frontend's number for this request.
    pub number: u64,
    /// The queue that the request joins.
    pub queue: QueueAlias,
    /// The time left until the deadline; `Duration::MAX`: no deadline.
    pub left: Duration,
    /// The time that the request may still wait in a queue; `Duration::MAX`: any time.
    pub queue_left: Duration,
    /// The time until the request's inputs are expected to be ready; zero: they are. A plan may have
    /// a batch start no earlier.
    pub ready_in: Duration,
    /// The request's priority level, 0 the highest.
    pub level: u32,
    /// Items in the request.
    pub size: u32,
    /// How often a backend that had the request was lost.
    pub tried: u8,
}

/// Why a scheduler gives a request back without a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// The scheduler did not admit the request.
    Rejected(Reject),
    /// The scheduler dropped the request from its queue.
    Dropped(DropReason),
    /// The backend of the request's batch is lost. The frontend may hand the request in again if no
    /// batch has claimed it.
    Lost,
    /// The backend has ended this batch without the request, and runs it no more. The frontend may hand
    /// the request in again if no other batch has claimed it.
    Missed(BatchKey),
}

/// A batch for a backend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The name of the batch.
    pub batch: BatchKey,
    /// The slot of the backend that runs the batch.
    pub slot: u32,
    /// The queue of the batch's requests.
    pub queue: QueueAlias,
    /// The requests of the batch, in order.
    pub members: Vec<RequestKey>,
    /// Items in the batch.
    pub size: u32,
    /// The time until the batch must start. All inputs must have come by then.
    pub starts_in: Duration,
    /// The latency `l(size)` that the scheduler planned with.
    pub expected: Duration,
}

/// A slot of a backend. A slot that is no seat runs one batch after another.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Slot {
    /// The slot's hardware. Slots of equal hardware run a model alike (`cpu 2 threads rten`,
    /// `NVIDIA H100 50%`).
    pub hardware: String,
    /// The backend's device, from 0, that this slot is a part of. Busy time and advice on the
    /// number of devices count devices, not slots.
    pub device: u32,
    /// Whether the slot is a *seat*: its batches run beside those of the device's other seats, as
    /// the device policies of the models decide. Seats only bound the number of such batches.
    pub is_seat: bool,
}

/// A model as a backend serves it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OfferedModel {
    /// Name of the model.
    pub model: String,
    /// Version.
    pub version: u64,
    /// Identifies the model's files and configuration. Backends with the same model files and
    /// configuration have the same fingerprint.
    pub fingerprint: String,
    /// The facts that frontends need to read and check requests. Schedulers hand the bytes on and
    /// never look into them.
    pub definition: Vec<u8>,
    /// The largest batch, in items.
    pub max_batch: u32,
    /// Which requests the scheduler drops to save deadlines.
    pub drop: DropPolicy,
    /// When a batch may start.
    pub dispatch: DispatchPolicy,
    /// How long a request without a deadline may wait.
    pub max_wait: Duration,
    /// Priority levels, the highest first.
    pub levels: Vec<PriorityLevel>,
    /// Batches of the model that one backend may run at once.
    pub at_once: u32,
    /// Bytes of one item's inputs.
    pub item_bytes: u64,
    /// Whether a request that may already have run may run again.
    pub may_repeat: bool,
    /// The shape that the profiles were measured with (see [`QueueKey::shape`]).
    pub shape: Vec<i64>,
    /// `l(b)` by slot. A slot without an entry does not run the model.
    pub profiles: Vec<(u32, LatencyProfile)>,
}

/// A model that a backend could load on a scheduler's order.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Loadable {
    /// Name of the model.
    pub model: String,
    /// Bytes that the loaded model takes on a device. Until the backend has loaded the model once, this
    /// is an estimate by the size of its files.
    pub memory: u64,
    /// Bytes that a run of the model takes beside these, or the same estimate.
    pub run_memory: u64,
    /// How long the backend's last load of the model took; `None`: there was none.
    pub load_time: Option<Duration>,
    /// Why the last ordered load failed, if it did.
    pub failed: Option<String>,
}

/// The slots and models of a backend.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Offer {
    /// The slots, in order; never fewer than before.
    pub slots: Vec<Slot>,
    /// All loaded models that schedulers may use.
    pub models: Vec<OfferedModel>,
    /// Models that schedulers may order the backend to load and unload. Empty: the backend alone
    /// chooses its models.
    pub repository: Vec<Loadable>,
    /// Bytes for models on the backend's smallest device; `None`: not known.
    pub memory: Option<u64>,
    /// The most bytes that runs beside each other take; `None`: a device runs one batch at a time.
    pub runs: Option<u64>,
    /// The last assignment that the backend heard. `models` leaves out every model that this
    /// assignment takes away.
    pub assigned: Option<Assignment>,
}

impl Offer {
    /// The model's entry in the repository, if schedulers may load and unload the model.
    pub(super) fn loadable(&self, model: &str) -> Option<&Loadable> {
        self.repository.iter().find(|loadable| loadable.model == model)
    }

    /// Whether the backend could load a model, as far as it knows.
    pub(super) fn can_load(&self, model: &str) -> bool {
        self.loadable(model).is_some_and(|loadable| loadable.failed.is_none())
    }
}

/// A batch that a backend still has, reported to a new leader.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Running {
    /// The name of the batch.
    pub batch: BatchKey,
    /// The slot that runs the batch.
    pub slot: u32,
    /// The time until the batch is expected to be done.
    pub ends_in: Duration,
}

/// A change of one model that a backend must make.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Doing {
    /// Load the model.
    Load,
    /// Unload the model, once its last batch is done.
    Unload,
}

/// A process's answer to a question about the whole cluster, as the leader hands it on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Told {
    /// The process that has answered.
    pub node: NodeId,
    /// The process's role.
    pub role: Role,
    /// The process's name for people.
    #[serde(deserialize_with = "short_text")]
    pub name: String,
    /// The leader's clock beside the process's; `None`: not known yet.
    pub clock: Option<ClockLead>,
    /// The answer. Schedulers hand the bytes on and never look into them.
    #[serde(deserialize_with = "at_most::<_, _, MOST_ANSWER>")]
    pub answer: Vec<u8>,
}

/// How far one clock is ahead of another, measured from round trips.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClockLead {
    /// Nanoseconds.
    pub ahead: i64,
    /// The most that `ahead` may be wrong, either way.
    pub error: Duration,
}

/// A model as the leader describes it to frontends.
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

/// Message delays that a backend has measured (Symphony appendix D): high percentiles, and the least
/// of the fresh values. The backend's own pauses do not count.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Delays {
    /// The time of a message without tensors to or from a frontend, for the slowest frontend.
    pub control: Duration,
    /// Fetching inputs: the part that does not depend on their size.
    pub fetch: Duration,
    /// Fetching inputs: nanoseconds for each KiB.
    pub fetch_per_kib: u64,
    /// The least fresh time of a message without tensors, for the quickest frontend. Zero if there
    /// is no fresh value.
    pub fresh_control: Duration,
    /// The least fresh time of a fetch, for each class of sizes that was fetched lately: the
    /// logarithm of the bytes, and the time.
    pub fresh_fetches: Vec<(u8, Duration)>,
}

impl Delays {
    /// The least time that a fetch of `bytes` takes by fresh fetches: larger fetches take no less
    /// than smaller fetches. Zero if no fetch of that size or a smaller one is fresh.
    pub(super) fn fresh_fetch(&self, bytes: u64) -> Duration {
        let up_to = self.fresh_fetches.iter().filter(|(class, _)| *class <= class_of(bytes));
        up_to.map(|(_, took)| *took).max().unwrap_or_default()
    }

    /// A high percentile of the time that a fetch of `bytes` takes.
    pub(super) fn fetch_of(&self, bytes: u64) -> Duration {
        let size = Duration::from_nanos(self.fetch_per_kib).saturating_mul(bytes.div_ceil(1024));
        self.fetch + size
    }

    /// Whether plans should follow the other values soon: a value has doubled or halved, and by
    /// more than a millisecond.
    pub(super) fn differs(&self, other: &Delays) -> bool {
        let differs = |a: Duration, b: Duration| {
            let (less, more) = (a.min(b), a.max(b));
            more > less.saturating_mul(2) && more.saturating_sub(less) > Duration::from_millis(1)
        };
        let mebibyte = |delays: &Delays| Duration::from_nanos(delays.fetch_per_kib.saturating_mul(1024));
        let mut classes =
            self.fresh_fetches.iter().chain(&other.fresh_fetches).map(|(class, _)| 1u64 << class.min(&63));
        differs(self.control, other.control)
            || differs(self.fetch, other.fetch)
            || differs(mebibyte(self), mebibyte(other))
            || differs(self.fresh_control, other.fresh_control)
            || classes.any(|bytes| differs(self.fresh_fetch(bytes), other.fresh_fetch(bytes)))
    }
}

/// The result of a request on a backend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Outcome<P> {
    /// The request's outputs.
    Outputs(P),
    /// The request itself failed, so that another run would not help. The process that runs models
    /// defines the codes.
    Failed {
        /// The kind of error, which decides the status that the client sees.
        code: u16,
        /// Text for the client.
        message: String,
    },
    /// The run is over. The request's answers come by [`Message::Streamed`], before this result and
    /// after it.
    Streamed,
}

impl<P> Outcome<P> {
    /// Whether the request failed.
    pub fn is_failed(&self) -> bool {
        matches!(self, Outcome::Failed { .. })
    }
}

/// The run of a batch, for the counts of the frontends whose requests it answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BatchRun {
    /// The backend's device, from 0.
    pub device: u32,
    /// Items of the batch, with the requests of other frontends and padding.
    pub items: u32,
    /// The time that joining the inputs took.
    pub compute_input: Duration,
    /// The time that the engine's run took.
    pub compute_infer: Duration,
    /// The time that separating the outputs took.
    pub compute_output: Duration,
    /// How long ago the run ended.
    pub ended_ago: Duration,
    /// Whether the receiver counts the batch. Of all frontends with requests in the batch, one does.
    pub counts: bool,
}

/// Any message on a link. Each variant is worded as the sender speaks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Message<P> {
    /// Frontend to scheduler, scheduler to backend: from now on `alias` stands for this queue.
    Queue {
        /// The short name.
        alias: QueueAlias,
        /// The queue.
        key: QueueKey,
    },
    /// Frontend to scheduler: these requests wait with me. The scheduler keeps its entry of a
    /// request that already waits. A request that it had in a batch has left that batch, and waits
    /// again.
    Requests(#[serde(deserialize_with = "at_most::<_, _, A_MESSAGE>")] Vec<HandedIn>),
    /// Frontend to scheduler, frontend to backend: the clients of these requests have gone.
    Cancel(#[serde(deserialize_with = "at_most::<_, _, A_MESSAGE>")] Vec<u64>),
    /// Scheduler to frontend: these requests get no batch, and why.
    Refused(Vec<(u64, Refusal)>),
    /// Scheduler to frontend: the complete list of models that clients may ask for.
    Models(Vec<ServedModel>),
    /// Scheduler to frontend and backend: I lead in this epoch.
    Leads(Epoch),
    /// Scheduler to scheduler: the highest epoch that I have heard of, and whether I am its leader.
    /// Frontend or backend to a scheduler whose [`Message::Leads`] it does not follow (`leads` is
    /// false): I would follow only greater epochs. Scheduler to frontend and backend (`leads` is
    /// false): I no longer lead.
    Standing {
        /// The highest epoch that the sender has heard of.
        epoch: Epoch,
        /// Whether the sender leads in this epoch.
        leads: bool,
    },
    /// Frontend or backend to a scheduler that leads in this epoch: another process has led in it.
    /// Take the next one.
    Taken(Epoch),
    /// Scheduler to backend: a frontend, and its address.
    Meet {
        /// The frontend.
        frontend: NodeId,
        /// `host:port`.
        address: String,
    },
    /// Scheduler to backend: run this batch.
    Plan(Plan),
    /// Backend to scheduler: my slots and models, which replace my last offer.
    /// It is large and rare: boxed, it makes no other message larger.
    Offer(Box<Offer>),
    /// Scheduler to backend: the models that you must have, which replace your last assignment.
    Assign(Assignment),
    /// Backend to scheduler: the network delays that I have measured.
    Delays(Delays),
    /// Backend to a scheduler that has begun to lead: the batches that I have under way.
    UnderWay(Vec<Running>),
    /// Backend to scheduler: the slot is done with this batch.
    Completed {
        /// The name of the batch.
        batch: BatchKey,
        /// Items that ran, and the time of the run; `None`: nothing ran.
        ran: Option<(u32, Duration)>,
        /// Members whose inputs did not come in time.
        missed: Vec<RequestKey>,
    },
    /// Backend to scheduler: I am leaving. The backend ends after the scheduler has [let it
    /// go](Message::LetGo) and its last batch is done.
    Leave,
    /// Scheduler to a backend that leaves: you get no more batches.
    LetGo,
    /// Scheduler to frontend: this batch of this backend claims these requests of yours; send the
    /// backend their inputs. The backend hears of the batch by [`Message::Plan`] at the same time.
    Claim {
        /// The batch.
        batch: BatchKey,
        /// The backend that runs the batch.
        backend: NodeId,
        /// The frontend's numbers of the requests, in the order of the plan.
        numbers: Vec<u64>,
    },
    /// Frontend to backend: the inputs of the granted requests, with the time left to their
    /// deadlines. You cannot have the gone requests. The inputs of further claimed requests follow
    /// once they are ready.
    Inputs {
        /// The batch that claimed the requests.
        batch: BatchKey,
        /// Number, time left and inputs of each granted request.
        granted: Vec<(u64, Duration, P)>,
        /// Requests that are answered or cancelled, or that another batch has claimed.
        gone: Vec<u64>,
    },
    /// Backend to frontend: I do not run these requests. The inputs came too late for the batch, or
    /// the run gave no result.
    Release {
        /// The batch that claimed the requests.
        batch: BatchKey,
        /// The frontend's numbers of the requests.
        numbers: Vec<u64>,
    },
    /// Backend to frontend: the results of requests.
    Answers {
        /// The run of the batch that the requests were in. `None`: the batch did not run as a whole.
        run: Option<BatchRun>,
        /// Number and result of each request.
        answers: Vec<(u64, Outcome<P>)>,
    },
    /// Frontend to scheduler, scheduler to backend: a client wants this change of a model.
    Order {
        /// The sender's number of the order.
        number: u64,
        /// Name of the model.
        #[serde(deserialize_with = "short_text")]
        model: String,
        /// The change.
        doing: Doing,
    },
    /// Frontend to scheduler, scheduler to frontend: a decision about the rollout of a model.
    Rollout {
        /// Name of the model.
        #[serde(deserialize_with = "short_text")]
        model: String,
        /// Counts the decisions of the model, from 1. Of two with one number the greater bytes count.
        number: u64,
        /// The decision, which schedulers hand on and never look into.
        #[serde(deserialize_with = "at_most::<_, _, MOST_DECISION>")]
        decision: Vec<u8>,
    },
    /// Backend to scheduler, scheduler to frontend: the order is carried out.
    Ordered {
        /// The number that the receiver gave the order.
        number: u64,
        /// Why the order failed, if it did.
        failed: Option<String>,
    },
    /// Any process to the leader, and the leader to frontends and backends: a client asks about the
    /// whole cluster.
    Ask {
        /// The sender's number of the question.
        number: u64,
        /// The question. Schedulers hand the bytes on and never look into them.
        #[serde(deserialize_with = "at_most::<_, _, MOST_QUESTION>")]
        question: Vec<u8>,
    },
    /// Frontend and backend to scheduler: my answer to a question.
    Tell {
        /// The number that the receiver gave the question.
        number: u64,
        /// The answer.
        #[serde(deserialize_with = "at_most::<_, _, MOST_ANSWER>")]
        answer: Vec<u8>,
    },
    /// Scheduler to the process that has asked: an answer, or the end of the answers.
    Told {
        /// The number that the receiver gave the question.
        number: u64,
        /// A process's answer; `None`: there are no more.
        told: Option<Told>,
    },
    /// Frontend to scheduler: the inputs of these requests are ready, earlier than
    /// [said](HandedIn::ready_in).
    Ready(#[serde(deserialize_with = "at_most::<_, _, A_MESSAGE>")] Vec<u64>),
    /// Backend to frontend: the next answer of a decoupled model to a request. At most
    /// [`MOST_STREAMED`] answers wait for [`Message::Room`].
    Streamed {
        /// The frontend's number of the request.
        number: u64,
        /// The answer; `None`: the answers end without another.
        answer: Option<Outcome<P>>,
        /// Whether no answer follows.
        is_last: bool,
    },
    /// Frontend to backend: the client has taken so many answers of a request. As many may follow.
    Room {
        /// The frontend's number of the request.
        number: u64,
        /// The number of answers.
        answers: u32,
    },
}

/// The budget that remains after `spent`. A budget without an end stays endless.
fn left_after(left: Duration, spent: Duration) -> Duration {
    if left == Duration::MAX { left } else { left.saturating_sub(spent) }
}

impl<P> Message<P> {
    /// A backend's slots and models.
    pub fn offer(offer: Offer) -> Self {
        Message::Offer(Box::new(offer))
    }

    /// Whether a process of one role sends this message to a process of another. A link to a peer
    /// that sends anything else is lost.
    pub fn may_go(&self, from: Role, to: Role) -> bool {
        use self::Role::{Backend, Frontend, Scheduler};
        match self {
            Message::Queue { .. } => matches!((from, to), (Frontend, Scheduler { .. }) | (Scheduler { .. }, Backend)),
            Message::Requests(_) | Message::Ready(_) => matches!((from, to), (Frontend, Scheduler { .. })),
            Message::Cancel(_) => matches!((from, to), (Frontend, Scheduler { .. } | Backend)),
            Message::Refused(_) | Message::Models(_) | Message::Claim { .. } => {
                matches!((from, to), (Scheduler { .. }, Frontend))
            }
            Message::Leads(_) => matches!((from, to), (Scheduler { .. }, Frontend | Backend)),
            Message::Standing { leads, .. } => match (from, to) {
                (Scheduler { .. }, Scheduler { .. }) => true,
                (Scheduler { .. }, _) | (_, Scheduler { .. }) => !leads,
                _ => false,
            },
            Message::Taken(_) => matches!((from, to), (Frontend | Backend, Scheduler { .. })),
            Message::Meet { .. } | Message::Plan(_) | Message::Assign(_) | Message::LetGo => {
                matches!((from, to), (Scheduler { .. }, Backend))
            }
            Message::Offer(_)
            | Message::Delays(_)
            | Message::UnderWay(_)
            | Message::Completed { .. }
            | Message::Leave => matches!((from, to), (Backend, Scheduler { .. })),
            Message::Release { .. } | Message::Answers { .. } | Message::Streamed { .. } => {
                matches!((from, to), (Backend, Frontend))
            }
            Message::Inputs { .. } | Message::Room { .. } => matches!((from, to), (Frontend, Backend)),
            Message::Rollout { .. } => {
                matches!((from, to), (Frontend, Scheduler { .. }) | (Scheduler { .. }, Frontend))
            }
            Message::Order { .. } => matches!((from, to), (Frontend, Scheduler { .. }) | (Scheduler { .. }, Backend)),
            Message::Ordered { .. } => matches!((from, to), (Backend, Scheduler { .. }) | (Scheduler { .. }, Frontend)),
            Message::Ask { .. } => matches!((from, to), (Scheduler { .. }, _) | (_, Scheduler { .. })),
            Message::Tell { .. } => matches!((from, to), (Frontend | Backend, Scheduler { .. })),
            Message::Told { .. } => matches!((from, to), (Scheduler { .. }, _)),
        }
    }

    /// Whether the message may be large.
    pub fn has_tensors(&self) -> bool {
        matches!(self, Message::Inputs { .. } | Message::Answers { .. } | Message::Streamed { .. })
    }

    /// Takes `spent`, the time that the message has waited or travelled, off the budgets in the
    /// message. A run in the message ended so much longer ago.
    pub fn spend(&mut self, spent: Duration) {
        match self {
            Message::Requests(requests) => {
                for request in requests {
                    request.left = left_after(request.left, spent);
                    request.queue_left = left_after(request.queue_left, spent);
                    request.ready_in = request.ready_in.saturating_sub(spent);
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
            Message::Answers { run, .. } => {
                if let Some(run) = run {
                    run.ended_ago += spent;
                }
            }
            Message::Queue { .. }
            | Message::Cancel(_)
            | Message::Refused(_)
            | Message::Models(_)
            | Message::Leads(_)
            | Message::Standing { .. }
            | Message::Taken(_)
            | Message::Meet { .. }
            | Message::Offer(_)
            | Message::Assign(_)
            | Message::Delays(_)
            | Message::Completed { .. }
            | Message::Leave
            | Message::LetGo
            | Message::Claim { .. }
            | Message::Release { .. }
            | Message::Order { .. }
            | Message::Rollout { .. }
            | Message::Ordered { .. }
            | Message::Ask { .. }
            | Message::Tell { .. }
            | Message::Told { .. }
            | Message::Streamed { .. }
            | Message::Room { .. }
            | Message::Ready(_) => {}
        }
    }
}
