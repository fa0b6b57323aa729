//! `downbeat key`: API keys, and secrets of clusters.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use downbeat_server::{NewKey, Scope, add_key, add_secret, new_secret};

use crate::options::units;

/// Make API keys for `downbeat serve --api-keys FILE`, and secrets of clusters.
#[derive(Subcommand, Debug)]
pub enum KeyCommand {
    Add(AddArgs),
    Secret(SecretArgs),
}

/// Make a secret for `--cluster-secret FILE`, which the processes of a cluster prove to each other.
///
/// Without a file the secret is printed. A file that has secrets gets one more, as its last line:
/// processes prove the first secret, and accept each. To replace a secret, add a new line on all
/// machines. Then move the new line to the top everywhere, and then delete the old line.
#[derive(Args, Debug)]
pub struct SecretArgs {
    /// The file of secrets; it is made if there is none, for its owner alone
    file: Option<PathBuf>,
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
    match command {
        KeyCommand::Add(args) => add(args),
        KeyCommand::Secret(args) => secret(args),
    }
}

fn secret(args: &SecretArgs) -> anyhow::Result<()> {
    let Some(file) = &args.file else { return Ok(writeln!(downbeat_report::out(), "{}", new_secret()?)?) };
    let (count, shown) = (add_secret(file)?, file.display());
    downbeat_report::note(match count {
        1 => format!("{shown} has a secret: give all processes of the cluster this file (--cluster-secret)"),
        count => format!("{shown} has {count} secrets: processes prove the first, and accept each"),
    });
    Ok(())
}

fn add(args: &AddArgs) -> anyhow::Result<()> {
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
