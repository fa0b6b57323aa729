//! `downbeat man` and `downbeat completions`: the command line for `man` and for shells.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Command};

/// Write manual pages, one for each command.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// Folder for the pages, such as ~/.local/share/man/man1
    folder: PathBuf,
}

/// Print a script that completes commands and flags in a shell.
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

/// Writes the manual pages of `command`.
///
/// # Errors
/// If a page cannot be written.
pub fn write_pages(args: &ManArgs, command: Command) -> anyhow::Result<()> {
    let cannot = || format!("cannot write manual pages to {}", args.folder.display());
    std::fs::create_dir_all(&args.folder).with_context(cannot)?;
    clap_mangen::generate_to(command, &args.folder).with_context(cannot)
}

/// Prints the completions of `command`.
///
/// # Errors
/// If standard output cannot be written.
pub fn print_completions(args: &CompletionsArgs, mut command: Command) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "downbeat", &mut script);
    Ok(downbeat_report::out().write_all(&script)?)
}
