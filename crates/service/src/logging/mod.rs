//! The server's log: structured lines on standard error.
//!
//! ```text
//! event -> filter by level -> limits: too many of a kind? -> one line, escaped -> queue -> writer thread -> stderr
//! ```
//!
//! No thread but the writer ever waits for the reader of the log.

mod levels;
mod limits;
mod line;
mod queue;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use indicatif::MultiProgress;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{format, layer};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;

use crate::error::ServiceError;
use crate::options::{LogFormat, LogOptions};
use levels::Levels;
pub use levels::{LogChange, LogSettings};
use limits::LineLimits;
pub use line::escaped;
use line::{Line, text_field};
use queue::LogQueue;

/// The end of the process waits at most this long for the reader of the log.
const FLUSHES_WITHIN: Duration = Duration::from_secs(1);
/// A bare level such as `info` applies to lines whose targets begin with one of these. Other
/// libraries write errors alone: clients decide how often a library warns.
const OWN_TARGETS: [&str; 2] = ["downbeat", "onnxruntime"];

static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);
static QUEUE: LogQueue = LogQueue::new(lost_text);
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);
/// Whether the writer thread runs.
static IS_STARTED: AtomicBool = AtomicBool::new(false);
/// The levels of the log; not set before the log is started.
static LEVELS_NOW: OnceLock<Levels> = OnceLock::new();

/// The progress bars of this process. They step aside for lines of the log.
pub fn bars() -> &'static MultiProgress {
    &BARS
}

/// The number of lines that were lost since the start, for want of a reader.
pub fn lost() -> u64 {
    QUEUE.lost()
}

/// The number of lines that were left out since the start, because there were too many of their
/// kind.
pub fn left_out() -> u64 {
    LEFT_OUT.load(Relaxed)
}

/// The present settings of the log.
pub fn settings() -> LogSettings {
    LEVELS_NOW.get().map_or_else(LogSettings::of_the_process, Levels::settings)
}

/// Changes settings of the log while the server runs. Returns the settings after the change.
///
/// # Errors
/// `InvalidArgument` if a value is impossible; `Unimplemented` if another program has this process's
/// log.
pub fn change(change: &LogChange) -> Result<LogSettings, ServiceError> {
    match LEVELS_NOW.get() {
        Some(levels) => levels.change(change),
        None if change.is_nothing_to(&settings()) => Ok(settings()),
        None => Err(ServiceError::Unimplemented(
            "the log of this process belongs to the program around the server; set its level there".to_owned(),
        )),
    }
}

/// Waits a moment until all lines are written.
pub fn flush() {
    QUEUE.flush(FLUSHES_WITHIN);
}

/// Logs why the process ends, and waits a moment until that is written; false if logging was not
/// started.
pub fn last_words(text: &str) -> bool {
    if IS_STARTED.load(Relaxed) {
        QUEUE.push(format!("{text}\n").as_bytes());
        flush();
        return true;
    }
    false
}

/// Flushes the log when it is dropped, also by a panic.
pub struct FlushAtEnd;

impl Drop for FlushAtEnd {
    fn drop(&mut self) {
        flush();
    }
}

/// The levels of the log.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// The crates of the program, as the log names them.
const CRATES: [&str; 24] = [
    "downbeat",
    "downbeat_bench",
    "downbeat_cluster",
    "downbeat_core",
    "downbeat_driver",
    "downbeat_engine",
    "downbeat_engine_ort",
    "downbeat_fetch",
    "downbeat_frontend",
    "downbeat_host",
    "downbeat_models",
    "downbeat_plan",
    "downbeat_preprocess",
    "downbeat_protocol",
    "downbeat_python",
    "downbeat_repair",
    "downbeat_report",
    "downbeat_repository",
    "downbeat_roles",
    "downbeat_server",
    "downbeat_service",
    "downbeat_sim",
    "downbeat_telemetry",
    "downbeat_training",
];

/// The level of the log, or a filter such as `info,downbeat_models=debug`.
///
/// # Errors
/// A text with a list of the levels, if a part of it is no level. The filter would take such a word
/// for a module and log only that module.
pub fn check_level(text: &str) -> Result<String, String> {
    let words = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let is_level =
        |word: &&str| word.contains(['=', '[']) || LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let mut unknown = words.filter(|word| !is_level(word));
    if let Some(word) = unknown.next() {
        let hint = downbeat_repository::did_you_mean(word, LEVELS);
        return Err(format!(
            "'{word}' is no log level; levels are {}, and a module has its own as in info,downbeat_models=debug{hint}",
            LEVELS.join(", ")
        ));
    }
    if let Some((module, hint)) = text.split(',').find_map(misspelled_crate) {
        return Err(format!("'{module}' is no module of this program{hint}"));
    }
    filter(text).map(|_| text.to_owned())
}

/// A module that seems to be meant for one of this program and is none, with the hint.
fn misspelled_crate(directive: &str) -> Option<(&str, String)> {
    let (target, _) = directive.trim().split_once('=')?;
    let module = target.split(['[', ':']).next().filter(|module| !CRATES.contains(module))?;
    let hint = downbeat_repository::did_you_mean(module, CRATES);
    (!hint.is_empty() && module.starts_with("downbeat")).then_some((module, hint))
}

/// The filter of a level. Errors of all modules pass it, unless the level itself names all modules.
fn filter(level: &str) -> Result<EnvFilter, String> {
    let filter = EnvFilter::try_new(format!("error,{}", directives(level)));
    filter.map_err(|error| format!("'{level}': {error}; levels are {}", LEVELS.join(", ")))
}

/// Starts logging.
///
/// # Errors
/// If the filter cannot be understood, logging was started before, or the operating system has no
/// thread left.
pub fn start(options: &LogOptions) -> anyhow::Result<FlushAtEnd> {
    let filter = filter(&options.level).map_err(|error| anyhow::anyhow!("log level {error}"))?;
    let (filter, reload) = reload::Layer::new(filter);
    let registry = tracing_subscriber::registry().with(filter);
    let layer = layer().log_internal_errors(false).with_writer(|| Waiting);
    let (limits, is_terminal) = (LineLimits::new(&LEFT_OUT), io::stderr().is_terminal());
    match options.format {
        LogFormat::Text => {
            let format = format().with_target(false).with_ansi(is_terminal);
            let layer = layer.event_format(Line { format, limits, is_json: false });
            registry.with(layer.fmt_fields(text_field().delimited(" "))).try_init()?;
        }
        LogFormat::Json => {
            QUEUE.tell_by(lost_json);
            let layer = layer.event_format(Line { format: format().json(), limits, is_json: true });
            registry.with(layer.fmt_fields(JsonFields::new())).try_init()?;
        }
    }
    let write = move || QUEUE.write_all(|line| if is_terminal { BARS.suspend(|| write(line)) } else { write(line) });
    std::thread::Builder::new().name("log".to_owned()).spawn(write)?;
    // The standard hook would wait for the reader of standard error.
    std::panic::set_hook(Box::new(log_panic));
    let replace = move |filter| reload.reload(filter).map_err(|error| error.to_string());
    // The log starts once: a second start fails above.
    let _ = LEVELS_NOW.set(Levels::new(options, Box::new(replace)));
    IS_STARTED.store(true, Relaxed);
    Ok(FlushAtEnd)
}

/// Writes to standard error without its lock: a panic or an error of another thread must not wait
/// for the log's reader.
fn write(mut line: &[u8]) -> io::Result<()> {
    let stderr = io::stderr();
    while !line.is_empty() {
        match rustix::io::write(stderr.as_fd(), line) {
            Ok(written) => line = &line[written..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => drop(poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], None)?),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The filter for `level`, with bare levels only for lines of the server.
fn directives(level: &str) -> String {
    let directive = |part: &str| match part.trim().parse::<LevelFilter>() {
        Ok(level) => {
            let own = OWN_TARGETS.map(|target| format!("{target}={level}"));
            format!("{},{}", level.min(LevelFilter::ERROR), own.join(","))
        }
        Err(_) => part.to_owned(),
    };
    level.split(',').map(directive).collect::<Vec<_>>().join(",")
}

fn log_panic(panic: &PanicHookInfo<'_>) {
    let payload = panic.payload();
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason is given");
    let (thread, at) = (std::thread::current(), panic.location().map(tracing::field::display));
    let backtrace = Backtrace::capture();
    let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| tracing::field::display(backtrace));
    tracing::error!(thread = thread.name(), at, backtrace, "a panic: {text}");
}

fn now() -> String {
    let mut text = String::new();
    // A string takes everything.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

fn lost_text(lost: u64) -> String {
    format!("{}  WARN {lost} lines were lost: nobody read the log\n", now())
}

fn lost_json(lost: u64) -> String {
    let message = format!("{lost} lines were lost: nobody read the log");
    let line = serde_json::json!({
        "timestamp": now(), "level": "WARN", "fields": {"message": message, "lost": lost}, "target": module_path!(),
    });
    format!("{line}\n")
}

/// Standard error, behind the queue. The log's layer writes a line at a time.
struct Waiting;

impl Write for Waiting {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        QUEUE.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_level_is_for_lines_of_the_server_alone() {
        assert_eq!(directives("info"), "error,downbeat=info,onnxruntime=info");
        assert_eq!(directives("off"), "off,downbeat=off,onnxruntime=off");
        assert_eq!(directives("warn,h2=debug"), "error,downbeat=warn,onnxruntime=warn,h2=debug");
        assert_eq!(directives("downbeat_models=debug"), "downbeat_models=debug");
    }

    /// The check would refuse a crate that the list lacks.
    #[test]
    fn every_crate_of_the_program_may_have_a_level() {
        for manifest in ["../server/Cargo.toml", "../downbeat/Cargo.toml"] {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(manifest);
            let text = std::fs::read_to_string(path).unwrap();
            let crates = text.lines().filter_map(|line| line.strip_suffix(".workspace = true"));
            let own: Vec<String> =
                crates.filter(|name| name.starts_with("downbeat")).map(|name| name.replace('-', "_")).collect();
            assert!(own.len() > 5, "{own:?}");
            for name in own {
                let level = format!("info,{name}=debug");
                assert_eq!(check_level(&level), Ok(level.clone()));
                assert!(CRATES.contains(&&*name), "{name}");
            }
        }
    }

    #[test]
    fn a_word_that_is_no_level_is_refused_with_the_levels() {
        let known =
            ["warn", "INFO", "off", "info,downbeat_models=debug", "downbeat_models=debug", "info,[span{a}]=trace", ""];
        for level in known {
            assert_eq!(check_level(level), Ok(level.to_owned()));
        }
        let error = check_level("info,downbeat_sever::http=debug").unwrap_err();
        assert_eq!(error, "'downbeat_sever' is no module of this program; did you mean 'downbeat_server'?");
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
            shown("downbeat_models=debug").split(',').any(|part| part == "error"),
            "{}",
            shown("downbeat_models=debug")
        );
        assert_eq!(shown("h2=debug,off").split(',').filter(|part| *part == "off").count(), 1);
    }
}
