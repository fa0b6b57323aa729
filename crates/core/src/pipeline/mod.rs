//! Pipelines: several models under one deadline.
//!
//! A request of a pipeline passes through *steps*, and each step is a request of one model. The
//! steps form a graph without circles ([`Shape`]). Only the whole has a deadline. [`Shares`] divide
//! the time that is left. Each step gets a *local deadline*. A step that is done by then leaves the
//! later steps their shares. To the model's queue it is an ordinary deadline, so
//! a queue that serves several pipelines orders by these instants.
//!
//! The server walks its ensembles by [`graph`] and [`Shares`]. The simulator plays pipelines by
//! [`Flow`]. Both rehearse weights by [`WeightRehearsal`], and have batches that leave early.
//!
//! ```
//! use downbeat_core::pipeline::{Shape, Shares, StepCost};
//! use downbeat_core::{Duration, LatencyProfile, Time};
//!
//! // A detector, then two classifiers side by side, then a vote that waits for both.
//! let shape = Shape::new(vec![vec![], vec![0], vec![0], vec![1, 2]])?;
//! let cost = |ms| StepCost { alone: Duration::from_millis(ms), devices: 2.0, load: 0.5 };
//! let shares = Shares::fixed(&shape, &[cost(20), cost(5), cost(10), cost(1)]);
//!
//! // A request that comes at 0 must be answered by 100 ms. The detector alone takes 20 ms, but may
//! // take 56 ms, which is its share of the longest path.
//! let (now, deadline) = (Time::ZERO, Time::ZERO + Duration::from_millis(100));
//! let local = shares.local_deadline(0, now, deadline);
//! assert_eq!(local.as_nanos() / 100_000, 560);
//!
//! // The slower classifier decides when both must be done.
//! let after = Time::ZERO + Duration::from_millis(50);
//! let slower = shares.local_deadline(2, after, deadline);
//! assert_eq!(shares.local_deadline_beside(1, &[1, 2], after, deadline), slower);
//!
//! // After 90 ms in the detector, 10 + 1 ms no longer fit.
//! let late = Time::ZERO + Duration::from_millis(90);
//! assert!(!shares.can_make(&[1, 2], late, deadline));
//! # Ok::<(), downbeat_core::pipeline::ShapeError>(())
//! ```

mod division;
mod flow;
pub mod graph;
mod progress;
mod rehearsal;
mod replay;
mod shape;
mod shares;
mod stage;

pub use division::{BatchDone, Division, Reached};
pub use flow::{End, Flow, Launch, Outcome};
pub use progress::{Progress, StepState};
pub use rehearsal::{RehearsalOptions, TrialOutcome, WeightRehearsal};
pub use replay::{PipelineArrival, Replay};
pub use shape::{Shape, ShapeError, StepShape};
pub use shares::{Shares, StepCost};
pub use stage::{MOST_STEPS, Pipeline, Stage, StageError, StepModel};
