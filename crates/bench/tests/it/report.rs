//! Programs and browsers can read the reports, which have the counted numbers.

use downbeat_bench::results::html;
use downbeat_bench::results::report::Report;
use serde_json::Value;

use crate::servers::{Server, bench, plan, respond};

fn report(words: &[&str]) -> Report {
    Report::new(&plan(words).expect("valid"), &bench(words), None)
}

/// Checks that every element is closed in order. Returns the names of the elements.
fn check_nesting(html: &str) -> Vec<String> {
    const VOID: [&str; 2] = ["meta", "!doctype"];
    let mut open: Vec<String> = Vec::new();
    let mut seen = Vec::new();
    let mut rest = html;
    while let Some(start) = rest.find('<') {
        let end = rest[start..].find('>').expect("a tag ends") + start;
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "in order");
            continue;
        }
        let name = tag.split([' ', '/']).next().unwrap_or_default().to_lowercase();
        seen.push(name.clone());
        if !tag.ends_with('/') && !VOID.contains(&name.as_str()) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "left open: {open:?}");
    seen
}

#[test]
fn json_and_html_hold_what_was_counted() {
    let server = Server::http(|head, _, stream, number| {
        if head.contains("bad") && number.is_multiple_of(2) {
            return respond(stream, "503 Service Unavailable", b"<b>\"full\" & more</b>");
        }
        respond(stream, "200 OK", b"{}")
    });
    let url = server.url();
    let report = report(&[
        "-m",
        "good",
        "-m",
        "bad<i>",
        "--url",
        &url,
        "--rate",
        "2000",
        "--warmup",
        "0",
        "--duration",
        "0.3",
        "--slo-ms",
        "1000",
    ]);
    let json: Value = serde_json::from_str(&serde_json::to_string(&report).expect("JSON")).expect("JSON");
    assert_eq!(json["models"].as_array().expect("a list").len(), 2);
    let sum = |field: &str| -> u64 { (0..2).map(|m| json["models"][m][field].as_u64().expect("a count")).sum() };
    for field in ["scheduled", "ok", "late", "bad"] {
        assert_eq!(json["total"][field].as_u64(), Some(sum(field)), "{field}");
    }
    assert!(json["models"][1]["failures"]["http 503"]["count"].as_u64().is_some_and(|n| n > 0));
    let cdf = json["total"]["latency_cdf"].as_array().expect("points");
    assert!(cdf.windows(2).all(|w| w[0][0].as_f64() <= w[1][0].as_f64() && w[0][1].as_f64() < w[1][1].as_f64()));
    assert_eq!(cdf.last().and_then(|p| p[1].as_f64()), Some(1.0));
    assert!(json["generator"]["cpu_us_per_request"].as_f64().is_some_and(|us| us > 0.0));
    let offered: f64 =
        json["series"].as_array().expect("points").iter().filter_map(|p| p["offered_per_second"].as_f64()).sum();
    let offered = offered * json["interval_s"].as_f64().expect("a length");
    assert!((offered - sum("scheduled") as f64).abs() < 1e-6);

    let page = html::page(&report);
    let seen = check_nesting(&page);
    assert_eq!(seen.iter().filter(|n| *n == "figure").count(), 4);
    assert!(!seen.iter().any(|n| ["script", "link", "img", "iframe", "b", "i"].contains(&n.as_str())), "{seen:?}");
    assert!(page.contains("bad&lt;i&gt;") && page.contains("&lt;b&gt;&quot;full&quot; &amp; more"));
    assert!(!page.contains("NaN") && !page.contains("inf\""), "coordinates are numbers");

    let table = report.to_string();
    assert!(table.contains("http 503") && table.contains("us CPU a request"), "{table}");
}

#[test]
fn a_run_without_an_answer_has_a_report_as_well() {
    let server = Server::http(|_, _, _, _| false);
    let url = server.url();
    let report = report(&["-m", "m", "--url", &url, "--rate", "300", "--warmup", "0", "--duration", "0.1"]);
    assert_eq!(report.total.ok, 0);
    let page = html::page(&report);
    check_nesting(&page);
    assert!(!page.contains("NaN"));
    assert!(report.to_string().contains("connection closed"), "{report}");
    assert!(serde_json::to_string(&report).is_ok());
}
