//! A decision log with requests of a pipeline, made by the production scheduler under virtual time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, Output, Request, Scheduler};
use downbeat_core::journal::Journal;
use downbeat_core::journal::cluster::Input;
use downbeat_core::journal::pipelines::{End, PipelineBook, PipelineInput, PipelineSpec, StepSpec};
use downbeat_core::{
    BatchId, DeviceId, DeviceKind, DeviceProfiles, Duration, LatencyProfile, ModelId, RequestId, Time,
};

/// The whole has this long.
const SLO: Duration = Duration::from_millis(40);

/// Requests of `photos`: step 0 `decode` takes 1.5 ms alone, step 1 `detect` 9 ms.
pub struct Run {
    scheduler: Journal<Scheduler>,
    book: Journal<PipelineBook>,
    batches: BinaryHeap<Reverse<(Time, u64, DeviceId, BatchId)>>,
    members: HashMap<(DeviceId, BatchId), (Time, Vec<RequestId>)>,
    /// By request to a model: the pipeline's request and its step. Plain requests are missing.
    steps: HashMap<RequestId, (u64, u32)>,
    deadlines: HashMap<u64, Time>,
    next: u64,
}

/// The content of the files of a log: `shard-0.log` and `pipelines.log`. A request of `photos` comes
/// every `gap`, and each `plain_every` of them with a request that clients send to `detect` itself.
/// Each model has one device of its own.
pub fn logs(requests: u64, gap: Duration, plain_every: u64) -> [(&'static str, Vec<u8>); 2] {
    let mut run = Run::new();
    let (mut arrived, mut arrival) = (0, Time::ZERO + Duration::from_millis(1_000));
    loop {
        let comes = if arrived < requests { arrival } else { Time::MAX };
        let ends = run.batches.peek().map_or(Time::MAX, |Reverse((at, ..))| *at);
        let timeout = run.scheduler.machine().poll_timeout().map_or(Time::MAX, |(at, _)| at);
        let now = comes.min(ends).min(timeout);
        if now == Time::MAX {
            break;
        }
        if ends == now {
            run.complete(now);
        } else if comes == now {
            run.arrive(now, arrived);
            if plain_every > 0 && arrived % plain_every == 0 {
                run.ask(now, ModelId(1), now + SLO, None);
            }
            (arrived, arrival) = (arrived + 1, arrival + gap);
        } else {
            run.scheduler.handle_timeout(now);
        }
        run.settle(now);
    }
    let (mut scheduler, mut book) = (Vec::new(), Vec::new());
    run.scheduler.take_log(&mut scheduler);
    run.book.take_log(&mut book);
    [("shard-0.log", scheduler), ("pipelines.log", book)]
}

impl Run {
    fn new() -> Run {
        let (mut scheduler, mut book) = (Journal::on(Scheduler::new()), Journal::on(PipelineBook::new()));
        for kind in [0, 1] {
            scheduler.apply(Time::ZERO, Input::AddDevice(DeviceKind(kind)));
        }
        for (kind, alpha, beta) in [(0, 0.5, 1.0), (1, 3.0, 6.0)] {
            let profile = LatencyProfile::linear_ms(alpha, beta, 8).unwrap();
            let profiles = DeviceProfiles::by_kind([(DeviceKind(kind), profile.clone())]).unwrap();
            let options = ModelOptions::new(profile, DispatchPolicy::Eager, DropPolicy::HeadDrop);
            let options = Box::new(ModelOptions { profiles, ..options });
            scheduler.apply(Time::ZERO, Input::AddModel(ModelId(kind), options));
        }
        let step = |model: &str, after: &[u32]| StepSpec { model: model.to_owned(), after: after.to_vec() };
        let steps = vec![step("decode", &[]), step("detect", &[0])];
        let (name, version) = ("photos".to_owned(), "1".to_owned());
        let spec = PipelineSpec { name, version, is_code: false, steps };
        book.apply(Time::ZERO, PipelineInput::Pipeline(0, Box::new(spec))).unwrap();
        let (batches, members, steps, deadlines) = Default::default();
        Run { scheduler, book, batches, members, steps, deadlines, next: 0 }
    }

    fn tell(&mut self, now: Time, input: PipelineInput) {
        self.book.apply(now, input).unwrap();
    }

    fn arrive(&mut self, now: Time, request: u64) {
        let deadline = now + SLO;
        self.deadlines.insert(request, deadline);
        self.tell(now, PipelineInput::Request { request, pipeline: 0, deadline, size: 1, within: None });
        self.reach(now, request, 0);
    }

    fn reach(&mut self, now: Time, request: u64, step: u32) {
        let whole = self.deadlines[&request];
        let deadline = if step == 0 { now + Duration::from_nanos(whole.since(now).as_nanos() / 4) } else { whole };
        self.tell(now, PipelineInput::Reached { request, step, deadline });
        self.ask(now, ModelId(step), deadline, Some((request, step)));
    }

    fn ask(&mut self, now: Time, model: ModelId, deadline: Time, step: Option<(u64, u32)>) {
        let id = RequestId(self.next);
        self.next += 1;
        self.steps.extend(step.map(|step| (id, step)));
        let request = Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
        if self.scheduler.handle_request(now, request).is_err() {
            self.lose(now, id);
        }
    }

    fn lose(&mut self, now: Time, asked: RequestId) {
        if let Some((request, step)) = self.steps.remove(&asked) {
            let (asked, end) = (Some(asked), End::Dropped);
            self.tell(now, PipelineInput::Done { request, step, asked, began: None, end });
            self.tell(now, PipelineInput::End { request, end, step: Some(step) });
        }
    }

    fn settle(&mut self, now: Time) {
        while let Some(output) = self.scheduler.poll_output() {
            match output {
                Output::Drop { request, .. } => self.lose(now, request),
                Output::Dispatch { batch, device, members, expected, .. } => {
                    self.members.insert((device, batch), (now, members));
                    self.batches.push(Reverse((now + expected, batch.0, device, batch)));
                }
            }
        }
    }

    fn complete(&mut self, now: Time) {
        let Some(Reverse((_, _, device, batch))) = self.batches.pop() else { return };
        self.scheduler.handle_completion(now, device, batch);
        let (began, members) = self.members.remove(&(device, batch)).unwrap();
        for asked in members {
            let Some((request, step)) = self.steps.remove(&asked) else { continue };
            let (asked, began) = (Some(asked), Some(began));
            self.tell(now, PipelineInput::Done { request, step, asked, began, end: End::Answered });
            if step == 0 {
                self.reach(now, request, 1);
            } else {
                let end = if now > self.deadlines[&request] { End::Late } else { End::Answered };
                self.tell(now, PipelineInput::End { request, end, step: None });
            }
        }
    }
}
