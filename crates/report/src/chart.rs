//! Draws lines and bars. Colours come from the page's style sheet, so that they follow light and
//! dark.

use std::fmt::Write;

/// Width of the drawing, in SVG units.
const WIDTH: f64 = 560.0;
/// Height of the drawing.
const HEIGHT: f64 = 270.0;
/// Space for the labels: left, right, top, bottom.
const MARGIN: (f64, f64, f64, f64) = (64.0, 16.0, 12.0, 46.0);

/// The placing of values along an axis.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Scale {
    /// Evenly, from 0.
    Linear,
    /// Evenly, over the range of the values alone.
    Near,
    /// By their logarithm; for positive values.
    Log,
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Axis<'a> {
    /// The quantity, with its unit.
    pub label: &'a str,
    /// The placing of values.
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

/// A value that a plot of lines marks by a straight line across it.
#[derive(Clone, PartialEq, Debug)]
pub enum Mark {
    /// A value of the horizontal axis.
    Down {
        /// The value.
        at: f64,
        /// The text beside the line.
        label: String,
    },
    /// A value of the vertical axis.
    Across {
        /// The value.
        at: f64,
        /// The text above the line.
        label: String,
    },
}

/// Replaces the characters that HTML takes for markup.
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

/// The label of a value on an axis, with as few digits as possible.
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
        let usable = values.filter(|v| v.is_finite() && (scale != Scale::Log || *v > 0.0));
        let low = usable.clone().fold(f64::INFINITY, f64::min);
        let high = usable.fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
        match scale {
            Scale::Linear => {
                let high = if high > 0.0 { high } else { 1.0 };
                let step = round_step(high / 5.0);
                let count = (high / step).ceil() as usize;
                let ticks: Vec<f64> = (0..=count).map(|i| i as f64 * step).collect();
                Range { low: 0.0, high: step * count as f64, ticks, scale }
            }
            Scale::Near => {
                let span = if high > low { high - low } else { high.abs().max(1.0) / 10.0 };
                let step = round_step(span / 5.0);
                let (first, last) = ((low / step).floor() as i64, (high / step).ceil() as i64);
                let ticks: Vec<f64> = (first..=last.max(first + 1)).map(|tick| tick as f64 * step).collect();
                let (low, high) = (first as f64 * step, last.max(first + 1) as f64 * step);
                Range { low, high, ticks, scale }
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

    /// The place of a value on the axis, 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let place = match self.scale {
            Scale::Linear | Scale::Near => (value - self.low) / (self.high - self.low),
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
    ($out:expr, $($arg:tt)*) => {{ let _ = write!($out, $($arg)*); }};
}
pub(crate) use put;

/// Rounds up to one, two or five times a power of ten.
pub(crate) fn round_step(rough: f64) -> f64 {
    let power = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= rough).unwrap_or(rough)
}

/// Begins a figure that is higher than usual by `below`, for labels below the axis.
fn begin(title: &str, description: &str, below: f64) -> String {
    let (title, description) = (escape(title), escape(description));
    let height = HEIGHT + below;
    format!(
        "<figure><figcaption>{title}</figcaption>\
         <svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{title}\"><title>{title}</title><desc>{description}</desc>"
    )
}

/// Draws the axes. The label of the horizontal axis is lower than usual by `below`.
fn axes(out: &mut String, x: &Range, y: &Range, (x_label, y_label): (&str, &str), below: f64) {
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
    put!(
        out,
        "<text class=\"label\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
        (left + right) / 2.0,
        HEIGHT + below - 8.0,
        escape(x_label)
    );
    put!(
        out,
        "<text class=\"label\" transform=\"translate(14 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        (top + bottom) / 2.0,
        escape(y_label)
    );
}

/// Draws lines over common axes, with a legend if there is more than one. Colour, dashes and
/// markers tell lines apart and follow from a line's place in `lines`. A line without points is not
/// drawn, but keeps its place, so that the same line looks alike in other plots.
pub fn lines(title: &str, description: &str, x: &Axis<'_>, y: &Axis<'_>, lines: &[Line<'_>]) -> String {
    marked(title, description, (x, y), lines, &[])
}

/// As [`lines`], with marks across the plot.
pub fn marked(
    title: &str,
    description: &str,
    (x, y): (&Axis<'_>, &Axis<'_>),
    lines: &[Line<'_>],
    marks: &[Mark],
) -> String {
    let points = || lines.iter().flat_map(|l| l.points.iter());
    let down = |mark: &Mark| if let Mark::Down { at, .. } = mark { Some(*at) } else { None };
    let across = |mark: &Mark| if let Mark::Across { at, .. } = mark { Some(*at) } else { None };
    let x_range = Range::new(points().map(|p| p.0).chain(marks.iter().filter_map(down)), x.scale);
    let y_range = Range::new(points().map(|p| p.1).chain(marks.iter().filter_map(across)), y.scale);
    let mut out = begin(title, description, 0.0);
    axes(&mut out, &x_range, &y_range, (x.label, y.label), 0.0);
    for (place, mark) in marks.iter().enumerate() {
        out += &mark.drawn(&x_range, &y_range, place);
    }
    let drawn = || lines.iter().enumerate().filter(|(_, line)| !line.points.is_empty());
    for (i, line) in drawn() {
        let mut path = String::new();
        let mut last_y = None;
        let apart = line.points.len().div_ceil(MOST_MARKERS);
        let mut markers = String::new();
        for (n, (px, py)) in line.points.iter().enumerate() {
            if !py.is_finite() {
                last_y = None;
                continue;
            }
            let (at_x, at_y) = (x_at(&x_range, *px), y_at(&y_range, *py));
            match last_y {
                None => put!(path, "M{at_x:.1} {at_y:.1}"),
                Some(_) if line.stepped => put!(path, "H{at_x:.1}V{at_y:.1}"),
                Some(_) => put!(path, "L{at_x:.1} {at_y:.1}"),
            }
            last_y = Some(at_y);
            if n % apart == 0 {
                markers += &marker(i, at_x, at_y);
            }
        }
        put!(out, "<g {}><path class=\"line\"{} d=\"{path}\"/>{markers}</g>", ink(i), dashes(i));
    }
    out += "</svg>";
    if drawn().count() > 1 {
        let key = |i| format!("<path class=\"line\"{} d=\"M0 6L28 6\"/>{}", dashes(i), marker(i, 14.0, 6.0));
        out += &legend(drawn().map(|(i, line)| (i, line.name, key(i))));
    }
    out + "</figure>"
}

impl Mark {
    /// The line and its label. Labels of different places stand at different heights.
    fn drawn(&self, x: &Range, y: &Range, place: usize) -> String {
        let (top, bottom) = (MARGIN.2, HEIGHT - MARGIN.3);
        match self {
            Mark::Down { at, label } => {
                let at = x_at(x, *at);
                // A label beyond the middle would go over the right edge.
                let (anchor, text_at) = if at > WIDTH / 2.0 { ("end", at - 5.0) } else { ("start", at + 5.0) };
                format!(
                    "<path class=\"mark\" d=\"M{at:.1} {top}V{bottom}\"/>\
                     <text x=\"{text_at:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{}</text>",
                    bottom - 6.0 - 14.0 * place as f64,
                    escape(label)
                )
            }
            Mark::Across { at, label } => {
                let (at, left, right) = (y_at(y, *at), MARGIN.0, WIDTH - MARGIN.1);
                format!(
                    "<path class=\"mark\" d=\"M{left} {at:.1}H{right}\"/>\
                     <text x=\"{}\" y=\"{:.1}\">{}</text>",
                    left + 4.0,
                    at + 14.0,
                    escape(label)
                )
            }
        }
    }
}

/// Points of one kind, named in the legend.
#[derive(Clone, Debug)]
pub struct Cloud<'a> {
    /// Name.
    pub name: &'a str,
    /// The points' places.
    pub points: &'a [(f64, f64)],
}

/// Draws the actual and the predicted time of some tests, in milliseconds, and the line on which
/// predictions are right. Colour and shape tell kinds of tests apart.
pub fn predictions(description: &str, clouds: &[Cloud<'_>]) -> String {
    let points = || clouds.iter().flat_map(|cloud| cloud.points);
    let [low, high] = [f64::min, f64::max].map(|of| points().map(|point| point.0).reduce(of).unwrap_or(1.0));
    let line = [(low, low), (high, high)];
    let x_range = Range::new(points().map(|p| p.0), Scale::Log);
    let y_range = Range::new(points().chain(&line).map(|p| p.1), Scale::Log);
    let mut out = begin("Predicted against actual", description, 0.0);
    axes(&mut out, &x_range, &y_range, ("measured milliseconds", "milliseconds predicted"), 0.0);
    let at = |point: &(f64, f64)| (x_at(&x_range, point.0), y_at(&y_range, point.1));
    let line = line.each_ref().map(at).map(|(x, y)| format!("{x:.1} {y:.1}")).join("L");
    put!(out, "<path class=\"grid\" fill=\"none\" d=\"M{line}\"/>");
    let drawn = || clouds.iter().enumerate().filter(|(_, cloud)| !cloud.points.is_empty());
    for (i, cloud) in drawn() {
        let markers: String = cloud.points.iter().map(at).map(|(x, y)| marker(i, x, y)).collect();
        put!(out, "<g fill-opacity=\"0.5\" {}>{markers}</g>", ink(i));
    }
    out += "</svg>";
    if drawn().count() > 1 {
        out += &legend(drawn().map(|(i, cloud)| (i, cloud.name, marker(i, 14.0, 6.0))));
    }
    out + "</figure>"
}

/// Most markers of a line.
const MOST_MARKERS: usize = 12;

/// The colour of the `i`-th line or bar: six colours that colour-blind readers can tell apart, then
/// others without repetition.
pub(crate) fn ink(i: usize) -> String {
    match i {
        0..6 => format!("class=\"k{i}\""),
        // Steps of the golden angle stay away from all earlier hues.
        _ => format!("style=\"--k:hsl({:.0} 60% var(--light))\"", i as f64 * 137.508 % 360.0),
    }
}

fn dashes(i: usize) -> String {
    match ["", "7 3", "2 3", "10 3 2 3", "4 4", "14 2 3 2 3 2"].get(i % 6) {
        Some(dashes) if !dashes.is_empty() => format!(" stroke-dasharray=\"{dashes}\""),
        _ => String::new(),
    }
}

/// One of five shapes around a point: with the dashes, thirty lines differ also in black and white.
fn marker(i: usize, x: f64, y: f64) -> String {
    let shape =
        ["m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", "m-3-3h6v6h-6z", "m0-4l4 7h-8z", "m0-4l4 4-4 4-4-4z", "m0 4l4-7h-8z"];
    format!("<path class=\"fill\" d=\"M{x:.1} {y:.1}{}\"/>", shape[i % shape.len()])
}

/// The begin of a legend.
pub(crate) const LEGEND: &str = "<ul class=\"legend\">";

/// Explains the colours. An entry has a place, a name, and its drawing.
pub(crate) fn legend<'a>(keys: impl Iterator<Item = (usize, &'a str, String)>) -> String {
    let entry = |(i, name, key): (usize, &str, String)| {
        format!(
            "<li><svg viewBox=\"0 0 28 12\" aria-hidden=\"true\"><g {}>{key}</g></svg>{}</li>",
            ink(i),
            escape(name)
        )
    };
    format!("{LEGEND}{}</ul>", keys.map(entry).collect::<String>())
}

/// The width of a character of a label.
const CHARACTER: f64 = 6.6;
/// The angle of labels that are longer than their column is wide, degrees.
const SLOPE: f64 = 35.0;

/// The labels below groups of bars.
struct Labels {
    /// One in so many labels is written. Numbers follow from their neighbours; names do not.
    every: usize,
    /// Whether labels slope down to the left.
    slope: bool,
    /// The height that sloping labels take below the usual place.
    below: f64,
}

impl Labels {
    fn of(groups: &[(String, Vec<f64>)], column: f64) -> Labels {
        let longest = groups.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0) as f64 * CHARACTER;
        if longest + 4.0 <= column {
            return Labels { every: 1, slope: false, below: 0.0 };
        }
        if groups.iter().all(|(label, _)| label.parse::<f64>().is_ok()) {
            return Labels { every: (28.0 / column).ceil().max(1.0) as usize, slope: false, below: 0.0 };
        }
        Labels { every: 1, slope: true, below: longest * SLOPE.to_radians().sin() }
    }

    fn put(&self, out: &mut String, middle: f64, label: &str) {
        let (y, label) = (HEIGHT - MARGIN.3 + 18.0, escape(label));
        match self.slope {
            false => put!(out, "<text x=\"{middle:.1}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>"),
            true => {
                let (x, y) = (middle + 4.0, y - 4.0);
                let turn = format!("rotate(-{SLOPE} {x:.1} {y})");
                put!(out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"end\" transform=\"{turn}\">{label}</text>");
            }
        }
    }
}

/// Draws bars in groups: a label below each group, one bar for each of `names`. Colours tell the
/// bars apart; with several names, a legend lists them. NaN draws a dash in place of a bar.
pub fn bars(
    title: &str,
    description: &str,
    x_label: &str,
    y_label: &str,
    names: &[String],
    groups: &[(String, Vec<f64>)],
) -> String {
    let values = || groups.iter().flat_map(|(_, values)| values.iter().copied());
    let y_range = Range::new(values(), Scale::Linear);
    let x_range = Range { low: 0.0, high: 1.0, ticks: Vec::new(), scale: Scale::Linear };
    let column = (WIDTH - MARGIN.0 - MARGIN.1) / groups.len().max(1) as f64;
    let labels = Labels::of(groups, column);
    let mut out = begin(title, description, labels.below);
    axes(&mut out, &x_range, &y_range, (x_label, y_label), labels.below);
    let width = (column * 0.84 / names.len().max(1) as f64).min(48.0);
    for (g, (label, values)) in groups.iter().enumerate() {
        let middle = MARGIN.0 + column * (g as f64 + 0.5);
        let left = middle - width * names.len() as f64 / 2.0;
        for (i, (value, name)) in values.iter().zip(names).enumerate() {
            let at = left + width * i as f64;
            let text_at = at + width / 2.0;
            if value.is_nan() {
                put!(out, "<text x=\"{text_at:.1}\" y=\"{}\" text-anchor=\"middle\">–</text>", HEIGHT - MARGIN.3 - 4.0);
                continue;
            }
            let top = y_at(&y_range, *value);
            put!(
                out,
                "<g {}><rect class=\"fill\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{}, {}: {}</title></rect></g>",
                ink(i),
                at + width * 0.06,
                width * 0.88,
                HEIGHT - MARGIN.3 - top,
                escape(label),
                escape(name),
                tick_label(*value)
            );
            if width >= 26.0 {
                let value = tick_label((value * 100.0).round() / 100.0);
                put!(out, "<text x=\"{text_at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{value}</text>", top - 3.0);
            }
        }
        if g % labels.every == 0 {
            labels.put(&mut out, middle, label);
        }
    }
    out += "</svg>";
    if names.len() > 1 {
        let key = "<rect class=\"fill\" width=\"28\" height=\"12\"/>".to_owned();
        out += &legend(names.iter().enumerate().map(|(i, name)| (i, name.as_str(), key.clone())));
    }
    out + "</figure>"
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const AXIS: Axis<'_> = Axis { label: "x, ms", scale: Scale::Linear };

    #[test]
    fn no_two_lines_are_drawn_alike() {
        let colours: BTreeSet<String> = (0..100).map(ink).collect();
        assert_eq!(colours.len(), 100, "no colour twice");
        let shapes: BTreeSet<(String, String)> = (0..30).map(|i| (dashes(i), marker(i, 0.0, 0.0))).collect();
        assert_eq!(shapes.len(), 30, "also in black and white");
    }

    #[test]
    fn a_line_without_points_keeps_its_place() {
        let line = |name, points| Line { name, points, stepped: false };
        let drawn = lines(
            "t",
            "",
            &AXIS,
            &AXIS,
            &[line("none", vec![]), line("a<", vec![(1.0, 1.0)]), line("b", vec![(1.0, 2.0)])],
        );
        assert!(drawn.contains(&ink(1)) && drawn.contains(&ink(2)) && !drawn.contains(&ink(0)), "{drawn}");
        assert!(drawn.contains("</svg>a&lt;</li>") && !drawn.contains("none"), "{drawn}");
    }

    #[test]
    fn marks_are_named_and_inside_the_axes() {
        let line = [Line { name: "a", points: vec![(0.0, 1.0), (4.0, 2.0)], stepped: false }];
        let marks = [
            Mark::Down { at: 9.0, label: "knee <9>".to_owned() },
            Mark::Across { at: 1.0, label: "target".to_owned() },
        ];
        let drawn = marked("t", "", (&AXIS, &AXIS), &line, &marks);
        // The axis goes to 10, so that the mark has its place.
        let at = MARGIN.0 + 0.9 * (WIDTH - MARGIN.0 - MARGIN.1);
        assert!(
            drawn.contains(&format!("d=\"M{at:.1} ")) && drawn.contains("text-anchor=\"end\">knee &lt;9&gt;"),
            "{drawn}"
        );
        assert_eq!(drawn.matches("class=\"mark\"").count(), 2, "{drawn}");
        assert!(!drawn.contains("legend"), "{drawn}");
    }

    #[test]
    fn an_axis_may_begin_near_its_values() {
        let range = |values: &[f64]| Range::new(values.iter().copied(), Scale::Near);
        let near = range(&[91.0, 99.5]);
        assert_eq!((near.low, near.high, near.ticks), (90.0, 100.0, vec![90.0, 92.0, 94.0, 96.0, 98.0, 100.0]));
        let single = range(&[100.0]);
        assert!(single.low <= 100.0 && single.high > single.low && single.ticks.len() > 1);
    }

    #[test]
    fn every_name_stands_under_its_bar() {
        let drawn = |names: &[&str]| {
            let groups: Vec<(String, Vec<f64>)> = names.iter().map(|name| ((*name).to_owned(), vec![1.0])).collect();
            bars("t", "", "x", "y", &["n".to_owned()], &groups)
        };
        let names: Vec<String> = (0..40).map(|n| format!("deferred+window {n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let long = drawn(&names);
        assert!(names.iter().all(|name| long.contains(&format!(">{name}</text>"))), "{long}");
        assert_eq!(long.matches("rotate(-35 ").count(), 40, "long names slope: {long}");
        assert!(!drawn(&["a", "b"]).contains("rotate(-35 "));
        let numbers: Vec<String> = (1000..1100).map(|n| n.to_string()).collect();
        let numbers = drawn(&numbers.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(numbers.contains(">1000</text>") && !numbers.contains(">1001</text>"), "{numbers}");
    }

    #[test]
    fn what_is_no_number_is_a_gap() {
        let points = vec![(0.0, 1.0), (1.0, f64::NAN), (2.0, 1.0)];
        let drawn = lines("t", "", &AXIS, &AXIS, &[Line { name: "a", points, stepped: false }]);
        assert!(!drawn.contains("NaN") && !drawn.contains("legend"), "{drawn}");
        let drawn = bars("t", "", "x", "y", &["n".to_owned()], &[("g".to_owned(), vec![f64::NAN])]);
        assert!(!drawn.contains("NaN") && drawn.contains('–') && !drawn.contains("legend"), "{drawn}");
    }
}
