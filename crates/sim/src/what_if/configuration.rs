//! The lines of `downbeat.toml` that give a server a setting.

use std::collections::BTreeMap;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, OrderPolicy};
use serde_json::Value;

use super::recorded::{Recorded, RecordedModel};
use super::setting::{BadSetting, Setting};
use crate::simulation::Load;

/// The policies of a setting, in the words of the options of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Served {
    /// Of each model.
    models: Vec<(DispatchPolicy, DropPolicy)>,
    order: OrderPolicy,
}

impl Served {
    /// The policies of the log's models under this setting.
    pub fn of(recorded: &Recorded, setting: &Setting) -> Result<Served, BadSetting> {
        let simulation = recorded.simulation(setting)?;
        let of = |load: &Load| (load.options.dispatch.clone(), load.options.drop);
        Ok(Served { models: simulation.loads.iter().map(of).collect(), order: simulation.order })
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
    let [own, new] = [&Setting::of(recorded), setting].map(|setting| Served::of(recorded, setting));
    let (own, new) = (own?, new?);
    let mut lines = Vec::new();
    if setting.devices != recorded.devices {
        lines.push(format!(
            "devices = {}    # the log has {}; on GPUs name as many in [cuda] gpus instead",
            setting.devices, recorded.devices
        ));
    }
    if new.order != own.order {
        lines.push(format!("order = \"{}\"", new.order));
    }
    if !setting.rehearse && recorded.models.iter().any(|model| model.options.is_adaptive()) {
        lines.push("rehearsal_cpu = 0".to_owned());
    }
    let (mut sections, mut unnamed) = (BTreeMap::<&str, Vec<String>>::new(), Vec::new());
    for ((model, before), after) in recorded.models.iter().zip(&own.models).zip(&new.models) {
        let mut of_model = if before == after { Vec::new() } else { of_model(model, after) };
        of_model.extend(setting.slos.get(&model.id).map(|slo| format!("slo_ms = {}", slo.as_millis_f64())));
        match &model.queue {
            Some(queue) => sections.entry(&queue.model).or_default().extend(of_model),
            None => unnamed.extend(of_model),
        }
    }
    // A log without names is of one model, or of models that all change alike.
    unnamed.sort();
    unnamed.dedup();
    lines.extend(unnamed);
    for (name, mut of_model) in sections {
        // Each shape of requests has a queue, and all queues of a model have its settings.
        of_model.sort();
        of_model.dedup();
        if !of_model.is_empty() {
            let gap = if lines.is_empty() { "" } else { "\n" };
            lines.push(format!("{gap}[models.{}]\n{}", key(name), of_model.join("\n")));
        }
    }
    Ok(lines.iter().map(|line| format!("{line}\n")).collect())
}

/// The lines of a model's section.
fn of_model(model: &RecordedModel, (dispatch, drop): &(DispatchPolicy, DropPolicy)) -> Vec<String> {
    let mut lines = vec![format!("scheduler = \"{}\"", dispatch.name()), format!("drop = \"{}\"", drop.name())];
    if let DispatchPolicy::Timeout { delay, .. } = dispatch {
        let (name, us) = (model.name(), delay.as_nanos() / 1_000);
        lines.push(format!(
            "# config.pbtxt of {name} needs: dynamic_batching {{ max_queue_delay_microseconds: {us} }}"
        ));
    }
    lines
}

/// A name as a key of TOML. Texts of JSON and of TOML are written alike.
fn key(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.chars().all(is_bare) { name.to_owned() } else { Value::from(name).to_string() }
}
