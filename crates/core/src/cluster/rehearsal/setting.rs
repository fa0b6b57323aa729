//! A setting of the scheduler: the behaviours of all models, and the order.

use crate::cluster::behaviour::Behaviour;
use crate::cluster::order::Order;

/// A setting of the scheduler, which is a candidate of a trial.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Setting {
    /// By model; `None`: the load of the moment decides, or the model is gone.
    pub behaviours: Vec<Option<Behaviour>>,
    /// The order for all models.
    pub order: Order,
}
