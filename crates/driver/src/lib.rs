//! Runs Downbeat's scheduler on threads (Symphony §4.2, *scalability of the centralized scheduler*).
//!
//! The parts come from `downbeat-core`: some [`Shard`]s, each for some of the models, and one
//! [`Matchmaker`]. These parts know no threads, and exchange messages. Here each part is the state
//! of a `Mailbox`, into which threads put messages. A [`Cluster`] has all mailboxes. A [`Handler`]
//! brings the clock and the payloads.
//!
//! **Two ways to run a mailbox**, with the same code:
//!
//! - *The posting thread works* ([`Cluster::post`], [`Cluster::complete`]). A thread that has put
//!   a message in tries to become the mailbox's worker. If another thread already works there, that
//!   thread finds the message, and no thread waits. So an event costs no wake-up and no context
//!   switch. A device that completes a batch usually leaves with its next one in hand. A message
//!   for an idle mailbox is handled at once, without a place in the mailbox. A thread that goes
//!   from a shard to the matchmaker stays in the shard, and takes the shard's grants along. This
//!   way suits a server: its threads have work for the frontends and engines, and its cores are
//!   few. A spinning thread would take a core from the engine. A sleeping one would cost every
//!   request a wake-up (5 us and more) before it is even queued. The price: a thread may handle
//!   other threads' events before it returns to its own, some tenths of a microsecond each.
//! - *A thread of its own* ([`Cluster::own_shard`], [`Cluster::own_matchmaker`]). This thread
//!   enters and stays, so that all others leave their messages. This way suits a machine with cores
//!   for scheduling alone, and the benchmark. One thread may own all parts: the simulator runs a
//!   cluster in virtual time like this, and chooses which part is late and which overtakes.
//!
//! **From the queues to the matchmaker** each model passes candidates through a place that holds
//! only the newest. A thousand requests between two looks then cost the matchmaker one look. A
//! message announces a model, at most one at a time, so no thread ever scans the models. Grants,
//! their answers and completions are messages, which are never lost or overtaken.
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
//! Without a log each event finds an `Option` empty.
//!
//! One thing is left undone: an event prefers no thread. A busy shard therefore moves between
//! cores, and its queues' cache lines with it. Pinning the shard to one thread would bring back the
//! wake-up.
//!
//! [`Shard`]: downbeat_core::cluster::Shard
//! [`Matchmaker`]: downbeat_core::cluster::Matchmaker
#![forbid(unsafe_code)]

mod alarm;
mod cluster;
mod handler;
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
