//! Runs of pipelines' arrivals in virtual time.

use downbeat_core::pipeline::{
    Division, End, PipelineArrival, RehearsalOptions, Replay, Shares, Stage, StageError, WeightRehearsal,
};

/// How weights are rehearsed during a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rehearsing {
    /// How weights are looked for.
    pub options: RehearsalOptions,
    /// Replayed events that the rehearsal gets for each event of the run.
    pub lent: u64,
    /// Chooses the tries.
    pub seed: u64,
}

/// Plays all arrivals. Returns the log of ends, in order of time. Times count from the first
/// arrival.
///
/// # Errors
/// If a number of the stage names nothing.
pub fn play(stage: &Stage, arrivals: &[PipelineArrival], by: &mut dyn Division) -> Result<Vec<End>, StageError> {
    Ok(play_while(stage, arrivals, by, |_| true)?.unwrap_or_default())
}

/// [`play`], as long as the ends so far are worth going on. Returns `None` if the run was given up.
///
/// # Errors
/// If a number of the stage names nothing.
pub fn play_while(
    stage: &Stage,
    arrivals: &[PipelineArrival],
    by: &mut dyn Division,
    mut goes_on: impl FnMut(&End) -> bool,
) -> Result<Option<Vec<End>>, StageError> {
    let mut replay = Replay::new(stage, 100)?;
    let mut ends = Vec::with_capacity(arrivals.len());
    while replay.step(arrivals, by) {
        if !take(&mut replay, &mut ends, &mut goes_on) {
            return Ok(None);
        }
    }
    Ok(Some(ends))
}

/// [`play_while`] by weights that begin with `shares` and are rehearsed meanwhile.
///
/// # Errors
/// If a number of the stage names nothing.
pub fn play_rehearsed(
    stage: &Stage,
    arrivals: &[PipelineArrival],
    mut shares: Vec<Shares>,
    rehearsing: Rehearsing,
    mut goes_on: impl FnMut(&End) -> bool,
) -> Result<Option<Vec<End>>, StageError> {
    let Rehearsing { options, lent, seed } = rehearsing;
    let mut rehearsal = WeightRehearsal::new(stage.clone(), shares.clone(), options, seed)?;
    let mut replay = Replay::new(stage, 100)?;
    let mut ends = Vec::with_capacity(arrivals.len());
    let mut told = 0;
    while replay.step(arrivals, &mut shares) {
        if !take(&mut replay, &mut ends, &mut goes_on) {
            return Ok(None);
        }
        while told < replay.arrived() {
            rehearsal.arrival(arrivals[told]);
            told += 1;
        }
        rehearsal.step(lent);
        if let Some(better) = rehearsal.poll_decision() {
            shares = better;
        }
    }
    Ok(Some(ends))
}

/// Takes the new ends. Returns whether the run goes on.
fn take(replay: &mut Replay, ends: &mut Vec<End>, goes_on: &mut impl FnMut(&End) -> bool) -> bool {
    while let Some(end) = replay.poll_end() {
        if !goes_on(&end) {
            return false;
        }
        ends.push(end);
    }
    true
}
