//! Trains the predictor of the time that operator groups take (Abacus §5). It learns offline from
//! samples (`downbeat profile --co-run`, the lab), and in a server from the groups that ran.
//!
//! The crate only computes: samples and a source of random numbers come in, a perceptron goes out.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod error;
mod group_sample;
mod group_sampler;
mod mlp_training;
mod random_group;

pub use error::{error_below, mean_error, relative_error, says};
pub use group_sample::{GroupSample, sets_of};
pub use group_sampler::{GroupSampler, SampledModel};
pub use mlp_training::{MlpTraining, spread, train_mlp};
pub use random_group::random_group;
