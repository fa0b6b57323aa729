//! A cut model as table, plots and JSON.

use std::fmt::Write;

use downbeat_engine::{Activations, SegmentInfo};
use downbeat_plot::{bars, escape};
use serde::Serialize;

use crate::units;

/// Width of the bars in the terminal, characters.
const BAR_WIDTH: usize = 20;
/// Longest line of the table, characters.
const LINE_WIDTH: usize = 120;
/// Where the line of what is alive begins: below the names.
const LIVE_INDENT: usize = 10;
/// Longest name in the table, characters.
const NAME_WIDTH: usize = 22;

/// Where a model is cut, and what that costs.
#[derive(Clone, Debug, Serialize)]
pub struct SliceReport {
    /// The model.
    pub model: String,
    /// Name of the engine.
    pub engine: String,
    /// Version of the engine.
    pub engine_version: String,
    /// Threads inside one run.
    pub threads: usize,
    /// Batch size that whole and cut were compared at.
    pub batch: u16,
    /// The segments, in order.
    pub segments: Vec<Segment>,
    /// Median of the whole model, milliseconds.
    pub whole_ms: f64,
    /// Median of all segments, milliseconds.
    pub cut_ms: f64,
    /// `cut_ms` by `whole_ms`.
    pub ratio: f64,
    /// What activations take at batch 1, if that is known.
    pub activations: Option<ActivationBytes>,
    /// What loading took, if the system says.
    pub memory: Option<Memory>,
}

/// A segment.
#[derive(Clone, Debug, Serialize)]
pub struct Segment {
    operators: usize,
    first: String,
    last: String,
    /// Milliseconds at batch 1 when the model was cut.
    time_ms: Option<f64>,
    live: Vec<Live>,
    live_bytes_per_item: u64,
    weight_bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
struct Live {
    name: String,
    datatype: &'static str,
    dims: Vec<i64>,
}

/// See [`Activations`].
#[derive(Clone, Debug, Serialize)]
pub struct ActivationBytes {
    separate: u64,
    planned: u64,
    alive: u64,
    engine: Option<u64>,
}

/// Growth of the process's own resident memory (what is mapped from files is left out), bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// By loading and running the model whole.
    pub whole: u64,
    /// By loading it a second time, cut, and running it.
    pub cut: u64,
}

impl From<&SegmentInfo> for Segment {
    fn from(info: &SegmentInfo) -> Self {
        let live =
            info.live.iter().map(|l| Live { name: l.name.clone(), datatype: l.datatype.name(), dims: l.dims.clone() });
        Segment {
            operators: info.operators,
            first: info.first.clone(),
            last: info.last.clone(),
            time_ms: info.time.map(|t| t.as_millis_f64()),
            live: live.collect(),
            live_bytes_per_item: info.live_bytes_per_item,
            weight_bytes: info.weight_bytes,
        }
    }
}

impl Segment {
    /// Its milliseconds in words.
    fn time(&self) -> String {
        self.time_ms.map_or_else(|| "-".into(), |ms| format!("{ms:.3}"))
    }

    /// What is alive at its end in words, a name as `shown` says.
    fn live(&self, shown: fn(&str) -> String) -> String {
        let live = self.live.iter().map(|l| format!("{} {}{:?}", shown(&l.name), l.datatype, l.dims));
        live.collect::<Vec<_>>().join(", ")
    }
}

impl From<&Activations> for ActivationBytes {
    fn from(activations: &Activations) -> Self {
        let Activations { separate, planned, alive, engine } = *activations;
        ActivationBytes { separate, planned, alive, engine }
    }
}

fn bytes(n: u64) -> String {
    match n {
        0..1024 => format!("{n} B"),
        1024..1_048_576 => format!("{:.1} KiB", n as f64 / 1024.0),
        _ => format!("{:.1} MiB", n as f64 / 1_048_576.0),
    }
}

fn short(name: &str) -> String {
    let long = name.chars().count() > NAME_WIDTH;
    if long { name.chars().take(NAME_WIDTH - 1).chain(['…']).collect() } else { name.to_owned() }
}

/// Writes what is alive, in lines that a terminal can hold.
fn folded(out: &mut String, live: &str) {
    let mut line = format!("{:>LIVE_INDENT$}live:", "");
    for part in live.split_inclusive(", ") {
        if line.chars().count() + part.trim_end().chars().count() + 1 > LINE_WIDTH {
            let _ = writeln!(out, "{}", line.trim_end());
            line = format!("{:>1$}", "", LIVE_INDENT + "live:".len());
        }
        line.push(' ');
        line.push_str(part.trim_end());
    }
    let _ = writeln!(out, "{line}");
}

impl SliceReport {
    fn subject(&self) -> String {
        let threads = units::threads(self.threads);
        format!("{} segments, {} {}, {threads}", self.segments.len(), self.engine, self.engine_version)
    }

    /// What is compared in the end.
    fn verdict(&self) -> String {
        format!(
            "all segments {:.3} ms, whole {:.3} ms, batch {}: {:.3} times",
            self.cut_ms, self.whole_ms, self.batch, self.ratio
        )
    }

    /// What activations and loading take, a line each.
    fn sizes(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(a) = &self.activations {
            let saved = 100.0 * (1.0 - a.planned as f64 / a.separate.max(1) as f64);
            lines.push(format!(
                "activations of one item: {} if each had memory of its own, {} with a static plan (-{saved:.0}%), {} alive at most{}",
                bytes(a.separate),
                bytes(a.planned),
                bytes(a.alive),
                a.engine.map_or_else(String::new, |n| format!("; the engine's own arena held {}", bytes(n))),
            ));
        }
        if let Some(memory) = &self.memory {
            lines.push(format!(
                "resident memory, loading and one run: {} whole, {} cut",
                bytes(memory.whole),
                bytes(memory.cut)
            ));
        }
        lines
    }

    /// The table for a terminal; its last line is the time of all segments against the whole.
    pub fn table(&self) -> String {
        let most = self.segments.iter().filter_map(|s| s.time_ms).fold(0.0, f64::max);
        let mut out = format!("{}: {}\n\n", self.model, self.subject());
        let _ = writeln!(
            out,
            "{:>3} {:>5} {:<NAME_WIDTH$} {:<NAME_WIDTH$} {:>10} {:<BAR_WIDTH$} {:>12} {:>12}",
            "", "ops", "from", "to", "ms", "", "weights", "live/item"
        );
        for (index, s) in self.segments.iter().enumerate() {
            let filled = s.time_ms.map_or(0.0, |ms| (ms / most.max(f64::MIN_POSITIVE) * BAR_WIDTH as f64).round());
            let _ = writeln!(
                out,
                "{index:>3} {:>5} {:<NAME_WIDTH$} {:<NAME_WIDTH$} {:>10} {:<BAR_WIDTH$} {:>12} {:>12}",
                s.operators,
                short(&s.first),
                short(&s.last),
                s.time(),
                "█".repeat(filled as usize),
                bytes(s.weight_bytes),
                bytes(s.live_bytes_per_item),
            );
            folded(&mut out, &s.live(short));
        }
        out.push('\n');
        self.sizes().iter().chain([&self.verdict()]).for_each(|line| {
            let _ = writeln!(out, "{line}");
        });
        out
    }

    /// The table and plots as one HTML page that needs nothing else.
    pub fn page(&self) -> String {
        let mut out = format!("<p class=\"sub\">{}</p>", escape(&self.subject()));
        for line in self.sizes().iter().chain([&self.verdict()]) {
            let _ = write!(out, "<p class=\"sub\">{}</p>", escape(line));
        }
        let points = |value: fn(&Segment) -> f64| -> Vec<(String, f64)> {
            self.segments.iter().enumerate().map(|(index, s)| (index.to_string(), value(s))).collect()
        };
        out += "<div class=\"plots\">";
        out += &bars(
            "Time",
            "Milliseconds of each segment at batch 1, measured when the model was cut.",
            "segment",
            "milliseconds",
            &points(|s| s.time_ms.unwrap_or(0.0)),
        );
        out += &bars(
            "Alive at its end",
            "KiB of one item that a cut behind each segment keeps.",
            "segment",
            "KiB an item",
            &points(|s| s.live_bytes_per_item as f64 / 1024.0),
        );
        let mut rows = String::new();
        for (index, s) in self.segments.iter().enumerate() {
            let _ = write!(
                rows,
                "<tr><td>{index}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td class=\"text\">{}</td></tr>",
                s.operators,
                escape(&s.first),
                escape(&s.last),
                s.time(),
                bytes(s.weight_bytes),
                bytes(s.live_bytes_per_item),
                escape(&s.live(str::to_owned))
            );
        }
        out += "</div><h2>Segments</h2>";
        let heads = ["segment", "operators", "from", "to", "ms", "weights", "live an item", "live"];
        out += &downbeat_plot::table(&heads, &rows);
        downbeat_plot::page(&format!("Segments of {}", self.model), &out)
    }
}
