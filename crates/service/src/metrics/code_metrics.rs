//! Metrics that the code of models keeps, such as `MetricFamily` of a Python model.

use std::collections::BTreeMap;
use std::fmt::Write;

use parking_lot::Mutex;
use serde::Deserialize;

/// Most series, of all models together. More are left out, with a warning.
const MOST_SERIES: usize = 10_000;
/// Most bytes of a name, a label or a description.
const LONGEST: usize = 1_024;
/// Beginnings of the names of the server's own metrics.
const OWN: [&str; 2] = ["nv_", "downbeat_"];

/// The metrics that the code of models keeps.
#[derive(Default)]
pub struct CodeMetrics(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    families: BTreeMap<String, Family>,
    series: usize,
    /// Whether the log is silent about more than [`MOST_SERIES`].
    is_full_told: bool,
}

struct Family {
    kind: Kind,
    description: String,
    series: BTreeMap<BTreeMap<String, String>, Series>,
}

#[derive(Default)]
struct Series {
    value: f64,
    count: u64,
    /// The numbers of values up to each bound.
    buckets: Vec<(f64, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// A change of a series: of a gauge its value, otherwise the increase.
#[derive(Deserialize)]
struct Change {
    name: String,
    description: String,
    kind: Kind,
    labels: BTreeMap<String, String>,
    value: f64,
    #[serde(default)]
    count: u64,
    #[serde(default)]
    buckets: Vec<(f64, u64)>,
}

impl CodeMetrics {
    /// Takes over changes, JSON values that a model's code sent. The log names changes that are
    /// invalid.
    pub fn change(&self, model: &str, changes: Vec<serde_json::Value>) {
        for change in changes {
            let taken = serde_json::from_value(change).map_err(|error| error.to_string());
            let taken = taken.and_then(|change: Change| self.0.lock().take(change));
            if let Err(reason) = taken {
                tracing::warn!(%model, %reason, "a metric of the model's code is left out");
            }
        }
    }

    /// The metrics in Prometheus' text format.
    pub fn render(&self, text: &mut String) {
        for (name, family) in &self.0.lock().families {
            family.render(name, text);
        }
    }
}

impl Kept {
    fn take(&mut self, change: Change) -> Result<(), String> {
        check(&change)?;
        let new = || Family { kind: change.kind, description: change.description.clone(), series: BTreeMap::new() };
        let is_full = self.series >= MOST_SERIES;
        let has = |labels| self.families.get(&change.name).is_some_and(|family| family.series.contains_key(labels));
        let is_known = has(&change.labels);
        if is_full && !is_known {
            let is_told = std::mem::replace(&mut self.is_full_told, true);
            return if is_told { Ok(()) } else { Err(format!("there are {MOST_SERIES} series, the most")) };
        }
        self.series += usize::from(!is_known);
        let family = self.families.entry(change.name.clone()).or_insert_with(new);
        if family.kind != change.kind {
            return Err(format!("{} is of another kind in another model", change.name));
        }
        let series = family.series.entry(change.labels).or_default();
        match change.kind {
            Kind::Gauge => series.value = change.value,
            Kind::Counter | Kind::Histogram => series.value += change.value,
        }
        series.count += change.count;
        if series.buckets.len() == change.buckets.len() {
            series.buckets.iter_mut().zip(change.buckets).for_each(|(have, (_, more))| have.1 += more);
        } else {
            series.buckets = change.buckets;
        }
        Ok(())
    }
}

/// Checks the names of a change.
fn check(change: &Change) -> Result<(), String> {
    let is_name = |name: &str, colon: bool| {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || (colon && c == ':');
        !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit()) && name.chars().all(is_part)
    };
    let Change { name, description, labels, .. } = change;
    let texts = labels.iter().flat_map(|(label, value)| [label, value]).chain([name, description]);
    if texts.into_iter().any(|text| text.len() > LONGEST) {
        return Err(format!("a text of it has more than {LONGEST} bytes"));
    }
    if !is_name(name, true) {
        return Err(format!("'{name}' is no name of a metric: letters, digits and _"));
    }
    if OWN.iter().any(|own| name.starts_with(own)) {
        return Err(format!("'{name}' begins as the server's own metrics do ({})", OWN.join(", ")));
    }
    match labels.keys().find(|label| !is_name(label, false)) {
        Some(label) => Err(format!("'{label}' is no name of a label: letters, digits and _")),
        None => Ok(()),
    }
}

impl Family {
    fn render(&self, name: &str, text: &mut String) {
        let kind = match self.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let description = self.description.replace('\\', "\\\\").replace('\n', "\\n");
        // A write to a string never fails.
        let _ = write!(text, "# HELP {name} {description}\n# TYPE {name} {kind}\n");
        for (labels, series) in &self.series {
            if self.kind != Kind::Histogram {
                let _ = writeln!(text, "{name}{} {}", written(labels, None), series.value);
                continue;
            }
            for (bound, count) in &series.buckets {
                let _ = writeln!(text, "{name}_bucket{} {count}", written(labels, Some(&bound.to_string())));
            }
            let _ = writeln!(text, "{name}_bucket{} {}", written(labels, Some("+Inf")), series.count);
            let _ = writeln!(text, "{name}_sum{} {}", written(labels, None), series.value);
            let _ = writeln!(text, "{name}_count{} {}", written(labels, None), series.count);
        }
    }
}

/// `{model="m",le="0.5"}`, or nothing.
fn written(labels: &BTreeMap<String, String>, bound: Option<&str>) -> String {
    let escaped = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let labels = labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value)));
    let all: Vec<String> = labels.chain(bound.map(|bound| format!("le=\"{bound}\""))).collect();
    if all.is_empty() { String::new() } else { format!("{{{}}}", all.join(",")) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rendered(changes: Vec<serde_json::Value>) -> String {
        let metrics = CodeMetrics::default();
        metrics.change("m", changes);
        let mut text = String::new();
        metrics.render(&mut text);
        text
    }

    fn change(name: &str, kind: &str, value: f64) -> serde_json::Value {
        json!({"name": name, "description": "of a\ntest", "kind": kind, "labels": {"l": "a\"b"}, "value": value})
    }

    #[test]
    fn counters_add_up_and_gauges_are_set() {
        let text = rendered(vec![
            change("hits", "counter", 2.0),
            change("level", "gauge", 5.0),
            change("hits", "counter", 1.5),
            change("level", "gauge", 4.0),
        ]);
        let expected = "# HELP hits of a\\ntest\n# TYPE hits counter\nhits{l=\"a\\\"b\"} 3.5\n\
                        # HELP level of a\\ntest\n# TYPE level gauge\nlevel{l=\"a\\\"b\"} 4\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_histogram_has_its_buckets_sum_and_count() {
        let observed = |counts: [u64; 2], count: u64, sum: f64| {
            json!({"name": "h", "description": "", "kind": "histogram", "labels": {}, "value": sum, "count": count,
                   "buckets": [[0.5, counts[0]], [1.0, counts[1]]]})
        };
        let text = rendered(vec![observed([1, 2], 3, 4.5), observed([0, 1], 1, 0.75)]);
        let expected = "# HELP h \n# TYPE h histogram\nh_bucket{le=\"0.5\"} 1\nh_bucket{le=\"1\"} 3\n\
                        h_bucket{le=\"+Inf\"} 4\nh_sum 5.25\nh_count 4\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn changes_with_wrong_names_kinds_or_forms_are_left_out() {
        let long = "x".repeat(LONGEST + 1);
        for name in ["", "1a", "a b", "nv_inference_count", "downbeat_devices", &long] {
            assert_eq!(rendered(vec![change(name, "gauge", 1.0)]), "", "{name}");
        }
        assert_eq!(rendered(vec![json!({"name": "a"}), json!(7)]), "");
        let text = rendered(vec![change("a", "gauge", 1.0), change("a", "counter", 1.0)]);
        assert!(text.contains("# TYPE a gauge") && !text.contains("counter"), "{text}");
    }

    #[test]
    fn series_are_bounded() {
        let series = |number: usize| json!({"name": "a", "description": "", "kind": "gauge", "labels": {"n": number.to_string()}, "value": 1});
        let text = rendered((0..MOST_SERIES + 5).map(series).collect());
        assert_eq!(text.lines().filter(|line| line.starts_with("a{")).count(), MOST_SERIES);
    }
}
