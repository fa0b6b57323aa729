//! Separate frontends, schedulers and backends under virtual time, with every fault that can happen
//! between them.
//!
//! A [`NetworkScenario`] is a cluster of the production state machines of [`downbeat_roles`].
//! Each process has a clock of its own. Wires delay, lose, double and reorder frames, and are cut.
//! Processes are killed, paused, slowed, and started anew. The [`NetworkJudge`] watches the
//! processes from outside, and knows nothing of their inner state. A run follows from its seed.
//!
//! | file | what |
//! |---|---|
//! | `scenario.rs`, `random.rs`, `file.rs` | what a run is made of: said, drawn from a seed, read from a file |
//! | `wires.rs` | what becomes of a frame |
//! | `process.rs` | a process: its clock, its machine, its slots |
//! | `run.rs` | what happens when |
//! | `streams.rs` | how a model gives any number of answers |
//! | `sub_clusters.rs` | which models backends have, where the scheduler says so |
//! | `judge.rs`, `copies.rs`, `refusals.rs` | the rules: of requests, of models, of refusals |
//! | `outcome.rs` | what came of it |

mod copies;
mod events;

mod file;
mod judge;
mod outcome;
mod process;
mod random;
mod refusals;
mod rehearsing;
mod run;
mod scenario;
mod streams;
mod sub_clusters;
mod wires;

pub use file::{BadNetwork, NetworkFile};
pub use judge::{Broken, NetworkJudge};
pub use outcome::{NetworkOutcome, NetworkResults, SeedResults};
pub use refusals::RefusalJudge;
pub use scenario::{Fault, Host, NetworkModel, NetworkScenario, Pauses, Preparation, Roles, Timing, Wires};
pub use streams::Streaming;
pub use sub_clusters::{MODEL_BYTES, SubClusters};
