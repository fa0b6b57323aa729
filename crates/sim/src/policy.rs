//! The schedulers by their names.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, OrderPolicy};
use downbeat_core::{Duration, UnknownName};

use crate::simulation::system::{Downbeat, System};

/// A scheduler by name: a dispatch policy of Downbeat's scheduler with a drop policy and an order
/// of turns, or another system.
///
/// Written `NAME[:ARGUMENT][+DROP][@ORDER]`, such as `deferred`, `eager+head`,
/// `timeout:20%+head@fair`. The names are those of [`Policies`], [`DropPolicy`] and [`OrderPolicy`].
#[derive(Clone, Debug)]
pub struct Policy {
    name: String,
    choice: Choice,
    /// The drop policy; `None`: the system has its own.
    drop: Option<DropPolicy>,
    /// The order of turns; `None`: the text names none.
    order: Option<OrderPolicy>,
}

/// A scheduler that a name stands for.
#[derive(Clone, Debug)]
pub enum Choice {
    /// Downbeat's scheduler with this dispatch policy.
    Dispatch(DispatchPolicy),
    /// Downbeat's scheduler with [`DispatchPolicy::Timeout`], by a share of each model's SLO.
    TimeoutShare(f64),
    /// Another system, which drops by rules of its own.
    System(Arc<dyn System>),
}

/// The policies that a program knows: those of [`DispatchPolicy::ALL`] by which a scheduler makes
/// batches, and these systems beside them.
#[derive(Clone, Copy, Debug)]
pub struct Policies(pub &'static [Name]);

/// The policies that a server also has.
pub const SERVED: Policies = Policies(&[]);

/// A policy in a table.
#[derive(Clone, Debug)]
pub struct Name {
    /// The name as users write it.
    pub name: &'static str,
    /// The form of the argument; empty: the policy takes none.
    pub argument: &'static str,
    /// The default drop policy.
    pub drop: DropPolicy,
    /// The arguments that [`Policies::all`] uses.
    pub arguments: &'static [&'static str],
    /// Makes the scheduler from the argument.
    make: Make,
}

/// Makes a scheduler.
#[derive(Clone, Debug)]
enum Make {
    Dispatch(DispatchPolicy),
    System(fn(&str) -> Option<Choice>),
}

impl Name {
    /// A system with drop rules of its own. `make` makes it from the argument (empty: none), and
    /// returns `None` if the argument is invalid.
    pub const fn system(name: &'static str, argument: &'static str, make: fn(&str) -> Option<Choice>) -> Self {
        Name { name, argument, drop: DropPolicy::WindowDrop, arguments: &[""], make: Make::System(make) }
    }

    fn dispatch(policy: &DispatchPolicy) -> Self {
        let (argument, arguments): (_, &[&str]) = match policy {
            DispatchPolicy::Timeout { .. } => ("MS or P%", &["10%", "25%", "50%"]),
            _ => ("", &[""]),
        };
        let (name, drop, make) = (policy.name(), policy.suitable_drop(), Make::Dispatch(policy.clone()));
        Name { name, argument, drop, arguments, make }
    }

    /// Makes the scheduler from the argument (empty: none); `None` if the argument is invalid.
    fn make(&self, argument: &str) -> Option<Choice> {
        match &self.make {
            Make::Dispatch(DispatchPolicy::Timeout { .. }) => timeout(argument),
            Make::Dispatch(policy) => argument.is_empty().then(|| Choice::Dispatch(policy.clone())),
            Make::System(make) => make(argument),
        }
    }
}

/// The reason why a text is not a policy.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UnknownPolicy {
    /// No such name.
    #[error("unknown policy '{text}'; expected one of: {}", known.join(", "))]
    Policy {
        /// The text.
        text: String,
        /// The known names.
        known: Vec<String>,
    },
    /// An argument that is missing, not wanted, or wrong.
    #[error("'{text}': expected {expected}")]
    Argument {
        /// The given text.
        text: String,
        /// The expected form.
        expected: String,
    },
    /// No such drop policy or order of turns.
    #[error(transparent)]
    Name(#[from] UnknownName),
    /// An order of turns for a system that has its own.
    #[error("the policy '{0}' has an order of its own; leave out '@{1}'")]
    OwnOrder(String, String),
    /// A drop policy for a system that has its own.
    #[error("the policy '{0}' drops requests by its own rules; leave out '+{1}'")]
    OwnDrop(String, String),
}

/// Parses a timeout, at most an hour or ten SLOs.
fn timeout(argument: &str) -> Option<Choice> {
    let number = |text: &str, most: f64| text.parse().ok().filter(|n: &f64| (0.0..=most).contains(n));
    match argument.strip_suffix('%') {
        Some(percent) => number(percent, 1e3).map(|percent| Choice::TimeoutShare(percent / 100.0)),
        None => {
            let delay = Duration::from_millis_f64(number(argument, 3.6e6)?);
            Some(Choice::Dispatch(DispatchPolicy::Timeout { delay, preferred: Vec::new() }))
        }
    }
}

fn written(name: &Name) -> String {
    let Name { name, argument, .. } = name;
    if argument.is_empty() { (*name).to_owned() } else { format!("{name}:{argument}") }
}

impl Policies {
    fn known(&self) -> impl Iterator<Item = Name> {
        let dispatches = DispatchPolicy::ALL.iter().filter(|policy| **policy != DispatchPolicy::Route);
        dispatches.map(Name::dispatch).chain(self.0.iter().cloned())
    }

    /// The names, as they are written.
    pub fn names(&self) -> Vec<String> {
        self.known().map(|known| written(&known)).collect()
    }

    /// Parses a policy such as `eager+head@fair`. A text without a drop policy gets the name's
    /// default.
    ///
    /// # Errors
    /// If the text names no policy of these tables, or gives a system a drop policy or an order.
    pub fn parse(&self, text: &str) -> Result<Policy, UnknownPolicy> {
        let (plain, order) = text.split_once('@').map_or((text, None), |(plain, order)| (plain, Some(order)));
        let (system, drop) = plain.split_once('+').map_or((plain, None), |(system, drop)| (system, Some(drop)));
        let (name, argument) = system.split_once(':').unwrap_or((system, ""));
        let known = self.known().find(|known| known.name == name);
        let known = known.ok_or_else(|| UnknownPolicy::Policy { text: system.to_owned(), known: self.names() })?;
        let choice = known
            .make(argument)
            .ok_or_else(|| UnknownPolicy::Argument { text: system.to_owned(), expected: written(&known) })?;
        let own = matches!(choice, Choice::System(_));
        let drop = match drop {
            Some(drop) if own => return Err(UnknownPolicy::OwnDrop(system.to_owned(), drop.to_owned())),
            None if own => None,
            None => Some(known.drop),
            Some(drop) => Some(drop.parse::<DropPolicy>()?),
        };
        let order = match order {
            Some(order) if own => return Err(UnknownPolicy::OwnOrder(system.to_owned(), order.to_owned())),
            None => None,
            Some(order) => Some(order.parse()?),
        };
        Ok(Policy { name: text.to_owned(), choice, drop, order })
    }

    /// As [`Policies::parse`], but `drop` replaces the default if the text names no drop policy and
    /// the system has none of its own.
    ///
    /// # Errors
    /// As [`Policies::parse`].
    pub fn with_drop(&self, text: &str, drop: DropPolicy) -> Result<Policy, UnknownPolicy> {
        let policy = self.parse(text)?;
        if policy.drop.is_none() || text.contains('+') {
            return Ok(policy);
        }
        let (plain, order) = text.split_at(text.find('@').unwrap_or(text.len()));
        Ok(Policy { name: format!("{plain}+{drop}{order}"), drop: Some(drop), ..policy })
    }

    /// All policies; timeouts come with a few shares of the SLO. Each policy is combined with each
    /// of `drops`, unless it has its own drop policy. If `drops` is empty, each has its default,
    /// and those with window drop also head drop.
    pub fn all(&self, drops: &[DropPolicy]) -> Vec<Policy> {
        let mut all: Vec<Policy> = Vec::new();
        for Name { name, arguments, drop, .. } in self.known() {
            let own: &[DropPolicy] = if drop == DropPolicy::WindowDrop { &[DropPolicy::HeadDrop] } else { &[] };
            for argument in arguments {
                let text = if argument.is_empty() { name.to_owned() } else { format!("{name}:{argument}") };
                let plain = self.parse(&text).into_iter().filter(|_| drops.is_empty());
                let drops = if drops.is_empty() { own } else { drops };
                for policy in plain.chain(drops.iter().filter_map(|drop| self.with_drop(&text, *drop).ok())) {
                    if !all.contains(&policy) {
                        all.push(policy);
                    }
                }
            }
        }
        all
    }
}

impl Policy {
    /// The scheduler.
    pub fn system(&self) -> Arc<dyn System> {
        match &self.choice {
            Choice::System(system) => system.clone(),
            _ => Arc::new(Downbeat),
        }
    }

    /// The dispatch policy of a model with this SLO.
    pub fn dispatch(&self, slo: Duration) -> DispatchPolicy {
        match &self.choice {
            Choice::Dispatch(dispatch) => dispatch.clone(),
            Choice::TimeoutShare(share) => {
                let delay = Duration::from_secs_f64(slo.as_secs_f64() * share);
                DispatchPolicy::Timeout { delay, preferred: Vec::new() }
            }
            Choice::System(_) => DispatchPolicy::Eager,
        }
    }

    /// Whether batches wait for a delay.
    pub fn is_timeout(&self) -> bool {
        matches!(self.choice, Choice::TimeoutShare(_) | Choice::Dispatch(DispatchPolicy::Timeout { .. }))
    }

    /// The order in which candidates get devices.
    pub fn order(&self) -> OrderPolicy {
        self.order.unwrap_or_default()
    }

    /// The order that the text names; `None`: the text leaves the order as it is.
    pub fn own_order(&self) -> Option<OrderPolicy> {
        self.order
    }

    /// The drop policy. The checker holds a system with its own drop policy to the deadlines of its
    /// batches.
    pub fn drop(&self) -> DropPolicy {
        self.drop.unwrap_or(DropPolicy::HeadDrop)
    }
}

/// Two policies are equal if their texts are equal.
impl PartialEq for Policy {
    fn eq(&self, other: &Policy) -> bool {
        self.name == other.name
    }
}

/// Parses one of [`SERVED`].
impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        SERVED.parse(text)
    }
}

/// Writes the policy as the user wrote it.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::cluster::Order;

    use super::*;

    fn parse(text: &str) -> Result<Policy, String> {
        text.parse().map_err(|error: UnknownPolicy| error.to_string())
    }

    #[test]
    fn names_arguments_and_drop_policies() {
        let slo = Duration::from_millis(50);
        assert_eq!(parse("deferred").unwrap().drop(), DropPolicy::WindowDrop);
        assert_eq!(parse("eager+head").unwrap().drop(), DropPolicy::HeadDrop);
        for text in ["timeout:10", "timeout:20%+none"] {
            let delay = Duration::from_millis(10);
            let expected = DispatchPolicy::Timeout { delay, preferred: Vec::new() };
            assert_eq!(parse(text).unwrap().dispatch(slo), expected, "{text}");
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn orders_of_turns() {
        let order = |text: &str| parse(text).map(|policy| policy.order());
        assert_eq!(order("adaptive@urgency"), Ok(OrderPolicy::Fixed(Order::Urgency)));
        assert_eq!(order("timeout:20%+head@fair"), Ok(OrderPolicy::Fixed(Order::Fair)));
        assert_eq!(order("adaptive@rehearsed"), Ok(OrderPolicy::Rehearsed));
        let expected = "unknown order 'random'; expected one of: shortest, urgency, fair, rehearsed";
        assert_eq!(order("eager@random").unwrap_err(), expected);
        let with_drop = SERVED.with_drop("eager@fair", DropPolicy::HeadDrop).unwrap();
        assert_eq!(with_drop, "eager+head@fair".parse().unwrap());
    }

    #[test]
    fn what_is_no_policy_is_told_what_is_one() {
        let expected = format!("unknown policy 'lazy'; expected one of: {}", SERVED.names().join(", "));
        assert_eq!(parse("lazy").unwrap_err(), expected);
        assert_eq!(
            parse("eager+tail").unwrap_err(),
            "unknown drop policy 'tail'; expected one of: window, head, adaptive, none"
        );
        for text in ["timeout", "timeout:-1", "timeout:nan", "timeout:x%", "eager:3"] {
            assert!(parse(text).unwrap_err().contains("': expected "), "{text}");
        }
    }

    #[test]
    fn all_have_head_drop_and_timeouts_among_them() {
        let names = |drops: &[DropPolicy]| SERVED.all(drops).iter().map(ToString::to_string).collect::<Vec<_>>();
        let expected = "deferred deferred+head eager eager+head latest latest+head timeout:10% timeout:10%+head timeout:25% \
                        timeout:25%+head timeout:50% timeout:50%+head adaptive consolidating";
        assert_eq!(names(&[]).join(" "), expected);
        let both = names(&[DropPolicy::WindowDrop, DropPolicy::HeadDrop]);
        assert!(both.starts_with(&["deferred+window".to_owned(), "deferred+head".to_owned()]), "{both:?}");
        assert!(
            both.contains(&"adaptive+head".to_owned()) && both.contains(&"timeout:50%+window".to_owned()),
            "{both:?}"
        );
    }
}
