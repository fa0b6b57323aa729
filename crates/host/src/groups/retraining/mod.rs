//! Training of the predictor of operator groups with served groups. The feature `retraining`
//! compiles this module; a build without the feature has `absent.rs` in its place.

mod group_retrainer;
mod learning;
mod served_groups;

pub use group_retrainer::GroupRetrainer;
pub use learning::Learning;
