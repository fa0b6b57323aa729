//! `downbeat key`: API keys.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use downbeat_server::{NewKey, Scope, add_key};

use crate::options::units;

/// Make API keys for `downbeat serve --api-keys FILE`.
#[derive(Subcommand, Debug)]
pub enum KeyCommand {
    Add(AddArgs),
}

/// Make a key, add its hash to a file, and print the key.
///
/// The server follows the file. To take a key back, delete its part of the file.
#[derive(Args, Debug)]
pub struct AddArgs {
    /// The file of keys; it is made if there is none
    file: PathBuf,
    /// Name of the key, such as that of its user
    name: String,
    /// A right of the key: infer, read or manage; repeatable
    #[arg(long, default_values = ["infer", "read"])]
    scope: Vec<Scope>,
    /// A model that the key is for, or the beginning of names and *; repeatable. Default: all models
    #[arg(long)]
    model: Vec<String>,
    /// Most requests a second
    #[arg(long, value_name = "N", value_parser = rate)]
    requests_per_second: Option<f64>,
    /// Most bytes that the key's requests may hold together, such as 64M
    #[arg(long, value_name = "BYTES", value_parser = units::bytes)]
    bytes_in_flight: Option<usize>,
    /// The tenant of the key, which the file must have
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("expected a number above 0".to_owned()),
    }
}

/// Runs the command.
///
/// # Errors
/// If the file is wrong or cannot be written, or has a key of this name.
pub fn run(command: &KeyCommand) -> anyhow::Result<()> {
    let KeyCommand::Add(args) = command;
    let new = NewKey {
        name: args.name.clone(),
        scopes: args.scope.clone(),
        models: args.model.clone(),
        requests_per_second: args.requests_per_second,
        bytes_in_flight: args.bytes_in_flight.map(|bytes| bytes as u64),
        tenant: args.tenant.clone(),
    };
    let key = add_key(&args.file, &new)?;
    downbeat_report::note(format!(
        "the hash of key '{}' is in {}; the key itself is printed once, here:",
        args.name,
        args.file.display()
    ));
    Ok(writeln!(downbeat_report::out(), "{key}")?)
}
