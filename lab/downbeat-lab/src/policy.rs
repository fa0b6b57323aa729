//! The policies of the lab: a server's policies, and published systems for comparison.

use std::sync::Arc;

use downbeat_sim::policy::{Choice, Name, Policies};

use crate::baseline::{Clockwork, Gather, Nexus, NexusOptions, Pinned, Shepherd};
use downbeat_core::DeviceId;
use downbeat_sim::{BadArrivals, Report, Simulation, System};

/// All policies of the lab: those of a server, and the published systems. `clockwork`, `nexus` and
/// `shepherd` drop by rules of their own.
pub const POLICIES: Policies = Policies(&[
    // The batch that has to start first, in the largest size that still meets its deadline.
    Name::system("clockwork", "", |argument| system(argument, Baseline::Clockwork)),
    // A plan of batches and devices for each epoch, with so many frontends (1).
    Name::system("nexus", "FRONTENDS", nexus),
    // Shepherd Flex: the largest batch first, which may preempt one of a third its size.
    Name::system("shepherd", "", |argument| system(argument, Baseline::Shepherd(Gather::Prefix))),
]);

/// A published system. Of a model's options only the profile and the largest batch count.
#[derive(Clone, PartialEq, Debug)]
pub enum Baseline {
    /// [`Clockwork`].
    Clockwork,
    /// [`Nexus`].
    Nexus(NexusOptions),
    /// [`Shepherd`] Flex.
    Shepherd(Gather),
    /// [`Pinned`]: by model, its devices, each with its share of the model's requests.
    Pinned(Vec<Vec<(DeviceId, f64)>>),
}

/// Each arm is compiled for its scheduler: no call of a run is virtual.
impl System for Baseline {
    fn run(&self, simulation: &Simulation) -> Result<Report, BadArrivals> {
        match self {
            Baseline::Clockwork => simulation.run_on(Clockwork::new()),
            Baseline::Nexus(options) => simulation.run_on(Nexus::new(*options)),
            Baseline::Pinned(places) => simulation.run_on(Pinned::new(places.clone())),
            Baseline::Shepherd(gather) => simulation.run_on(Shepherd::new(*gather)),
        }
    }
}

fn system(argument: &str, baseline: Baseline) -> Option<Choice> {
    argument.is_empty().then(|| Choice::System(Arc::new(baseline)))
}

fn nexus(argument: &str) -> Option<Choice> {
    let frontends =
        if argument.is_empty() { Some(1) } else { argument.parse().ok().filter(|n| (1..=1024).contains(n)) };
    let options = NexusOptions { frontends: frontends?, ..NexusOptions::default() };
    Some(Choice::System(Arc::new(Baseline::Nexus(options))))
}

#[cfg(test)]
mod tests {
    use downbeat_core::cluster::DropPolicy;

    use super::*;

    #[test]
    fn a_published_system_has_drops_and_turns_of_its_own() {
        let refused = |text: &str| POLICIES.parse(text).unwrap_err().to_string();
        assert!(refused("shepherd+head").contains("drops requests by its own rules"));
        assert!(refused("nexus@fair").contains("leave out '@fair'"));
        assert!(refused("nexus:0").contains("': expected nexus:FRONTENDS"));
    }

    #[test]
    fn all_policies_have_each_published_system_once() {
        let names = |drops: &[DropPolicy]| POLICIES.all(drops).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(names(&[]).join(" ").ends_with("adaptive consolidating clockwork nexus shepherd"));
        let both = names(&[DropPolicy::WindowDrop, DropPolicy::HeadDrop]);
        assert_eq!(both.iter().filter(|name| *name == "shepherd").count(), 1, "{both:?}");
    }
}
