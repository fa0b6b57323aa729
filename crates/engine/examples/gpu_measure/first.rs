//! What the design rests on, checked before anything else: weights on the device are shared, kernels keep to a partition's compute units, segments cost little.

use downbeat_engine::cuda::{Device, Splitter};
use downbeat_engine::{Cut, Engine, Share};

use crate::Outcome;
use crate::arguments::Arguments;
use crate::row::{Row, quantile};
use crate::subject::{From, Subject, span};

const STEP: &str = "first";
const RUNS: usize = 30;

pub fn measure(engine: &dyn Engine, arguments: &Arguments) -> Outcome<()> {
    let info = engine.info();
    Row::new(STEP, "", "engine").note(format!("{} {} on {}", info.name, info.version, info.device)).print();
    let device = Device::open(0)?;
    match Splitter::new(&device).and_then(|splitter| Ok((splitter.grain(), splitter.ladder()?))) {
        Ok((grain, ladder)) => {
            let sizes: Vec<u32> = ladder.iter().map(|rung| rung.partition.compute_units()).collect();
            let note = format!("{} compute units in steps of {grain}: {sizes:?}", device.compute_units());
            Row::new(STEP, "", "partitions").note(note).print();
        }
        Err(error) => Row::new(STEP, "", "partitions").note(error.to_string()).print(),
    }
    for name in &arguments.models {
        for check in [weights, partition, segments] {
            if let Err(error) = check(engine, arguments, name, &device) {
                Row::new(STEP, name, "check").note(error.to_string()).print();
            }
        }
    }
    Ok(())
}

/// How much memory lanes take beside the weights.
fn weights(engine: &dyn Engine, arguments: &Arguments, name: &str, device: &Device) -> Outcome<()> {
    let path = arguments.path(name);
    let file = std::fs::metadata(&path)?.len() >> 20;
    for (what, cut) in [("whole", Cut::Whole), ("cut", Cut::Stages(arguments.segments))] {
        let subject = Subject::load(engine, &path, cut, 1)?;
        let before = device.free_memory()?;
        let taken = || device.free_memory().map(|free| before.saturating_sub(free) >> 20);
        let mut lane = subject.lane(Share::Whole)?;
        subject.run(&mut *lane, 1, From::Ring)?;
        let one = taken()?;
        let mut other = subject.lane(Share::Whole)?;
        subject.run(&mut *other, 1, From::Ring)?;
        let two = taken()?;
        let note = format!("file {file} MiB; memory taken by one lane {one} MiB, by two {two} MiB");
        Row::new(STEP, name, format!("weights shared, {what}")).note(note).print();
    }
    Ok(())
}

/// Whether kernels keep to their compute units: a large batch has to take longer on few.
fn partition(engine: &dyn Engine, arguments: &Arguments, name: &str, _: &Device) -> Outcome<()> {
    let batch = arguments.batches.iter().copied().max().unwrap_or(16);
    let subject = Subject::load(engine, &arguments.path(name), Cut::Whole, batch)?;
    for share in [Share::Whole, Share::Units(64), Share::Units(16)] {
        let mut lane = subject.lane(share)?;
        let mut spans = Vec::new();
        for run in 0..RUNS / 2 {
            subject.run(&mut *lane, batch, From::Ring)?;
            spans.extend((run > 3).then(|| span(&*lane)));
        }
        let row = Row::new(STEP, name, format!("{share:?}")).note("times on the device");
        row.runs(batch, 1, &mut spans).print();
    }
    Ok(())
}

/// What a cut costs, in one launch of all segments and in one launch for each.
fn segments(engine: &dyn Engine, arguments: &Arguments, name: &str, _: &Device) -> Outcome<()> {
    let path = arguments.path(name);
    let (whole, cut) = (
        Subject::load(engine, &path, Cut::Whole, 8)?,
        Subject::load(engine, &path, Cut::Stages(arguments.segments), 8)?,
    );
    let count = cut.model.segments();
    let (mut of_whole, mut of_cut) = (whole.lane(Share::Whole)?, cut.lane(Share::Whole)?);
    for batch in [1, 8] {
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        for run in 0..RUNS + 4 {
            let one = whole.run(&mut *of_whole, batch, From::Ring)?;
            let together = cut.run(&mut *of_cut, batch, From::Ring)?;
            let mut state = cut.batch(batch, From::Ring)?;
            let begin = std::time::Instant::now();
            for segment in 0..count {
                of_cut.run(segment..segment + 1, &mut state)?;
            }
            let apart = begin.elapsed().as_secs_f64() * 1e3;
            if run >= 4 {
                times.iter_mut().zip([one, together, apart]).for_each(|(times, ms)| times.push(ms));
            }
        }
        let [base, together, apart] = times.each_mut().map(|times| quantile(times, 0.5).unwrap_or(f64::NAN));
        let each = |ms: f64| (ms - base) * 1e3 / (count.max(2) - 1) as f64;
        let note = format!(
            "whole {base:.3} ms; {count} segments in one launch {together:.3} ms ({:.1} us a cut), in a launch each {apart:.3} ms ({:.1} us a cut)",
            each(together),
            each(apart)
        );
        Row { batch: Some(batch), ms: Some(together), ..Row::new(STEP, name, "cost of a cut") }.note(note).print();
    }
    Ok(())
}
