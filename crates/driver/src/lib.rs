//! Runs Downbeat's scheduler on threads (Symphony §4.2, *scalability of the centralized scheduler*).
//!
//! The parts are those of `downbeat-core`: a [`Shard`] for some of the models each, and one [`Matchmaker`]. They know nothing of
//! threads, and talk in messages. Here each is the state of a `Mailbox`, which messages are put into. A [`Cluster`] has all of them; a
//! [`Handler`] brings the clock and the payloads.
//!
//! **Two ways to run a mailbox**, with the same code:
//!
//! - *Whoever posts works* ([`Cluster::post`], [`Cluster::complete`]): who has put a message in tries to become the one who
//!   works the mailbox off; if somebody is at it already, that one will find the message, and nobody waits. So an event costs no
//!   wake-up and no context switch, and a device that completes a batch usually leaves with its next one in hand. A message that finds its mailbox idle
//!   is handled at once, without a place in the mailbox. Who goes from a shard
//!   to the matchmaker stays in the shard, and takes the grants for it along. That is
//!   the way of a server, whose threads have the frontends' and engines' work to do, and whose cores are few: a thread that spins would take a
//!   core from the engine, one that sleeps would cost every request a wake-up (5 us and more) before it is even queued. The price is that a
//!   thread may work off others' events before it returns to its own, some tenths of a microsecond each.
//! - *A thread of its own* ([`Cluster::own_shard`], [`Cluster::own_matchmaker`]): it enters and stays, so that all others
//!   leave their messages. That is the way of a machine that has cores for nothing but scheduling, and of the benchmark.
//!   One thread may have all of them: so the simulator runs a cluster in virtual time, and chooses who is late and who overtakes.
//!
//! **From the queues to the matchmaker** candidates go through one place a model that holds the newest and nothing else, so
//! that a thousand requests between two looks cost the matchmaker one look. A model is announced by a message, at most one at a time, so
//! nothing ever scans the models. Grants, their answers and completions are messages of which none is lost or overtaken.
//!
//! **What waits.** No request and no completion waits for a lock: mailboxes and candidates are lock-free, the right to work on a
//! mailbox is only tried for. Where models and devices come and go there is a lock that gives out their names; and removing an idle
//! model waits for its shard, because it wants an answer.
//!
//! **Time.** A candidate's `exec` and the queues' deadlines have one alarm clock, whose thread sleeps until the earliest of all. It is told of
//! another time by one store to an atomic, and woken only if that becomes the earliest.
//!
//! **Decision logs.** With [`Setup::log`] each shard and the matchmaker has a journal of its own, whose bytes go to a [`LogSink`] some tens of
//! thousands at a time, at the end of a turn. Without it each event finds an `Option` empty.
//!
//! What is left undone, and why: an event carries no thread's preference, so that a busy shard moves between cores, and with it its
//! queues' cache lines. Pinning it to one thread would bring back the wake-up.
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
