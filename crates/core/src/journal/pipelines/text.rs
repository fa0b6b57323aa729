//! The inputs of the book of pipelines, in words.

use std::fmt;

use super::record::{End, PipelineInput, PipelineSpec, StepSpec};
use crate::journal::machine::Fact;
use crate::journal::names::Names;
use crate::time::Time;

impl Fact for PipelineInput {
    fn tell(&self, now: Time, _names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PipelineInput::Pipeline(number, spec) => write!(f, "pipeline p{number}: {spec}"),
            PipelineInput::Callee(number, step) => {
                write!(f, "pipeline p{number} calls '{}', a further step", step.model)
            }
            PipelineInput::Request { request, pipeline, deadline, size, within } => {
                write!(f, "request #{request} of p{pipeline}{}", Due(*deadline, now))?;
                if *size != 1 {
                    write!(f, ", {size} items")?;
                }
                within.map_or(Ok(()), |(outer, step)| write!(f, ", which is step {step} of request #{outer}"))
            }
            PipelineInput::Reached { request, step, deadline } => {
                write!(f, "#{request} is at step {step}{}", Due(*deadline, now))
            }
            PipelineInput::Done { request, step, asked, began, end } => {
                write!(f, "#{request} is {end} in step {step}")?;
                asked.map_or(Ok(()), |asked| write!(f, ", as {asked}"))?;
                began.map_or(Ok(()), |began| write!(f, ", where it ran for {}", now.since(began)))
            }
            PipelineInput::End { request, end, step } => {
                write!(f, "request #{request} is {end}")?;
                step.map_or(Ok(()), |step| write!(f, ", in step {step}"))
            }
        }
    }
}

/// `step 0 'decode', step 1 'detect' after 0`.
impl fmt::Display for PipelineSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_code {
            true => write!(f, "the code of model '{}'", self.name)?,
            false => write!(f, "ensemble '{}'", self.name)?,
        }
        if !self.version.is_empty() {
            write!(f, ", version {}", self.version)?;
        }
        for (number, StepSpec { model, after }) in self.steps.iter().enumerate() {
            write!(f, "{} step {number} '{model}'", if number == 0 { ":" } else { "," })?;
            for (place, first) in after.iter().enumerate() {
                write!(f, "{}{first}", if place == 0 { " after " } else { " and " })?;
            }
        }
        Ok(())
    }
}

/// As in "the request is dropped".
impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            End::Answered => "answered",
            End::Late => "answered late",
            End::Hopeless => "given up, as the rest no longer fits",
            End::Dropped => "dropped",
            End::Full => "refused by a full queue",
            End::TimedOut => "ended by the client's timeout",
            End::Failed => "failed",
            End::Cancelled => "cancelled",
        })
    }
}

/// A deadline, counted from an instant.
struct Due(Time, Time);

impl fmt::Display for Due {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Time::MAX => f.write_str(", without a deadline"),
            deadline => write!(f, ", due in {}", deadline.since(self.1)),
        }
    }
}
