//! What the server writes about itself: structured lines on standard error.

use std::io::Write;
use std::sync::LazyLock;

use indicatif::MultiProgress;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::options::{LogFormat, LogOptions};

static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// The progress bars of this process. They make room for lines of the log.
pub fn bars() -> &'static MultiProgress {
    &BARS
}

/// Standard error, without bars while something is written.
struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        BARS.suspend(|| std::io::stderr().write(line))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}

/// Starts logging.
///
/// # Errors
/// If the filter cannot be understood, or logging was started before.
pub fn start(options: &LogOptions) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&options.level).map_err(|error| {
        anyhow::anyhow!("log level '{}': {error}; use error, warn, info, debug or trace", options.level)
    })?;
    let registry = tracing_subscriber::registry().with(filter);
    let lines = tracing_subscriber::fmt::layer().with_writer(|| Lines);
    match options.format {
        LogFormat::Text => {
            use std::io::IsTerminal;
            registry.with(lines.with_ansi(std::io::stderr().is_terminal()).with_target(false)).try_init()?;
        }
        LogFormat::Json => registry.with(lines.json()).try_init()?,
    }
    Ok(())
}
