//! The `downbeat` command: parse, resolve, call. It is a library, so that tests can read files
//! without a process.

#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod commands;
pub mod options;
pub mod profile;
pub mod run_output;

use std::process::ExitCode;

use anyhow::Context;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use downbeat_report::note;
use downbeat_service::options::{LogFormat, ServerOptions};
use options::resolve::Process;

pub use commands::engine_command::{engine_choice, engine_for};
pub use commands::log_command::write_log;
pub use options::options_file::read_text;
pub use options::resolve::{open_repository, options_of_text};
pub use profile::profile_shares::device_units;

/// Serve deep-learning models under latency SLOs.
#[derive(Parser, Debug)]
#[command(name = "downbeat", version, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Serve(Box<options::serve_flags::ServeFlags>),
    /// Take requests of clients for the backends of a cluster
    ///
    /// Options come from the same sources as those of `downbeat serve`; a frontend has no models of
    /// its own.
    Frontend(Box<options::serve_flags::ServeFlags>),
    /// Decide for the frontends and backends of a cluster which batch runs where and when, or stand
    /// by
    ///
    /// Options come from the same sources as those of `downbeat serve`; a scheduler has no models
    /// of its own.
    Scheduler(Box<options::serve_flags::ServeFlags>),
    /// Run the models of a repository for the frontends of a cluster
    ///
    /// Options, and their sources, are the same as for `downbeat serve`.
    Backend(Box<options::serve_flags::ServeFlags>),
    Infer(commands::infer::InferArgs),
    Import(commands::import::ImportArgs),
    Profile(Box<profile::profile_command::ProfileArgs>),
    Plan(commands::plan_command::PlanArgs),
    Bench(Box<downbeat_bench::Args>),
    #[command(subcommand)]
    Simulate(commands::simulate::SimulateCommand),
    #[command(subcommand)]
    Engine(commands::engine_command::EngineCommand),
    #[command(subcommand)]
    Config(commands::config_check::ConfigCommand),
    #[command(subcommand)]
    Log(commands::log_command::LogCommand),
    WhatIf(commands::what_if_command::WhatIfArgs),
    Advise(commands::what_if_command::AdviseArgs),
    Timeline(commands::timeline_command::TimelineArgs),
    Top(commands::top::TopArgs),
    #[command(subcommand)]
    Key(commands::key_command::KeyCommand),
    Man(commands::manual::ManArgs),
    Completions(commands::manual::CompletionsArgs),
    /// Runs a model for the server that started this process; standard input is the socket to the
    /// server.
    #[command(hide = true)]
    Executor,
}

/// Exit status of a wrong command line, as clap's own.
const USAGE: u8 = 2;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    downbeat_engine::process::begin(downbeat_engine_ort::VARIABLES);
    let cli = Cli::try_parse().unwrap_or_else(|error| with_tip(error, std::env::args().collect()).exit());
    match run(cli.command) {
        Ok(code) => code,
        Err(failure) => {
            let words = format!("downbeat: {}", one_paragraph(&failure.error));
            // The log's queue keeps the order of lines, and does not delay the end.
            if !downbeat_server::last_words(&words) {
                note(words);
            }
            ExitCode::from(failure.code)
        }
    }
}

/// Words of earlier command lines, and the commands of the lab that replace them.
const MOVED: [(&str, &str); 2] = [("slice", "downbeat-lab slice"), ("--beside", "downbeat-lab pairs")];

/// Adds a tip if the lab has the command, or if an argument is missing because `--json` has taken
/// it for its file.
fn with_tip(mut error: clap::Error, arguments: Vec<String>) -> clap::Error {
    let unknown = error.get(ContextKind::InvalidSubcommand).or(error.get(ContextKind::InvalidArg));
    let is_it = |(old, _): &&(&str, &str)| matches!(unknown, Some(ContextValue::String(word)) if word == old);
    if let Some((_, new)) = MOVED.iter().find(is_it) {
        let tip = format!("it is '{new}' now");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    let taken = arguments.windows(2).find(|pair| pair[0] == "--json" && !pair[1].starts_with('-'));
    if let (ErrorKind::MissingRequiredArgument, Some([_, file])) = (error.kind(), taken) {
        let tip =
            format!("'--json {file}' writes the report to {file}; for JSON on standard output write '{file} --json'");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// The error of a command, and its exit status.
struct Failure {
    error: anyhow::Error,
    code: u8,
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure { error: error.into(), code: 1 }
    }
}

/// Runs a process that serves until a signal ends it.
fn serve(
    flags: &options::serve_flags::ServeFlags,
    process: Process,
    serve: fn(ServerOptions) -> anyhow::Result<()>,
) -> Result<ExitCode, Failure> {
    let usage = |error| Failure { error, code: USAGE };
    let resolved = options::resolve::resolve(flags, process, std::path::Path::new("")).map_err(usage)?;
    if let (Some(file), LogFormat::Text) = (&resolved.file, resolved.options.log.format) {
        note(format_args!("options from {}", file.display()));
    }
    Ok(serve(resolved.options).map(|()| ExitCode::SUCCESS)?)
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Serve(flags) => serve(&flags, Process::Server, downbeat_server::serve),
        Command::Frontend(flags) => serve(&flags, Process::Frontend, downbeat_server::serve_frontend),
        Command::Scheduler(flags) => serve(&flags, Process::Scheduler, downbeat_server::serve_scheduler),
        Command::Backend(flags) => serve(&flags, Process::Backend, downbeat_server::serve_backend),
        Command::Infer(args) => Ok(commands::infer::run(&args).map(|()| ExitCode::SUCCESS)?),
        Command::Import(args) => Ok(commands::import::run(&args).map(|()| ExitCode::SUCCESS)?),
        Command::Profile(args) => Ok(profile::profile_command::run(&args).map(|()| ExitCode::SUCCESS)?),
        Command::Plan(args) => Ok(commands::plan_command::run(&args).map(|()| ExitCode::SUCCESS)?),
        Command::Bench(args) => Ok(downbeat_bench::run(*args)?),
        Command::Simulate(command) => Ok(commands::simulate::run(&command).map(|()| ExitCode::SUCCESS)?),
        Command::Engine(command) => Ok(commands::engine_command::run(&command).map(|()| ExitCode::SUCCESS)?),
        Command::Timeline(args) => Ok(commands::timeline_command::run(&args).map(|()| ExitCode::SUCCESS)?),
        Command::Top(args) => Ok(commands::top::run(&args).map(|()| ExitCode::SUCCESS)?),
        Command::Key(command) => Ok(commands::key_command::run(&command).map(|()| ExitCode::SUCCESS)?),
        Command::Man(args) => Ok(commands::manual::write_pages(&args, Cli::command()).map(|()| ExitCode::SUCCESS)?),
        Command::Completions(args) => {
            Ok(commands::manual::print_completions(&args, Cli::command()).map(|()| ExitCode::SUCCESS)?)
        }
        Command::Log(command) => {
            Ok(if commands::log_command::run(&command)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::WhatIf(args) => Ok(commands::what_if_command::what_if(&args).map(|()| ExitCode::SUCCESS)?),
        Command::Advise(args) => Ok(commands::what_if_command::advice(&args).map(|()| ExitCode::SUCCESS)?),
        Command::Executor => {
            downbeat_engine::isolation::serve(&downbeat_engine_ort::of_executor)
                .context("only a Downbeat server may start `downbeat executor`")?;
            downbeat_engine::process::end(0)
        }
        Command::Config(command) => {
            Ok(if commands::config_check::run(&command)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

/// An error with its causes, without parts that an outer message repeats.
fn one_paragraph(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let part = cause.to_string();
        if text.contains(&part) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&part);
    }
    text
}
