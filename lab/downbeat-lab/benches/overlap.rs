//! The cost of Abacus' predictor and controller on one core:
//! `cargo bench -p downbeat-lab --bench overlap`.
//!
//! The predictor is a perceptron of three layers of 32 for up to four of Abacus' models (ResNet101,
//! ResNet152, VGG19, BERT). The first part times a pass for one group, four and eight (goal: 60 us,
//! four at once in one pass). The second part times the controller's decisions while a group runs,
//! with four waiting requests of each model (goal: 260 us a decision). All times are microseconds.
//! A pass has the least of many rounds, because other load on the machine can only lengthen it.
//! Decisions have the median and the 99th percentile.

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::{Duration as Elapsed, Instant};

use downbeat_core::device::overlap::{
    GroupPart, LearnedPredictor, OperatorGroup, Overlap, OverlapModel, OverlapOptions, OverlapOutput, Predictor,
};
use downbeat_core::device::{DeviceRequest, SegmentRange, Span};
use downbeat_core::{Duration, ModelId, RequestId, Time, quantiles};
use downbeat_lab::device::{Architecture, EmulatedModel, Platform, TrainedPredictor};

const MODELS: [Architecture; 4] =
    [Architecture::ResNet101, Architecture::ResNet152, Architecture::Vgg19, Architecture::BertBase];
/// The numbers of the models among Abacus' models.
const NUMBERS: [usize; 4] = [1, 2, 5, 6];
const ROUNDS: usize = 200;
/// The passes of a round.
const PASSES: u32 = 500;
const DECISIONS: u32 = 20_000;
const SIZES: [u32; 4] = [4, 8, 16, 32];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let platform = Platform::A100_CUDNN;
    let trained = TrainedPredictor::train(platform, (&NUMBERS, 4), 300, (1, 1))?;
    let predictor = trained.of(&MODELS)?;
    let operators = MODELS
        .iter()
        .map(|model| Ok(EmulatedModel::abacus(*model, platform)?.segment_count()))
        .collect::<Result<Vec<u16>, Box<dyn std::error::Error>>>()?;
    println!("a pass of the predictor, us");
    for groups in [1, 4, 8] {
        println!("{groups:8} groups {:8.2}", pass(&predictor, &operators, groups));
    }
    println!("a decision, us {:>12}{:>8}{:>8}", "passes", "half", "99%");
    for ways in [1, 2, 4, 8] {
        decisions(&predictor, &operators, ways);
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
fn now() -> Instant {
    Instant::now()
}

/// Returns the least microseconds of a pass for this many groups of all models.
fn pass(predictor: &LearnedPredictor, operators: &[u16], groups: usize) -> f64 {
    let group = |index: usize| -> Vec<GroupPart> {
        let part = |(model, end): (u32, &u16)| GroupPart {
            request: RequestId(u64::from(model)),
            model: ModelId(model),
            operators: SegmentRange::new((index as u16).min(end - 1), *end),
            rows: SIZES[index % 4],
            length: if model == 3 { 64 } else { 0 },
        };
        (0..).zip(operators).map(part).collect()
    };
    let groups: Vec<Vec<GroupPart>> = (0..groups).map(group).collect();
    let groups: Vec<&[GroupPart]> = groups.iter().map(Vec::as_slice).collect();
    let round = |_| {
        let begin = now();
        (0..PASSES).for_each(|_| drop(black_box(predictor.predict(black_box(&groups)))));
        begin.elapsed()
    };
    (0..ROUNDS).map(round).min().unwrap_or(Elapsed::ZERO).as_secs_f64() * 1e6 / f64::from(PASSES)
}

/// The controller with waiting requests and the running group.
struct Loop {
    overlap: Overlap<LearnedPredictor>,
    now: Time,
    next: u64,
    running: Option<OperatorGroup>,
    answered: VecDeque<ModelId>,
}

impl Loop {
    /// Adds a request with a deadline that most requests meet, unless they run beside all others.
    fn request(&mut self, model: ModelId) {
        let id = self.next;
        self.next += 1;
        let deadline = self.now + Duration::from_millis(60 + id * 37 % 120);
        let (size, length) = (SIZES[(id * 7 % 11 % 4) as usize], if model.0 == 3 { 64 } else { 0 });
        let request = DeviceRequest { id: RequestId(id * 4 + u64::from(model.0)), model, deadline, size, length };
        let _ = black_box(self.overlap.handle_request(self.now, &request));
    }

    fn poll(&mut self) {
        while let Some(output) = self.overlap.poll_output() {
            match output {
                OverlapOutput::Run(group) => self.running = Some(group),
                OverlapOutput::Reply { request } | OverlapOutput::Drop { request, .. } => {
                    self.answered.push_back(ModelId((request.0 % 4) as u32));
                }
            }
        }
    }
}

/// Ends a group, begins the one that was decided beside it, and decides the next one.
fn decisions(predictor: &LearnedPredictor, operators: &[u16], ways: usize) {
    let options = OverlapOptions { ways, worth: 0.0, ..OverlapOptions::default() };
    let overlap = Overlap::new(options, predictor.clone());
    let mut run = Loop { overlap, now: Time::ZERO, next: 0, running: None, answered: VecDeque::new() };
    for (model, count) in (0..).zip(operators) {
        run.overlap.handle_model(run.now, ModelId(model), Some(OverlapModel { operators: *count, drop: true }));
    }
    run.answered.extend((0..16).map(|index| ModelId(index % 4)));
    let (mut took, mut passes) = (Vec::with_capacity(DECISIONS as usize), 0);
    while took.len() < DECISIONS as usize {
        while let Some(model) = run.answered.pop_front() {
            run.request(model);
            run.poll();
        }
        let Some(group) = run.running.take() else { continue };
        let start = run.now;
        run.now += group.expected.unwrap_or(Duration::from_millis(10));
        let (before, begin) = (run.overlap.stats().passes, now());
        run.overlap.handle_completion(run.now, group.id, Span { start, end: run.now });
        run.overlap.handle_timeout(run.now);
        took.push(begin.elapsed().as_secs_f64() * 1e6);
        passes += run.overlap.stats().passes - before;
        run.poll();
    }
    let [half, most] = quantiles(took.iter().copied(), [0.5, 0.99]).unwrap_or([f64::NAN; 2]);
    let passes = passes as f64 / took.len() as f64;
    println!("{ways:9} ways {passes:12.2}{half:8.1}{most:8.1}");
}
