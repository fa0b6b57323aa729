//! The lines of `downbeat.toml` that give a server a setting.

use std::collections::BTreeMap;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, OrderPolicy};
use serde_json::Value;

use super::recorded::Recorded;
use super::setting::{BadSetting, Setting};
use crate::simulation::Load;

/// The policies of a setting, in the words of the options of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ModelPolicies {
    /// Of each model.
    models: Vec<(DispatchPolicy, DropPolicy)>,
    order: OrderPolicy,
}

impl ModelPolicies {
    /// The policies of the log's models under this setting.
    pub fn of(recorded: &Recorded, setting: &Setting) -> Result<ModelPolicies, BadSetting> {
        let simulation = recorded.simulation(setting)?;
        let of = |load: &Load| (load.options.dispatch.clone(), load.options.drop);
        Ok(ModelPolicies { models: simulation.loads.iter().map(of).collect(), order: simulation.order })
    }

    /// The values of `scheduler`, `drop` and `order`.
    pub fn words(&self) -> [String; 3] {
        let same = |of: fn(&(DispatchPolicy, DropPolicy)) -> String| {
            let mut words: Vec<String> = self.models.iter().map(of).collect();
            words.dedup();
            if let [word] = &words[..] { word.clone() } else { "each its own".to_owned() }
        };
        let scheduler = |(dispatch, _): &(DispatchPolicy, DropPolicy)| match dispatch {
            DispatchPolicy::Timeout { delay, .. } => format!("timeout, {} ms", delay.as_millis_f64()),
            other => other.name().to_owned(),
        };
        [same(scheduler), same(|(_, drop)| drop.name().to_owned()), self.order.to_string()]
    }
}

/// The lines of `downbeat.toml` that differ between the server of the log and a server with this
/// setting. Empty: nothing differs.
pub(super) fn configuration(recorded: &Recorded, setting: &Setting) -> Result<String, BadSetting> {
    let [own, new] = [&Setting::of(recorded), setting].map(|setting| ModelPolicies::of(recorded, setting));
    let (own, new) = (own?, new?);
    let mut lines = Configuration::default();
    lines.devices(setting.devices, recorded.devices);
    if new.order != own.order {
        lines.top(format!("order = \"{}\"", new.order));
    }
    if !setting.rehearse && recorded.models.iter().any(|model| model.options.is_adaptive()) {
        lines.top("rehearsal_cpu = 0".to_owned());
    }
    for ((model, before), after) in recorded.models.iter().zip(&own.models).zip(&new.models) {
        let name = model.queue.as_ref().map(|queue| &*queue.model);
        if before != after {
            lines.policies(name, after);
        }
        if let Some(slo) = setting.slos.get(&model.id) {
            lines.of_model(name, format!("slo_ms = {}", slo.as_millis_f64()));
        }
    }
    Ok(lines.text())
}

/// Lines of `downbeat.toml`.
#[derive(Clone, Debug, Default)]
pub(super) struct Configuration {
    top: Vec<String>,
    /// By table, such as `models.encoder`.
    tables: BTreeMap<String, Vec<String>>,
}

impl Configuration {
    /// Adds a line above all tables, once.
    pub fn top(&mut self, line: String) {
        if !self.top.contains(&line) {
            self.top.push(line);
        }
    }

    /// Adds a line to a table, once. Each shape of requests has a queue, and all queues of
    /// a model have its settings.
    pub fn in_table(&mut self, table: &str, line: String) {
        let lines = self.tables.entry(table.to_owned()).or_default();
        if !lines.contains(&line) {
            lines.push(line);
        }
    }

    /// Adds a line for a model, or for all models if the log has no name.
    pub fn of_model(&mut self, model: Option<&str>, line: String) {
        match model {
            Some(model) => self.in_table(&format!("models.{}", key(model)), line),
            None => self.top(line),
        }
    }

    /// Adds the number of devices, if it differs from the log's.
    pub fn devices(&mut self, devices: u32, recorded: u32) {
        if devices != recorded {
            let line =
                format!("devices = {devices}    # the log has {recorded}; on GPUs name as many in [cuda] gpus instead");
            self.top(line);
        }
    }

    /// Adds the policies of a model.
    pub fn policies(&mut self, model: Option<&str>, (dispatch, drop): &(DispatchPolicy, DropPolicy)) {
        self.of_model(model, format!("scheduler = \"{}\"", dispatch.name()));
        self.of_model(model, format!("drop = \"{}\"", drop.name()));
        if let DispatchPolicy::Timeout { delay, .. } = dispatch {
            let us = delay.as_nanos() / 1_000;
            let line = format!("# config.pbtxt needs: dynamic_batching {{ max_queue_delay_microseconds: {us} }}");
            self.of_model(model, line);
        }
    }

    /// The text of the file.
    pub fn text(&self) -> String {
        let mut text: String = self.top.iter().map(|line| format!("{line}\n")).collect();
        for (table, lines) in &self.tables {
            let gap = if text.is_empty() { "" } else { "\n" };
            text += &format!("{gap}[{table}]\n{}\n", lines.join("\n"));
        }
        text
    }
}

/// A name as a key of TOML. Texts of JSON and of TOML are written alike.
pub(super) fn key(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.chars().all(is_bare) { name.to_owned() } else { Value::from(name).to_string() }
}

/// The words above the lines of a configuration.
pub(super) const PASTE: &str =
    "For downbeat.toml (`downbeat config check MODELS --config downbeat.toml` checks it before a start):";

/// The text as a block of Markdown.
pub(super) fn indented(text: &str) -> String {
    text.lines().map(|line| if line.is_empty() { "\n".to_owned() } else { format!("    {line}\n") }).collect()
}
