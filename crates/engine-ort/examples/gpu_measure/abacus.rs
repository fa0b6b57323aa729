//! Samples for a predictor of operator groups (Abacus §5.4): two models, a range of segments and a
//! batch size each, alone and side by side.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Barrier;
use std::time::Instant;

use downbeat_engine::{Cut, Engine, Lane, Share, Span, State};
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::arguments::Arguments;
use crate::row::{Row, quantile};
use crate::subject::{From, LENGTH, Subject, random_bits};

const STEP: &str = "abacus";
const SEED: u64 = 1;
/// How often each sample is run, alone and side by side in turns, and how many of the first runs
/// are not counted.
const RUNS: usize = 9;
const WARM_UP: usize = 2;
/// After so many samples the step prints a row.
const STRIDE: u64 = 50;

/// A sample for training a predictor. Times are milliseconds by the device's clock, a value a run.
#[derive(Serialize)]
struct Sample<'a> {
    /// The sample's number. With the seed it decides the group.
    sample: u64,
    seed: u64,
    models: [&'a str; 2],
    /// How many segments each model has.
    segments: [usize; 2],
    /// The segments that run, the end excluded.
    ranges: [[usize; 2]; 2],
    batches: [usize; 2],
    /// Tokens of an item, where its length varies.
    length: usize,
    /// The times of each alone.
    solo_ms: [Vec<f64>; 2],
    /// Each beside the other. Both begin together.
    beside_ms: [Vec<f64>; 2],
    /// The times from the begin of the first to the end of the last.
    together_ms: Vec<f64>,
}

/// The fields of an earlier sample that matter for the next ones.
#[derive(Deserialize)]
struct Done {
    sample: u64,
    seed: u64,
}

/// A model, its lane, and the batch sizes that it has run.
struct Side<'a> {
    name: &'a str,
    subject: Subject,
    lane: Box<dyn Lane>,
    warm: BTreeSet<usize>,
}

impl Side<'_> {
    /// Runs up to the begin of a range.
    fn before(&mut self, batch: usize, range: &Range<usize>) -> Outcome<State> {
        let mut state = self.subject.batch(batch, From::Ring)?;
        self.lane.run(0..range.start, &mut state)?;
        Ok(state)
    }

    fn run(&mut self, mut state: State, range: &Range<usize>) -> Outcome<Span> {
        self.lane.run(range.clone(), &mut state)?;
        self.lane.last_run().ok_or_else(|| "a run without times".into())
    }

    /// Makes sessions and plans for a size.
    fn warm(&mut self, batch: usize) -> Outcome<()> {
        if self.warm.insert(batch) {
            for _ in 0..3 {
                let mut state = self.subject.batch(batch, From::Ring)?;
                let segments = 0..self.subject.model.segments();
                segments.into_iter().try_for_each(|segment| self.lane.run(segment..segment + 1, &mut state))?;
            }
        }
        Ok(())
    }
}

/// The measured group: its two models, their batches and their ranges.
struct Group {
    sides: [usize; 2],
    batches: [usize; 2],
    ranges: [Range<usize>; 2],
}

impl Group {
    /// The group of a number. Pairs and batch sizes take turns, so that each is sampled as often.
    /// Ranges are random. At least one model comes to its end, and a model that has just arrived
    /// begins at its first segment (Abacus figure 9).
    fn of(sample: u64, sides: &[Side<'_>], batches: &[usize]) -> Outcome<Group> {
        let pairs: Vec<[usize; 2]> = (0..sides.len()).flat_map(|a| (a + 1..sides.len()).map(move |b| [a, b])).collect();
        let mut turn = sample as usize;
        let mut next = |count: usize| {
            let index = turn.checked_rem(count).ok_or("it takes two models, and a batch size")?;
            turn /= count;
            Ok::<_, &str>(index)
        };
        let sides_of = pairs[next(pairs.len())?];
        let batches = [batches[next(batches.len())?], batches[next(batches.len())?]];
        let mut seed = SEED ^ (sample << 20);
        let mut below = |count: usize| (random_bits(&mut seed) % count.max(1) as u64) as usize;
        let ends = 1 + below(3);
        let arrives = below(4);
        let ranges = [0, 1].map(|index| {
            let segments = sides[sides_of[index]].subject.model.segments();
            let begin = if arrives >> index & 1 == 1 { 0 } else { below(segments) };
            let end = if ends >> index & 1 == 1 { segments } else { begin + 1 + below(segments - begin) };
            begin..end
        });
        Ok(Group { sides: sides_of, batches, ranges })
    }
}

pub fn measure(engine: &dyn Engine, arguments: &Arguments) -> Outcome<()> {
    let end = Instant::now() + arguments.time;
    let path = arguments.samples.as_deref().ok_or("abacus needs --samples FILE")?;
    let done = done(path)?;
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    let largest = arguments.batches.iter().copied().max().unwrap_or(1);
    let mut sides = Vec::new();
    for name in &arguments.models {
        let begin = Instant::now();
        let side = || -> Outcome<Side<'_>> {
            let subject = Subject::load(engine, &arguments.path(name), Cut::Stages(arguments.segments), largest)?;
            let lane = subject.lane(Share::Whole)?;
            Ok(Side { name, subject, lane, warm: BTreeSet::new() })
        };
        match side() {
            Ok(side) => {
                let note = format!(
                    "{} segments, loaded in {:.1} s",
                    side.subject.model.segments(),
                    begin.elapsed().as_secs_f64()
                );
                Row::new(STEP, name, "model").note(note).print();
                sides.push(side);
            }
            Err(error) => Row::new(STEP, name, "model").note(error.to_string()).print(),
        }
    }
    let (mut count, mut ratios, mut failures) = (done.len() as u64, Vec::new(), 0);
    for index in (0..).filter(|sample| !done.contains(sample)) {
        // At least one sample, so that each call makes progress.
        if Instant::now() >= end && !ratios.is_empty() {
            break;
        }
        match sample(index, &mut sides, &arguments.batches, &mut file) {
            Ok(ratio) => ratios.push(ratio),
            Err(error) if failures < 3 => {
                failures += 1;
                Row::new(STEP, "", format!("sample {index}")).note(error.to_string()).print();
            }
            Err(error) => return Err(error),
        }
        count += 1;
        if count.is_multiple_of(STRIDE) {
            print(count, &mut ratios);
        }
    }
    print(count, &mut ratios);
    Ok(())
}

fn print(count: u64, ratios: &mut [f64]) {
    let at = |ratios: &mut [f64], q| quantile(ratios, q).unwrap_or(f64::NAN);
    let (low, median, high) = (at(ratios, 0.05), at(ratios, 0.5), at(ratios, 0.95));
    let note = format!("side by side takes {median:.2} of one after the other ({low:.2} to {high:.2} for 90 of 100)");
    Row::new(STEP, "", format!("{count} samples")).note(note).print();
}

/// The samples in a file. A sample that was cut off in the middle does not count, and its line is
/// ended.
fn done(path: &Path) -> Outcome<BTreeSet<u64>> {
    let Ok(file) = File::open(path) else { return Ok(BTreeSet::new()) };
    let mut is_whole = true;
    let mut done = BTreeSet::new();
    let mut lines = BufReader::new(file);
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 {
        is_whole = line.ends_with('\n');
        let sample = serde_json::from_str::<Done>(&line).ok().filter(|sample| sample.seed == SEED && is_whole);
        done.extend(sample.map(|sample| sample.sample));
        line.clear();
    }
    if !is_whole {
        OpenOptions::new().append(true).open(path)?.write_all(b"\n")?;
    }
    Ok(done)
}

/// Runs a sample and writes it. Returns the time side by side, as a fraction of the two times
/// alone.
fn sample(index: u64, sides: &mut [Side<'_>], batches: &[usize], file: &mut File) -> Outcome<f64> {
    let group = Group::of(index, sides, batches)?;
    let [a, b] = sides.get_disjoint_mut(group.sides)?;
    a.warm(group.batches[0])?;
    b.warm(group.batches[1])?;
    let mut times = Sample {
        sample: index,
        seed: SEED,
        models: [a.name, b.name],
        segments: [a.subject.model.segments(), b.subject.model.segments()],
        ranges: group.ranges.each_ref().map(|range| [range.start, range.end]),
        batches: group.batches,
        length: LENGTH,
        solo_ms: Default::default(),
        beside_ms: Default::default(),
        together_ms: Vec::new(),
    };
    for run in 0..RUNS {
        let [of_a, of_b] = &group.ranges;
        let begin = [a.before(group.batches[0], of_a)?, b.before(group.batches[1], of_b)?];
        let [state_a, state_b] = begin;
        let alone = [took(&a.run(state_a, of_a)?)?, took(&b.run(state_b, of_b)?)?];
        let (state_a, state_b) = (a.before(group.batches[0], of_a)?, b.before(group.batches[1], of_b)?);
        let start = Barrier::new(2);
        let (one, other) = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                start.wait();
                b.run(state_b, of_b)
            });
            start.wait();
            let one = a.run(state_a, of_a);
            (one, other.join().unwrap_or_else(|_| Err("a lane's thread panicked".into())))
        });
        let (one, other) = (one?, other?);
        let (begin, end) = other.from_begin_of(&one).ok_or("the device is lost")?;
        if run >= WARM_UP {
            times.solo_ms.iter_mut().zip(alone).for_each(|(times, ms)| times.push(ms));
            times.beside_ms[0].push(took(&one)?);
            times.beside_ms[1].push(took(&other)?);
            times.together_ms.push((end as f64 / 1e6).max(took(&one)?) - begin.min(0) as f64 / 1e6);
        }
    }
    let mut line = serde_json::to_vec(&times)?;
    line.push(b'\n');
    file.write_all(&line)?;
    let median = |times: &[f64]| quantile(&mut times.to_vec(), 0.5).unwrap_or(f64::NAN);
    Ok(median(&times.together_ms) / (median(&times.solo_ms[0]) + median(&times.solo_ms[1])))
}

/// Milliseconds from the span's begin to its end.
fn took(span: &Span) -> Outcome<f64> {
    Ok(span.took().ok_or("the device is lost")?.as_nanos() as f64 / 1e6)
}
