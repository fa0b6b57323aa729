//! `downbeat config check`: what is wrong, and what is passed over, in a model repository.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use downbeat_engine::{Emulated, Engine, LoadOptions};
use downbeat_repository::{ModelDefinition, ModelFormat, ModelRepository};

/// Look at configurations without serving them.
#[derive(Subcommand, Debug)]
pub enum ConfigCommand {
    /// Check every model of a repository; fails if one could not be served
    Check(CheckArgs),
}

/// Arguments of `downbeat config check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// The model repository
    repository: PathBuf,
    /// Fail on warnings, too
    #[arg(long)]
    strict: bool,
}

/// Runs the command; `false` if something was found that it fails on.
///
/// # Errors
/// If the repository cannot be read.
pub fn run(command: &ConfigCommand) -> anyhow::Result<bool> {
    let ConfigCommand::Check(args) = command;
    let repository = ModelRepository::open(&args.repository)?;
    let scan = repository.scan()?;
    let (mut errors, mut warnings) = (0, 0);
    let mut warn = |warning: &dyn std::fmt::Display| {
        warnings += 1;
        println!("warning: {warning}");
    };
    scan.warnings.iter().for_each(|w| warn(w));
    for name in &scan.names {
        let mut definition = match repository.definition(name, None) {
            Ok(definition) => definition,
            Err(error) => {
                errors += 1;
                println!("error: {error}");
                continue;
            }
        };
        if let Err(error) = against_files(&mut definition) {
            errors += 1;
            println!("error: {error}");
        }
        definition.warnings.iter().for_each(|w| warn(w));
    }
    let models = scan.names.len();
    println!("{models} {}, {errors} in error, {warnings} {}", plural(models, "model"), plural(warnings, "warning"));
    Ok(errors == 0 && (warnings == 0 || !args.strict))
}

/// Checks a definition against the signature of each of its model files.
fn against_files(definition: &mut ModelDefinition) -> anyhow::Result<()> {
    for (_, file) in definition.versions.clone() {
        let signature = match definition.format {
            ModelFormat::Onnx => downbeat_engine::inspect(&file)?,
            ModelFormat::Emulated => Emulated::new().load(&LoadOptions::new(file, 1))?.signature().clone(),
        };
        definition.complete(&signature)?;
    }
    Ok(())
}

fn plural(count: usize, word: &str) -> String {
    if count == 1 { word.to_owned() } else { format!("{word}s") }
}
