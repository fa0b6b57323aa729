//! Open-loop load on any Open Inference Protocol server. The crate never links the server.
//!
//! [`load::plan`] resolves the command line ([`args`]). [`run`](fn@run) offers the planned load once;
//! each of its threads drives one [`load::Generator`] over a [`client::transport`]. [`load::capacity`] runs the
//! load at one rate after another. [`results::report`] and [`results::html`] show the results.

#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod allocator;
pub mod args;
pub mod client;
pub mod clock;
pub mod code_pages;
pub mod interrupt;
pub mod load;
pub mod results;

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Result;
use downbeat_report::note;

use crate::load::plan::Plan;
use crate::results::report::Report;

pub use args::Args;

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
    // Progress is for people who wait, and not for files.
    let quiet = args.quiet || !std::io::stderr().is_terminal();
    let report = match &plan.search {
        Some(search) => {
            let (outcome, found) = load::capacity::search(&plan, search, quiet)?;
            Report::new(&plan, &outcome, Some(found))
        }
        None => {
            let mut seconds = 0;
            let outcome = load::run::run(&plan, &plan.pace, load::run::Hopeless::default(), &mut |now| {
                let passed = now.as_nanos() / 1_000_000_000;
                if !quiet && passed >= seconds + 5 {
                    seconds = passed;
                    note(format_args!("{passed} s"));
                }
            })?;
            Report::new(&plan, &outcome, None)
        }
    };
    args.json.print(&report)?;
    args.html.write(|| results::html::page(&report))?;
    Ok(if report.total.ok > 0 { ExitCode::SUCCESS } else { ExitCode::from(NOTHING_ANSWERED) })
}
