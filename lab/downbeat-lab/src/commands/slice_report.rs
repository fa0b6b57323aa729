//! A cut model as a table, plots and JSON.

use std::fmt;

use downbeat::options::units;
use downbeat_engine::{Activations, SegmentInfo};
use downbeat_plan::words::bytes;
use downbeat_report::{Page, Table, bars};
use serde::Serialize;

/// Width of the bars in the terminal, characters.
const BAR_WIDTH: usize = 20;
/// Longest line of live values, characters.
const LINE_WIDTH: usize = 120;
/// Indent of the lines that continue it.
const LIVE_INDENT: usize = 5;
/// Longest name in the table, characters.
const NAME_WIDTH: usize = 18;

/// The cuts of a model, and their cost.
#[derive(Clone, Debug, Serialize)]
pub struct SliceReport {
    pub model: String,
    pub engine: String,
    pub engine_version: String,
    /// Threads inside one run.
    pub threads: usize,
    /// The batch size of the comparison of whole and cut.
    pub batch: u16,
    /// The segments, in order.
    pub segments: Vec<Segment>,
    /// Median of the whole model, milliseconds.
    pub whole_ms: f64,
    /// Median of all segments, milliseconds.
    pub cut_ms: f64,
    /// `cut_ms` divided by `whole_ms`.
    pub ratio: f64,
    /// Memory of activations at batch 1, if it is known.
    pub activations: Option<Activations>,
    /// Memory of loading, if the system reports it.
    pub memory: Option<Memory>,
}

/// A segment of the model.
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

/// Growth of the process's own resident memory, without mapped files, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// Growth by loading and running the whole model.
    pub whole: u64,
    /// Growth by loading the model a second time, cut, and running it.
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
    /// The segment's milliseconds in words.
    fn time(&self) -> String {
        self.time_ms.map_or_else(|| "-".into(), |ms| format!("{ms:.3}"))
    }

    /// The values that are alive at the segment's end, in words. `shown` formats each name.
    fn live(&self, shown: fn(&str) -> String) -> String {
        let live = self.live.iter().map(|l| format!("{} {}{:?}", shown(&l.name), l.datatype, l.dims));
        live.collect::<Vec<_>>().join(", ")
    }
}

fn short(name: &str) -> String {
    let long = name.chars().count() > NAME_WIDTH;
    if long { name.chars().take(NAME_WIDTH - 1).chain(['…']).collect() } else { name.to_owned() }
}

/// The live values in lines that fit a terminal.
fn folded(live: &str) -> String {
    let (mut out, mut width) = ("live:".to_owned(), "live:".len());
    for part in live.split_inclusive(", ") {
        let part = part.trim_end();
        width += part.chars().count() + 1;
        if width > LINE_WIDTH {
            width = LIVE_INDENT + part.chars().count() + 1;
            out += &format!("\n{:LIVE_INDENT$}", "");
        }
        out += &format!(" {part}");
    }
    out
}

impl SliceReport {
    fn subject(&self) -> String {
        let threads = units::threads(self.threads);
        format!("{} segments, {} {}, {threads}", self.segments.len(), self.engine, self.engine_version)
    }

    /// The comparison of whole and cut.
    fn verdict(&self) -> String {
        format!(
            "all segments {:.3} ms, whole model {:.3} ms, both at batch {}: the segments take {:.3} times as long",
            self.cut_ms, self.whole_ms, self.batch, self.ratio
        )
    }

    /// The memory of activations and of loading, a line each.
    fn sizes(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(a) = &self.activations {
            let saved = 100.0 * (1.0 - a.planned as f64 / a.separate.max(1) as f64);
            lines.push(format!(
                "memory for the activations of one item: {} if each had its own, {} with a static plan \
                 (-{saved:.0}%), {} in use at most{}",
                bytes(a.separate),
                bytes(a.planned),
                bytes(a.alive),
                a.engine.map_or_else(String::new, |n| format!("; the engine's own arena held {}", bytes(n))),
            ));
        }
        if let Some(memory) = &self.memory {
            lines.push(format!(
                "resident memory after loading and one run: {} for the whole model, {} for the cut model",
                bytes(memory.whole),
                bytes(memory.cut)
            ));
        }
        lines
    }

    /// The table of segments. `shown` formats each name.
    fn table(&self, shown: fn(&str) -> String) -> Table<(usize, &Segment)> {
        let most = self.segments.iter().filter_map(|s| s.time_ms).fold(f64::MIN_POSITIVE, f64::max);
        Table::of(self.segments.iter().enumerate())
            .number("segment", |(index, _)| *index)
            .number("ops", |(_, s)| s.operators)
            .text("from", |(_, s)| shown(&s.first))
            .text("to", |(_, s)| shown(&s.last))
            .number("ms", |(_, s)| s.time())
            .text("", |(_, s)| "█".repeat((s.time_ms.unwrap_or(0.0) / most * BAR_WIDTH as f64).round() as usize))
            .number("weights", |(_, s)| bytes(s.weight_bytes))
            .number("live/item", |(_, s)| bytes(s.live_bytes_per_item))
    }

    /// The table and plots as one HTML page.
    pub fn page(&self) -> String {
        let points = |value: fn(&Segment) -> f64| -> Vec<(String, Vec<f64>)> {
            self.segments.iter().enumerate().map(|(index, s)| (index.to_string(), vec![value(s)])).collect()
        };
        let time = bars(
            "Time",
            "Milliseconds of each segment at batch 1, measured when the model was cut.",
            "segment",
            "milliseconds",
            &["time".to_owned()],
            &points(|s| s.time_ms.unwrap_or(0.0)),
        );
        let live = bars(
            "Memory at the end of each segment",
            "KiB of one item that a cut behind each segment keeps.",
            "segment",
            "KiB an item",
            &["alive".to_owned()],
            &points(|s| s.live_bytes_per_item as f64 / 1024.0),
        );
        let notes = [vec![self.subject()], self.sizes(), vec![self.verdict()]].concat();
        let page = Page::new(&format!("Segments of {}", self.model));
        notes
            .iter()
            .fold(page, |page, note| page.note(note))
            .plots(&[time, live])
            .table("Segments", &self.table(str::to_owned).text("live", |(_, s)| s.live(str::to_owned)))
            .html()
    }
}

/// The last line compares the time of all segments with the whole model's.
impl fmt::Display for SliceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}\n", self.model, self.subject())?;
        self.table(short).fmt(f)?;
        writeln!(f)?;
        for s in &self.segments {
            writeln!(f, "{}", folded(&s.live(short)))?;
        }
        writeln!(f)?;
        self.sizes().iter().chain([&self.verdict()]).try_for_each(|line| writeln!(f, "{line}"))
    }
}
