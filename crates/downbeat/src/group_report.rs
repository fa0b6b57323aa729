//! What a predictor of operator groups is off by, as table and picture.

use std::fmt;

use downbeat_report::{Cloud, Page, Table, predictions};
use serde::Serialize;

/// Groups of one set of models.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SetReport {
    /// Their names.
    pub models: Vec<String>,
    /// Groups of the test.
    pub tested: usize,
    /// What they take on average, milliseconds.
    pub mean_ms: f64,
    /// Mean absolute relative error of the perceptron.
    pub error: f64,
    /// Of a perceptron that was trained without this pair; `None`: it is no pair, or there are no others.
    pub unseen: Option<f64>,
}

/// A predictor, and how it did with groups that it was not trained with.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GroupReport {
    /// The models, with their numbers of segments.
    pub models: Vec<(String, u16)>,
    /// Engine, device, threads.
    pub conditions: String,
    /// Groups of the training.
    pub samples: usize,
    /// Groups of the test.
    pub tested: usize,
    /// The relative error that 95% of the test are below.
    pub error: f64,
    /// Mean absolute relative error of the test (Abacus equation 1).
    pub mean_error: f64,
    /// How far the median of groups that are the same is off for them, on average: about as good as a predictor can be. `None`: none was sampled twice.
    pub repeated: Option<f64>,
    /// By set of models; the last is all.
    pub sets: Vec<SetReport>,
    /// What each group of the test took and what it was predicted to take, milliseconds, by number of models.
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
        let segments: Vec<String> = self.models.iter().map(|(name, count)| format!("{name} in {count}")).collect();
        let repeated = self.repeated.map_or_else(String::new, |off| {
            format!(" Who knew the median of groups that are the same would be {}% off.", percent(off))
        });
        format!(
            "{}; {}. Trained with {} groups, tested with {} others: {}% off on average, 95% of them less than {}%.{repeated}",
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
            .some("without the pair, %", |set| set.unseen.map(percent))
    }

    /// The table and the picture as one HTML page.
    pub fn page(&self) -> String {
        let names: Vec<String> = (1..=self.points.len()).map(|count| format!("{count} at once")).collect();
        let clouds: Vec<Cloud<'_>> =
            names.iter().zip(&self.points).map(|(name, points)| Cloud { name, points }).collect();
        let about = "Each point is a group of the test. On the line predictions are right.";
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
        let set = |models: &[&str], unseen| SetReport {
            models: models.iter().map(|model| (*model).to_owned()).collect(),
            tested: 20,
            mean_ms: 1.5,
            error: 0.05,
            unseen,
        };
        let report = GroupReport {
            models: vec![("a<".to_owned(), 4), ("b".to_owned(), 1)],
            conditions: "rten on cpu".to_owned(),
            samples: 80,
            tested: 20,
            error: 0.155,
            mean_error: 0.05,
            repeated: Some(0.02),
            sets: vec![set(&["a<"], None), set(&["a<", "b"], Some(0.4))],
            points: vec![vec![(1.0, 1.1)], vec![(2.0, 1.9), (20.0, 21.0)]],
        };
        let text = report.to_string();
        assert!(text.contains("rten on cpu; a< in 4, b in 1. Trained with 80 groups, tested with 20 others: 5.0% off on average, 95% of them less than 15.5%. Who knew the median of groups that are the same would be 2.0% off."), "{text}");
        assert!(text.contains("| a< + b |     20 |   1.500 |      5.0 |                40.0 |"), "{text}");
        let page = report.page();
        assert!(page.contains("Predicted against actual") && page.contains("2 at once") && page.contains("a&lt; + b"));
    }
}
