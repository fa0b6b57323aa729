//! The cost of a cut: with one launch of all segments, with a launch for each, and with batches
//! that are parted and joined at the cut.

use std::time::Instant;

use downbeat_engine::{Cut, Engine, Lane, Share, State};

use crate::Outcome;
use crate::arguments::Arguments;
use crate::row::{Row, quantile};
use crate::subject::{From, Subject};

const STEP: &str = "cuts";
const RUNS: usize = 30;
/// Runs that are not counted.
const WARM_UP: usize = 4;

pub fn measure(engine: &dyn Engine, arguments: &Arguments) -> Outcome<()> {
    for name in &arguments.models {
        if let Err(error) = model(engine, arguments, name) {
            Row::new(STEP, name, "not measured").note(error.to_string()).print();
        }
    }
    Ok(())
}

fn model(engine: &dyn Engine, arguments: &Arguments, name: &str) -> Outcome<()> {
    let largest = arguments.batches.iter().copied().max().unwrap_or(2).max(2);
    let path = arguments.path(name);
    let whole = Subject::load(engine, &path, Cut::Whole, largest)?;
    let cut = Subject::load(engine, &path, Cut::Stages(arguments.segments), largest)?;
    arguments.batches.iter().try_for_each(|batch| price(&whole, &cut, name, *batch))?;
    boundary(&cut, name, largest / 2 * 2)
}

/// Runs `does`, and records its milliseconds by the host's clock.
fn timed<T>(times: &mut Vec<f64>, does: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let done = does();
    times.push(begin.elapsed().as_secs_f64() * 1e3);
    done
}

fn median(times: &mut Vec<f64>) -> f64 {
    times.drain(..WARM_UP.min(times.len()));
    quantile(times, 0.5).unwrap_or(f64::NAN)
}

fn price(whole: &Subject, cut: &Subject, name: &str, batch: usize) -> Outcome<()> {
    let count = cut.model.segments();
    let (mut of_whole, mut of_cut) = (whole.lane(Share::Whole)?, cut.lane(Share::Whole)?);
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..RUNS + WARM_UP {
        times[0].push(whole.run(&mut *of_whole, batch, From::Ring)?);
        times[1].push(cut.run(&mut *of_cut, batch, From::Ring)?);
        let mut state = cut.batch(batch, From::Ring)?;
        timed(&mut times[2], || (0..count).try_for_each(|segment| of_cut.run(segment..segment + 1, &mut state)))?;
    }
    let [base, together, apart] = times.each_mut().map(median);
    let each = |ms: f64| (ms - base) * 1e3 / (count.max(2) - 1) as f64;
    let note = format!(
        "whole {base:.3} ms; {count} segments in one launch {together:.3} ms ({:.1} us a cut), in a launch each {apart:.3} ms ({:.1} us a cut)",
        each(together),
        each(apart)
    );
    Row { batch: Some(batch), ms: Some(together), ..Row::new(STEP, name, "cost of a cut") }.note(note).print();
    Ok(())
}

/// Two halves of a batch come to the middle of the model. They are joined and run, against the
/// batch that came as one; and parted again.
fn boundary(cut: &Subject, name: &str, batch: usize) -> Outcome<()> {
    let (segments, half) = (cut.model.segments(), batch / 2);
    let middle = segments / 2;
    if middle == 0 {
        return Err("a model in one segment has no boundary".into());
    }
    let mut lane = cut.lane(Share::Whole)?;
    let until = |lane: &mut dyn Lane, rows| -> Outcome<State> {
        let mut state = cut.batch(rows, From::Ring)?;
        lane.run(0..middle, &mut state)?;
        Ok(state)
    };
    let (mut one, mut joined, mut join, mut split, mut parts) = (vec![], vec![], vec![], vec![], vec![]);
    for _ in 0..RUNS + WARM_UP {
        let mut state = until(&mut *lane, batch)?;
        timed(&mut one, || lane.run(middle..segments, &mut state))?;
        let halves = vec![until(&mut *lane, half)?, until(&mut *lane, half)?];
        timed(&mut joined, || -> Outcome<()> {
            let mut state = timed(&mut join, || lane.join(halves))?;
            Ok(lane.run(middle..segments, &mut state)?)
        })?;
        let state = until(&mut *lane, batch)?;
        let halves = timed(&mut split, || state.split(&[half, half]))?;
        timed(&mut parts, || halves.into_iter().try_for_each(|mut half| lane.run(middle..segments, &mut half)))?;
    }
    let bytes = cut.model.segment_info().get(middle - 1).map_or(0, |info| info.live_bytes_per_item) * batch as u64;
    let [one, joined, join, split, parts] = [one, joined, join, split, parts].map(|mut times| median(&mut times));
    let told = |what: &str, ms: f64, note: String| {
        Row { batch: Some(batch), ms: Some(ms), ..Row::new(STEP, name, what) }.note(note).print();
    };
    let kib = bytes as f64 / 1024.0;
    let note = format!(
        "{kib:.0} KiB, before segment {} of {segments}: the rest takes {joined:.3} ms joined, {one:.3} ms as one; the caller's part is {:.1} us",
        middle + 1,
        join * 1e3
    );
    told("join of two halves", joined - one, note);
    let note = format!(
        "the caller's part is {:.1} us; the rest takes {parts:.3} ms in halves, {one:.3} ms as one",
        split * 1e3
    );
    told("split in two halves", parts - one, note);
    Ok(())
}
