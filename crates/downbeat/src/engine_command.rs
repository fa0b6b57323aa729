//! `downbeat engine`: which engines can be used here, and getting the faster one.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use downbeat_engine::install::Install;

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

/// Runs the command.
///
/// # Errors
/// If the library cannot be fetched or written.
pub fn run(command: &EngineCommand) -> anyhow::Result<()> {
    match command {
        EngineCommand::List => {
            for info in downbeat_engine::available(&downbeat_engine::Search::from_env()) {
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
