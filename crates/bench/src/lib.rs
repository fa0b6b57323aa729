//! Open-loop load on any Open Inference Protocol server. The crate never links the server.
//!
//! [`plan`] resolves the command line ([`args`]). [`run`](mod@run) offers the planned load once;
//! each of its threads drives one [`load::Generator`] over a [`transport`]. [`capacity`] runs the
//! load at one rate after another. [`report`] and [`html`] show the results.

#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod allocator;
pub mod args;
pub mod arrivals;
pub mod capacity;
pub mod client;
pub mod clock;
pub mod control;
pub mod html;
pub mod interrupt;
pub mod load;
pub mod mix;
pub mod outcome;
pub mod plan;
pub mod poller;
pub mod record;
pub mod report;
pub mod request;
pub mod response;
pub mod run;
pub mod seed;
pub mod statistics;
pub mod tensors;
pub mod transport;

use std::process::ExitCode;

use anyhow::Result;
use downbeat_report::note;

pub use args::Args;

use crate::plan::Plan;
use crate::report::Report;

/// Exit status of a run in which no request was answered well.
pub const NOTHING_ANSWERED: u8 = 3;

/// Measures as the command line says, prints a table, and writes the requested reports. Returns
/// [`NOTHING_ANSWERED`] if no request was answered well. SIGINT ends the measuring, not the report;
/// a second one ends the process.
///
/// # Errors
/// If the command line is wrong, the server does not name its models' inputs, or a report cannot be
/// written.
pub fn run(args: Args) -> Result<ExitCode> {
    let plan = Plan::resolve(&args)?;
    interrupt::watch(plan.interrupted.clone())?;
    let report = match &plan.search {
        Some(search) => {
            let (outcome, found) = capacity::search(&plan, search, args.quiet)?;
            Report::new(&plan, &outcome, Some(found))
        }
        None => {
            let mut seconds = 0;
            let outcome = run::run(&plan, &plan.pace, run::Hopeless::default(), &mut |now| {
                let passed = now.as_nanos() / 1_000_000_000;
                if !args.quiet && passed >= seconds + 5 {
                    seconds = passed;
                    note(format_args!("{passed} s"));
                }
            })?;
            Report::new(&plan, &outcome, None)
        }
    };
    args.json.print(&report)?;
    args.html.write(|| html::page(&report))?;
    Ok(if report.total.ok > 0 { ExitCode::SUCCESS } else { ExitCode::from(NOTHING_ANSWERED) })
}
