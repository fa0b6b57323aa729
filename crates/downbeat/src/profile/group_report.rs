//! The errors of a predictor of operator groups, as a table and a plot.

use std::fmt;

use downbeat_report::{Cloud, Page, Table, predictions};
use serde::Serialize;

/// Groups of one set of models.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SetReport {
    /// The models' names.
    pub models: Vec<String>,
    /// The number of groups in the test.
    pub tested: usize,
    /// The groups' mean time, milliseconds.
    pub mean_ms: f64,
    /// Mean absolute relative error of the perceptron.
    pub error: f64,
}

/// A predictor, and its errors on groups that were not in its training.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GroupReport {
    /// The models, with their numbers of segments.
    pub models: Vec<(String, u16)>,
    /// The engine, device and threads in words.
    pub conditions: String,
    /// The number of groups in the training.
    pub samples: usize,
    /// The number of groups in the test.
    pub tested: usize,
    /// The relative error that 95% of the test stay below.
    pub error: f64,
    /// Mean absolute relative error of the test (Abacus equation 1).
    pub mean_error: f64,
    /// The report of each set of models; the last is of all sets.
    pub sets: Vec<SetReport>,
    /// The measured and the predicted time of each group of the test, milliseconds, by the number
    /// of models.
    pub points: Vec<Vec<(f64, f64)>>,
}

fn percent(share: f64) -> String {
    format!("{:.1}", share * 100.0)
}

impl GroupReport {
    fn title(&self) -> String {
        let names: Vec<&str> = self.models.iter().map(|(name, _)| &**name).collect();
        format!("Groups of operators of {}", names.join(", "))
    }

    fn summary(&self) -> String {
        let segments: Vec<String> = self.models.iter().map(|(name, count)| format!("{name} {count}")).collect();
        format!(
            "{}; segments: {}. Trained with {} groups, tested with {} others: predictions are {}% off on average, and \
             95% of them less than {}%.",
            self.conditions,
            segments.join(", "),
            self.samples,
            self.tested,
            percent(self.mean_error),
            percent(self.error)
        )
    }

    fn table(&self) -> Table<&SetReport> {
        Table::of(&self.sets)
            .text("models", |set| set.models.join(" + "))
            .number("groups", |set| set.tested)
            .number("mean ms", |set| format!("{:.3}", set.mean_ms))
            .number("error, %", |set| percent(set.error))
    }

    /// The table and the picture as one HTML page.
    pub fn page(&self) -> String {
        let names: Vec<String> = (1..=self.points.len()).map(|count| format!("{count} at once")).collect();
        let clouds: Vec<Cloud<'_>> =
            names.iter().zip(&self.points).map(|(name, points)| Cloud { name, points }).collect();
        let about = "Each point is a group of the test. The prediction of a point on the line is exact.";
        let plot = predictions(about, &clouds);
        Page::new(&self.title()).note(&self.summary()).plots(&[plot]).table("Mean absolute error", &self.table()).html()
    }
}

impl fmt::Display for GroupReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n{}\n", self.title(), self.summary())?;
        self.table().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_shown_by_set_and_predictions_against_what_groups_took() {
        let set = |models: &[&str]| SetReport {
            models: models.iter().map(|model| (*model).to_owned()).collect(),
            tested: 20,
            mean_ms: 1.5,
            error: 0.05,
        };
        let report = GroupReport {
            models: vec![("a<".to_owned(), 4), ("b".to_owned(), 1)],
            conditions: "rten on cpu".to_owned(),
            samples: 80,
            tested: 20,
            error: 0.155,
            mean_error: 0.05,
            sets: vec![set(&["a<"]), set(&["a<", "b"])],
            points: vec![vec![(1.0, 1.1)], vec![(2.0, 1.9), (20.0, 21.0)]],
        };
        let text = report.to_string();
        assert!(text.contains("rten on cpu; segments: a< 4, b 1. Trained with 80 groups, tested with 20 others: predictions are 5.0% off on average, and 95% of them less than 15.5%."), "{text}");
        assert!(text.contains("| a< + b |     20 |   1.500 |      5.0 |"), "{text}");
        let page = report.page();
        assert!(page.contains("Predicted against actual") && page.contains("2 at once") && page.contains("a&lt; + b"));
    }
}
