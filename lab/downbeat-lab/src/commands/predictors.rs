//! `downbeat-lab predictors`: the errors of a perceptron, a linear regression and a support vector
//! regression on the same samples.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use downbeat::profile::group_samples::{GroupSamples, Split, samples_of};
use downbeat_core::median;
use downbeat_host::groups::stored_predictor::StoredPredictor;
use downbeat_report::{Json, Table};
use downbeat_sim::random;
use downbeat_training::{GroupSample, mean_error, says, train_mlp};
use serde::Serialize;

use crate::device::ComparedPredictors;

/// Compare predictors of the times of groups of operators, on samples of real models (Abacus figure
/// 10).
///
/// Four fifths of the groups of each set of models train a perceptron, a linear regression and a
/// regression on support vectors. The rest tests them.
///
/// Example:
///   downbeat profile resnet50 --co-run bert --samples groups.jsonl
///   downbeat-lab predictors groups.jsonl
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct PredictorsArgs {
    /// Samples that `downbeat profile --co-run --samples` has written.
    #[arg(value_name = "SAMPLES")]
    samples: PathBuf,

    /// How many times the perceptron goes through all samples.
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    epochs: u32,

    /// Seed of the perceptron.
    #[arg(long, default_value_t = 17, value_name = "N")]
    seed: u64,

    #[command(flatten)]
    json: Json,
}

/// The errors for groups of one set of models.
#[derive(Debug, Serialize)]
struct Row {
    models: Vec<String>,
    tested: usize,
    /// Mean absolute relative errors of the perceptron, the line and the support vectors.
    errors: [f64; 3],
    /// The error of a perceptron that was trained without this pair. `None`: the set is no pair, or
    /// there are no other pairs.
    unseen: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Comparison {
    rows: Vec<Row>,
    /// Mean error of the median of equal groups: about the best that a predictor can reach. `None`:
    /// no group was sampled twice.
    repeated: Option<f64>,
}

/// Trains the predictors and prints their errors.
///
/// # Errors
/// If the file has no samples, or too few.
pub fn run(args: &PredictorsArgs) -> anyhow::Result<()> {
    let shown = args.samples.display();
    let read = GroupSamples::read(&args.samples)?.with_context(|| format!("{shown}: there is no such file"))?;
    let at_once = read.groups.iter().map(|measured| measured.group.len()).max().unwrap_or(1);
    let layout = StoredPredictor::layout(&read.on.models, at_once);
    let (sets, samples) = samples_of(&layout, &read.groups).with_context(|| shown.to_string())?;
    let Split { training, test } = Split::new(&samples, sets.len());
    ensure!(!test.is_empty(), "{shown}: {} groups are too few to train and to test with", samples.len());
    let compared = ComparedPredictors::train(&training, args.epochs, args.seed)?;
    let row = |models: Vec<String>, tested: &[&GroupSample], unseen| Row {
        models,
        tested: tested.len(),
        errors: compared.off(tested),
        unseen,
    };
    let has_pairs = sets.iter().filter(|set| set.len() == 2).count() > 2;
    let of_set = |(number, set): (usize, &Vec<usize>)| {
        let tested: Vec<&GroupSample> = test.iter().copied().filter(|sample| sample.set == number).collect();
        let unseen =
            (has_pairs && set.len() == 2).then(|| unseen_error(args, &training, number, &tested)).transpose()?;
        Ok(row(set.iter().map(|model| read.on.models[*model].name.clone()).collect(), &tested, unseen))
    };
    let mut rows = sets.iter().enumerate().map(of_set).collect::<anyhow::Result<Vec<Row>>>()?;
    rows.push(row(vec!["all".to_owned()], &test, None));
    args.json.print(&Comparison { rows, repeated: repeated(&samples) })
}

/// The error for groups of a pair under a perceptron that was trained without any group of that
/// pair.
fn unseen_error(
    args: &PredictorsArgs,
    training: &[&GroupSample],
    pair: usize,
    tested: &[&GroupSample],
) -> anyhow::Result<f64> {
    let others: Vec<&GroupSample> = training.iter().copied().filter(|sample| sample.set != pair).collect();
    let blind = train_mlp(&others, args.epochs, random(args.seed, 0))?;
    Ok(mean_error(tested.iter().copied(), |features| says(&blind, features)))
}

/// The mean error of the median of equal groups, as a share of their measured times. `None`: no
/// group was drawn twice.
fn repeated(samples: &[GroupSample]) -> Option<f64> {
    let mut same: BTreeMap<Vec<u32>, Vec<f64>> = BTreeMap::new();
    for sample in samples {
        let key = sample.features.iter().map(|feature| feature.to_bits()).collect();
        same.entry(key).or_default().push(sample.takes_ms);
    }
    let off = |times: &Vec<f64>| {
        let middle = median(times.iter().copied()).filter(|_| times.len() > 1)?;
        Some(times.iter().map(|ms| (middle / ms - 1.0).abs()).collect::<Vec<_>>())
    };
    let off: Vec<f64> = same.values().filter_map(off).flatten().collect();
    (!off.is_empty()).then(|| off.iter().sum::<f64>() / off.len() as f64)
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |error: f64| format!("{:.1}", error * 100.0);
        writeln!(f, "Mean absolute relative error of groups that were not trained with\n")?;
        Table::of(&self.rows)
            .text("models", |row| row.models.join(" + "))
            .number("groups", |row| row.tested)
            .number("MLP, %", |row| percent(row.errors[0]))
            .number("linear, %", |row| percent(row.errors[1]))
            .number("SVM, %", |row| percent(row.errors[2]))
            .some("MLP without the pair, %", |row| row.unseen.map(percent))
            .fmt(f)?;
        let Some(off) = self.repeated else { return Ok(()) };
        writeln!(
            f,
            "\nThe median of equal groups is {}% off on average: no predictor can be much better.",
            percent(off)
        )
    }
}
