//! Which scheduler is simulated.

use downbeat_core::cluster::Scheduler;
use downbeat_core::{DeviceId, Time};

use crate::arrivals::BadArrivals;
use crate::baseline::{Clockwork, Gather, Nexus, NexusOptions, Pinned, Shepherd};
use crate::rehearsed::Rehearsed;
use crate::report::Report;
use crate::simulation::Simulation;

/// Which scheduler is simulated: Downbeat's own, or one that it is compared with.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum System {
    /// The production [`Scheduler`]; each model's options say by which policies.
    #[default]
    Downbeat,
    /// [`Clockwork`]; of a model's options only the profile and the largest batch count.
    Clockwork,
    /// [`Nexus`]; likewise.
    Nexus(NexusOptions),
    /// [`Shepherd`] Flex; likewise.
    Shepherd(Gather),
    /// [`Pinned`]: by model, on which devices it is, each with the share of its requests that goes there.
    Pinned(Vec<Vec<(DeviceId, f64)>>),
}

impl System {
    /// Runs `simulation` on a new scheduler of this kind. Each arm is compiled for its scheduler: no call is virtual.
    pub(crate) fn run(&self, simulation: &Simulation) -> Result<Report, BadArrivals> {
        match self {
            System::Downbeat => match Rehearsed::of(simulation) {
                Some(rehearsed) => simulation.run_on(rehearsed),
                None => {
                    let mut scheduler = Scheduler::new();
                    scheduler.set_order(Time::ZERO, simulation.order.first());
                    simulation.run_on(scheduler)
                }
            },
            System::Clockwork => simulation.run_on(Clockwork::new()),
            System::Nexus(options) => simulation.run_on(Nexus::new(*options)),
            System::Pinned(places) => simulation.run_on(Pinned::new(places.clone())),
            System::Shepherd(gather) => simulation.run_on(Shepherd::new(*gather)),
        }
    }
}
