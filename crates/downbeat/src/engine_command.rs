//! `downbeat engine`: which engines can be used here, and getting the faster one.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Subcommand};
use downbeat_engine::install::Install;
use downbeat_engine::{Emulated, Engine, Preference, Search};
use downbeat_repository::ModelFormat;
use downbeat_server::options::EngineChoice;

/// List engines, or install onnxruntime.
#[derive(Subcommand, Debug)]
pub enum EngineCommand {
    /// The engines that can be used here, the fastest first
    List,
    /// Fetch the onnxruntime library with pip into the user's cache folder
    Install(InstallArgs),
}

/// Arguments of `downbeat engine install`.
#[derive(Args, Debug)]
pub struct InstallArgs {
    /// Version of onnxruntime [default: the one this was tested with]
    #[arg(long, value_name = "VERSION")]
    version: Option<String>,
    /// The Python whose pip fetches it [default: python3]
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// A wheel that was fetched elsewhere, to unpack instead
    #[arg(long, value_name = "FILE")]
    wheel: Option<PathBuf>,
}

/// The engine for models of this format; what there is to know of the choice is printed.
///
/// # Errors
/// If the engine that is wanted cannot be used.
pub fn engine_for(format: ModelFormat, wanted: EngineChoice, search: &Search) -> anyhow::Result<Arc<dyn Engine>> {
    Ok(match format {
        ModelFormat::Emulated => Arc::new(Emulated::new()),
        ModelFormat::Onnx => {
            let preference: Preference = wanted.name().parse()?;
            let choice = downbeat_engine::choose(preference, search)?;
            if let Some(hint) = choice.hint {
                eprintln!("{hint}");
            }
            choice.engine
        }
    })
}

/// Runs the command.
///
/// # Errors
/// If the library cannot be fetched or written.
pub fn run(command: &EngineCommand) -> anyhow::Result<()> {
    match command {
        EngineCommand::List => {
            for info in downbeat_engine::available(&Search::from_env()) {
                let library = info.library.map_or_else(|| "built in".to_owned(), |path| path.display().to_string());
                println!("{:<12} {:<10} {:<6} {library}", info.name, info.version, info.device);
            }
        }
        EngineCommand::Install(args) => {
            let mut install = Install::new()?;
            if let Some(version) = &args.version {
                install.version.clone_from(version);
            }
            if let Some(python) = &args.python {
                install.python.clone_from(python);
            }
            install.wheel.clone_from(&args.wheel);
            let installed = install.run()?;
            println!(
                "onnxruntime {} is in {}; `downbeat serve` finds it there",
                installed.version,
                installed.library.display()
            );
        }
    }
    Ok(())
}
