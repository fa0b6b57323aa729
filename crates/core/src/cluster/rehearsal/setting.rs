//! What the scheduler can be told to do.

use crate::cluster::behaviour::Behaviour;
use crate::cluster::order::Order;

/// What the scheduler can be told to do: what a candidate of a trial is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Setting {
    /// By model; `None`: as follows from the load of the moment, or it is gone.
    pub behaviours: Vec<Option<Behaviour>>,
    /// Of all models.
    pub order: Order,
}
