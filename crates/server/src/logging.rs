//! What the server writes about itself: structured lines on standard error.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::options::{LogFormat, LogOptions};

/// Starts logging.
///
/// # Errors
/// If the filter cannot be understood, or logging was started before.
pub fn start(options: &LogOptions) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&options.level).map_err(|error| {
        anyhow::anyhow!("log level '{}': {error}; use error, warn, info, debug or trace", options.level)
    })?;
    let registry = tracing_subscriber::registry().with(filter);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match options.format {
        LogFormat::Text => {
            use std::io::IsTerminal;
            registry.with(lines.with_ansi(std::io::stderr().is_terminal()).with_target(false)).try_init()?;
        }
        LogFormat::Json => registry.with(lines.json()).try_init()?,
    }
    Ok(())
}
