//! Which step of a log's pipelines is short of devices, and how many devices hold a target.

use std::fmt;

use downbeat_report::Page;
use serde::Serialize;

use super::super::candidate::figure;
use super::super::configuration::{Configuration, PASTE, indented, key};
use super::comparison::{flows, pools};
use super::flows::RecordedPipelines;
use super::outcome::PipelineRow;
use super::replay::{BadPipelineSetting, PipelineSetting};
use crate::parallel;

/// Rates that are tried, as multiples, until the target no longer holds.
const RATES: [f64; 8] = [1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0];

/// The advice for a log with pipelines.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PipelineAdvice {
    /// The share of each pipeline's requests that must be answered in time.
    pub target: f64,
    /// The price of a device for an hour, in any currency.
    pub price: Option<f64>,
    /// The replay without more devices.
    pub before: PipelineRow,
    /// The devices that were added, one after another, each with the replay that has them all.
    pub added: Vec<Added>,
    /// Whether the target holds in the end.
    pub holds: bool,
    /// The step that is short of devices: first at this rate, if not at the log's.
    pub short: Option<Short>,
    /// The highest tried multiple of the rate that the devices in the end hold; `None`: not even one.
    pub margin: Option<f64>,
    /// The devices that could be taken away: with one less for these models the target holds.
    pub spare: Vec<String>,
    /// The lines of `downbeat.toml` that differ between the server of the log and a server with the
    /// devices that were added. Empty: nothing differs. `None`: the target does not hold.
    pub config: Option<String>,
    /// The assumptions, and remarks.
    pub notes: Vec<String>,
}

/// A device that was added.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Added {
    /// The model.
    pub model: String,
    /// The replay.
    pub row: PipelineRow,
}

/// The step that is short of devices.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Short {
    /// The model of the step.
    pub model: String,
    /// The steps that the model runs, in words.
    pub steps: Vec<String>,
    /// The multiple of the rate at which the model is short.
    pub rate: f64,
    /// The least attainment at this rate without a further device.
    pub without: f64,
    /// The least attainment with one device more for the model.
    pub with_one: f64,
}

/// The reason why there is no advice.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum NoPipelineAdvice {
    /// The setting is invalid.
    #[error(transparent)]
    Setting(#[from] BadPipelineSetting),
    /// The caller ended the search.
    #[error("the command was interrupted before it found advice")]
    Interrupted,
}

/// The search.
struct Search<'a> {
    recorded: &'a RecordedPipelines,
    target: f64,
    threads: usize,
    goes_on: &'a (dyn Fn(usize, usize) -> bool + Sync),
    done: std::cell::Cell<usize>,
}

impl RecordedPipelines {
    /// Adds devices one by one, each where it helps most, until `target` of each pipeline's requests is
    /// answered in time, or there are `most` devices. `goes_on` gets the number of finished runs and the
    /// number that is known to come, and returns whether the search goes on. `price`: of a device for an
    /// hour.
    ///
    /// # Errors
    /// If the setting is invalid, or the caller ended the search.
    pub fn advise(
        &self,
        setting: &PipelineSetting,
        (target, most, price): (f64, u32, Option<f64>),
        threads: usize,
        goes_on: &(dyn Fn(usize, usize) -> bool + Sync),
    ) -> Result<PipelineAdvice, NoPipelineAdvice> {
        let search = Search { recorded: self, target, threads, goes_on, done: std::cell::Cell::new(0) };
        let as_logged = search.run(&[PipelineSetting::unchanged()])?.remove(0);
        let before = search.run(std::slice::from_ref(setting))?.remove(0);
        let (mut setting, mut row) = (setting.clone(), before.clone());
        let (mut added, mut short) = (Vec::new(), None);
        while row.worst() < target && self.devices(&setting).iter().sum::<u32>() < most {
            let (model, better) = search.best(&setting)?;
            short.get_or_insert_with(|| self.short(model, setting.rate, &row, &better));
            *setting.more.entry(model).or_default() += 1;
            row = better;
            added.push(Added { model: self.models[model].name.clone(), row: row.clone() });
        }
        let holds = row.worst() >= target;
        let mut margin = None;
        if holds {
            margin = Some(1.0);
            for times in RATES {
                let faster = PipelineSetting { rate: setting.rate * times, ..setting.clone() };
                let at = search.run(std::slice::from_ref(&faster))?.remove(0);
                if at.worst() < target {
                    if short.is_none() {
                        let (model, better) = search.best(&faster)?;
                        short = Some(self.short(model, faster.rate, &at, &better));
                    }
                    break;
                }
                margin = Some(times);
            }
        }
        let spare = if holds && added.is_empty() { search.spare(&setting)? } else { Vec::new() };
        let notes = self.notes.iter().cloned().chain(self.difference(&as_logged)).collect();
        let config = holds.then(|| self.configuration(&setting));
        Ok(PipelineAdvice { target, price, before, added, holds, short, margin, spare, config, notes })
    }

    /// The lines of `downbeat.toml` for this setting.
    fn configuration(&self, setting: &PipelineSetting) -> String {
        let mut lines = Configuration::default();
        let devices = self.devices(setting);
        let recorded: u32 = self.pools.iter().map(|pool| pool.devices).sum();
        lines.devices(devices.iter().sum(), recorded);
        if self.pools.len() > 1 && devices.iter().sum::<u32>() != recorded {
            let mut first = 0;
            for (pool, count) in self.pools.iter().zip(&devices) {
                let numbers: Vec<String> = (first..first + count).map(|number| number.to_string()).collect();
                first += count;
                for model in &pool.models {
                    lines.in_table("placement", format!("{} = [{}]", key(model), numbers.join(", ")));
                }
            }
        }
        for (index, model) in self.models.iter().enumerate() {
            let options = self.options(setting, index, devices[model.pool]);
            if setting.policy.is_some() {
                lines.policies(Some(&model.name), &(options.dispatch, options.drop));
            }
            if setting.more.contains_key(&index) && model.options.max_in_flight < self.pools[model.pool].devices {
                let line = format!("# config.pbtxt needs: instance_group [ {{ count: {} }} ]", options.max_in_flight);
                lines.of_model(Some(&model.name), line);
            }
        }
        for (flow, slo) in &setting.slos {
            lines.of_model(Some(&self.flows[*flow].name), format!("slo_ms = {}", slo.as_millis_f64()));
        }
        lines.text()
    }

    fn short(&self, model: usize, rate: f64, without: &PipelineRow, with: &PipelineRow) -> Short {
        let steps = self.flows.iter().filter(|flow| !flow.is_plain).flat_map(|flow| {
            flow.steps.iter().filter(|(its, _)| *its == model).map(|(_, step)| format!("{step} of '{}'", flow.name))
        });
        let (name, steps) = (self.models[model].name.clone(), steps.collect());
        Short { model: name, steps, rate, without: without.worst(), with_one: with.worst() }
    }
}

impl Search<'_> {
    fn run(&self, settings: &[PipelineSetting]) -> Result<Vec<PipelineRow>, NoPipelineAdvice> {
        let rows = parallel::map(settings, self.threads, |setting| self.recorded.run(setting), |_| {});
        self.done.set(self.done.get() + settings.len());
        if !(self.goes_on)(self.done.get(), self.done.get() + 1) {
            return Err(NoPipelineAdvice::Interrupted);
        }
        Ok(rows.into_iter().collect::<Result<_, _>>()?)
    }

    /// The models that may get a device: one for each pool, and each with a limit of its own.
    fn candidates(&self) -> Vec<usize> {
        let recorded = self.recorded;
        let limited = |model: usize| {
            let its = &recorded.models[model];
            its.options.max_in_flight < recorded.pools[its.pool].devices
        };
        let mut seen = vec![false; recorded.pools.len()];
        // The model with the most work stands for its pool.
        let mut models: Vec<usize> = (0..recorded.models.len()).collect();
        models.sort_by(|a, b| recorded.models[*b].load.total_cmp(&recorded.models[*a].load));
        models.retain(|model| {
            let first = !std::mem::replace(&mut seen[recorded.models[*model].pool], true);
            first || limited(*model)
        });
        models
    }

    /// The model for which one device more helps most, and the replay with this device.
    fn best(&self, setting: &PipelineSetting) -> Result<(usize, PipelineRow), NoPipelineAdvice> {
        let candidates = self.candidates();
        let settings: Vec<PipelineSetting> = candidates
            .iter()
            .map(|model| {
                let mut setting = setting.clone();
                *setting.more.entry(*model).or_default() += 1;
                setting
            })
            .collect();
        let rows = self.run(&settings)?;
        let worth = |row: &PipelineRow| (row.worst(), row.in_time());
        let better = |(_, a): &(usize, PipelineRow), (_, b): &(usize, PipelineRow)| {
            let (a, b) = (worth(a), worth(b));
            // Of equal ones the first wins: it has the most work.
            b.0.total_cmp(&a.0).then(b.1.cmp(&a.1))
        };
        let mut both: Vec<(usize, PipelineRow)> = candidates.into_iter().zip(rows).collect();
        both.sort_by(better);
        Ok(both.swap_remove(0))
    }

    /// The models whose pool holds the target with one device less.
    fn spare(&self, setting: &PipelineSetting) -> Result<Vec<String>, NoPipelineAdvice> {
        let pools = 0..self.recorded.pools.len();
        let fewer: Vec<usize> = pools.filter(|pool| self.recorded.pools[*pool].devices > 1).collect();
        let mut spare = Vec::new();
        for pool in fewer {
            let mut smaller = self.recorded.clone();
            smaller.pools[pool].devices -= 1;
            let search = Search { recorded: &smaller, done: self.done.clone(), ..*self };
            if search.run(std::slice::from_ref(setting))?.remove(0).worst() >= self.target {
                spare.push(smaller.pools[pool].models.join(", "));
            }
        }
        Ok(spare)
    }
}

impl PipelineAdvice {
    fn rows(&self) -> Vec<PipelineRow> {
        std::iter::once(self.before.clone()).chain(self.added.iter().map(|added| added.row.clone())).collect()
    }

    /// The advice in sentences.
    fn sentences(&self) -> Vec<String> {
        let PipelineAdvice { target, price, before, added, holds, short, margin, spare, .. } = self;
        let percent = |share: f64| format!("{:.1}%", 100.0 * share);
        let mut sentences = Vec::new();
        if let Some(short) = short {
            let steps =
                if short.steps.is_empty() { format!("model '{}'", short.model) } else { short.steps.join(" and ") };
            let mut chars = steps.chars();
            let steps: String = chars.next().into_iter().flat_map(char::to_uppercase).chain(chars).collect();
            let at = if short.rate == 1.0 { String::new() } else { format!(" at {} times the rate", short.rate) };
            sentences.push(format!(
                "{steps} is short of devices{at}: with one more for '{}', {} of the requests are in time instead of {} (the \
                 pipeline that fares worst).",
                short.model,
                percent(short.with_one),
                percent(short.without)
            ));
        }
        let devices = before.devices();
        let (each, count) = (percent(*target), added.len());
        sentences.push(match (holds, count) {
            (true, 0) => format!("The log's {devices} devices answer {each} of each pipeline's requests in time."),
            (true, _) => {
                let mut models = std::collections::BTreeMap::<&str, u32>::new();
                added.iter().for_each(|added| *models.entry(&added.model).or_default() += 1);
                let models: Vec<String> =
                    models.iter().map(|(model, count)| format!("{count} for '{model}'")).collect();
                let each = format!("{each} of each pipeline's requests in time");
                match &added[..] {
                    [one] => format!("With one device more, for '{}', the server answers {each}.", one.model),
                    _ => format!("With {count} devices more, {}, the server answers {each}.", models.join(", ")),
                }
            }
            (false, _) => format!(
                "With {} devices no more than {} of each pipeline's requests are in time, and not {each}.",
                self.rows().last().map_or(0, PipelineRow::devices),
                percent(self.rows().last().map_or(0.0, PipelineRow::worst))
            ),
        });
        if let Some(margin) = margin.filter(|margin| *margin > 1.0) {
            sentences.push(format!("These devices hold {margin} times the rate, too."));
        }
        if let (Some(price), Some(row)) = (price, self.rows().last()) {
            let hours = row.device_hours_per_million;
            sentences.push(format!(
                "A million requests in time cost {}: {} hours of a device.",
                figure(price * hours),
                figure(hours)
            ));
        }
        if !spare.is_empty() {
            sentences.push(format!("One device less would do for {}.", spare.join("; and one for ")));
        }
        sentences
    }

    /// The advice as one HTML page without external files.
    pub fn page(&self) -> String {
        let rows = self.rows();
        let page = self.sentences().iter().fold(Page::new("Advice"), |page, sentence| page.note(sentence));
        let page = match self.config.as_deref() {
            Some(config) if !config.is_empty() => page.note(PASTE).code(config),
            _ => page,
        };
        let page = page.table("Requests", &flows(&rows)).table("Devices", &pools(&rows));
        self.notes.iter().fold(page, |page, note| page.note(note)).html()
    }
}

impl fmt::Display for PipelineAdvice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.sentences().iter().try_for_each(|sentence| writeln!(f, "{sentence}"))?;
        if let Some(config) = self.config.as_deref().filter(|config| !config.is_empty()) {
            write!(f, "\n{PASTE}\n\n{}", indented(config))?;
        }
        let rows = self.rows();
        write!(f, "\n{}\n{}", flows(&rows), pools(&rows))?;
        self.notes.iter().try_for_each(|note| write!(f, "\n{note}\n"))
    }
}
