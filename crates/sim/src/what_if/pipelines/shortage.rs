//! The step of a pipeline that is short of devices.

use std::fmt;

use serde::Serialize;

use super::view::StepView;

/// A device is short of time if it was busy for this share of the time.
const BUSY: f64 = 0.85;
/// Or for this share of its busiest second.
const BUSY_PEAK: f64 = 0.95;
/// Less waiting for devices, as a share of all time in the steps, is no shortage.
const LEAST_WAITING: f64 = 0.05;

/// Whether a step of a pipeline is short of devices.
///
/// **Rule.** The scheduler writes why a batch began when it did. A batch may wait for members, or for
/// its moment: such waiting is by choice. If the batch was ready, the rest of its waiting is for a
/// device. A step is short of devices if two things come together. Such waiting takes 5% of the time
/// in all steps, dropped requests included. And the devices were busy, 85% of the time or 95% of the
/// busiest second. Of several such steps the one with the most waiting is named. Waiting for devices that have idle time has another
/// cause, such as requests that come in bursts.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Shortage {
    /// The step with the most waiting for a device.
    pub step: u32,
    /// Its model.
    pub model: String,
    /// Whether the step is short of devices.
    pub is_short: bool,
    /// The share of waiting for a device there, in the time of all requests in all steps.
    pub waiting: f64,
    /// The share of the requests that ended there without an answer.
    pub lost: f64,
    /// The number of devices, or of batches that the model's own limit permits at once.
    pub places: u32,
    /// Whether the model's own limit sets the number.
    pub is_limit: bool,
    /// The busy share of these places; `None`: the log does not tell.
    pub load: Option<f64>,
    /// The busy share in the busiest second.
    pub peak: Option<f64>,
    /// Other models that use the same devices.
    pub others: Vec<String>,
}

/// Judges a pipeline with these steps and this number of requests. There is at least one step.
pub(super) fn shortage(steps: &[StepView], requests: u64) -> Shortage {
    let time = |step: &StepView| {
        let mean = |spans: Option<super::Spans>| spans.map_or(0.0, |spans| spans.mean_ms);
        let answered = step.requests.saturating_sub(step.lost.values().sum::<u64>()) as f64;
        (mean(step.waiting) + mean(step.running)) * answered / 1e3
    };
    // The time of dropped requests is a part of the waiting alone.
    let waited: f64 = steps.iter().map(|step| step.waited_seconds).sum();
    let all = steps.iter().map(time).sum::<f64>() + waited;
    let is_busy = |step: &StepView| {
        step.devices.as_ref().is_some_and(|devices| devices.load >= BUSY || devices.peak >= BUSY_PEAK)
    };
    let share = |step: &StepView| if all > 0.0 { step.waited_seconds / all } else { 0.0 };
    let most = |of: &dyn Fn(&StepView) -> bool| {
        let candidates = steps.iter().filter(|step| of(step));
        candidates.max_by(|a, b| a.waited_seconds.total_cmp(&b.waited_seconds).then(b.step.cmp(&a.step)))
    };
    let short = most(&|step| is_busy(step) && share(step) >= LEAST_WAITING);
    let is_short = short.is_some();
    let most = short.or_else(|| most(&|_| true));
    let Some(most) = most else {
        let (model, others) = (String::new(), Vec::new());
        let (waiting, lost, places, is_limit) = (0.0, 0.0, 0, false);
        return Shortage { step: 0, model, is_short, waiting, lost, places, is_limit, load: None, peak: None, others };
    };
    let devices = most.devices.as_ref();
    let waiting = share(most);
    let losses: u64 = most.lost.iter().filter(|(why, _)| **why != "cancelled").map(|(_, count)| count).sum();
    let lost = losses as f64 / requests.max(1) as f64;
    Shortage {
        step: most.step,
        model: most.model.clone(),
        is_short,
        waiting,
        lost,
        places: devices.map_or(0, |devices| devices.places),
        is_limit: devices.is_some_and(|devices| devices.is_limit),
        load: devices.map(|devices| devices.load),
        peak: devices.map(|devices| devices.peak),
        others: devices.map(|devices| devices.others.clone()).unwrap_or_default(),
    }
}

/// One or more sentences.
impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage { step, model, is_short, waiting, lost, places, is_limit, load, peak, others } = self;
        let percent = |share: f64| format!("{:.0}%", 100.0 * share);
        let step = format!("step {step} ('{model}')");
        if *waiting < LEAST_WAITING {
            write!(f, "No step is short of devices: waiting for a device takes {} of the time", percent(*waiting))?;
            write!(f, " in {step}, and less elsewhere.")?;
            return Ok(());
        }
        let (Some(load), Some(peak)) = (load, peak) else {
            write!(
                f,
                "Most waiting is in {step}: {} of the time. The log does not tell how busy its",
                percent(*waiting)
            )?;
            return f.write_str(" devices were.");
        };
        let (what, is) = match (is_limit, places) {
            (true, 1) => ("instances", "its one instance is".to_owned()),
            (true, places) => ("instances", format!("its {places} instances are")),
            (false, 1) => ("devices", "its one device is".to_owned()),
            (false, places) => ("devices", format!("its {places} devices are")),
        };
        let busy = format!("{is} busy {} of the time and {} of the busiest second", percent(*load), percent(*peak));
        let waits = format!("waiting for one takes {} of the requests' time", percent(*waiting));
        match is_short {
            true => write!(f, "Step {} is short of {what}: {waits}, and {busy}.", &step[5..])?,
            false => write!(
                f,
                "No step is short of {what}: in {step} {waits}, but {busy}. Requests come in bursts, batches are \
                 long, or the machine was short of CPU time."
            )?,
        }
        if *lost > 0.0 {
            write!(f, " {:.1}% of the requests end there without an answer.", 100.0 * lost)?;
        }
        if !others.is_empty() {
            let others: Vec<String> = others.iter().map(|other| format!("'{other}'")).collect();
            write!(f, " The same devices run {}.", others.join(", "))?;
        }
        Ok(())
    }
}
