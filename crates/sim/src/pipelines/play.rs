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
    let mut replay = Replay::new(stage, 100)?;
    let mut ends = Vec::with_capacity(arrivals.len());
    while replay.step(arrivals, by) {
        ends.extend(std::iter::from_fn(|| replay.poll_end()));
    }
    Ok(ends)
}

/// Plays all arrivals by weights that begin with `shares` and are rehearsed meanwhile.
///
/// # Errors
/// If a number of the stage names nothing.
pub fn play_rehearsed(
    stage: &Stage,
    arrivals: &[PipelineArrival],
    mut shares: Vec<Shares>,
    rehearsing: Rehearsing,
) -> Result<Vec<End>, StageError> {
    let Rehearsing { options, lent, seed } = rehearsing;
    let mut rehearsal = WeightRehearsal::new(stage.clone(), shares.clone(), options, seed)?;
    let mut replay = Replay::new(stage, 100)?;
    let mut ends = Vec::with_capacity(arrivals.len());
    let mut told = 0;
    while replay.step(arrivals, &mut shares) {
        ends.extend(std::iter::from_fn(|| replay.poll_end()));
        while told < replay.arrived() {
            rehearsal.arrival(arrivals[told]);
            told += 1;
        }
        rehearsal.step(lent);
        if let Some(better) = rehearsal.poll_decision() {
            shares = better;
        }
    }
    Ok(ends)
}
