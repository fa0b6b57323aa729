//! Abacus' figure 10: how far predictors are off.

use downbeat_report::{Cloud, predictions};
use downbeat_training::{GroupSample, mean_error, says, sets_of};

use super::abacus::{PLATFORM, samples_each};
use super::{DeviceFailure, Figure, FigureOptions, each, head, mean};
use crate::device::overlap_compared::{VECTORS, vectors};
use crate::device::overlap_predictor::EPOCHS;
use crate::device::{ABACUS_MODELS, ComparedPredictors, draw_samples, predict_linear, train_linear};

/// One in this many samples is for the test: 20% (§5.5).
const TESTED: usize = 5;
/// Pairs that are left out of training. Every model is in at least one of these pairs.
const UNSEEN: [[usize; 2]; 4] = [[0, 4], [1, 6], [2, 3], [3, 5]];
/// The points drawn for each of pairs, triples and fours.
const DRAWN: usize = 1_000;

fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// Sampled groups of all sets of a number of models.
struct Groups {
    sets: Vec<Vec<usize>>,
    samples: Vec<GroupSample>,
}

impl Groups {
    fn draw(count: usize, options: &FigureOptions) -> Result<Groups, DeviceFailure> {
        let all: Vec<usize> = (0..ABACUS_MODELS.len()).collect();
        let sets = sets_of(&all, count);
        let samples = draw_samples(PLATFORM, &sets, samples_each(options), (options.seed, options.threads))?;
        Ok(Groups { sets, samples })
    }

    /// Returns the samples for the test, or all others.
    fn of(&self, is_tested: bool) -> Vec<&GroupSample> {
        let chosen = self.samples.iter().enumerate().filter(|(index, _)| index.is_multiple_of(TESTED) == is_tested);
        chosen.map(|(_, sample)| sample).collect()
    }
}

/// Returns the first cells of a row: the name of a set, its number of groups, and their mean time.
fn begin(name: String, test: &[&GroupSample]) -> Vec<String> {
    vec![name, test.len().to_string(), format!("{:.1}", mean(test.iter().map(|sample| sample.takes_ms)))]
}

/// Returns measured and predicted milliseconds of some groups of a test, taken at even steps.
fn points(trained: &ComparedPredictors, test: &[&GroupSample]) -> Vec<(f64, f64)> {
    let step = test.len().div_ceil(DRAWN).max(1);
    test.iter().step_by(step).map(|sample| (sample.takes_ms, says(&trained.mlp, &sample.features))).collect()
}

pub(super) fn figure_10(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let [pairs, triples, fours] = [Groups::draw(2, options)?, Groups::draw(3, options)?, Groups::draw(4, options)?];
    let (training, test) = (pairs.of(false), pairs.of(true));
    let is_seen = |sample: &&&GroupSample| !UNSEEN.iter().any(|pair| pairs.sets[sample.set] == pair);
    let seen: Vec<&GroupSample> = training.iter().filter(is_seen).copied().collect();
    let jobs = [training, seen, triples.of(false), fours.of(false)];
    let train = |samples: &Vec<&GroupSample>| {
        ComparedPredictors::train(samples, EPOCHS, options.seed).map_err(|bad| DeviceFailure(bad.to_string()))
    };
    let trained = each(&jobs, options, train)?;
    let ([training, ..], [all, blind, of_triples, of_fours]) = (&jobs, trained.as_slice()) else {
        return Err(DeviceFailure("a training is missing".to_owned()));
    };
    let own = |set: usize| {
        let of_set = |all: &[&'_ GroupSample]| all.iter().copied().filter(|s| s.set == set).cloned().collect();
        let (training, tested): (Vec<_>, Vec<_>) = (of_set(training), of_set(&test));
        let own: Vec<&GroupSample> = training.iter().collect();
        let (line, vectors) = (train_linear(&own), vectors(&own));
        let off = [mean_error(&tested, |x| predict_linear(&line, x)), mean_error(&tested, |x| vectors.predict(x))];
        (tested, off)
    };
    let mut table = vec![head(
        "models | groups | mean ms | MLP | linear | SVM | linear of the pair | SVM of it | MLP without it | linear | SVM",
    )];
    let (mut of_pairs, mut left_out) = (Vec::new(), Vec::new());
    for (set, pair) in pairs.sets.iter().enumerate() {
        let (tested, off_own) = own(set);
        let tested: Vec<&GroupSample> = tested.iter().collect();
        let name = pair.iter().map(|model| ABACUS_MODELS[*model].name()).collect::<Vec<_>>().join(", ");
        let mut cells = begin(name, &tested);
        cells.extend(all.off(&tested).into_iter().chain(off_own).map(percent));
        of_pairs.push(off_own);
        if UNSEEN.iter().any(|unseen| pair == unseen) {
            left_out.push(blind.off(&tested));
            cells.extend(blind.off(&tested).map(percent));
        }
        table.push(cells);
    }
    let column = |of: &dyn Fn(&[f64; 3]) -> f64| mean(left_out.iter().map(of));
    let without = [column(&|off| off[0]), column(&|off| off[1]), column(&|off| off[2])];
    let own = [mean(of_pairs.iter().map(|off| off[0])), mean(of_pairs.iter().map(|off| off[1]))];
    let numbers = all.off(&test).into_iter().chain(own).chain(without);
    table.push([begin("all pairs".to_owned(), &test), numbers.map(percent).collect()].concat());
    let mut drawn = vec![("pairs", points(all, &test))];
    for (name, groups, trained) in [("triples", triples, of_triples), ("fours", fours, of_fours)] {
        let test = groups.of(true);
        drawn.push((name, points(trained, &test)));
        table.push([begin(format!("all {name}"), &test), trained.off(&test).map(percent).to_vec()].concat());
    }
    let note = format!(
        "Mean absolute error of what groups take, as a share of it, for the fifth of {} groups of each pair, triple and four that were not trained with. An MLP of three layers of 32, a linear regression and an SVM (Gaussian kernel, {VECTORS} of the samples) for all pairs, \
         the latter two for each, and all without four pairs; then the three for all triples and for all fours. The paper: MLP 5.7%, linear 30.1%, SVM 29.2%; a linear regression for each 23.5%, an SVM 21.5%; MLP of triples 4.9%, of fours 6.4%.",
        samples_each(options)
    );
    let clouds: Vec<_> = drawn.iter().map(|(name, points)| Cloud { name, points }).collect();
    let plots =
        vec![predictions("Groups of the test, by the perceptron for all. On the line predictions are right.", &clouds)];
    Ok(Figure { note, table, plots, ..Figure::default() })
}
