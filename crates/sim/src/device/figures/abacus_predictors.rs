//! Abacus' figure 10: how far predictors are off.

use downbeat_core::device::overlap::Mlp;

use super::{DeviceFailure, Figure, FigureOptions, head, mean};
use crate::device::{ABACUS_MODELS, OverlapSample, Platform, mean_error, predict_linear, train_linear, train_mlp};

/// How often the samples are gone through.
const EPOCHS: u32 = 60;
/// Every so many samples are for the test: 20% (§5.5).
const TESTED: usize = 5;
/// Pairs that are left out of training: every model is in one of them at least.
const UNSEEN: [(usize, usize); 4] = [(0, 4), (1, 6), (2, 3), (3, 5)];

fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

fn trained(samples: &[&OverlapSample], seed: u64) -> Result<Mlp, DeviceFailure> {
    train_mlp(samples, EPOCHS, seed).map_err(|bad| DeviceFailure(bad.to_string()))
}

fn says(mlp: &Mlp) -> impl Fn(&[f32]) -> f64 {
    |features| mlp.infer(features).first().copied().map_or(f64::NAN, f64::from)
}

pub(super) fn figure_10(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let each = (options.requests as usize / 3).max(10);
    let samples = OverlapSample::draw(Platform::A100_CUDNN, each, options.seed)?;
    let of = |is_tested: bool| {
        let chosen = samples.iter().enumerate().filter(move |(index, _)| index.is_multiple_of(TESTED) == is_tested);
        chosen.map(|(_, sample)| sample).collect::<Vec<_>>()
    };
    let (training, test, pairs) = (of(false), of(true), OverlapSample::pairs());
    let (mlp, one) = (trained(&training, options.seed)?, train_linear(&training));
    let is_seen = |sample: &&&OverlapSample| !UNSEEN.contains(&pairs[sample.pair]);
    let seen: Vec<&OverlapSample> = training.iter().filter(is_seen).copied().collect();
    let (blind, blind_line) = (trained(&seen, options.seed)?, train_linear(&seen));
    let mut table =
        vec![head("pair | groups | mean ms | MLP | linear | linear of the pair | MLP without it | linear without it")];
    let (mut of_pairs, mut left_out) = (Vec::new(), Vec::new());
    for (pair, (a, b)) in pairs.iter().enumerate() {
        let of_pair =
            |all: &[&'_ OverlapSample]| all.iter().copied().filter(|s| s.pair == pair).cloned().collect::<Vec<_>>();
        let (own, tested) = (of_pair(&training), of_pair(&test));
        let own_line = train_linear(&own.iter().collect::<Vec<_>>());
        let off_own = mean_error(&tested, |x| predict_linear(&own_line, x));
        of_pairs.push(off_own);
        let mut cells = vec![
            format!("{}, {}", ABACUS_MODELS[*a], ABACUS_MODELS[*b]),
            tested.len().to_string(),
            format!("{:.1}", mean(tested.iter().map(|sample| sample.takes_ms))),
            percent(mean_error(&tested, says(&mlp))),
            percent(mean_error(&tested, |x| predict_linear(&one, x))),
            percent(off_own),
        ];
        if UNSEEN.contains(&(*a, *b)) {
            let off = (mean_error(&tested, says(&blind)), mean_error(&tested, |x| predict_linear(&blind_line, x)));
            left_out.push(off);
            cells.extend([percent(off.0), percent(off.1)]);
        }
        table.push(cells);
    }
    let all = [
        "all".to_owned(),
        test.len().to_string(),
        format!("{:.1}", mean(test.iter().map(|sample| sample.takes_ms))),
        percent(mean_error(test.iter().copied(), says(&mlp))),
        percent(mean_error(test.iter().copied(), |x| predict_linear(&one, x))),
        percent(mean(of_pairs.into_iter())),
        percent(mean(left_out.iter().map(|(mlp, _)| *mlp))),
        percent(mean(left_out.iter().map(|(_, line)| *line))),
    ];
    table.push(all.to_vec());
    let note = format!(
        "Mean absolute error of what groups of pairs take, as a share of it, for the fifth of {each} groups a pair that were not trained with. One MLP of three layers of 32 and one linear regression for all pairs, one regression for each, \
         and both trained without four pairs. The paper: MLP 5.7%, linear 30.1%, a linear regression for each 23.5%."
    );
    Ok(Figure { note, table, ..Figure::default() })
}
