//! Where reports go: standard output, which its reader may close, and files.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

/// `--json [FILE]`, the same in every command.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Json {
    /// Write everything measured as JSON: to this file, or without one to standard output in place of the text
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
}

/// `--html FILE`.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Html {
    /// Write a page with tables and plots to this file; it needs nothing else
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

impl Json {
    fn on_stdout(&self) -> bool {
        self.json.as_deref() == Some(Path::new("-"))
    }

    /// Where the text goes: to standard output, or nowhere if the JSON is written there.
    pub fn text(&self) -> Out {
        if self.on_stdout() { Out(None) } else { out() }
    }

    /// Writes the JSON, if it is asked for.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, report: &impl Serialize) -> Result<()> {
        let Some(file) = &self.json else { return Ok(()) };
        let text = serde_json::to_string_pretty(report)? + "\n";
        if self.on_stdout() { Ok(out().write_all(text.as_bytes())?) } else { write(file, &text) }
    }

    /// Prints the report as wide as the terminal is, and writes the JSON, if it is asked for.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn print(&self, report: &(impl Display + Serialize)) -> Result<()> {
        show(&mut self.text(), report)?;
        self.write(report)
    }
}

impl Html {
    /// Writes the page, if it is asked for.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, page: impl FnOnce() -> String) -> Result<()> {
        self.html.as_ref().map_or(Ok(()), |file| write(file, &page()))
    }
}

/// Writes a file that was asked for.
///
/// # Errors
/// Naming the file that cannot be written.
pub fn write(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// Standard output. A reader that has seen enough, such as `head`, may close it: what is written after that goes nowhere.
pub struct Out(Option<io::Stdout>);

/// Standard output, see [`Out`].
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

/// Writes text, tables as wide as the terminal is.
///
/// # Errors
/// If standard output takes no more.
pub fn show(out: &mut Out, text: &impl Display) -> Result<()> {
    match console::Term::stdout().size_checked() {
        Some((_, columns)) => write!(out, "{text:width$}", width = usize::from(columns))?,
        None => write!(out, "{text}")?,
    }
    Ok(out.flush()?)
}

/// A line on standard output.
///
/// # Errors
/// If standard output takes no more.
pub fn say(line: impl Display) -> io::Result<()> {
    writeln!(out(), "{line}")
}

/// A line on standard error, for people who wait. Nobody may be there to read it.
pub fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}
