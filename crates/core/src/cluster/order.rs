//! The order in which candidates get devices.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::ModelId;
use crate::names::UnknownName;
use crate::time::{Duration, Time};

/// The order in which candidates get devices, among the candidates of all models that wait only for
/// a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Shortest feasible first. If all waiting candidates could run before the first of them must
    /// start, no order costs a deadline. Then the candidate with the least device time an item goes
    /// first (Smith's rule), provided that it takes a quarter less. In all other cases as
    /// [`Order::Urgency`].
    #[default]
    Shortest,
    /// The candidate that must start first (Symphony §3.2): earliest deadline first, less the time
    /// of the batch.
    Urgency,
    /// Fair shares of the device time. The model whose next batch begins earliest goes first, in
    /// the time of start-time fair queueing (Goyal, Vin and Cheng 1996, §2). Among equals the most
    /// urgent goes first. All models have the same weight. A model that asks for less than its
    /// share gets all that it asks for, even if other models ask for more.
    Fair,
}

impl Order {
    /// All orders.
    pub const ALL: [Order; 3] = [Order::Shortest, Order::Urgency, Order::Fair];

    /// The order's name in configuration and messages.
    pub fn name(self) -> &'static str {
        match self {
            Order::Shortest => "shortest",
            Order::Urgency => "urgency",
            Order::Fair => "fair",
        }
    }
}

/// Prints [`Order::name`].
impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the order is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OrderPolicy {
    /// Always this order.
    Fixed(Order),
    /// The [`super::Rehearsal`] chooses, and begins with [`Order::Shortest`].
    Rehearsed,
}

impl OrderPolicy {
    const REHEARSED: &str = "rehearsed";

    /// The names of all policies: the names of the orders, and `rehearsed`.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Order::ALL.into_iter().map(Order::name).chain([OrderPolicy::REHEARSED])
    }

    /// The order at the beginning.
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

impl FromStr for OrderPolicy {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == OrderPolicy::REHEARSED {
            return Ok(OrderPolicy::Rehearsed);
        }
        let known = Order::ALL.into_iter().find(|order| order.name() == text);
        known.map(OrderPolicy::Fixed).ok_or_else(|| UnknownName::new("order", text, OrderPolicy::names()))
    }
}

/// Prints the policy's name.
impl fmt::Display for OrderPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OrderPolicy::Fixed(order) => order.fmt(f),
            OrderPolicy::Rehearsed => f.write_str(OrderPolicy::REHEARSED),
        }
    }
}

/// The time of start-time fair queueing, on the devices of one kind. With each grant, this time
/// moves on to the begin of the granted batch. A model's next batch begins where its last batch
/// ended, or now if that is later. A model that did not ask saves nothing up. Time that other
/// models used meanwhile does not count against them. A candidate thus waits at most for a batch of
/// each other model, and for the time that these models are behind it.
#[derive(Clone, Debug, Default)]
pub(super) struct FairTime {
    now: Time,
    /// By model: the end of its last batch.
    ends: Vec<Time>,
}

impl FairTime {
    /// The beginning of time, for `models` models.
    pub fn new(models: usize) -> Self {
        FairTime { now: Time::ZERO, ends: vec![Time::ZERO; models] }
    }

    /// Adds the next model.
    pub fn join(&mut self) {
        self.ends.push(Time::ZERO);
    }

    /// The begin of a model's next batch.
    pub fn begin(&self, model: u32) -> Time {
        self.now.max(self.ends[model as usize])
    }

    /// Notes that a model is granted a device.
    pub fn granted(&mut self, model: ModelId) {
        self.now = self.begin(model.0);
        self.ends[model.0 as usize] = self.now;
    }

    /// Notes how long the granted batch takes.
    pub fn runs(&mut self, model: ModelId, takes: Duration) {
        self.ends[model.0 as usize] += takes;
    }
}
