//! The levels of the log, which an operator may change while the server runs.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use parking_lot::Mutex;
use tracing::Level;
use tracing::level_filters::LevelFilter as Most;
use tracing_subscriber::EnvFilter;

use super::filter;
use crate::error::ServiceError;
use crate::options::{LogFormat, LogOptions};

/// A bit for each of the levels error, warning and info that is switched off although a wider level
/// is on. For example, Triton's clients may ask for info without warnings.
static MUTED: AtomicU8 = AtomicU8::new(0);

/// Whether lines of this level are left out although the filter lets them pass.
pub fn is_muted(level: Level) -> bool {
    MUTED.load(Relaxed) & bit(level) != 0
}

fn bit(level: Level) -> u8 {
    match level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 4,
        _ => 0,
    }
}

/// The settings of the log, by Triton's names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogSettings {
    /// Whether errors are written.
    pub error: bool,
    /// Whether warnings are written.
    pub warning: bool,
    /// Whether notices are written.
    pub info: bool,
    /// 0, 1 (level debug), or 2 and more (level trace).
    pub verbose: u32,
    /// `default`, `ISO8601`, or `json`. The first two name the same lines of text.
    pub format: String,
}

/// Wishes for the settings of the log; `None` leaves a setting as it is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LogChange {
    /// Whether errors are written.
    pub error: Option<bool>,
    /// Whether warnings are written.
    pub warning: Option<bool>,
    /// Whether notices are written.
    pub info: Option<bool>,
    /// How verbose the log is.
    pub verbose: Option<u32>,
    /// The form of lines.
    pub format: Option<String>,
}

impl LogSettings {
    /// The settings of a process whose log another program has.
    pub fn of_the_process() -> LogSettings {
        LogSettings::of(Most::current(), LogFormat::Text)
    }

    fn of(most: Most, format: LogFormat) -> LogSettings {
        let verbose = match most {
            Most::TRACE => 2,
            Most::DEBUG => 1,
            _ => 0,
        };
        let (error, warning, info) = (most >= Most::ERROR, most >= Most::WARN, most >= Most::INFO);
        let format = match format {
            LogFormat::Text => "default",
            LogFormat::Json => "json",
        };
        LogSettings { error, warning, info, verbose, format: format.to_owned() }
    }

    /// The widest level that is on.
    fn most(&self) -> Most {
        match self {
            LogSettings { verbose: 2.., .. } => Most::TRACE,
            LogSettings { verbose: 1, .. } => Most::DEBUG,
            LogSettings { info: true, .. } => Most::INFO,
            LogSettings { warning: true, .. } => Most::WARN,
            LogSettings { error: true, .. } => Most::ERROR,
            _ => Most::OFF,
        }
    }

    /// The levels within the widest one that are off.
    fn muted(&self) -> u8 {
        let levels = [(Level::ERROR, self.error), (Level::WARN, self.warning), (Level::INFO, self.info)];
        levels.into_iter().filter(|(_, is_on)| !is_on).map(|(level, _)| bit(level)).sum()
    }

    fn changed(&self, change: &LogChange) -> LogSettings {
        LogSettings {
            error: change.error.unwrap_or(self.error),
            warning: change.warning.unwrap_or(self.warning),
            info: change.info.unwrap_or(self.info),
            verbose: change.verbose.unwrap_or(self.verbose),
            format: change.format.clone().unwrap_or_else(|| self.format.clone()),
        }
    }
}

impl LogChange {
    /// Whether the settings are already as the change wishes.
    pub fn is_nothing_to(&self, settings: &LogSettings) -> bool {
        settings.changed(self) == *settings
    }
}

/// Replaces the filter of the log.
type Replace = Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>;

/// The levels of the log, and the way to change them.
pub struct Levels {
    /// The parts of the filter that name a module, as `downbeat_models=debug`. They stay.
    modules: Vec<String>,
    settings: Mutex<LogSettings>,
    replace: Replace,
}

impl Levels {
    /// The levels as the options set them.
    pub fn new(options: &LogOptions, replace: Replace) -> Levels {
        let parts = || options.level.split(',').map(str::trim).filter(|part| !part.is_empty());
        let bare = parts().filter_map(|part| part.parse::<Most>().ok()).next_back();
        // Errors pass every filter, unless it names all modules.
        let settings = LogSettings::of(bare.unwrap_or(Most::ERROR), options.format);
        let modules = parts().filter(|part| part.parse::<Most>().is_err()).map(str::to_owned).collect();
        Levels { modules, settings: Mutex::new(settings), replace }
    }

    /// The present settings.
    pub fn settings(&self) -> LogSettings {
        self.settings.lock().clone()
    }

    /// Changes the settings. Returns the settings after the change.
    ///
    /// # Errors
    /// `InvalidArgument` if the lines cannot have the wished form.
    pub fn change(&self, change: &LogChange) -> Result<LogSettings, ServiceError> {
        let mut settings = self.settings.lock();
        let wanted = settings.changed(change);
        check_format(&settings.format, &wanted.format)?;
        let level = [&[wanted.most().to_string()], &self.modules[..]].concat().join(",");
        let internal = |error: String| ServiceError::Internal(format!("the level of the log cannot change: {error}"));
        let new = filter(&level).map_err(internal)?;
        (self.replace)(new).map_err(internal)?;
        MUTED.store(wanted.muted(), Relaxed);
        *settings = wanted;
        Ok(settings.clone())
    }
}

/// Lines of text stay text, and JSON stays JSON: a reader of the log expects one form.
fn check_format(now: &str, wanted: &str) -> Result<(), ServiceError> {
    let is_text = |format: &str| matches!(format, "default" | "ISO8601");
    if now == wanted || (is_text(now) && is_text(wanted)) {
        return Ok(());
    }
    Err(ServiceError::InvalidArgument(format!(
        "log_format cannot change from '{now}' to '{}' while the server runs; the values 'default' and 'ISO8601' both \
         name lines of text, and --log-format json chooses JSON at start",
        wanted.chars().take(64).collect::<String>()
    )))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Levels by these options, and the filters that they set.
    fn levels(level: &str) -> (Levels, Arc<Mutex<Vec<String>>>) {
        let set = Arc::new(Mutex::new(Vec::new()));
        let filters = set.clone();
        let replace = move |filter: EnvFilter| {
            filters.lock().push(filter.to_string());
            Ok(())
        };
        let options = LogOptions { level: level.to_owned(), ..LogOptions::default() };
        (Levels::new(&options, Box::new(replace)), set)
    }

    fn has(filters: &Mutex<Vec<String>>, part: &str) -> bool {
        filters.lock().last().is_some_and(|filter| filter.split(',').any(|its| its == part))
    }

    #[test]
    fn the_widest_level_is_the_filter_and_others_are_muted() {
        let (levels, filters) = levels("info");
        let now = levels.settings();
        assert_eq!((now.error, now.warning, now.info, now.verbose), (true, true, true, 0));
        levels.change(&LogChange { info: Some(false), ..LogChange::default() }).unwrap();
        assert!(has(&filters, "downbeat=warn"), "{filters:?}");
        let now = levels.change(&LogChange { verbose: Some(1), warning: Some(false), ..LogChange::default() }).unwrap();
        assert!(has(&filters, "downbeat=debug"), "{filters:?}");
        assert_eq!((now.warning, now.info, now.verbose), (false, false, 1));
        assert_eq!(now.muted(), bit(Level::WARN) | bit(Level::INFO));
        MUTED.store(0, Relaxed);
    }

    #[test]
    fn modules_keep_their_levels() {
        let (levels, filters) = levels("warn,downbeat_models=debug");
        assert!(!levels.settings().info && levels.settings().verbose == 0);
        levels.change(&LogChange { info: Some(true), ..LogChange::default() }).unwrap();
        assert!(has(&filters, "downbeat=info") && has(&filters, "downbeat_models=debug"), "{filters:?}");
    }

    #[test]
    fn the_form_of_lines_stays() {
        let (levels, _) = levels("info");
        let form = |name: &str| LogChange { format: Some(name.to_owned()), ..LogChange::default() };
        assert_eq!(levels.change(&form("ISO8601")).unwrap().format, "ISO8601");
        let error = levels.change(&form("json")).unwrap_err().to_string();
        assert!(error.contains("--log-format json"), "{error}");
    }
}
