//! The places that reports go to: standard output, which its reader may close, and files.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

/// `--json [FILE]`, the same in every command.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Json {
    /// Write everything measured as JSON: to this file, or without one to standard output in place
    /// of the text
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
}

/// `--html FILE`.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Html {
    /// Write a page with tables and plots to this file; it needs no other file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

impl Json {
    fn on_stdout(&self) -> bool {
        self.json.as_deref() == Some(Path::new("-"))
    }

    /// The destination of the text: standard output, or nowhere if the JSON is written there.
    pub fn text(&self) -> Out {
        if self.on_stdout() { Out(None) } else { out() }
    }

    /// Writes the JSON, if the user asked for it.
    ///
    /// # Errors
    /// If the JSON cannot be written.
    pub fn write(&self, report: &impl Serialize) -> Result<()> {
        let Some(file) = &self.json else { return Ok(()) };
        let text = serde_json::to_string_pretty(report)? + "\n";
        if self.on_stdout() { Ok(out().write_all(text.as_bytes())?) } else { write(file, &text) }
    }

    /// Prints the report as wide as the terminal, and writes the JSON if the user asked for it.
    ///
    /// # Errors
    /// If either cannot be written.
    pub fn print(&self, report: &(impl Display + Serialize)) -> Result<()> {
        show(&mut self.text(), report)?;
        self.write(report)
    }
}

impl Html {
    /// Writes the page, if the user asked for it.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn write(&self, page: impl FnOnce() -> String) -> Result<()> {
        self.html.as_ref().map_or(Ok(()), |file| write(file, &page()))
    }
}

/// Writes a text to a file.
///
/// # Errors
/// If the file cannot be written; the error names it.
pub fn write(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// Standard output. A reader that has seen enough, such as `head`, may close it. Later output is
/// discarded.
pub struct Out(Option<io::Stdout>);

/// Opens standard output, see [`Out`].
pub fn out() -> Out {
    Out(Some(io::stdout()))
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(stdout) = &mut self.0 else { return Ok(bytes.len()) };
        match stdout.write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.0 = None;
                Ok(bytes.len())
            }
            result => result,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.0.as_mut().map_or(Ok(()), Write::flush) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    }
}

/// Writes text, with tables as wide as the terminal.
///
/// # Errors
/// If writing to standard output fails.
pub fn show(out: &mut Out, text: &impl Display) -> Result<()> {
    match console::Term::stdout().size_checked() {
        Some((_, columns)) => write!(out, "{text:width$}", width = usize::from(columns))?,
        None => write!(out, "{text}")?,
    }
    Ok(out.flush()?)
}

/// Prints a line on standard output.
///
/// # Errors
/// If writing to standard output fails.
pub fn say(line: impl Display) -> io::Result<()> {
    writeln!(out(), "{line}")
}

/// Prints a line on standard error, for people who wait. Errors are ignored.
pub fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}
