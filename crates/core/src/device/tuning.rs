//! The choice among settings by their highest load and their latency.

use serde::{Deserialize, Serialize};

/// Peaks that are this close are equal, and the latency decides.
const ALIKE: f64 = 0.99;
/// The load of the comparison of latencies, as a share of the best peak.
const HIGH_LOAD: f64 = 0.9;

/// A choice and the results of its trials.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Tried<C> {
    /// The choice.
    pub choice: C,
    /// The highest load that the choice holds, in requests per second; 0: none.
    pub peak: f64,
    /// The mean latency at 9/10 of the best peak of all choices, in milliseconds. `None`: the
    /// choice's own peak is too low.
    pub mean_ms: Option<f64>,
}

/// The best of some choices, and all trials.
#[derive(Clone, PartialEq, Debug)]
pub struct Tuned<C> {
    /// The best choice; `None`: no choice holds any load.
    pub chosen: Option<C>,
    /// All choices, in the order in which they were given.
    pub tried: Vec<Tried<C>>,
}

/// Finds the choice with the highest peak. Of choices with peaks within 1% of the best, it takes
/// the one with the lowest mean latency at 9/10 of the best peak. A later choice must have less than
/// `worth` times the latency of an earlier one, so simple choices come first.
///
/// `peak` finds the highest load that a choice holds, 0 if none. `mean_ms` finds a choice's mean
/// latency at a load, in milliseconds.
///
/// # Errors
/// The first error of a trial.
pub fn tune<C: Copy, E>(
    choices: &[C],
    worth: f64,
    peak: impl Fn(C) -> Result<f64, E>,
    mean_ms: impl Fn(C, f64) -> Result<f64, E>,
) -> Result<Tuned<C>, E> {
    let tried = |choice: &C| Ok(Tried { choice: *choice, peak: peak(*choice)?, mean_ms: None });
    let mut tried = choices.iter().map(tried).collect::<Result<Vec<_>, E>>()?;
    let best = tried.iter().map(|tried| tried.peak).fold(0.0, f64::max);
    let (mut chosen, mut lowest) = (None, f64::INFINITY);
    for one in tried.iter_mut().filter(|tried| best > 0.0 && tried.peak >= best * ALIKE) {
        let mean_ms = mean_ms(one.choice, best * HIGH_LOAD)?;
        one.mean_ms = Some(mean_ms);
        if mean_ms < lowest * worth {
            (chosen, lowest) = (Some(one.choice), mean_ms);
        }
    }
    Ok(Tuned { chosen, tried })
}
