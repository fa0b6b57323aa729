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

/// The levels of the log.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// The level of the log, or a filter such as `info,downbeat_server=debug`.
///
/// # Errors
/// If a part of it is no level, with the levels that there are: the filter would take the word for a module, and log nothing else.
pub fn check_level(text: &str) -> Result<String, String> {
    let words = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let is_level =
        |word: &&str| word.contains(['=', '[']) || LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let mut unknown = words.filter(|word| !is_level(word));
    if let Some(word) = unknown.next() {
        let hint = downbeat_repository::did_you_mean(word, LEVELS);
        return Err(format!(
            "'{word}' is no log level; levels are {}, and a module has its own as in info,downbeat_server=debug{hint}",
            LEVELS.join(", ")
        ));
    }
    filter(text).map(|_| text.to_owned())
}

/// The filter of a level. Errors of all modules pass it, unless it says otherwise of all.
fn filter(level: &str) -> Result<EnvFilter, String> {
    let filter = EnvFilter::try_new(format!("error,{level}"));
    filter.map_err(|error| format!("'{level}': {error}; levels are {}", LEVELS.join(", ")))
}

/// Starts logging.
///
/// # Errors
/// If the filter cannot be understood, or logging was started before.
pub fn start(options: &LogOptions) -> anyhow::Result<()> {
    let filter = filter(&options.level).map_err(|error| anyhow::anyhow!("log level {error}"))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_is_no_level_is_refused_with_the_levels() {
        let known =
            ["warn", "INFO", "off", "info,downbeat_server=debug", "downbeat_server=debug", "info,[span{a}]=trace", ""];
        for level in known {
            assert_eq!(check_level(level), Ok(level.to_owned()));
        }
        let error = check_level("wran").unwrap_err();
        assert!(
            error.contains("'wran' is no log level; levels are error, warn, info")
                && error.ends_with("; did you mean 'warn'?"),
            "{error}"
        );
        assert!(check_level("info,downbeat_server").unwrap_err().contains("'downbeat_server' is no log level"));
        assert!(
            check_level("info,downbeat_server=wran").unwrap_err().contains("levels are error, warn"),
            "of a module"
        );
    }

    #[test]
    fn a_filter_of_one_module_lets_errors_of_all_pass() {
        let shown = |level: &str| filter(level).unwrap().to_string();
        assert!(
            shown("downbeat_server=debug").split(',').any(|part| part == "error"),
            "{}",
            shown("downbeat_server=debug")
        );
        assert_eq!((shown("off"), shown("info")), ("off".to_owned(), "info".to_owned()));
    }
}
