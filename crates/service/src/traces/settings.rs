//! The settings of traces, by Triton's names, for the server and for single models.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::ServiceError;

/// Which requests are traced, and how files of traces are cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceSettings {
    /// Whether requests are traced at all: `trace_level` is `TIMESTAMPS`, and not `OFF`.
    pub is_on: bool,
    /// `trace_rate`: one request in this many is traced; at least 1.
    pub rate: u32,
    /// `trace_count`: this many requests are traced yet; `None` (-1): no limit.
    pub count: Option<u32>,
    /// `log_frequency`: each file takes this many traces; 0: one file takes all.
    pub log_frequency: u32,
}

/// A wish for one setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Change<T> {
    /// The setting stays.
    #[default]
    Keep,
    /// The setting goes back: that of a model to the server's, and the server's to its start.
    Clear,
    /// The setting gets this value.
    Set(T),
}

/// Wishes for the settings of traces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TraceChange {
    /// Whether requests are traced.
    pub is_on: Change<bool>,
    /// One request in this many is traced.
    pub rate: Change<u32>,
    /// This many requests are traced; `None`: no limit.
    pub count: Change<Option<u32>>,
    /// Each file takes this many traces.
    pub log_frequency: Change<u32>,
}

/// The values that a scope sets itself; `None`: the scope falls back on another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Own {
    is_on: Option<bool>,
    rate: Option<u32>,
    count: Option<Option<u32>>,
    log_frequency: Option<u32>,
}

fn apply<T>(own: &mut Option<T>, change: Change<T>) {
    match change {
        Change::Keep => {}
        Change::Clear => *own = None,
        Change::Set(value) => *own = Some(value),
    }
}

impl Own {
    fn change(&mut self, change: TraceChange) {
        apply(&mut self.is_on, change.is_on);
        apply(&mut self.rate, change.rate);
        apply(&mut self.count, change.count);
        apply(&mut self.log_frequency, change.log_frequency);
    }

    fn over(&self, base: TraceSettings) -> TraceSettings {
        TraceSettings {
            is_on: self.is_on.unwrap_or(base.is_on),
            rate: self.rate.unwrap_or(base.rate),
            count: self.count.unwrap_or(base.count),
            log_frequency: self.log_frequency.unwrap_or(base.log_frequency),
        }
    }
}

/// The requests that share settings: those of one model, or all others.
#[derive(Debug)]
struct Scope {
    /// The model; empty: all models without settings of their own.
    name: Arc<str>,
    own: Own,
    /// As they were set.
    settings: TraceSettings,
    /// Requests that came under these settings.
    seen: u64,
    /// The traces that `trace_count` leaves.
    left: Option<u32>,
}

impl Scope {
    fn new(name: &str, own: Own, base: TraceSettings) -> Scope {
        let settings = own.over(base);
        Scope { name: name.into(), own, settings, seen: 0, left: settings.count }
    }

    /// Takes new settings. The count of requests and traces begins again only if the settings differ.
    fn set(&mut self, own: Own, base: TraceSettings, restarts: bool) {
        let settings = own.over(base);
        self.own = own;
        if restarts || settings != self.settings {
            (self.settings, self.seen, self.left) = (settings, 0, settings.count);
        }
    }

    fn shown(&self) -> TraceSettings {
        TraceSettings { count: self.left, ..self.settings }
    }

    /// Whether the next request is traced. As in Triton, the last one of each `rate` requests is.
    fn is_next(&mut self) -> bool {
        if !self.settings.is_on || self.left == Some(0) {
            return false;
        }
        self.seen += 1;
        let is_next = self.seen.is_multiple_of(u64::from(self.settings.rate.max(1)));
        if is_next && let Some(left) = &mut self.left {
            *left -= 1;
        }
        is_next
    }
}

/// The verdict on a request whose model's traces are on.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Whether the request is traced by its turn.
    pub is_next: bool,
    /// The model whose settings hold; empty: the server's settings hold.
    pub scope: Arc<str>,
    /// How many traces a file takes; 0: all.
    pub log_frequency: u32,
}

/// The settings of the server and of its models.
///
/// **Bound.** Only models that exist have settings, so the number of models bounds the table.
#[derive(Debug)]
pub struct SettingsTable {
    /// As the server was started.
    start: TraceSettings,
    server: Scope,
    models: BTreeMap<String, Scope>,
}

impl SettingsTable {
    /// The settings of a server at its start.
    pub fn new(start: TraceSettings) -> SettingsTable {
        SettingsTable { start, server: Scope::new("", Own::default(), start), models: BTreeMap::new() }
    }

    /// The settings of a model, or of the server. The count is the number of traces that are left.
    pub fn get(&self, model: Option<&str>) -> TraceSettings {
        model.and_then(|model| self.models.get(model)).unwrap_or(&self.server).shown()
    }

    /// Changes the settings of a model, or of the server and of the models that follow it.
    pub fn change(&mut self, model: Option<&str>, change: TraceChange) {
        match model {
            None => {
                let mut own = self.server.own;
                own.change(change);
                self.server.set(own, self.start, change != TraceChange::default());
                for scope in self.models.values_mut() {
                    scope.set(scope.own, self.server.settings, false);
                }
            }
            Some(model) => {
                let mut own = self.models.get(model).map_or(Own::default(), |scope| scope.own);
                own.change(change);
                if own == Own::default() {
                    self.models.remove(model);
                    return;
                }
                let base = self.server.settings;
                let scope = self.models.entry(model.to_owned()).or_insert_with(|| Scope::new(model, own, base));
                scope.set(own, base, change != TraceChange::default());
            }
        }
    }

    /// Whether a request of any model may be traced.
    pub fn is_on(&self) -> bool {
        self.server.settings.is_on || self.models.values().any(|scope| scope.settings.is_on)
    }

    /// Counts a request of a model, and decides whether it is traced; `None`: the model's traces are
    /// off.
    pub fn decide(&mut self, model: &str) -> Option<Verdict> {
        let scope = match self.models.is_empty() {
            true => &mut self.server,
            false => self.models.get_mut(model).unwrap_or(&mut self.server),
        };
        if !scope.settings.is_on {
            return None;
        }
        let is_next = scope.is_next();
        Some(Verdict { is_next, scope: scope.name.clone(), log_frequency: scope.settings.log_frequency })
    }
}

/// Reads `trace_level`, a list such as `TIMESTAMPS`.
///
/// # Errors
/// `InvalidArgument`, with the levels.
pub fn is_on_by(levels: &[&str]) -> Result<bool, ServiceError> {
    match levels {
        ["OFF"] => Ok(false),
        [_, ..] if levels.iter().all(|level| *level == "TIMESTAMPS") => Ok(true),
        _ => {
            let given: String = levels.join(", ").chars().take(64).collect();
            Err(ServiceError::InvalidArgument(format!(
                "trace_level is '{given}'; expected OFF or TIMESTAMPS (this server does not trace the contents of \
                 tensors)"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFF: TraceSettings = TraceSettings { is_on: false, rate: 1000, count: None, log_frequency: 0 };

    fn traced(table: &mut SettingsTable, model: &str, requests: usize) -> Vec<usize> {
        (1..=requests).filter(|_| table.decide(model).is_some_and(|verdict| verdict.is_next)).collect()
    }

    fn on(rate: u32, count: Option<u32>) -> TraceChange {
        let (is_on, rate) = (Change::Set(true), Change::Set(rate));
        TraceChange { is_on, rate, count: Change::Set(count), ..TraceChange::default() }
    }

    #[test]
    fn the_last_of_each_rate_requests_is_traced_until_the_count_is_used_up() {
        let mut table = SettingsTable::new(OFF);
        assert!(!table.is_on() && table.decide("m").is_none());
        table.change(None, on(3, Some(2)));
        assert_eq!(traced(&mut table, "m", 20), [3, 6]);
        assert_eq!(table.get(None).count, Some(0), "the count says how many are left");
        table.change(None, TraceChange { count: Change::Set(Some(1)), ..TraceChange::default() });
        assert_eq!(traced(&mut table, "m", 20), [3]);
    }

    #[test]
    fn a_model_follows_the_server_but_for_its_own_settings() {
        let mut table = SettingsTable::new(OFF);
        table.change(Some("m"), TraceChange { rate: Change::Set(2), ..TraceChange::default() });
        assert!(!table.is_on(), "the server is off, and the model has only a rate");
        table.change(None, on(4, None));
        assert_eq!((table.get(Some("m")).rate, table.get(Some("other")).rate), (2, 4));
        assert_eq!(traced(&mut table, "m", 8), [2, 4, 6, 8]);
        assert_eq!(traced(&mut table, "other", 8), [4, 8], "other models share one count");
        table.change(Some("m"), TraceChange { rate: Change::Clear, ..TraceChange::default() });
        assert_eq!((table.get(Some("m")), table.models.len()), (table.get(None), 0));
        table.change(None, TraceChange { is_on: Change::Clear, rate: Change::Clear, ..TraceChange::default() });
        assert_eq!(table.get(None), OFF, "cleared settings are those of the start");
    }

    #[test]
    fn the_contents_of_tensors_are_refused_with_the_levels() {
        assert!(!is_on_by(&["OFF"]).unwrap());
        assert!(is_on_by(&["TIMESTAMPS"]).unwrap());
        for levels in [&["TENSORS"][..], &["OFF", "TIMESTAMPS"], &[], &["timestamps"]] {
            assert!(is_on_by(levels).unwrap_err().to_string().contains("expected OFF or TIMESTAMPS"), "{levels:?}");
        }
    }
}
