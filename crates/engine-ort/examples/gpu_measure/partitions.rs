//! Partitions: latency over share, the change from one share to another, and a neighbour's
//! influence.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use downbeat_engine::{Cut, Engine, Lane, Share, Span};
use downbeat_engine_ort::cuda::{Device, Splitter};

use crate::Outcome;
use crate::arguments::Arguments;
use crate::row::{Row, quantile};
use crate::subject::{From, Subject, span};

/// About half of the compute units.
pub fn half() -> Outcome<u32> {
    let device = Device::open(0)?;
    let grain = Splitter::new(&device)?.grain();
    Ok((device.compute_units() / 2 / grain).max(1) * grain)
}

/// Latency over batch and share (GSLICE figure 2).
pub fn shares(engine: &dyn Engine, arguments: &Arguments) -> Outcome<()> {
    let device = Device::open(0)?;
    let grain = Splitter::new(&device)?.grain();
    let largest = arguments.batches.iter().copied().max().unwrap_or(1);
    let steps: Vec<u32> = [1, 2, 3, 4, 6, 8, 12, 16].map(|step| step * grain).to_vec();
    let end = Instant::now() + arguments.time;
    for name in &arguments.models {
        let subject = Subject::load(engine, &arguments.path(name), Cut::Whole, largest)?;
        let shares = steps.iter().filter(|units| **units < device.compute_units()).map(|units| Share::Units(*units));
        for share in shares.chain([Share::Whole]) {
            let mut lane = subject.lane(share)?;
            for batch in &arguments.batches {
                let mut spans = Vec::new();
                for run in 0..12 {
                    subject.run(&mut *lane, *batch, From::Ring)?;
                    spans.extend((run > 3).then(|| span(&*lane)));
                }
                Row::new("shares", name, format!("{share:?}")).runs(*batch, 1, &mut spans).print();
                if Instant::now() > end {
                    Row::new("shares", name, "stopped").note("its time is up").print();
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// The time without service when a model goes to another share (GSLICE §4.3). This is the time from
/// the end of a launch on one share to the begin of the next on the other. The time between two
/// launches on one share is subtracted.
pub fn switch(engine: &dyn Engine, arguments: &Arguments) -> Outcome<()> {
    let units = half()?;
    for name in &arguments.models {
        let subject = Subject::load(engine, &arguments.path(name), Cut::Whole, 1)?;
        let mut lanes = [subject.lane(Share::Units(units))?, subject.lane(Share::AllBut(units))?];
        for lane in &mut lanes {
            for _ in 0..5 {
                subject.run(&mut **lane, 1, From::Ring)?;
            }
        }
        let (mut staying, mut switching) = (Vec::new(), Vec::new());
        let mut last: Option<Span> = None;
        for run in 0..400 {
            // Two launches on each share: every second launch comes after a switch.
            let lane = &mut lanes[run / 2 % 2];
            subject.run(&mut **lane, 1, From::Ring)?;
            let span = lane.last_run().ok_or("a run without times")?;
            if let Some(last) = last {
                let (begin, _) = span.from_begin_of(&last).ok_or("a run without times")?;
                let gap = begin as f64 / 1e6 - last.took().ok_or("a run without times")?.as_nanos() as f64 / 1e6;
                if run % 2 == 0 { switching.push(gap) } else { staying.push(gap) }
            }
            last = Some(span);
        }
        let medians = [&mut staying, &mut switching].map(|gaps| quantile(gaps, 0.5).unwrap_or(f64::NAN));
        let note = format!(
            "{:.1} us: between launches {:.1} us in one place, {:.1} us from one to the other",
            (medians[1] - medians[0]) * 1e3,
            medians[0] * 1e3,
            medians[1] * 1e3
        );
        let ms = Some(medians[1] - medians[0]);
        Row { ms, ..Row::new("switch", name, "time without service") }.note(note).print();
    }
    Ok(())
}

/// A model in a closed loop at batch 1, beside a neighbour with the largest batch: alone, sharing
/// freely, and in partitions (GSLICE figure 8).
pub fn isolation(engine: &dyn Engine, arguments: &Arguments) -> Outcome<()> {
    let [name, neighbour] = arguments.models.as_slice() else {
        return Err("isolation takes two models: the one that is looked at, and its neighbour".into());
    };
    let largest = arguments.batches.iter().copied().max().unwrap_or(1);
    let subject = Subject::load(engine, &arguments.path(name), Cut::Whole, 1)?;
    let other = Subject::load(engine, &arguments.path(neighbour), Cut::Whole, largest)?;
    let units = half()?;
    let arrangements = [
        ("alone", Share::Whole, None),
        ("alone in its half", Share::Units(units), None),
        ("sharing freely", Share::Whole, Some(Share::Whole)),
        ("in halves", Share::Units(units), Some(Share::AllBut(units))),
    ];
    let mut lanes = Vec::new();
    for (what, share, beside) in arrangements {
        let mut lane = subject.lane(share)?;
        let mut beside = beside.map(|share| other.lane(share)).transpose()?;
        for _ in 0..5 {
            subject.run(&mut *lane, 1, From::Ring)?;
            if let Some(lane) = &mut beside {
                other.run(&mut **lane, largest, From::Ring)?;
            }
        }
        lanes.push((what, lane, beside, Vec::new(), 0.0));
    }
    const ROUNDS: u32 = 3;
    let time = arguments.time / (ROUNDS * lanes.len() as u32);
    for _ in 0..ROUNDS {
        for (_, lane, beside, millis, per_s) in &mut lanes {
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| -> Outcome<()> {
                let neighbour = beside.as_mut().map(|lane| scope.spawn(|| until(&done, &other, &mut **lane, largest)));
                let end = Instant::now() + time;
                while Instant::now() < end {
                    match subject.run(&mut **lane, 1, From::Ring) {
                        Ok(ms) => millis.push(ms),
                        Err(error) => {
                            done.store(true, Ordering::Relaxed);
                            return Err(error);
                        }
                    }
                }
                done.store(true, Ordering::Relaxed);
                if let Some(neighbour) = neighbour {
                    *per_s += neighbour.join().map_err(|_| "the neighbour's thread panicked")?? / f64::from(ROUNDS);
                }
                Ok(())
            })?;
        }
    }
    for (what, _, beside, mut millis, per_s) in lanes {
        let note = beside.map(|_| format!("neighbour {neighbour}, batch {largest}: {per_s:.0} items/s"));
        Row::new("isolation", name, what).runs(1, 1, &mut millis).note(note.unwrap_or_default()).print();
    }
    Ok(())
}

/// Items a second.
fn until(done: &AtomicBool, subject: &Subject, lane: &mut dyn Lane, batch: usize) -> Outcome<f64> {
    let begin = Instant::now();
    let mut items = 0;
    while !done.load(Ordering::Relaxed) {
        subject.run(lane, batch, From::Ring)?;
        items += batch;
    }
    Ok(items as f64 / begin.elapsed().as_secs_f64())
}
