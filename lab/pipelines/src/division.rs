//! Divisions of the time that learn nothing.

use downbeat_core::pipeline::{Division, Reached};
use downbeat_core::{Duration, Time};

/// An SLO for each step: it counts from when the request reaches the step. The whole's deadline is
/// not known there, as if each step were a service of its own.
#[derive(Clone, Debug)]
pub struct StepSlos(
    /// By pipeline and step.
    pub Vec<Vec<Duration>>,
);

impl Division for StepSlos {
    fn local_deadline(&mut self, reached: &Reached<'_>) -> Option<Time> {
        Some(reached.now + self.0[reached.pipeline][reached.step])
    }
}

/// The same parts as instants from the arrival on: a step may use the time that earlier steps left.
#[derive(Clone, Debug)]
pub struct Instants(
    /// By pipeline and step: the time from the arrival to the step's end.
    pub Vec<Vec<Duration>>,
);

impl Division for Instants {
    fn local_deadline(&mut self, reached: &Reached<'_>) -> Option<Time> {
        Some(reached.arrival + self.0[reached.pipeline][reached.step])
    }
}

/// Each step knows only the deadline of the whole.
#[derive(Clone, Copy, Debug)]
pub struct WholeDeadline;

impl Division for WholeDeadline {
    fn local_deadline(&mut self, reached: &Reached<'_>) -> Option<Time> {
        Some(reached.deadline)
    }
}

/// No step knows a deadline: Triton's ensembles.
#[derive(Clone, Copy, Debug)]
pub struct NoDeadline;

impl Division for NoDeadline {
    fn local_deadline(&mut self, _reached: &Reached<'_>) -> Option<Time> {
        Some(Time::MAX)
    }
}
