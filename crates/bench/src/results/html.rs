//! The report as one HTML page.

use downbeat_report::{Axis, Line, Page, Scale, Table, bars, lines};

use crate::load::capacity::{Capacity, Trial};
use crate::results::report::{FailureReport, GeneratorReport, ModelReport, Report, ServerReport, short, short_or_none};
use crate::results::statistics::{ModelStatistics, Phase};

/// Makes the page.
pub fn page(report: &Report) -> String {
    let names: Vec<&str> = report.models.iter().map(|m| m.name.as_str()).collect();
    let mut page = Page::new(&format!("Load on {}", names.join(", ")))
        .note(&format!("{} · {} tensors · {}", report.url, report.tensors, report.load))
        .note(&format!(
            "Warm-up {} s, measured {} s, seed {}. Latencies count from the time a request was due.",
            short(report.warmup_s),
            short(report.measured_s),
            report.seed
        ))
        .facts(&facts(report));
    page = report.warnings.iter().fold(page, |page, warning| page.warning(warning));
    page = page.table("Requests", &report.table());
    if !report.total.failures.is_empty() {
        page = page.table("Failures", &failures(report));
    }
    page = page.heading("Plots").plots(&plots(report));
    if report.models.iter().any(|m| m.server.is_some()) {
        page = page.table("The server's own count", &server(report));
    }
    if let Some(capacity) = &report.capacity {
        page = page.table("Capacity search", &trials(capacity)).note(&format!("Target: {}.", capacity.target));
    }
    page.table("The generator", &generator(&report.generator))
        .note(&format!("downbeat bench {}", report.version))
        .html()
}

fn facts(report: &Report) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    if let Some(capacity) = &report.capacity {
        facts.push(("capacity /s", capacity.rate.map_or("none".to_owned(), short)));
    }
    facts.push(("goodput /s", short(report.total.goodput_per_second)));
    facts.push(("bad", format!("{:.2}%", report.total.bad_percent)));
    if let Some(latency) = &report.total.latency_ms {
        facts.push(("p50 ms", short(latency.p50)));
        facts.push(("p99 ms", short(latency.p99)));
        facts.push(("max ms", short(latency.max)));
    }
    facts
}

fn failures(report: &Report) -> Table<(&ModelReport, &String, &FailureReport)> {
    let rows = report.models.iter().flat_map(|m| m.failures.iter().map(move |(kind, failure)| (m, kind, failure)));
    Table::of(rows)
        .text("model", |(model, _, _)| &model.name)
        .number("count", |(_, _, failure)| failure.count)
        .text("kind", |(_, kind, _)| *kind)
        .text("first message", |(_, _, failure)| &failure.example)
}

fn trials(capacity: &Capacity) -> Table<&Trial> {
    Table::of(&capacity.trials)
        .number("rate /s", |trial| short(trial.rate))
        .number("p99 ms", |trial| short_or_none(trial.p99_ms))
        .number("bad %", |trial| format!("{:.2}", trial.bad_percent))
        .text("result", |trial| if trial.passed { "passed" } else { &trial.reason }.to_owned())
}

fn plots(report: &Report) -> Vec<String> {
    let mut plots = Vec::new();
    let answered: Vec<&ModelReport> = report.models.iter().filter(|m| !m.latency_cdf.is_empty()).collect();
    let summary = report.total.latency_ms.as_ref().map_or(String::new(), |l| {
        format!("Half of the answers took at most {} ms, 99% at most {} ms.", short(l.p50), short(l.p99))
    });
    let milliseconds = Axis { label: "latency, ms", scale: Scale::Log };
    let cdf: Vec<Line<'_>> = answered
        .iter()
        .map(|m| {
            let points = m.latency_cdf.iter().map(|(ms, part)| (*ms, part * 100.0)).collect();
            Line { name: &m.name, points, stepped: true }
        })
        .collect();
    let percent = Axis { label: "answers at most this slow, %", scale: Scale::Linear };
    plots.push(lines("Latency distribution", &summary, &milliseconds, &percent, &cdf));
    let tail: Vec<Line<'_>> = answered
        .iter()
        .map(|m| {
            let slower = m.latency_cdf.iter().map(|(ms, part)| (*ms, (1.0 - part) * 100.0));
            Line { name: &m.name, points: slower.filter(|(_, part)| *part > 1e-6).collect(), stepped: true }
        })
        .collect();
    let rest = Axis { label: "answers slower, %", scale: Scale::Log };
    plots.push(lines("Latency tail", "The part of the answers that took longer.", &milliseconds, &rest, &tail));
    let seconds = Axis { label: "time, s", scale: Scale::Linear };
    let over_time = |value: fn(&crate::results::report::Point) -> Option<f64>| -> Vec<(f64, f64)> {
        report.series.iter().filter_map(|p| Some((p.seconds, value(p)?))).collect()
    };
    let rates = [
        Line { name: "offered", points: over_time(|p| Some(p.offered_per_second)), stepped: true },
        Line { name: "bad", points: over_time(|p| Some(p.bad_per_second)), stepped: true },
        Line { name: "good", points: over_time(|p| Some(p.good_per_second)), stepped: true },
    ];
    let per_second = Axis { label: "requests per second", scale: Scale::Linear };
    let by_schedule = "Requests by the time they were due.";
    plots.push(lines("Rate over time", by_schedule, &seconds, &per_second, &rates));
    let latencies = [
        Line { name: "longest", points: over_time(|p| p.max_ms), stepped: true },
        Line { name: "mean", points: over_time(|p| p.mean_ms), stepped: true },
    ];
    let latency = Axis { label: "latency, ms", scale: Scale::Log };
    plots.push(lines("Latency over time", by_schedule, &seconds, &latency, &latencies));
    for model in &report.models {
        let Some(server) = model.server.as_ref().filter(|s| !s.counters.batches.is_empty()) else { continue };
        let executions: Vec<(String, Vec<f64>)> =
            server.counters.batches.iter().map(|(size, b)| (size.to_string(), vec![b.executions as f64])).collect();
        plots.push(bars(
            &format!("Batch sizes of {}", model.name),
            &format!("Mean size {}.", short(server.mean_batch.unwrap_or(0.0))),
            "batch size",
            "executions",
            &["executions".to_owned()],
            &executions,
        ));
    }
    plots
}

fn server(report: &Report) -> Table<(&String, &ServerReport)> {
    let rows = report.models.iter().filter_map(|model| Some((&model.name, model.server.as_ref()?)));
    let phase = |of: fn(&ModelStatistics) -> &Phase| {
        move |(_, server): &(&String, &ServerReport)| short(of(&server.counters).mean_ms())
    };
    Table::of(rows)
        .text("model", |(name, _)| name.to_owned())
        .number("items", |(_, server)| server.counters.requests_executed)
        .number("batches", |(_, server)| server.counters.executions)
        .number("mean batch", |(_, server)| short_or_none(server.mean_batch))
        .number("queue ms", phase(|c| &c.queue))
        .number("input ms", phase(|c| &c.compute_input))
        .number("infer ms", phase(|c| &c.compute_infer))
        .number("output ms", phase(|c| &c.compute_output))
}

fn generator(g: &GeneratorReport) -> Table<(&'static str, String)> {
    let mut rows = vec![
        ("CPU per request, µs", short(g.cpu_us_per_request)),
        ("busy", format!("{:.0}% of {} thread(s)", g.busy * 100.0, g.threads)),
        ("connections, at most", g.connections.to_string()),
    ];
    if let Some(late) = &g.lateness_ms {
        let (p50, p99, max) = (short(late.p50), short(late.p99), short(late.max));
        rows.push(("late by, ms (p50 / p99 / max)", format!("{p50} / {p99} / {max}")));
    }
    rows.push(("requests that waited for a connection", g.waited_for_connection.to_string()));
    rows.push(("requests in all, warm-up included", g.requests.to_string()));
    Table::of(rows).text("what", |(name, _)| *name).number("value", |(_, value)| value.clone())
}
