//! Runs Downbeat's scheduler on threads (Symphony §4.2, *scalability of the centralized scheduler*).
//!
//! The parts come from `downbeat-core`: some [`Shard`]s, each for some of the models, and one
//! [`Matchmaker`]. These parts know no threads, and exchange messages. Here each part is the state
//! of a `Mailbox`, into which threads put messages. A [`Cluster`] has all mailboxes. A [`Handler`]
//! brings the clock and the payloads.
//!
//! **Two ways to run a mailbox**, with the same code:
//!
//! - *The posting thread works* ([`Cluster::post`], [`Cluster::complete`]). A thread that has put a
//!   message in tries to become the mailbox's worker. If another thread already works there, that
//!   thread finds the message, and no thread waits. So an event costs no wake-up and no context
//!   switch. Example: a device's thread reports a completed batch. Before the call returns, the
//!   device usually has its next batch. A message for an idle mailbox is handled at once, without a
//!   place in the mailbox. A thread may work on the matchmaker's mailbox after a shard's. It then
//!   keeps the shard, and handles that shard's grants without a message. This way suits a server:
//!   its threads have work for the frontends and engines, and its cores are few. A spinning thread
//!   would take a core from the engine. A sleeping one would cost every request a wake-up (5 us and
//!   more) before it is even queued. The price: before a thread returns to its own work, it may
//!   handle other threads' events. Each takes some tenths of a microsecond.
//! - *A thread of its own* ([`Cluster::own_shard`], [`Cluster::own_matchmaker`]). This thread takes
//!   the mailbox once and keeps it. All other threads only put messages in. This way suits a
//!   machine with cores for scheduling alone, and the benchmark. One thread may own all parts: the
//!   simulator runs a cluster in virtual time like this, and chooses which part is late and which
//!   overtakes.
//!
//! **From the queues to the matchmaker.** The matchmaker hears of a candidate once the candidate may
//! be sent. Until then the shard keeps the candidate and the model's timer. A batch costs three
//! messages, however many requests it has: the batch may leave, has left, is done. The matchmaker
//! hears of all candidates at once if there are several kinds of devices, or lent queues. A thread
//! that is in the shard and gets into the matchmaker, too, hands the news over without a message.
//! Otherwise each model passes candidates through a place that holds only the newest. A thousand
//! requests between two looks then cost the matchmaker one look. A message tells the matchmaker
//! which model has a new candidate, so no thread scans the models. Each model has at most one such
//! message under way. Grants, their answers and completions are messages, which are never lost or
//! overtaken.
//!
//! **Waits.** No request and no completion waits for a lock. Mailboxes and candidates are
//! lock-free, and a thread only tries for the right to work on a mailbox. A lock gives out the ids
//! of models and devices that come and go. Removing an idle model waits for its shard, because the
//! caller needs an answer.
//!
//! **Time.** A candidate's `exec` and the queues' deadlines share one alarm clock, whose thread
//! sleeps until the earliest alarm. One store to an atomic sets an alarm. The thread is woken only
//! for a new earliest alarm.
//!
//! **Decision logs.** With [`Setup::log`] each shard and the matchmaker has its own journal. A
//! journal's bytes go to a [`LogSink`] at the end of a turn, some tens of thousands at a time.
//! Without a log an event costs one check of an empty `Option`.
//!
//! One thing is left undone: any thread may handle an event of a shard. A busy shard therefore
//! moves between cores, and its queues' cache lines with it. Pinning the shard to one thread would
//! bring back the wake-up.
//!
//! [`Shard`]: downbeat_core::cluster::Shard
//! [`Matchmaker`]: downbeat_core::cluster::Matchmaker
#![forbid(unsafe_code)]

mod alarm;
mod cluster;
mod handler;
mod held_back;
mod latest_candidates;
mod mailbox;
mod matchmaker_state;
mod owned;
mod published_demand;
mod round;
mod setup;
mod shard_state;
mod sync;
mod turns;

pub use cluster::{Cluster, QueueHandle, TURN};
pub use handler::{Handler, LOG_BUFFER, LogSink, Moment, hand_over};
pub use owned::{OwnMatchmaker, OwnShard};
pub use round::MAX_SHARDS;
pub use setup::Setup;
