//! Lines and bars. Colours come from the page's style sheet, so that they follow light and dark.

use std::fmt::Write;

/// Width of the drawing, in SVG units.
const WIDTH: f64 = 560.0;
/// Height of the drawing.
const HEIGHT: f64 = 270.0;
/// Space for the labels: left, right, top, bottom.
const MARGIN: (f64, f64, f64, f64) = (64.0, 16.0, 12.0, 46.0);

/// How values are placed along an axis.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Scale {
    /// Evenly.
    Linear,
    /// By their logarithm; for positive values.
    Log,
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Axis<'a> {
    /// What it shows, with the unit.
    pub label: &'a str,
    /// How.
    pub scale: Scale,
}

/// A line, named in the legend.
#[derive(Clone, Debug)]
pub struct Line<'a> {
    /// Name.
    pub name: &'a str,
    /// Points from left to right.
    pub points: Vec<(f64, f64)>,
    /// Whether the value holds until the next point.
    pub stepped: bool,
}

/// Replaces what HTML would take for markup.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            c => escaped.push(c),
        }
    }
    escaped
}

/// A value on an axis: as few digits as tell it apart.
fn tick_label(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if magnitude >= 1e6 {
        format!("{}M", trim(value / 1e6))
    } else if magnitude >= 1e4 {
        format!("{}k", trim(value / 1e3))
    } else {
        trim(value)
    }
}

fn trim(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The range of an axis and its ticks.
struct Range {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
    scale: Scale,
}

impl Range {
    fn new(values: impl Iterator<Item = f64> + Clone, scale: Scale) -> Range {
        let usable = values.filter(|v| v.is_finite() && (scale == Scale::Linear || *v > 0.0));
        let low = usable.clone().fold(f64::INFINITY, f64::min);
        let high = usable.fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
        match scale {
            Scale::Linear => {
                let high = if high > 0.0 { high } else { 1.0 };
                let rough = high / 5.0;
                let power = 10_f64.powf(rough.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough).unwrap_or(rough);
                let count = (high / step).ceil() as usize;
                let ticks: Vec<f64> = (0..=count).map(|i| i as f64 * step).collect();
                Range { low: 0.0, high: step * count as f64, ticks, scale }
            }
            Scale::Log => {
                let (low, high) = if low > 0.0 { (low, high) } else { (0.1, 1.0) };
                let first = low.log10().floor() as i32;
                let last = (high.log10().ceil() as i32).max(first + 1);
                let fine: &[f64] = if last - first <= 2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
                let ticks = (first..=last).flat_map(|e| fine.iter().map(move |m| m * 10_f64.powi(e)));
                let (low, high) = (10_f64.powi(first), 10_f64.powi(last));
                Range { low, high, ticks: ticks.filter(|t| *t <= high * 1.001).collect(), scale }
            }
        }
    }

    /// Where a value is, 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let place = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
        };
        place.clamp(0.0, 1.0)
    }
}

fn x_at(range: &Range, value: f64) -> f64 {
    MARGIN.0 + range.place(value) * (WIDTH - MARGIN.0 - MARGIN.1)
}

fn y_at(range: &Range, value: f64) -> f64 {
    HEIGHT - MARGIN.3 - range.place(value) * (HEIGHT - MARGIN.2 - MARGIN.3)
}

/// Writing to a string cannot fail.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => { let _ = write!($out, $($arg)*); };
}

fn begin(out: &mut String, title: &str, description: &str) {
    put!(
        out,
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\"><title>{}</title><desc>{}</desc>",
        escape(title),
        escape(title),
        escape(description)
    );
}

fn axes(out: &mut String, x: &Range, y: &Range, x_label: &str, y_label: &str) {
    let (left, right, top, bottom) = (MARGIN.0, WIDTH - MARGIN.1, MARGIN.2, HEIGHT - MARGIN.3);
    for tick in &y.ticks {
        let at = y_at(y, *tick);
        put!(out, "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
        put!(out, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", left - 8.0, at + 4.0, tick_label(*tick));
    }
    for tick in &x.ticks {
        let at = x_at(x, *tick);
        put!(out, "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>");
        put!(out, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>", bottom + 18.0, tick_label(*tick));
    }
    axis_labels(out, x_label, y_label);
}

fn axis_labels(out: &mut String, x_label: &str, y_label: &str) {
    let (left, right, top, bottom) = (MARGIN.0, WIDTH - MARGIN.1, MARGIN.2, HEIGHT - MARGIN.3);
    put!(
        out,
        "<text class=\"label\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
        (left + right) / 2.0,
        HEIGHT - 8.0,
        escape(x_label)
    );
    put!(
        out,
        "<text class=\"label\" transform=\"translate(14 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        (top + bottom) / 2.0,
        escape(y_label)
    );
}

/// Lines over common axes, with a legend if there is more than one. Lines are told apart by colour and dashes.
pub fn lines(title: &str, description: &str, x: &Axis<'_>, y: &Axis<'_>, lines: &[Line<'_>]) -> String {
    let points = || lines.iter().flat_map(|l| l.points.iter());
    let x_range = Range::new(points().map(|p| p.0), x.scale);
    let y_range = Range::new(points().map(|p| p.1), y.scale);
    let mut out = String::from("<figure>");
    put!(out, "<figcaption>{}</figcaption>", escape(title));
    begin(&mut out, title, description);
    axes(&mut out, &x_range, &y_range, x.label, y.label);
    for (i, line) in lines.iter().enumerate() {
        let mut path = String::new();
        let mut last_y = None;
        for (px, py) in &line.points {
            let (at_x, at_y) = (x_at(&x_range, *px), y_at(&y_range, *py));
            match last_y {
                None => {
                    put!(path, "M{at_x:.1} {at_y:.1}");
                }
                Some(before) if line.stepped => {
                    put!(path, "L{at_x:.1} {before:.1}L{at_x:.1} {at_y:.1}");
                }
                Some(_) => {
                    put!(path, "L{at_x:.1} {at_y:.1}");
                }
            }
            last_y = Some(at_y);
        }
        put!(out, "<path class=\"line {}\" d=\"{path}\"/>", style(i));
    }
    out += "</svg>";
    if lines.len() > 1 {
        out += "<ul class=\"legend\">";
        for (i, line) in lines.iter().enumerate() {
            let name = escape(line.name);
            put!(
                out,
                "<li><svg viewBox=\"0 0 28 8\" aria-hidden=\"true\"><path class=\"line {}\" d=\"M0 4L28 4\"/></svg>{name}</li>",
                style(i)
            );
        }
        out += "</ul>";
    }
    out + "</figure>"
}

/// The class of the `i`-th line: six colours, then the same with another dash.
fn style(i: usize) -> String {
    format!("c{}{}", i % 6, if i < 6 { "" } else { " again" })
}

/// Bars with a label below and a value above each.
pub fn bars(title: &str, description: &str, x_label: &str, y_label: &str, bars: &[(String, f64)]) -> String {
    let y_range = Range::new(bars.iter().map(|b| b.1), Scale::Linear);
    let x_range = Range { low: 0.0, high: 1.0, ticks: Vec::new(), scale: Scale::Linear };
    let mut out = String::from("<figure>");
    put!(out, "<figcaption>{}</figcaption>", escape(title));
    begin(&mut out, title, description);
    axes(&mut out, &x_range, &y_range, x_label, y_label);
    let slot = (WIDTH - MARGIN.0 - MARGIN.1) / bars.len().max(1) as f64;
    // Labels that would touch are left out.
    let every = (28.0 / slot).ceil().max(1.0) as usize;
    for (i, (label, value)) in bars.iter().enumerate() {
        let left = MARGIN.0 + slot * i as f64;
        let top = y_at(&y_range, *value);
        let (width, height) = ((slot * 0.8).min(60.0), HEIGHT - MARGIN.3 - top);
        let at = left + (slot - width) / 2.0;
        put!(
            out,
            "<rect class=\"bar\" x=\"{at:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"><title>{}: {}</title></rect>",
            escape(label),
            tick_label(*value)
        );
        if i % every == 0 {
            put!(
                out,
                "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                left + slot / 2.0,
                HEIGHT - MARGIN.3 + 18.0,
                escape(label)
            );
        }
    }
    out + "</svg></figure>"
}

/// Bars in groups: a label below each group, one bar for each of `names`, told apart by colour and listed in a legend. NaN: no
/// bar, and a dash in its place.
pub fn groups(
    title: &str,
    description: &str,
    y_label: &str,
    names: &[String],
    groups: &[(String, Vec<f64>)],
) -> String {
    let values = || groups.iter().flat_map(|(_, values)| values.iter().copied());
    let y_range = Range::new(values(), Scale::Linear);
    let x_range = Range { low: 0.0, high: 1.0, ticks: Vec::new(), scale: Scale::Linear };
    let mut out = String::from("<figure>");
    put!(out, "<figcaption>{}</figcaption>", escape(title));
    begin(&mut out, title, description);
    axes(&mut out, &x_range, &y_range, "", y_label);
    let slot = (WIDTH - MARGIN.0 - MARGIN.1) / groups.len().max(1) as f64;
    let width = (slot * 0.84 / names.len().max(1) as f64).min(48.0);
    for (g, (label, values)) in groups.iter().enumerate() {
        let middle = MARGIN.0 + slot * (g as f64 + 0.5);
        let left = middle - width * names.len() as f64 / 2.0;
        for (i, (value, name)) in values.iter().zip(names).enumerate() {
            let at = left + width * i as f64;
            if value.is_nan() {
                let (x, y) = (at + width / 2.0, HEIGHT - MARGIN.3 - 4.0);
                put!(out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">–</text>");
                continue;
            }
            let top = y_at(&y_range, *value);
            let height = HEIGHT - MARGIN.3 - top;
            put!(
                out,
                "<rect class=\"f{}\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{height:.1}\"><title>{}, {}: {}</title></rect>",
                i % 6,
                at + width * 0.06,
                width * 0.88,
                escape(label),
                escape(name),
                tick_label(*value)
            );
            if width >= 26.0 {
                put!(
                    out,
                    "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                    at + width / 2.0,
                    top - 3.0,
                    tick_label((value * 100.0).round() / 100.0)
                );
            }
        }
        put!(
            out,
            "<text x=\"{middle:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - MARGIN.3 + 18.0,
            escape(label)
        );
    }
    out += "</svg><ul class=\"legend\">";
    for (i, name) in names.iter().enumerate() {
        put!(
            out,
            "<li><svg viewBox=\"0 0 28 8\" aria-hidden=\"true\"><rect class=\"f{}\" width=\"28\" height=\"8\"/></svg>{}</li>",
            i % 6,
            escape(name)
        );
    }
    out + "</ul></figure>"
}
