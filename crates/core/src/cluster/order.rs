//! Whose turn it is.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::ModelId;
use crate::time::{Duration, Time};

/// In which order candidates that wait for nothing but a device get one, those of all models.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Shortest feasible first: where all that waits could be run before the first of it has to start, no order costs a deadline, and what takes the least
    /// device time an item goes first (Smith's rule), if a quarter less; everywhere else as [`Order::Urgency`].
    #[default]
    Shortest,
    /// The one that has to start first (Symphony §3.2): earliest deadline first, less what the batch takes.
    Urgency,
    /// Fair shares of the device time: the model whose next batch begins earliest in the time of start-time fair queueing (Goyal, Vin and Cheng 1996, §2), all
    /// models with the same weight, and of those the most urgent. Who asks for less than its share gets all of it, whatever the others ask for.
    Fair,
}

impl Order {
    /// All there are.
    pub const ALL: [Order; 3] = [Order::Shortest, Order::Urgency, Order::Fair];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Order::Shortest => "shortest",
            Order::Urgency => "urgency",
            Order::Fair => "fair",
        }
    }
}

/// As [`Order::name`].
impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Who says which order it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OrderPolicy {
    /// It is this one.
    Fixed(Order),
    /// The [`super::Rehearsal`], which begins with [`Order::Shortest`].
    Rehearsed,
}

impl OrderPolicy {
    const REHEARSED: &str = "rehearsed";

    /// As they are written, by the names of the orders.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Order::ALL.into_iter().map(Order::name).chain([OrderPolicy::REHEARSED])
    }

    /// What holds until something else is said.
    pub fn first(self) -> Order {
        match self {
            OrderPolicy::Fixed(order) => order,
            OrderPolicy::Rehearsed => Order::default(),
        }
    }
}

impl Default for OrderPolicy {
    fn default() -> Self {
        OrderPolicy::Fixed(Order::default())
    }
}

/// A word that is no order.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown order '{0}'; expected one of: {names}", names = OrderPolicy::names().collect::<Vec<_>>().join(", "))]
pub struct UnknownOrder(String);

impl FromStr for OrderPolicy {
    type Err = UnknownOrder;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == OrderPolicy::REHEARSED {
            return Ok(OrderPolicy::Rehearsed);
        }
        let known = Order::ALL.into_iter().find(|order| order.name() == text);
        known.map(OrderPolicy::Fixed).ok_or_else(|| UnknownOrder(text.to_owned()))
    }
}

/// As it is written.
impl fmt::Display for OrderPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OrderPolicy::Fixed(order) => order.fmt(f),
            OrderPolicy::Rehearsed => f.write_str(OrderPolicy::REHEARSED),
        }
    }
}

/// The time of start-time fair queueing, on the devices of one kind: it goes on as device time is given out, to the begin of the batch that was granted last.
/// A model's next batch begins in it where its last one ended, or now if that is later: who did not ask saves nothing up, and what others had meanwhile is
/// held against nobody. So a candidate waits for no more than a batch of each other model, and what they are behind it.
#[derive(Clone, Debug, Default)]
pub(super) struct FairTime {
    now: Time,
    /// By model: where its last batch ended.
    ends: Vec<Time>,
}

impl FairTime {
    /// At its begin, of so many models.
    pub fn new(models: usize) -> Self {
        FairTime { now: Time::ZERO, ends: vec![Time::ZERO; models] }
    }

    /// There is another model.
    pub fn join(&mut self) {
        self.ends.push(Time::ZERO);
    }

    /// Where a model's next batch begins.
    pub fn begin(&self, model: u32) -> Time {
        self.now.max(self.ends[model as usize])
    }

    /// A model is granted a device.
    pub fn granted(&mut self, model: ModelId) {
        self.now = self.begin(model.0);
        self.ends[model.0 as usize] = self.now;
    }

    /// Its batch takes so long.
    pub fn runs(&mut self, model: ModelId, takes: Duration) {
        self.ends[model.0 as usize] += takes;
    }
}
