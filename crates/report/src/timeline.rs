//! Draws the batches of each device over time.

use std::fmt::Write;

use crate::chart::{escape, ink, put, round_step};

/// The batches of each device over time (Symphony figure 4): a row for each device, a box for each
/// batch, a dot for each request.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// The title above the picture.
    pub title: String,
    /// The unit of time, such as `ms`.
    pub unit: String,
    /// Labels of the rows, from the top.
    pub rows: Vec<String>,
    /// The batches.
    pub boxes: Vec<Box>,
    /// The arrivals, above the rows.
    pub dots: Vec<Dot>,
}

/// A batch.
#[derive(Clone, Debug)]
pub struct Box {
    /// Index of the row.
    pub row: usize,
    /// The batch's begin.
    pub start: f64,
    /// The batch's end.
    pub end: f64,
    /// The text in the box, if there is room.
    pub label: String,
    /// The number of the batch's colour.
    pub colour: usize,
    /// Whether the batch was stopped before its end.
    pub lost: bool,
    /// The text shown when the mouse points at the box.
    pub hint: String,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Dot {
    /// The arrival.
    pub at: f64,
    /// Whether the request was dropped or late.
    pub bad: bool,
    /// The number of the colour, which is its batch's.
    pub colour: usize,
    /// The text shown when the mouse points at the dot.
    pub hint: String,
}

/// Width of a picture in SVG units.
const WIDTH: f64 = 1080.0;
/// Least and most space for the labels on the left.
const LEFT: [f64; 2] = [48.0, 200.0];
/// The width of a character of a label.
const CHARACTER: f64 = 6.6;
/// Height of a row.
const ROW: f64 = 30.0;
/// Space above the rows: without dots, with dots.
const TOP: [f64; 2] = [4.0, 26.0];

impl Timeline {
    /// The picture from `from` to `to`; the rest is cut off.
    pub fn svg(&self, from: f64, to: f64) -> String {
        let span = if to > from { to - from } else { 1.0 };
        let longest = self.rows.iter().map(|label| label.chars().count()).max().unwrap_or(0);
        let left_edge = (longest as f64 * CHARACTER + 12.0).clamp(LEFT[0], LEFT[1]);
        let x = |at: f64| left_edge + ((at - from) / span).clamp(0.0, 1.0) * (WIDTH - left_edge - 8.0);
        let above = TOP[usize::from(!self.dots.is_empty())];
        let height = above + ROW * self.rows.len() as f64 + 24.0;
        let title = escape(&self.title);
        let mut out = format!("<figure class=\"wide\"><figcaption>{title}</figcaption>");
        put!(out, "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\"><title>{title}</title>");
        for (row, label) in self.rows.iter().enumerate() {
            let bottom = above + ROW * (row as f64 + 1.0);
            put!(
                out,
                "<line class=\"device\" x1=\"{left_edge}\" x2=\"{}\" y1=\"{bottom}\" y2=\"{bottom}\"/>",
                WIDTH - 8.0
            );
            put!(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">", left_edge - 6.0, bottom - 10.0);
            let (shown, whole) = (escape(&cut(label, left_edge)), escape(label));
            put!(out, "{shown}<title>{whole}</title></text>");
        }
        for tick in ticks(from, to) {
            let bottom = height - 24.0;
            put!(out, "<line class=\"grid\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{above}\" y2=\"{bottom}\"/>", x(tick));
            // The last label would not fit around its tick.
            let anchor = if x(tick) > WIDTH - LEFT[0] { "end" } else { "middle" };
            put!(out, "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"{anchor}\">", x(tick), height - 8.0);
            put!(out, "{} {}</text>", (tick * 1e6).round() / 1e6, escape(&self.unit));
        }
        for shown in self.boxes.iter().filter(|shown| shown.end > from && shown.start < to) {
            let (left, right) = (x(shown.start), x(shown.end));
            let top = above + ROW * shown.row as f64 + 5.0;
            let lost = if shown.lost { " lost" } else { "" };
            put!(
                out,
                "<g {}><rect class=\"batch{lost}\" x=\"{left:.1}\" y=\"{top}\" width=\"{:.1}\" height=\"{}\"><title>{}</title></rect></g>",
                ink(shown.colour),
                (right - left).max(0.5),
                ROW - 6.0,
                escape(&shown.hint)
            );
            if right - left > 6.0 * shown.label.len() as f64 + 4.0 {
                let middle = (left + right) / 2.0;
                put!(out, "<text class=\"size\" x=\"{middle:.1}\" y=\"{}\" text-anchor=\"middle\">", top + 16.0);
                put!(out, "{}</text>", escape(&shown.label));
            }
        }
        for dot in self.dots.iter().filter(|dot| (from..to).contains(&dot.at)) {
            let class = if dot.bad { "bad" } else { "fill" };
            put!(out, "<g {}><circle class=\"{class}\" cx=\"{:.1}\" cy=\"14\" r=\"3\">", ink(dot.colour), x(dot.at));
            put!(out, "<title>{}</title></circle></g>", escape(&dot.hint));
            if dot.bad {
                put!(out, "<path class=\"cross\" d=\"M{0:.1} 8l6 12m0-12l-6 12\"/>", x(dot.at) - 3.0);
            }
        }
        out + "</svg></figure>"
    }
}

/// The part of a label that fits into this width.
fn cut(label: &str, room: f64) -> String {
    let most = ((room - 12.0) / CHARACTER) as usize;
    if label.chars().count() <= most + 1 {
        return label.to_owned();
    }
    label.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// About ten round values between `from` and `to`.
fn ticks(from: f64, to: f64) -> Vec<f64> {
    let rough = (to - from) / 10.0;
    if !(rough > 0.0 && rough.is_finite()) {
        return Vec::new();
    }
    let step = round_step(rough);
    let first = (from / step).ceil() as i64;
    let last = (to / step).floor() as i64;
    (first..=last).map(|at| at as f64 * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_and_dots_are_placed_cut_and_escaped() {
        let shown = |start: f64, end: f64| Box {
            row: 1,
            start,
            end,
            label: "4".to_owned(),
            colour: 7,
            lost: false,
            hint: "a<b".to_owned(),
        };
        let timeline = Timeline {
            title: "3 & 4".to_owned(),
            unit: "ms".to_owned(),
            rows: vec!["d0".to_owned(), "d1".to_owned()],
            boxes: vec![shown(0.0, 5.0), shown(20.0, 30.0)],
            dots: vec![Dot { at: 1.0, bad: true, colour: 0, hint: String::new() }],
        };
        let svg = timeline.svg(0.0, 10.0);
        assert!(svg.contains("3 &amp; 4") && svg.contains("a&lt;b"), "{svg}");
        assert_eq!(
            svg.matches(&format!("<g {}><rect class=\"batch\"", ink(7))).count(),
            1,
            "the batch after the end is not drawn: {svg}"
        );
        assert_eq!(svg.matches("<circle class=\"bad\"").count(), 1, "{svg}");
    }

    #[test]
    fn long_labels_have_room_up_to_a_limit() {
        let svg = |label: &str| {
            let rows = vec![label.to_owned()];
            Timeline { unit: "ms".to_owned(), rows, ..Timeline::default() }.svg(0.0, 1.0)
        };
        assert!(svg("encoder of texts").contains(">encoder of texts<title>"));
        let long = "a".repeat(80);
        let cut = svg(&long);
        assert!(cut.contains(&format!("aaa…<title>{long}</title>")) && cut.contains("x1=\"200\""), "{cut}");
    }

    #[test]
    fn an_empty_span_has_no_ticks() {
        assert!(ticks(1.0, 1.0).is_empty());
        assert_eq!(ticks(0.0, 10.0).len(), 11);
        assert!(Timeline::default().svg(5.0, 5.0).contains("<svg"));
    }
}
