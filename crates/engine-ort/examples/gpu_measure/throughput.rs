//! A model by itself, cut, on two lanes, and beside other runtimes. All take turns, so that other
//! work of the machine slows all alike.

use std::time::{Duration, Instant};

use downbeat_engine::{Cut, Engine, Lane, Share};

use crate::Outcome;
use crate::arguments::Arguments;
use crate::beside::Beside;
use crate::row::{Row, quantile};
use crate::subject::{From, Subject, span};

const STEP: &str = "throughput";
/// The most runs of one turn in a round.
const MOST: usize = 50;
const ROUND: Duration = Duration::from_millis(60);

/// A way to run the model that takes turns with the others.
struct Turn<'a> {
    what: String,
    /// Runs so often, and returns the milliseconds of each run.
    runs: Box<dyn FnMut(usize) -> Outcome<Vec<f64>> + 'a>,
    at_once: usize,
    millis: Vec<f64>,
    failed: Option<String>,
}

impl<'a> Turn<'a> {
    fn new(what: impl Into<String>, at_once: usize, runs: impl FnMut(usize) -> Outcome<Vec<f64>> + 'a) -> Turn<'a> {
        Turn { what: what.into(), runs: Box::new(runs), at_once, millis: Vec::new(), failed: None }
    }

    fn take(&mut self, runs: usize, counts: bool) -> Duration {
        let begin = Instant::now();
        if self.failed.is_none() {
            match (self.runs)(runs) {
                Ok(millis) if counts => self.millis.extend(millis),
                Ok(_) => {}
                Err(error) => self.failed = Some(error.to_string()),
            }
        }
        begin.elapsed()
    }
}

/// Measures throughput. `without` is the same engine without CUDA graphs; `channels_last` is the
/// engine with `nhwc`.
pub fn measure(
    engine: &dyn Engine,
    without: &dyn Engine,
    channels_last: &dyn Engine,
    arguments: &Arguments,
) -> Outcome<()> {
    let mut beside: Vec<Beside> = arguments.beside.iter().filter_map(|command| started(command)).collect();
    let largest = arguments.batches.iter().copied().max().unwrap_or(1);
    let mut greeted = false;
    for name in &arguments.models {
        let path = arguments.path(name);
        let whole = Subject::load(engine, &path, Cut::Whole, largest)?;
        let mut variants = vec![("without graphs", Subject::load(without, &path, Cut::Whole, largest))];
        if arguments.segments > 1 {
            variants.push(("segments", Subject::load(engine, &path, Cut::Stages(arguments.segments), largest)));
        }
        for (form, what, turned) in [
            ("", "", "channels last"),
            ("-fp16", "FP16", "FP16, channels last"),
            ("-fused", "fused", ""),
            ("-fused-fp16", "fused, FP16", ""),
        ] {
            let path = arguments.path(&format!("{name}{form}"));
            // A BERT has no channels.
            for (engine, what) in [(engine, what), (channels_last, if name.starts_with("bert") { "" } else { turned })]
            {
                if !what.is_empty() && path.exists() {
                    variants.push((what, Subject::load(engine, &path, Cut::Whole, largest)));
                }
            }
        }
        let loaded = |(what, subject): (&str, Outcome<Subject>)| match subject {
            Ok(subject) if subject.model.segments() > 1 => {
                Some((format!("{} {what}", subject.model.segments()), subject))
            }
            Ok(subject) => Some((format!("whole, {what}"), subject)),
            Err(error) => {
                Row::new(STEP, name, what).note(error.to_string()).print();
                None
            }
        };
        let variants: Vec<(String, Subject)> = variants.into_iter().filter_map(loaded).collect();
        if !greeted {
            beside.retain_mut(|other| match other.greet() {
                Ok(()) => true,
                Err(error) => {
                    Row::new(STEP, name, other.name.clone()).note(error.to_string()).print();
                    false
                }
            });
            greeted = true;
        }
        for batch in &arguments.batches {
            let time = arguments.time / (arguments.models.len() * arguments.batches.len()) as u32;
            let of = Lanes { whole: &whole, variants: &variants };
            if let Err(error) = of.compare(name, *batch, time, &mut beside) {
                Row { batch: Some(*batch), ..Row::new(STEP, name, "all") }.note(error.to_string()).print();
            }
        }
    }
    Ok(())
}

fn started(command: &str) -> Option<Beside> {
    let said = |error: &dyn ToString| Row::new(STEP, "", command).note(error.to_string()).print();
    Beside::start(command).map_err(|error| said(&error)).ok()
}

struct Lanes<'a> {
    whole: &'a Subject,
    variants: &'a [(String, Subject)],
}

impl Lanes<'_> {
    fn compare(&self, name: &str, batch: usize, time: Duration, beside: &mut [Beside]) -> Outcome<()> {
        let Lanes { whole, variants } = *self;
        let (mut first, mut second) = (whole.lane(Share::Whole)?, whole.lane(Share::Whole)?);
        // Nothing counts while the first batches of a size set up their kernels.
        for lane in [&mut first, &mut second] {
            for _ in 0..3 {
                whole.run(&mut **lane, batch, From::Ring)?;
            }
        }
        let (mut spans, mut cpu) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            let before = thread_time();
            whole.run(&mut *first, batch, From::Ring)?;
            cpu.push(thread_time() - before);
            spans.push(span(&*first));
        }
        let note = format!(
            "on the device {:.3} ms; the host's thread was busy {:.3} ms, up to 0.05 of them waiting",
            quantile(&mut spans, 0.5).unwrap_or(f64::NAN),
            quantile(&mut cpu, 0.5).unwrap_or(f64::NAN)
        );
        // The other runtimes set this size up while no turn is measured, all at once.
        beside.iter_mut().for_each(|other| drop(other.ask(name, batch, 1)));
        // Errors can wait: a runtime that cannot do a size reports this again in its turn.
        beside.iter_mut().for_each(|other| drop(other.answer()));
        let lanes = std::cell::RefCell::new((first, second));
        let mut turns = vec![
            Turn::new("whole, inputs in the ring", 1, |runs| {
                repeat(runs, whole, &mut *lanes.borrow_mut().0, batch, From::Ring)
            }),
            // The same once more: the difference between the two is chance.
            Turn::new("whole, inputs in the ring, again", 1, |runs| {
                repeat(runs, whole, &mut *lanes.borrow_mut().0, batch, From::Ring)
            }),
            Turn::new("whole, inputs on the host", 1, |runs| {
                repeat(runs, whole, &mut *lanes.borrow_mut().0, batch, From::Host)
            }),
            Turn::new("whole, two lanes at once, both", 2, |runs| {
                let lanes = &mut *lanes.borrow_mut();
                both(runs, whole, &mut *lanes.0, &mut *lanes.1, batch)
            }),
        ];
        for (what, subject) in variants {
            let mut lane = match subject.lane(Share::Whole) {
                Ok(lane) => lane,
                Err(error) => {
                    Row { batch: Some(batch), ..Row::new(STEP, name, what.clone()) }.note(error.to_string()).print();
                    continue;
                }
            };
            turns.push(Turn::new(what.clone(), 1, move |runs| repeat(runs, subject, &mut *lane, batch, From::Ring)));
        }
        for other in beside {
            turns.push(Turn::new(other.name.clone(), 1, move |runs| other.runs(name, batch, runs)));
        }
        take_turns(&mut turns, time);
        for turn in &mut turns {
            let row = Row::new(STEP, name, turn.what.clone());
            let row = if turn.what == "whole, inputs in the ring" { row.note(note.clone()) } else { row };
            let row = turn.failed.as_ref().map_or(row.clone(), |error| row.note(error.clone()));
            row.runs(batch, turn.at_once, &mut turn.millis).print();
        }
        Ok(())
    }
}

fn take_turns(turns: &mut [Turn<'_>], time: Duration) {
    let begin = Instant::now();
    let runs: Vec<usize> = turns
        .iter_mut()
        .map(|turn| {
            turn.take(3, false);
            let one = turn.take(2, false) / 2;
            ((ROUND.as_secs_f64() / one.as_secs_f64().max(1e-6)) as usize).clamp(2, MOST)
        })
        .collect();
    let mut rounds = 0;
    while rounds < 3 || begin.elapsed() < time {
        for (turn, runs) in turns.iter_mut().zip(&runs) {
            turn.take(*runs, true);
        }
        rounds += 1;
        if rounds >= 40 || (rounds > 0 && begin.elapsed() > time * 3) {
            break;
        }
    }
}

fn repeat(runs: usize, subject: &Subject, lane: &mut dyn Lane, batch: usize, from: From) -> Outcome<Vec<f64>> {
    (0..runs).map(|_| subject.run(lane, batch, from)).collect()
}

/// Runs two lanes, each on a thread; a time is that of a pair of launches.
fn both(
    runs: usize,
    subject: &Subject,
    first: &mut dyn Lane,
    second: &mut dyn Lane,
    batch: usize,
) -> Outcome<Vec<f64>> {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| repeat(runs, subject, second, batch, From::Ring).map(drop));
        let this = repeat(runs, subject, first, batch, From::Ring);
        other.join().map_err(|_| "a lane's thread panicked")??;
        this.map(drop)
    })?;
    Ok(vec![begin.elapsed().as_secs_f64() * 1e3 / runs as f64; runs])
}

/// Milliseconds that the calling thread had a processor.
fn thread_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}
