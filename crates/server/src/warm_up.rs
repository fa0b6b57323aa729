//! The first runs of lanes, before they are in service: what an engine takes and plans then, no client waits for.

use downbeat_core::device::LaneSpec;
use downbeat_engine::{Lane, Model, RunError, State};

use crate::executable::Executable;
use crate::fill::Fill;
use crate::loader::PROFILED_LENGTH;
use crate::plan::{Admitted, BatchPlan, LARGEST_TRIAL};

/// A request that a lane is warmed up with.
pub struct Sample {
    /// What the configuration calls it; `None`: zeros.
    pub name: Option<String>,
    /// How often it is run.
    pub count: u32,
    /// The request.
    pub request: Admitted,
}

/// Warms up a lane that runs whole batches of any size.
///
/// # Errors
/// If a sample that was named does not run, or the device is lost or out of memory.
pub fn run_whole(samples: &[Sample], executable: &Executable, lane: &mut dyn Lane) -> anyhow::Result<()> {
    let segments = executable.model().segments();
    run_sizes(executable, executable.plan.max_batch(), |state| lane.run(0..segments, state))?;
    run_samples(samples, executable, |state| lane.run(0..segments, state))
}

/// Warms up the lanes of a device, each with the segments and the sizes that it will run.
///
/// # Errors
/// As [`run_whole`].
pub fn run_lanes(
    samples: &[Sample],
    executable: &Executable,
    specs: &[LaneSpec],
    lanes: &mut [Box<dyn Lane>],
) -> anyhow::Result<()> {
    let segments = executable.model().segments();
    let runs = |spec: &LaneSpec| usize::from(spec.segments.first)..usize::from(spec.segments.end);
    if let Some(chain) = chain(specs, segments) {
        // Each lane has a stage: a batch goes through all of them.
        let mut through =
            |state: &mut State| chain.iter().try_for_each(|lane| lanes[*lane].run(runs(&specs[*lane]), state));
        let most = specs.iter().map(|spec| spec.max_rows).min().unwrap_or(1);
        run_sizes(executable, most, &mut through)?;
        return run_samples(samples, executable, through);
    }
    for (spec, lane) in specs.iter().zip(lanes) {
        run_sizes(executable, spec.max_rows, |state| lane.run(0..segments, state))?;
        run_samples(samples, executable, |state| lane.run(0..segments, state))?;
    }
    Ok(())
}

/// The lanes in the order in which a batch passes them, if each of them is passed once.
fn chain(specs: &[LaneSpec], segments: usize) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..specs.len()).collect();
    order.sort_by_key(|lane| specs[*lane].segments.first);
    let mut at = 0;
    for lane in &order {
        let range = specs[*lane].segments;
        if usize::from(range.first) != at {
            return None;
        }
        at = usize::from(range.end);
    }
    (at == segments).then_some(order)
}

/// Lengths of varying dimensions that a model is tried with until it answers: as it is measured, as short as can be, and as pictures and texts often are.
const LENGTHS: [i64; 7] = [PROFILED_LENGTH, 1, 16, 64, 128, 224, 256];

/// Looks for a request of our own making that the model answers, so that a model that can answer none is not taken for ready.
///
/// # Errors
/// What it says to the first, if it answers none; if the device is lost or out of memory.
pub fn find_answer(plan: &BatchPlan, model: &dyn Model) -> anyhow::Result<()> {
    let mut lane = model.lane()?;
    let mut first = None;
    let lengths = if plan.has_varying_shapes() { &LENGTHS[..] } else { &LENGTHS[..1] };
    for length in lengths {
        for fill in Fill::ALL {
            let answer = plan
                .sample(fill, *length)
                .and_then(|request| plan.assemble(std::iter::once(&request)))
                .map_err(|reason| RunError::new("batch plan", reason))
                .and_then(|mut state| {
                    lane.run(0..model.segments(), &mut state)?;
                    plan.separate(state, &[1]).map_err(|reason| RunError::new("batch plan", reason))
                });
            match answer {
                Ok(_) => return Ok(()),
                Err(error) if error.of_device => return Err(error.into()),
                Err(error) => {
                    tracing::debug!(?fill, length, %error, "the model does not answer");
                    first.get_or_insert(error);
                }
            }
        }
    }
    anyhow::bail!(
        "the model answers none of the requests that it was tried with (zeros, ones, random numbers); to the first it says: {}. If it needs other \
         inputs, give one in config.pbtxt (model_warmup), which is run instead",
        first.map(|error| error.to_string()).unwrap_or_default()
    )
}

/// Batches of zeros of those sizes up to `most` that are slow the first time, each twice: an engine may take memory once more on the second.
fn run_sizes(
    executable: &Executable,
    most: u32,
    mut run: impl FnMut(&mut State) -> Result<(), RunError>,
) -> anyhow::Result<()> {
    let sizes = executable.model().sizes_to_warm(most as usize);
    let Some(bytes) = executable.plan.item_bytes(PROFILED_LENGTH).filter(|_| !sizes.is_empty()) else { return Ok(()) };
    // Larger ones are slow the first time.
    let Ok(item) = executable.plan.zeros(PROFILED_LENGTH) else { return Ok(()) };
    for size in sizes.into_iter().filter(|size| bytes.saturating_mul(*size) <= LARGEST_TRIAL) {
        for _ in 0..2 {
            let mut state = executable.plan.assemble(std::iter::repeat_n(&item, size)).map_err(anyhow::Error::msg)?;
            let Err(error) = run(&mut state) else { continue };
            anyhow::ensure!(
                !error.of_device,
                "a batch of {size} does not run: {error}. A smaller max_batch_size takes less memory"
            );
            // A model may refuse zeros.
            tracing::debug!(model = %executable.name, size, %error, "a batch of zeros does not run");
            return Ok(());
        }
    }
    Ok(())
}

fn run_samples(
    samples: &[Sample],
    executable: &Executable,
    mut run: impl FnMut(&mut State) -> Result<(), RunError>,
) -> anyhow::Result<()> {
    for Sample { name, count, request } in samples {
        for _ in 0..*count {
            let mut state = executable.plan.assemble(std::iter::once(request)).map_err(anyhow::Error::msg)?;
            match (run(&mut state), name) {
                (Err(error), Some(name)) => anyhow::bail!("model_warmup '{name}': {error}"),
                (Err(error), None) if error.of_device => anyhow::bail!("{error}"),
                // A model may refuse zeros.
                (Err(_), None) | (Ok(()), _) => {}
            }
        }
    }
    Ok(())
}
