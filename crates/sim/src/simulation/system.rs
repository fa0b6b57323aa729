//! The kind of scheduler that a simulation runs.

use std::fmt;

use downbeat_core::Time;
use downbeat_core::cluster::Scheduler;

use crate::arrivals::BadArrivals;
use crate::simulation::Simulation;
use crate::simulation::rehearsed::Rehearsed;
use crate::tables::report::Report;

/// A kind of cluster scheduler, such as [`Downbeat`]. The lab adds published systems.
pub trait System: fmt::Debug + Send + Sync {
    /// Runs `simulation` on a new scheduler of this kind, with [`Simulation::run_on`].
    ///
    /// # Errors
    /// If an arrival process has no positive, finite rate and shape.
    fn run(&self, simulation: &Simulation) -> Result<Report, BadArrivals>;
}

/// The production [`Scheduler`], with its rehearsal where a model is adaptive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Downbeat;

impl System for Downbeat {
    fn run(&self, simulation: &Simulation) -> Result<Report, BadArrivals> {
        if let Some(rehearsed) = Rehearsed::of(simulation) {
            return simulation.run_on(rehearsed);
        }
        let mut scheduler = Scheduler::new();
        scheduler.set_order(Time::ZERO, simulation.order.first());
        scheduler.set_wake_margin(Time::ZERO, simulation.wake_margin);
        simulation.run_on(scheduler)
    }
}
