//! Measures operator groups: segment ranges of several models that begin together and end in one
//! barrier (Abacus §5.4). Each range has a lane with a thread of its own.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;

use downbeat_core::device::overlap::GroupPart;
use downbeat_core::{Duration, Time, median};
use downbeat_engine::{Buffer, Lane, Place, RunError, State, Tensor};
use downbeat_host::request::batch_codec::Admitted;

use crate::measure::sampler::{Subject, at_once};

/// Runs to warm up: in the first of a shape engines allocate and plan.
const WARM_UP: usize = 1;

/// Models that run side by side, each on a lane.
pub struct GroupLanes<'a> {
    sides: Vec<Side<'a>>,
}

struct Side<'a> {
    subject: Subject<'a>,
    lane: Box<dyn Lane>,
    /// The item of its batches, by length.
    items: BTreeMap<u32, Admitted>,
}

impl<'a> GroupLanes<'a> {
    /// Opens a lane for each subject; a group names subjects by their places in `subjects`.
    ///
    /// # Errors
    /// If there is no memory for a lane.
    pub fn open(subjects: &[Subject<'a>]) -> Result<Self, RunError> {
        let side = |subject: &Subject<'a>| {
            let lane = subject.lane_at(Place::default())?;
            Ok(Side { subject: *subject, lane, items: BTreeMap::new() })
        };
        Ok(GroupLanes { sides: subjects.iter().map(side).collect::<Result<_, RunError>>()? })
    }

    /// The time of a group from the begin of its first part to the end of its last: the median of
    /// `runs` runs. The inputs of each part are computed before.
    ///
    /// # Errors
    /// If an engine cannot run such a batch, there is no thread for a part, or a model is in the
    /// group twice or has no lane.
    pub fn measure(&mut self, group: &[GroupPart], runs: usize) -> Result<Duration, RunError> {
        let barrier = Barrier::new(group.len());
        let sides = self.sides.iter_mut().enumerate();
        let of_group = sides.filter_map(|(place, side)| {
            let part = group.iter().find(|part| part.model.0 as usize == place)?;
            Some((side, *part))
        });
        let parts: Vec<(&mut Side<'_>, GroupPart)> = of_group.collect();
        if parts.len() != group.len() {
            // Otherwise all parts would wait at the barrier for a part that never comes.
            return Err(RunError::new("profiler", "a group has a model twice, or a model without a lane"));
        }
        let barrier = &barrier;
        let tasks = parts.into_iter().map(|(side, part)| move || side.run(part, WARM_UP + runs.max(1), barrier));
        let spans = at_once(tasks)?;
        let whole = |run: usize| {
            let begin = spans.iter().map(|spans| spans[run].0).min()?;
            let end = spans.iter().map(|spans| spans[run].1).max()?;
            Some(end.since(begin))
        };
        let runs: Vec<Duration> = (WARM_UP..WARM_UP + runs.max(1)).filter_map(whole).collect();
        median(runs).ok_or_else(|| RunError::new("profiler", "a group without parts"))
    }
}

impl Side<'_> {
    /// Runs the part's operators `runs` times, each time after the barrier. Returns the begin and
    /// end of each run.
    fn run(&mut self, part: GroupPart, runs: usize, barrier: &Barrier) -> Result<Vec<(Time, Time)>, RunError> {
        let clock = self.subject.clock;
        let mut prepared = caught(|| self.prepare(part));
        let mut spans = Vec::with_capacity(runs);
        for _ in 0..runs {
            let state = prepared.as_ref().ok().map(copy);
            // A part that has failed goes on to the barrier, too: the others wait for it there.
            barrier.wait();
            let begin = clock.now();
            if let Some(mut state) = state {
                let range = usize::from(part.operators.first)..usize::from(part.operators.end);
                if let Err(error) = caught(|| self.lane.run(range, &mut state)) {
                    prepared = Err(error);
                }
            }
            spans.push((begin, clock.now()));
        }
        prepared.map(|_| spans)
    }

    /// The input of the part's operators.
    fn prepare(&mut self, part: GroupPart) -> Result<State, RunError> {
        let refused = |reason| RunError::new("batch codec", reason);
        let codec = self.subject.codec;
        if !self.items.contains_key(&part.length) {
            let length = if part.length == 0 { self.subject.varying } else { part.length.into() };
            self.items.insert(part.length, codec.trial(length).map_err(refused)?);
        }
        let item = &self.items[&part.length];
        let mut state = codec.assemble(std::iter::repeat_n(item, part.rows as usize)).map_err(refused)?;
        if part.operators.first > 0 {
            self.lane.run(0..usize::from(part.operators.first), &mut state)?;
        }
        Ok(state)
    }
}

/// Runs an engine. A panic becomes an error, so that the other threads do not wait in vain.
fn caught<T>(run: impl FnOnce() -> Result<T, RunError>) -> Result<T, RunError> {
    let ran = catch_unwind(AssertUnwindSafe(run));
    ran.unwrap_or_else(|_| Err(RunError::new("profiler", "the engine panicked")))
}

fn copy(state: &State) -> State {
    let copy = |tensor: &Tensor| Tensor {
        datatype: tensor.datatype,
        shape: tensor.shape.clone(),
        data: Buffer::from(tensor.data.as_slice()),
    };
    State { tensors: state.tensors.iter().map(copy).collect() }
}
