//! The views of pipelines as tables.

use std::fmt;

use downbeat_report::{Page, Table};

use super::view::{PipelineView, PipelineViews, Spans, StepView};

/// Counts by reason in words, or nothing.
pub(super) fn reasons<'a>(lost: impl IntoIterator<Item = (&'a &'static str, &'a u64)>) -> String {
    let words: Vec<String> = lost.into_iter().map(|(why, count)| format!("{count} {why}")).collect();
    words.join(", ")
}

fn ms(spans: Option<Spans>, of: impl Fn(Spans) -> f64) -> Option<String> {
    spans.map(|spans| format!("{:.2}", of(spans)))
}

impl PipelineView {
    fn heading(&self) -> String {
        let PipelineView { pipeline, requests, in_time, late, lost, open, total, .. } = self;
        let share = 100.0 * *in_time as f64 / (*requests).max(1) as f64;
        let mut text = format!("{pipeline}: {requests} requests, {in_time} in time ({share:.1}%), {late} late");
        if !lost.is_empty() {
            text += &format!(", {}", reasons(lost));
        }
        if *open > 0 {
            text += &format!(", {open} not ended");
        }
        if let Some(Spans { mean_ms, p50_ms, p99_ms }) = total {
            text += &format!("; answers after {mean_ms:.1} ms in the mean, p50 {p50_ms:.1}, p99 {p99_ms:.1}");
        }
        text
    }

    fn table(&self) -> Table<&StepView> {
        Table::of(&self.steps)
            .text("step", |step| format!("{} {}", step.step, step.model))
            .number("requests", |step| step.requests)
            .some("waits ms", |step| ms(step.waiting, |spans| spans.mean_ms))
            .some("p50", |step| ms(step.waiting, |spans| spans.p50_ms))
            .some("p99", |step| ms(step.waiting, |spans| spans.p99_ms))
            .number("for a device", |step| format!("{:.2}", step.for_device_ms))
            .some("runs ms", |step| ms(step.running, |spans| spans.mean_ms))
            .some("p50", |step| ms(step.running, |spans| spans.p50_ms))
            .some("p99", |step| ms(step.running, |spans| spans.p99_ms))
            .number("of the time", |step| format!("{:.0}%", 100.0 * step.share))
            .some("devices", |step| step.devices.as_ref().map(|devices| devices.places))
            .some("busy", |step| step.devices.as_ref().map(|devices| format!("{:.0}%", 100.0 * devices.load)))
            .some("lost", |step| (!step.lost.is_empty()).then(|| reasons(&step.lost)))
    }
}

impl PipelineViews {
    /// The views as one HTML page without external files.
    pub fn page(&self) -> String {
        let page = self.pipelines.iter().fold(Page::new("Where did the time go?"), |page, view| {
            page.table(&view.heading(), &view.table()).note(&view.shortage.to_string())
        });
        self.notes.iter().fold(page, |page, note| page.note(note)).html()
    }
}

impl fmt::Display for PipelineViews {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, view) in self.pipelines.iter().enumerate() {
            if place > 0 {
                f.write_str("\n")?;
            }
            writeln!(f, "{}\n", view.heading())?;
            view.table().fmt(f)?;
            writeln!(f, "\n{}", view.shortage)?;
        }
        self.notes.iter().try_for_each(|note| write!(f, "\n{note}\n"))
    }
}
