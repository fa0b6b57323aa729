//! Random events against a checker that knows only what went in and what came out.

use std::collections::BTreeMap;

use downbeat_core::cluster::*;
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;

/// An event; the numbers choose among what is there.
#[derive(Clone, Debug)]
enum Event {
    Wait { us: u64, punctual: bool },
    Request { model: usize, level: u32, size: u32, slo_us: Option<u64>, expiry_us: Option<u64> },
    Cancel(usize),
    Complete(usize),
    StrayCompletion(u32, u64),
    AddDevice,
    RemoveDevice(u32),
    AddModel(Box<ModelOptions>),
    RemoveModel(u32),
    SetProfile(u32, LatencyProfile),
    SetDispatch(u32, DispatchPolicy),
    SetWakeMargin(u64),
    GoBack,
}

fn profiles() -> impl Strategy<Value = LatencyProfile> {
    // Not a line: plateaus and steps, so that l(b+1) may equal l(b).
    (1..400u64, prop::collection::vec(0..300u64, 0..8)).prop_map(|(first, steps)| {
        let mut at = first;
        let mut table = vec![Duration::from_micros(first)];
        for step in steps {
            at += step;
            table.push(Duration::from_micros(at));
        }
        LatencyProfile::from_table(table).unwrap()
    })
}

fn dispatches() -> impl Strategy<Value = DispatchPolicy> {
    prop_oneof![
        3 => Just(DispatchPolicy::Deferred),
        1 => Just(DispatchPolicy::Latest),
        2 => Just(DispatchPolicy::Eager),
        2 => (0..800u64, prop::collection::vec(0..9u32, 0..3))
            .prop_map(|(us, preferred)| DispatchPolicy::Timeout { delay: Duration::from_micros(us), preferred }),
    ]
}

fn models() -> impl Strategy<Value = ModelOptions> {
    let drop = prop_oneof![Just(DropPolicy::HeadDrop), Just(DropPolicy::WindowDrop), Just(DropPolicy::None)];
    let bound = prop_oneof![Just(u32::MAX), 0..12u32];
    let action = prop_oneof![Just(TimeoutAction::Reject), Just(TimeoutAction::Delay)];
    let level = (bound, action).prop_map(|(max_queue, timeout_action)| PriorityLevel { max_queue, timeout_action });
    let limit = prop_oneof![Just(u32::MAX), 1..3u32];
    (profiles(), 1..9u32, drop, dispatches(), limit, prop::collection::vec(level, 1..4)).prop_map(
        |(profile, max_batch, drop, dispatch, max_in_flight, levels)| ModelOptions {
            profiles: profile.into(),
            max_batch,
            drop,
            dispatch,
            max_in_flight,
            levels,
        },
    )
}

fn events() -> impl Strategy<Value = Event> {
    let slo = prop_oneof![1 => Just(None), 6 => (0..4000u64).prop_map(Some)];
    let expiry = prop_oneof![4 => Just(None), 1 => (0..2000u64).prop_map(Some)];
    let size = prop_oneof![4 => Just(1u32), 1 => 0..10u32];
    prop_oneof![
        8 => (0..400u64, any::<bool>()).prop_map(|(us, punctual)| Event::Wait { us, punctual }),
        16 => (0..4usize, 0..4u32, size, slo, expiry)
            .prop_map(|(model, level, size, slo_us, expiry_us)| Event::Request { model, level, size, slo_us, expiry_us }),
        2 => any::<usize>().prop_map(Event::Cancel),
        5 => any::<usize>().prop_map(Event::Complete),
        1 => (0..4u32, 0..20u64).prop_map(|(d, b)| Event::StrayCompletion(d, b)),
        1 => Just(Event::AddDevice),
        1 => (0..6u32).prop_map(Event::RemoveDevice),
        1 => models().prop_map(|m| Event::AddModel(Box::new(m))),
        1 => (0..6u32).prop_map(Event::RemoveModel),
        1 => (0..6u32, profiles()).prop_map(|(m, p)| Event::SetProfile(m, p)),
        1 => (0..6u32, dispatches()).prop_map(|(m, d)| Event::SetDispatch(m, d)),
        1 => (0..900u64).prop_map(Event::SetWakeMargin),
        1 => Just(Event::GoBack),
    ]
}

fn profile_of(options: &ModelOptions) -> &LatencyProfile {
    options.profiles.get(DeviceKind(0)).unwrap()
}

struct Queued {
    request: Request,
    delayed: bool,
}

#[derive(Default)]
struct Outside {
    scheduler: Scheduler,
    now: Time,
    models: Vec<(ModelOptions, bool)>,
    /// Present devices, with what runs there.
    devices: BTreeMap<DeviceId, Option<(BatchId, ModelId)>>,
    queued: BTreeMap<RequestId, Queued>,
    /// Of every request that was ever accepted, with its model.
    tickets: Vec<(RequestId, ModelId, Ticket)>,
    next_request: u64,
    accepted: u64,
    answered: u64,
    outputs: Vec<Output>,
}

impl Outside {
    fn weight(&self, model: ModelId, level: u32) -> u64 {
        let of = |q: &&Queued| q.request.model == model && q.request.level == level;
        self.queued.values().filter(of).map(|q| u64::from(q.request.size)).sum()
    }

    fn hopeless(&self, request: &Request) -> bool {
        let options = &self.models[request.model.0 as usize].0;
        options.drop != DropPolicy::None
            && request.deadline != Time::MAX
            && self.now + profile_of(options).latency(request.size) > request.deadline
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Wait { us, punctual } => {
                let until = self.now + Duration::from_micros(*us);
                // A punctual driver wakes up for every timer, another one is late for all.
                while *punctual
                    && let Some((at, _)) = self.scheduler.poll_timeout()
                    && at <= until
                {
                    assert!(at > self.now, "{at:?} is not later than {:?}: time would stand still", self.now);
                    self.now = at;
                    self.scheduler.handle_timeout(at);
                    self.collect();
                }
                self.now = until;
                self.scheduler.handle_timeout(until);
            }
            Event::Request { model, level, size, slo_us, expiry_us } => {
                let after = |us: &Option<u64>| us.map_or(Time::MAX, |us| self.now + Duration::from_micros(us));
                let id = RequestId(self.next_request);
                self.next_request += 1;
                let request = Request {
                    id,
                    model: ModelId(*model as u32),
                    deadline: after(slo_us),
                    queue_expiry: after(expiry_us),
                    level: *level,
                    size: *size,
                };
                let result = self.scheduler.handle_request(self.now, request);
                // What was due before the request comes first; it may have made room.
                let before = self.collect_until(id);
                assert_eq!(result.map(|_| ()), self.expected_answer(&request), "{request:?}");
                if let Ok(ticket) = result {
                    self.tickets.push((id, request.model, ticket));
                    self.accepted += 1;
                    self.queued.insert(id, Queued { request, delayed: false });
                }
                for output in before {
                    self.judge(output);
                }
            }
            Event::Cancel(n) => {
                if self.tickets.is_empty() {
                    return;
                }
                // Mostly of the last ones, which may still wait; those that do not must be told from their slots' next holders.
                let back = if n % 4 == 0 { n / 4 } else { n / 4 % 8 };
                let (id, model, ticket) = self.tickets[self.tickets.len() - 1 - back % self.tickets.len()];
                let left = self.scheduler.handle_cancel(self.now, model, ticket);
                if left {
                    assert!(self.queued.remove(&id).is_some(), "{id} was not there to be cancelled");
                    self.answered += 1;
                }
                self.collect();
                assert!(!self.queued.contains_key(&id), "{id} was cancelled and is still queued");
            }
            Event::Complete(n) => {
                let running: Vec<(DeviceId, BatchId)> =
                    self.devices.iter().filter_map(|(d, r)| r.map(|(batch, _)| (*d, batch))).collect();
                if !running.is_empty() {
                    let (device, batch) = running[n % running.len()];
                    // Timers of this instant are the scheduler's to do first; the device is free from then on.
                    self.scheduler.handle_timeout(self.now);
                    self.collect();
                    self.devices.insert(device, None);
                    self.scheduler.handle_completion(self.now, device, batch);
                }
            }
            Event::StrayCompletion(device, batch) => {
                let (device, batch) = (DeviceId(*device), BatchId(*batch));
                if self.devices.get(&device).is_none_or(|r| r.is_none_or(|(b, _)| b != batch)) {
                    self.scheduler.handle_completion(self.now, device, batch);
                }
            }
            Event::AddDevice => {
                self.scheduler.handle_timeout(self.now);
                self.collect();
                let device = self.scheduler.add_device(self.now, DeviceKind(0));
                assert!(self.devices.insert(device, None).is_none(), "{device} was there");
            }
            Event::RemoveDevice(device) => {
                self.scheduler.handle_timeout(self.now);
                self.collect();
                self.devices.remove(&DeviceId(*device));
                self.scheduler.remove_device(self.now, DeviceId(*device));
            }
            Event::AddModel(options) => {
                let id = self.scheduler.add_model(self.now, (**options).clone());
                assert_eq!(id, ModelId(self.models.len() as u32));
                self.models.push(((**options).clone(), true));
            }
            Event::RemoveModel(model) => {
                self.scheduler.handle_timeout(self.now);
                self.collect();
                if let Some((_, present)) = self.models.get_mut(*model as usize) {
                    *present = false;
                }
                self.scheduler.remove_model(self.now, ModelId(*model));
            }
            Event::SetProfile(model, profile) => {
                self.scheduler.handle_timeout(self.now);
                self.collect();
                if let Some((options, _)) = self.models.get_mut(*model as usize) {
                    options.profiles = profile.clone().into();
                }
                self.scheduler.set_profile(self.now, ModelId(*model), profile.clone());
            }
            Event::SetDispatch(model, dispatch) => {
                self.scheduler.handle_timeout(self.now);
                self.collect();
                if let Some((options, _)) = self.models.get_mut(*model as usize) {
                    options.dispatch = dispatch.clone();
                }
                self.scheduler.set_dispatch(self.now, ModelId(*model), dispatch.clone());
            }
            Event::SetWakeMargin(us) => self.scheduler.set_wake_margin(self.now, Duration::from_micros(*us)),
            Event::GoBack => self.scheduler.handle_timeout(Time::ZERO),
        }
        self.collect();
        self.judge_state();
    }

    /// What `handle_request` should say, from what is queued now.
    fn expected_answer(&self, request: &Request) -> Result<(), Reject> {
        let Some((options, true)) = self.models.get(request.model.0 as usize) else { return Err(Reject::UnknownModel) };
        let Some(level) = options.levels.get(request.level as usize) else { return Err(Reject::UnknownLevel) };
        if request.size == 0 {
            return Err(Reject::ZeroSize);
        }
        if request.size > options.max_batch {
            return Err(Reject::TooLarge { max_batch: options.max_batch });
        }
        if self.hopeless(request) {
            let needed = profile_of(options).latency(request.size);
            return Err(Reject::DeadlineImpossible { needed, allowed: request.deadline.since(self.now) });
        }
        let bound = level.max_queue;
        let waiting = self.weight(request.model, request.level) + u64::from(request.size);
        if bound != u32::MAX && waiting > u64::from(bound) { Err(Reject::QueueFull { bound }) } else { Ok(()) }
    }

    /// Takes the outputs; those about `id`, and all that come after the first of them, are returned unjudged.
    fn collect_until(&mut self, id: RequestId) -> Vec<Output> {
        let mut rest = Vec::new();
        while let Some(output) = self.scheduler.poll_output() {
            let about = match &output {
                Output::Drop { request, .. } => *request == id,
                Output::Dispatch { members, .. } => members.contains(&id),
            };
            if about || !rest.is_empty() { rest.push(output) } else { self.judge(output) }
        }
        rest
    }

    fn collect(&mut self) {
        while let Some(output) = self.scheduler.poll_output() {
            self.judge(output);
        }
    }

    fn judge(&mut self, output: Output) {
        let now = self.now;
        match &output {
            Output::Drop { request, model, reason, .. } => {
                let queued = self.queued.remove(request).unwrap_or_else(|| panic!("{request} dropped, but not queued"));
                self.answered += 1;
                assert_eq!(queued.request.model, *model);
                let (options, present) = &self.models[model.0 as usize];
                match reason {
                    DropReason::Hopeless => assert!(self.hopeless(&queued.request), "{request} had hope"),
                    DropReason::Sacrificed => assert_eq!(options.drop, DropPolicy::WindowDrop),
                    DropReason::QueueTimeout => {
                        assert!(queued.request.queue_expiry <= now, "{request} had time");
                        let level = options.levels[queued.request.level as usize];
                        assert_eq!(level.timeout_action, TimeoutAction::Reject);
                    }
                    DropReason::ModelRemoved => assert!(!present, "{model} is there"),
                }
            }
            Output::Dispatch { batch, device, model, members, size, start, expected, .. } => {
                let first_free = self.devices.iter().find(|(_, r)| r.is_none()).map(|(d, _)| *d);
                assert_eq!(first_free, Some(*device), "§3.2: the smallest free device id");
                assert_eq!(*start, now, "without a network a batch starts when it is sent");
                self.devices.insert(*device, Some((*batch, *model)));
                let (options, present) = &self.models[model.0 as usize];
                assert!(present, "{model} was removed");
                let in_flight = self.devices.values().flatten().filter(|(_, m)| m == model).count();
                assert!(in_flight <= options.max_in_flight as usize, "{in_flight} batches of {model} in flight");
                assert!(*size >= 1 && *size <= options.max_batch, "a batch of {size}");
                assert_eq!(*expected, profile_of(options).latency(*size));
                let drop = options.drop;
                let (mut items, mut lowest) = (0, 0);
                for member in members {
                    let queued = self.queued.remove(member).unwrap_or_else(|| panic!("{member} was not queued"));
                    self.answered += 1;
                    assert_eq!(queued.request.model, *model);
                    items += queued.request.size;
                    lowest = lowest.max(queued.request.level);
                    let late = queued.request.deadline != Time::MAX && now + *expected > queued.request.deadline;
                    assert!(drop == DropPolicy::None || !late, "{member} is sent to be late");
                }
                assert_eq!(items, *size);
                let passed_over = self.queued.values().any(|q| q.request.model == *model && q.request.level < lowest);
                assert!(!passed_over, "a higher level was passed over by {members:?}");
            }
        }
        self.outputs.push(output);
    }

    /// What must hold after every event.
    fn judge_state(&mut self) {
        // Everything due at this instant has been done by now.
        self.scheduler.handle_timeout(self.now);
        self.collect();
        let now = self.now;
        for queued in self.queued.values_mut() {
            queued.delayed |= queued.request.queue_expiry <= now;
        }
        for (id, queued) in &self.queued {
            assert!(!self.hopeless(&queued.request), "{id} is hopeless and still queued");
            let options = &self.models[queued.request.model.0 as usize].0;
            let level = options.levels[queued.request.level as usize];
            assert!(!queued.delayed || level.timeout_action == TimeoutAction::Delay, "{id} overstays");
        }
        let idle = self.devices.values().any(Option::is_none);
        for (index, (options, present)) in self.models.iter().enumerate() {
            let model = ModelId(index as u32);
            let weight: u64 = (0..options.levels.len()).map(|level| self.weight(model, level as u32)).sum();
            assert_eq!(u64::from(self.scheduler.queued(model)), weight);
            assert!(*present || weight == 0, "{model} is gone and has a queue");
            let in_flight = self.devices.values().flatten().filter(|(_, m)| *m == model).count();
            if options.dispatch == DispatchPolicy::Eager && idle && in_flight < options.max_in_flight as usize {
                assert_eq!(weight, 0, "eager {model} waits though a device is free");
            }
        }
        assert!(self.scheduler.poll_timeout().is_none_or(|(at, _)| at > now), "something due was left undone");
        assert_eq!(self.accepted, self.answered + self.queued.len() as u64, "nothing is lost, nothing answered twice");
    }

    /// Runs until everything is answered.
    fn finish(&mut self) {
        self.apply(&Event::AddDevice);
        for _ in 0..10_000 {
            if self.queued.is_empty() {
                return;
            }
            if let Some((at, _)) = self.scheduler.poll_timeout() {
                self.now = at;
            }
            self.apply(&Event::Complete(0));
            self.apply(&Event::Wait { us: 1, punctual: true });
        }
        panic!("{} requests are never answered", self.queued.len());
    }
}

fn run(models: &[ModelOptions], devices: usize, events: &[Event]) -> Vec<Output> {
    let mut outside = Outside::default();
    for model in models {
        outside.apply(&Event::AddModel(Box::new(model.clone())));
    }
    for _ in 0..devices {
        outside.apply(&Event::AddDevice);
    }
    for event in events {
        outside.apply(event);
    }
    outside.finish();
    outside.outputs
}

/// Who is sent where and who is dropped, without the reasons.
fn decisions(outputs: &[Output]) -> Vec<(Option<DeviceId>, Vec<RequestId>)> {
    let decision = |output: &Output| match output {
        Output::Dispatch { device, members, .. } => (Some(*device), members.clone()),
        Output::Drop { request, .. } => (None, vec![*request]),
    };
    outputs.iter().map(decision).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every rule of the checker holds for any events, and the same events make the same decisions.
    #[test]
    fn any_events_are_answered_by_the_rules_and_always_alike(
        models in prop::collection::vec(models(), 1..4),
        devices in 0..4usize,
        events in prop::collection::vec(events(), 0..120),
    ) {
        let first = run(&models, devices, &events);
        prop_assert_eq!(first, run(&models, devices, &events));
    }

    /// Symphony §3.4: a timeout of 0 is eager scheduling.
    #[test]
    fn section_3_4_a_timeout_of_zero_is_eager(
        model in models(),
        devices in 1..4usize,
        events in prop::collection::vec(events(), 0..80),
    ) {
        let events: Vec<Event> = events.into_iter().filter(|e| !matches!(e, Event::SetDispatch(..) | Event::AddModel(_))).collect();
        let with = |dispatch| ModelOptions { dispatch, ..model.clone() };
        let zero = DispatchPolicy::Timeout { delay: Duration::ZERO, preferred: Vec::new() };
        let timeout = run(&[with(zero)], devices, &events);
        let eager = run(&[with(DispatchPolicy::Eager)], devices, &events);
        prop_assert_eq!(decisions(&timeout), decisions(&eager));
    }
}
