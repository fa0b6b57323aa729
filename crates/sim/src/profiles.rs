//! Lists of models with their latency profiles and SLOs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use downbeat_core::{Duration, LatencyProfile};
use serde::{Deserialize, Serialize};

/// A model as the papers' tables list it: `l(b) = alpha * b + beta`, and its SLO.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelProfile {
    /// The model's name.
    pub name: String,
    /// Milliseconds for each item of a batch.
    pub alpha_ms: f64,
    /// Milliseconds for each batch.
    pub beta_ms: f64,
    /// Milliseconds from a request's arrival to its deadline.
    pub slo_ms: f64,
}

/// Largest default batch. Beyond it, one item more or less changes nothing.
const LARGEST_BATCH: u32 = 1024;
/// The longest SLO and latency: a day.
const MAX_MS: f64 = 86_400_000.0;
/// The columns of a file, by the names in its first line.
const COLUMNS: [&str; 4] = ["name", "alpha_ms", "beta_ms", "slo_ms"];

/// The reason why a list of models cannot be used. Lines and columns count from 1.
#[derive(Debug, thiserror::Error)]
pub enum BadProfiles {
    /// The file cannot be read.
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// The file has an error at a place.
    #[error("{}:{line}{at}: {message}", file.display(), at = column.map_or(String::new(), |column| format!(":{column}")))]
    At {
        /// The file.
        file: PathBuf,
        /// The line.
        line: u64,
        /// The column of the table, if the error is in one.
        column: Option<usize>,
        /// The error, and the expected content.
        message: String,
    },
}

impl ModelProfile {
    /// The model's latency profile for batches up to `max_batch`. 0: one more than the largest
    /// batch that the SLO allows, at most 1,024.
    pub fn latency(&self, max_batch: u32) -> LatencyProfile {
        let allowed = ((self.slo_ms - self.beta_ms) / self.alpha_ms.max(1e-6)).floor().clamp(1.0, 1e9);
        let largest = if max_batch > 0 { max_batch } else { (allowed as u32).saturating_add(1).min(LARGEST_BATCH) };
        let (alpha, beta) = (Duration::from_millis_f64(self.alpha_ms), Duration::from_millis_f64(self.beta_ms));
        LatencyProfile::linear(alpha, beta, largest)
            .unwrap_or_else(|error| panic!("{self:?} was checked when it was read: {error}"))
    }

    /// The model's SLO.
    pub fn slo(&self) -> Duration {
        Duration::from_millis_f64(self.slo_ms)
    }

    /// The gain from batching: `beta / alpha` (Symphony §5.1: above 2 is strong).
    pub fn batching_effect(&self) -> f64 {
        self.beta_ms / self.alpha_ms
    }

    /// Checks the numbers. An error names the field's index and the reason.
    ///
    /// # Errors
    /// If one is not a number, negative, or too large; if a batch takes no time; if the SLO is
    /// below `l(1)`.
    pub fn check(&self) -> Result<(), (usize, String)> {
        let ModelProfile { name, alpha_ms, beta_ms, slo_ms } = self;
        let fields = [alpha_ms, beta_ms, slo_ms];
        for ((field, value), index) in COLUMNS[1..].iter().zip(fields).zip(1..) {
            if !(0.0..=MAX_MS).contains(value) {
                return Err((
                    index,
                    format!("{field} of {name} is {value}; the value must be from 0 to {MAX_MS} (a day)"),
                ));
            }
        }
        let single = alpha_ms + beta_ms;
        if Duration::from_millis_f64(single) == Duration::ZERO {
            return Err((1, format!("a batch of {name} takes no time; alpha_ms or beta_ms must be above 0")));
        }
        if *slo_ms < single {
            return Err((3, format!("the SLO of {name} is {slo_ms} ms, but l(1) = alpha + beta is {single} ms")));
        }
        Ok(())
    }
}

/// Checks that all models have different names.
///
/// # Errors
/// If two models have the same name.
pub fn check_names(models: &[ModelProfile]) -> Result<(), String> {
    let mut known = BTreeSet::new();
    let twice = models.iter().find(|model| !known.insert(&model.name));
    twice.map_or(Ok(()), |model| {
        Err(format!("two models have the name {}; give each model a name of its own", model.name))
    })
}

/// `NAME,ALPHA_MS,BETA_MS,SLO_MS`.
impl FromStr for ModelProfile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        let [name, alpha, beta, slo] = parts[..] else {
            return Err(format!("'{text}' is not a model; expected NAME,ALPHA_MS,BETA_MS,SLO_MS"));
        };
        let number = |field: &str, text: &str| {
            text.parse::<f64>().map_err(|_| format!("{field} of {name} is '{text}', which is not a number"))
        };
        let profile = ModelProfile {
            name: name.to_owned(),
            alpha_ms: number("alpha_ms", alpha)?,
            beta_ms: number("beta_ms", beta)?,
            slo_ms: number("slo_ms", slo)?,
        };
        profile.check().map_err(|(_, message)| message)?;
        Ok(profile)
    }
}

/// Reads a csv file with the columns `name`, `alpha_ms`, `beta_ms` and `slo_ms`, in any order;
/// other columns are ignored.
///
/// # Errors
/// If the file cannot be read, a column is missing, a number is invalid, there is no model, or two
/// models have the same name.
pub fn read(file: &Path) -> Result<Vec<ModelProfile>, BadProfiles> {
    let bytes = std::fs::read(file).map_err(|error| BadProfiles::Read(file.to_owned(), error))?;
    parse(&bytes, file)
}

/// As [`read`], but of the file's content.
///
/// # Errors
/// As [`read`].
pub fn parse(bytes: &[u8], file: &Path) -> Result<Vec<ModelProfile>, BadProfiles> {
    let bad = |line, column, message| BadProfiles::At { file: file.to_owned(), line, column, message };
    let of_csv = |error: csv::Error| {
        let line = error.position().map_or(1, csv::Position::line);
        match error.kind() {
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                bad(line, None, format!("this line has {len} columns, the first line has {expected_len}"))
            }
            csv::ErrorKind::Utf8 { err, .. } => bad(line, Some(err.field() + 1), "this is not UTF-8 text".to_owned()),
            _ => bad(line, None, error.to_string()),
        }
    };
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(bytes);
    let header = reader.headers().map_err(of_csv)?.clone();
    let mut places = [0; 4];
    for (place, name) in places.iter_mut().zip(COLUMNS) {
        let found = header.iter().position(|column| column.trim_start_matches('\u{feff}') == name);
        *place = found.ok_or_else(|| {
            bad(1, None, format!("there is no column '{name}'; the first line must name {}", COLUMNS.join(", ")))
        })?;
    }
    let mut models: Vec<(ModelProfile, u64)> = Vec::new();
    for record in reader.records() {
        let record = record.map_err(of_csv)?;
        let line = record.position().map_or(0, csv::Position::line);
        let field = |index: usize| record.get(places[index]).unwrap_or_default();
        let number = |index: usize| -> Result<f64, BadProfiles> {
            field(index).parse().map_err(|_| {
                bad(
                    line,
                    Some(places[index] + 1),
                    format!("{} is '{}', which is not a number", COLUMNS[index], field(index)),
                )
            })
        };
        let model =
            ModelProfile { name: field(0).to_owned(), alpha_ms: number(1)?, beta_ms: number(2)?, slo_ms: number(3)? };
        model.check().map_err(|(index, message)| bad(line, Some(places[index] + 1), message))?;
        if let Some((_, first)) = models.iter().find(|(known, _)| known.name == model.name) {
            return Err(bad(
                line,
                Some(places[0] + 1),
                format!("the model {} is listed twice, first in line {first}", model.name),
            ));
        }
        models.push((model, line));
    }
    if models.is_empty() {
        return Err(bad(1, None, "the file lists no model".to_owned()));
    }
    Ok(models.into_iter().map(|(model, _)| model).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse(text.as_bytes(), Path::new("m.csv")).unwrap_err().to_string()
    }

    #[test]
    fn columns_in_any_order_and_more_of_them() {
        let text =
            "slo_ms, name,note,beta_ms,alpha_ms\n25,ResNet50,\"a, b\",5.072,1.053\n\n70,Inception,,18.368,5.09\n";
        let models = parse(text.as_bytes(), Path::new("m.csv")).unwrap();
        let expected = ModelProfile { name: "ResNet50".to_owned(), alpha_ms: 1.053, beta_ms: 5.072, slo_ms: 25.0 };
        assert_eq!(models[0], expected);
        assert_eq!((models.len(), models[1].beta_ms), (2, 18.368));
        // 18 items fit the SLO, and l(19) exists for the frontrun moment.
        assert_eq!(models[0].latency(0).max_batch(), 19);
    }

    #[test]
    fn what_is_wrong_is_said_with_line_and_column() {
        let header = "name,alpha_ms,beta_ms,slo_ms\n";
        let cases = [
            ("name,alpha_ms,slo_ms\nA,1,2\n", "m.csv:1: there is no column 'beta_ms'; the first line must name"),
            ("A,1,abc,20\n", "m.csv:2:3: beta_ms is 'abc', which is not a number"),
            ("A,1,2,20\nB,1,-3,20\n", "m.csv:3:3: beta_ms of B is -3; the value must be from 0 to 86400000 (a day)"),
            ("A,1,NaN,20\n", "m.csv:2:3: beta_ms of A is NaN; the value must be"),
            ("A,0,0,20\n", "m.csv:2:2: a batch of A takes no time"),
            ("A,1,2,2.5\n", "m.csv:2:4: the SLO of A is 2.5 ms, but l(1) = alpha + beta is 3 ms"),
            ("A,1,2\n", "m.csv:2: this line has 3 columns, the first line has 4"),
            ("A,1,2,20\nA,1,2,20\n", "m.csv:3:1: the model A is listed twice, first in line 2"),
            ("", "m.csv:1: the file lists no model"),
        ];
        for (text, expected) in cases {
            let text = if text.starts_with("name") { text.to_owned() } else { format!("{header}{text}") };
            let said = error(&text);
            assert!(said.starts_with(expected), "{text:?}: {said}");
        }
        assert!(error("").contains("there is no column 'name'"));
    }

    #[test]
    fn a_model_in_one_word() {
        assert_eq!("A, 1, 2.5, 20".parse::<ModelProfile>().unwrap().beta_ms, 2.5);
        assert!("A,1,2".parse::<ModelProfile>().unwrap_err().contains("expected NAME,ALPHA_MS,BETA_MS,SLO_MS"));
        assert!("A,1,2,x".parse::<ModelProfile>().unwrap_err().contains("slo_ms of A is 'x'"));
        assert!("A,1,2,2".parse::<ModelProfile>().unwrap_err().contains("the SLO of A is 2 ms"));
    }
}
