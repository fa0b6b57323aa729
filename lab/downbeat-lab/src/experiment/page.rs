//! The results as one HTML page that needs nothing else.

use downbeat_report::{Axis, Box as Batch, Dot, Line, Page, Scale, Timeline, bars, lines};
use downbeat_sim::tables::sample_table::{NamedSample, plot_batch_sizes, plot_delays};

use super::run::{Case, Results};
use super::{Experiment, Plot, Value};

/// A quantity of a case.
type Quantity<'a> = &'a dyn Fn(&Case) -> Option<f64>;

impl Experiment {
    /// The results as one HTML page that needs nothing else: no script, no network.
    pub fn page(&self, results: &Results) -> String {
        let mut plots = Vec::new();
        let mut wide = Vec::new();
        for plot in &self.plots {
            match plot {
                Plot::Timeline => self.timelines(&mut wide, results),
                Plot::Windows => self.windows(&mut plots, results),
                plot => self.plot(&mut plots, results, *plot),
            }
        }
        let page = Page::new(&self.title).note(&self.source).note(&self.note).plots(&plots);
        wide.into_iter()
            .fold(page, |page, plot| page.plots(&[plot]))
            .table("Table", &results.table())
            .note(&results.conditions())
            .html()
    }

    fn plot(&self, out: &mut Vec<String>, results: &Results, plot: Plot) {
        let percent = |share: f64| 100.0 * share;
        match plot {
            Plot::Value => {
                self.over_x(out, results, results.value_name(), &|case| Some(case.value?.median));
            }
            Plot::Relative => {
                let name = format!("% of {}", self.relative_to.as_deref().unwrap_or_default());
                self.over_x(out, results, &name, &|case| case.relative.map(percent));
            }
            Plot::Busy => {
                self.over_x(out, results, "devices busy, %", &|case| Some(percent(case.typical()?.busy_share)));
            }
            Plot::Bad => {
                self.over_x(out, results, "dropped or late, %", &|case| Some(percent(case.typical()?.bad_share)));
            }
            Plot::Spread => self.spread(out, results),
            Plot::Batch => self.distribution(out, results, plot_batch_sizes),
            Plot::Delay => self.distribution(out, results, plot_delays),
            Plot::Timeline | Plot::Windows => {}
        }
    }

    /// Lines over the varied setting on the x axis, one plot for each workload and each other
    /// varied setting. Without such an axis, bars.
    fn over_x(&self, out: &mut Vec<String>, results: &Results, y: &str, quantity: Quantity<'_>) {
        let Some(x) = &self.x else { return self.bars(out, results, y, quantity) };
        let label = |policy: &str| if policy.contains('%') { "timeout".to_owned() } else { policy.to_owned() };
        let mut names: Vec<String> = Vec::new();
        for name in policies(results).iter().map(|policy| label(policy)) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        for (facet, cases) in facets(results, Some(x)) {
            let at = |case: &Case| match case.point.get(x) {
                Some(Value::Number(at)) => *at,
                Some(Value::Text(text)) => {
                    text.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0.0)
                }
                None => 0.0,
            };
            let points = |name: &String| {
                let of_it = cases.iter().filter(|case| label(&case.policy) == *name);
                let mut points: Vec<(f64, f64)> = of_it.filter_map(|case| Some((at(case), quantity(case)?))).collect();
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                points
            };
            let drawn: Vec<Line<'_>> =
                names.iter().map(|name| Line { name, points: points(name), stepped: false }).collect();
            let title = if facet.is_empty() { y.to_owned() } else { format!("{facet}: {y}") };
            let axis = |label| Axis { label, scale: Scale::Linear };
            out.push(lines(&title, &format!("{y} over {x}"), &axis(x), &axis(y), &drawn));
        }
    }

    fn bars(&self, out: &mut Vec<String>, results: &Results, y: &str, quantity: Quantity<'_>) {
        let names = policies(results);
        // Workloads of very different size have plots of their own.
        for (facet, cases) in facets(results, None) {
            let value = |name: &String| {
                let case = cases.iter().find(|case| case.policy == *name);
                case.and_then(|case| quantity(case)).unwrap_or(f64::NAN)
            };
            let groups: Vec<_> = names.iter().map(|name| (name.clone(), vec![value(name)])).collect();
            let (title, about) = (format!("{facet} {y}"), format!("{y} by policy"));
            out.push(bars(&title, &about, "policy", y, &[y.to_owned()], &groups));
        }
    }

    /// The relative values of all cases, sorted: the share of the cases with at most each value.
    fn spread(&self, out: &mut Vec<String>, results: &Results) {
        let mut drawn = Vec::new();
        let names = policies(results);
        for name in &names {
            let others = Some(name) != self.relative_to.as_ref();
            let cases = results.cases.iter().filter(|case| others && case.policy == *name);
            let mut values: Vec<f64> = cases.filter_map(|case| case.relative).collect();
            values.sort_by(f64::total_cmp);
            let count = values.len() as f64;
            let points =
                values.iter().zip(1..).map(|(value, n)| (100.0 * f64::from(n) / count, 100.0 * value)).collect();
            drawn.push(Line { name, points, stepped: false });
        }
        let y = format!("% of {}", self.relative_to.as_deref().unwrap_or_default());
        let axis = |label| Axis { label, scale: Scale::Linear };
        out.push(lines("All cases, sorted", "relative values", &axis("% of the cases"), &axis(&y), &drawn));
    }

    /// A distribution of each policy's typical sample, a plot for each workload.
    fn distribution(&self, out: &mut Vec<String>, results: &Results, plot: fn(&str, &[NamedSample<'_>]) -> String) {
        for (facet, cases) in facets(results, None) {
            let typical = |name: String| {
                let case = cases.iter().find(|case| case.policy == name);
                (name, case.and_then(|case| case.typical()))
            };
            out.push(plot(&facet, &policies(results).into_iter().map(typical).collect::<Vec<_>>()));
        }
    }

    fn timelines(&self, out: &mut Vec<String>, results: &Results) {
        for case in &results.cases {
            let Some(sample) = case.typical() else { continue };
            let recording = &sample.report.recording;
            let ms = |at: downbeat_core::Time| at.as_nanos() as f64 / 1e6;
            let end = recording.batches.iter().map(|batch| ms(batch.end)).fold(0.0, f64::max);
            let (from, to) = self.shown_ms.unwrap_or((0.0, end));
            let several = case.models > 1;
            let colour =
                |batch: Option<usize>, model: u32| if several { model as usize } else { batch.unwrap_or(0) % 6 };
            let boxes = recording.batches.iter().enumerate().map(|(index, batch)| Batch {
                row: batch.device.0 as usize,
                start: ms(batch.start),
                end: ms(batch.end),
                label: batch.size.to_string(),
                colour: colour(Some(index), batch.model.0),
                lost: batch.preempted,
                hint: format!(
                    "{} of {}: {} requests, {:.2} to {:.2} ms{}",
                    batch.device,
                    batch.model,
                    batch.size,
                    ms(batch.start),
                    ms(batch.end),
                    if batch.preempted { ", preempted" } else { "" }
                ),
            });
            let dots = recording.requests.iter().enumerate().map(|(index, request)| Dot {
                at: ms(request.arrival),
                bad: !request.good,
                colour: colour(request.batch, request.model.0),
                hint: format!(
                    "request {} of {} at {:.2} ms{}",
                    index + 1,
                    request.model,
                    ms(request.arrival),
                    if request.good { "" } else { ": dropped or late" }
                ),
            });
            let title = format!("{} {}", case.workload, case.policy);
            let timeline = Timeline {
                title: title.trim().to_owned(),
                unit: "ms".to_owned(),
                rows: (0..case.devices).map(|device| format!("d{device}")).collect(),
                boxes: boxes.collect(),
                dots: dots.collect(),
            };
            out.push(timeline.svg(from, to));
        }
    }

    fn windows(&self, out: &mut Vec<String>, results: &Results) {
        let axis = |label| Axis { label, scale: Scale::Linear };
        for case in &results.cases {
            let Some(sample) = case.typical() else { continue };
            let title = |what: &str| format!("{} {}: {what}", case.workload, case.policy);
            let seconds = self.window.as_secs_f64();
            let mut lines_of = [const { Vec::new() }; 6];
            for window in &sample.report.windows {
                let at = window.start.as_nanos() as f64 / 1e9;
                let offered: f64 = window.offered.iter().map(|count| f64::from(*count)).sum();
                let good: f64 = window.good.iter().map(|count| f64::from(*count)).sum();
                // After the last arrival there is no load to measure.
                if offered == 0.0 {
                    continue;
                }
                let bad = 1.0 - good / offered;
                let used = window.busy.iter().filter(|busy| **busy > 0.0).count() as f64;
                let busy: f64 = window.busy.iter().map(|busy| f64::from(*busy)).sum();
                let devices = f64::from(case.devices);
                let values = [offered / seconds, good / seconds, used, busy, advice(bad, busy, devices), 100.0 * bad];
                for (points, value) in lines_of.iter_mut().zip(values) {
                    points.push((at, value));
                }
            }
            let [offered, good, used, busy, advised, bad] = lines_of;
            let line = |name, points| Line { name, points, stepped: true };
            let rates = [line("offered", offered), line("in time", good)];
            out.push(lines(&title("requests per second"), "rates", &axis("seconds"), &axis("requests/s"), &rates));
            let devices = [line("used at all", used), line("busy", busy)];
            out.push(lines(&title("devices"), "devices", &axis("seconds"), &axis("devices"), &devices));
            let advice = [line("devices advised", advised)];
            out.push(lines(&title("advice"), "advice", &axis("seconds"), &axis("devices advised"), &advice));
            out.push(lines(
                &title("bad"),
                "bad share",
                &axis("seconds"),
                &axis("dropped or late, %"),
                &[line("bad", bad)],
            ));
        }
    }
}

/// The number of devices that Symphony §3.5 advises: `N r / (1 - r)` more at a bad rate r above 1%,
/// `N f` fewer at an idle share f.
fn advice(bad: f64, busy: f64, devices: f64) -> f64 {
    // If nearly all requests are bad, the formula has no useful answer; ten times as many devices
    // is a start.
    let bad = bad.min(0.9);
    if bad > 0.01 { devices + devices * bad / (1.0 - bad) } else { busy }
}

/// Returns cases by workload and every varied setting but `x`, in their order.
fn facets<'a>(results: &'a Results, x: Option<&str>) -> Vec<(String, Vec<&'a Case>)> {
    let mut facets: Vec<(String, Vec<&Case>)> = Vec::new();
    for case in &results.cases {
        let others = case.point.iter().filter(|(name, _)| Some(name.as_str()) != x);
        let mut parts = vec![case.workload.clone()];
        parts.extend(others.map(|(name, value)| format!("{name} {value}")));
        let name = parts.join(" ").trim().to_owned();
        match facets.iter_mut().find(|(known, _)| *known == name) {
            Some((_, cases)) => cases.push(case),
            None => facets.push((name, vec![case])),
        }
    }
    facets
}

/// The policies, in their order.
fn policies(results: &Results) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for case in &results.cases {
        if !names.contains(&case.policy) {
            names.push(case.policy.clone());
        }
    }
    names
}
