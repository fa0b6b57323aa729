//! The report as one HTML page that needs nothing else: no script, no network.

use std::fmt::Write;

use crate::plot::{self, Axis, Line, Scale, bars, escape, lines};
use crate::report::{ModelReport, Report, short};

/// Writing to a string cannot fail.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => { let _ = write!($out, $($arg)*); };
}

/// The page.
pub fn page(report: &Report) -> String {
    let mut out = String::new();
    let names: Vec<&str> = report.models.iter().map(|m| m.name.as_str()).collect();
    put!(out, "<p class=\"sub\">{} · {} tensors · {}</p>", escape(&report.url), report.tensors, escape(&report.load));
    put!(
        out,
        "<p class=\"sub\">Warm-up {} s, measured {} s, seed {}. Latencies count from the time a request was due.</p>",
        short(report.warmup_s),
        short(report.measured_s),
        report.seed
    );
    facts(&mut out, report);
    for warning in &report.warnings {
        put!(out, "<p class=\"warn\"><strong>Note:</strong> {}</p>", escape(warning));
    }
    out += "<h2>Requests</h2>";
    table(&mut out, report);
    failures(&mut out, report);
    out += "<h2>Plots</h2><div class=\"plots\">";
    plots(&mut out, report);
    out += "</div>";
    server(&mut out, report);
    if let Some(capacity) = &report.capacity {
        put!(out, "<h2>Capacity search</h2><p>Target: {}.</p>", escape(&capacity.target));
        let mut rows = String::new();
        for trial in &capacity.trials {
            put!(
                rows,
                "<tr><td>{}</td><td>{}</td><td>{:.2}</td><td class=\"text\">{}</td></tr>",
                short(trial.rate),
                trial.p99_ms.map_or("–".to_owned(), short),
                trial.bad_percent,
                if trial.passed { "passed".to_owned() } else { escape(&trial.reason) }
            );
        }
        out += &plot::table(&["rate /s", "p99 ms", "bad %", "result"], &rows);
    }
    generator(&mut out, report);
    put!(out, "<p class=\"sub\">downbeat bench {}</p>", report.version);
    plot::page(&format!("Load on {}", names.join(", ")), &out)
}

fn facts(out: &mut String, report: &Report) {
    *out += "<dl class=\"facts\">";
    let mut fact = |name: &str, value: String| {
        put!(out, "<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(&value));
    };
    if let Some(capacity) = &report.capacity {
        fact("capacity /s", capacity.rate.map_or("none".to_owned(), short));
    }
    fact("goodput /s", short(report.total.goodput_per_second));
    fact("bad", format!("{:.2}%", report.total.bad_percent));
    if let Some(latency) = &report.total.latency_ms {
        fact("p50 ms", short(latency.p50));
        fact("p99 ms", short(latency.p99));
        fact("max ms", short(latency.max));
    }
    *out += "</dl>";
}

fn table(out: &mut String, report: &Report) {
    let heads = [
        "model",
        "offered /s",
        "goodput /s",
        "ok",
        "late",
        "failed",
        "bad %",
        "mean ms",
        "p50",
        "p90",
        "p99",
        "p99.9",
        "max",
    ];
    let mut rows = String::new();
    let all = (report.models.len() > 1).then_some(&report.total);
    for model in report.models.iter().chain(all) {
        put!(
            rows,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.2}</td>",
            escape(&model.name),
            short(model.offered_per_second),
            short(model.goodput_per_second),
            model.ok,
            model.late,
            model.bad - model.late,
            model.bad_percent
        );
        match &model.latency_ms {
            Some(l) => {
                for value in [l.mean, l.p50, l.p90, l.p99, l.p999, l.max] {
                    put!(rows, "<td>{}</td>", short(value));
                }
            }
            None => rows += &"<td>–</td>".repeat(6),
        }
        rows += "</tr>";
    }
    *out += &plot::table(&heads, &rows);
}

fn failures(out: &mut String, report: &Report) {
    if report.total.failures.is_empty() {
        return;
    }
    let mut rows = String::new();
    for model in &report.models {
        for (kind, failure) in &model.failures {
            put!(
                rows,
                "<tr><th scope=\"row\">{}</th><td>{}</td><td class=\"text\">{}</td><td class=\"text\">{}</td></tr>",
                escape(&model.name),
                failure.count,
                escape(kind),
                escape(&failure.example)
            );
        }
    }
    *out += "<h2>Failures</h2>";
    *out += &plot::table(&["model", "count", "kind", "first one said"], &rows);
}

fn plots(out: &mut String, report: &Report) {
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
    *out += &lines("Latency distribution", &summary, &milliseconds, &percent, &cdf);
    let tail: Vec<Line<'_>> = answered
        .iter()
        .map(|m| {
            let slower = m.latency_cdf.iter().map(|(ms, part)| (*ms, (1.0 - part) * 100.0));
            Line { name: &m.name, points: slower.filter(|(_, part)| *part > 1e-6).collect(), stepped: true }
        })
        .collect();
    let rest = Axis { label: "answers slower, %", scale: Scale::Log };
    *out += &lines("Latency tail", "The part of the answers that took longer.", &milliseconds, &rest, &tail);
    let seconds = Axis { label: "time, s", scale: Scale::Linear };
    let over_time = |value: fn(&crate::report::Point) -> Option<f64>| -> Vec<(f64, f64)> {
        report.series.iter().filter_map(|p| Some((p.seconds, value(p)?))).collect()
    };
    let rates = [
        Line { name: "offered", points: over_time(|p| Some(p.offered_per_second)), stepped: true },
        Line { name: "bad", points: over_time(|p| Some(p.bad_per_second)), stepped: true },
        Line { name: "good", points: over_time(|p| Some(p.good_per_second)), stepped: true },
    ];
    let per_second = Axis { label: "requests per second", scale: Scale::Linear };
    let by_schedule = "Requests by the time they were due.";
    *out += &lines("Rate over time", by_schedule, &seconds, &per_second, &rates);
    let latencies = [
        Line { name: "longest", points: over_time(|p| p.max_ms), stepped: true },
        Line { name: "mean", points: over_time(|p| p.mean_ms), stepped: true },
    ];
    let latency = Axis { label: "latency, ms", scale: Scale::Log };
    *out += &lines("Latency over time", by_schedule, &seconds, &latency, &latencies);
    for model in &report.models {
        let Some(server) = model.server.as_ref().filter(|s| !s.counters.batches.is_empty()) else { continue };
        let executions: Vec<(String, f64)> =
            server.counters.batches.iter().map(|(size, b)| (size.to_string(), b.executions as f64)).collect();
        *out += &bars(
            &format!("Batch sizes of {}", model.name),
            &format!("Mean size {}.", short(server.mean_batch.unwrap_or(0.0))),
            "batch size",
            "executions",
            &executions,
        );
    }
}

fn server(out: &mut String, report: &Report) {
    if report.models.iter().all(|m| m.server.is_none()) {
        return;
    }
    let mut rows = String::new();
    for model in &report.models {
        let Some(server) = &model.server else { continue };
        let c = &server.counters;
        put!(
            rows,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td>",
            escape(&model.name),
            c.requests_executed,
            c.executions,
            server.mean_batch.map_or("–".to_owned(), short)
        );
        for phase in [c.queue, c.compute_input, c.compute_infer, c.compute_output] {
            put!(rows, "<td>{}</td>", short(phase.mean_ms()));
        }
        rows += "</tr>";
    }
    let heads = ["model", "items", "batches", "mean batch", "queue ms", "input ms", "infer ms", "output ms"];
    *out += "<h2>The server's own count</h2>";
    *out += &plot::table(&heads, &rows);
}

fn generator(out: &mut String, report: &Report) {
    let g = &report.generator;
    *out += "<h2>The generator</h2><div class=\"scroll\"><table><tbody>";
    let mut row = |name: &str, value: String| {
        put!(out, "<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>");
    };
    row("CPU per request, µs", short(g.cpu_us_per_request));
    row("busy", format!("{:.0}% of {} thread(s)", g.busy * 100.0, g.threads));
    row("connections, at most", g.connections.to_string());
    if let Some(late) = &g.lateness_ms {
        row(
            "late by, ms (p50 / p99 / max)",
            format!("{} / {} / {}", short(late.p50), short(late.p99), short(late.max)),
        );
    }
    row("requests that waited for a connection", g.waited_for_connection.to_string());
    row("requests in all, warm-up included", g.requests.to_string());
    *out += "</tbody></table></div>";
}
