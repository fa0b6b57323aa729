//! Measures the cost of a device policy: CPU time a launch and a request, with all calls of a
//! driver (issue: under 20 us a launch).
//!
//! ```text
//! cargo run --release -p downbeat-lab --example device_speed
//! ```
//!
//! Requests arrive evenly, launches take exactly their profile. The CPU time is that of the whole
//! loop, its heap of events included. Each row is measured three times and the fastest printed: a
//! busy neighbour can only make it slower.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use downbeat_core::device::{
    DeviceModel, DeviceOutput, DeviceRequest, DeviceScheduler, ElasticOptions, Joining, LaneMix, LaunchId, MixTable,
    PolicyOptions, SegmentProfile, Span, StagedOptions, WindowedOptions,
};
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};
use rustix::time::{ClockId, clock_gettime};

const REQUESTS: u64 = 400_000;
const MODEL: ModelId = ModelId(0);
const QUEUE_BOUND: u32 = 4096;

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Completed(LaunchId, Time),
    Input(RequestId),
}

/// Sends [`REQUESTS`] requests, one each `gap`, of lengths that repeat. Returns the numbers of
/// launches and answers.
fn run(model: DeviceModel, profile: &SegmentProfile, gap: Duration) -> (u64, u64) {
    let mut policy = DeviceScheduler::new();
    if policy.handle_model(Time::ZERO, MODEL, Some(model)).is_err() {
        return (0, 0);
    }
    let mut events: BinaryHeap<Reverse<(Time, Event)>> = BinaryHeap::new();
    let (mut launches, mut answered, mut sent, mut now) = (0, 0, 0, Time::ZERO);
    loop {
        let arrival = (sent < REQUESTS).then(|| Time::ZERO + gap.saturating_mul(sent));
        let event = events.peek().map(|Reverse((at, _))| *at);
        let timer = policy.poll_timeout().map(|(at, _)| at);
        let Some(next) = [arrival, event, timer].into_iter().flatten().min() else { break };
        now = next.max(now);
        if arrival == Some(next) {
            let length = 16 + (sent * 37 % 180) as u32;
            let id = RequestId(sent);
            // A full queue refuses the request; then there are fewer answers than requests.
            let _ =
                policy.handle_request(now, &DeviceRequest { id, model: MODEL, deadline: Time::MAX, size: 1, length });
            sent += 1;
        } else if event == Some(next) {
            match events.pop() {
                Some(Reverse((_, Event::Completed(launch, start)))) => {
                    policy.handle_completion(now, launch, Span { start, end: now }, &[]);
                }
                Some(Reverse((_, Event::Input(request)))) => policy.handle_input(now, MODEL, request),
                None => {}
            }
        } else {
            policy.handle_timeout(now);
        }
        while let Some(output) = policy.poll_output() {
            match output {
                DeviceOutput::Launch(launch) => {
                    launches += 1;
                    let took = (launch.segments.first..launch.segments.end)
                        .map(|segment| profile.time(segment, launch.computed_rows, launch.length))
                        .fold(Duration::ZERO, |sum, time| sum + time);
                    events.push(Reverse((now + took, Event::Completed(launch.id, now))));
                }
                DeviceOutput::Admit { request, .. } => events.push(Reverse((now, Event::Input(request)))),
                DeviceOutput::Reply { .. } => answered += 1,
                _ => {}
            }
        }
    }
    (launches, answered)
}

fn cpu_nanos() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Four segments, whose times grow with items and length.
fn stages() -> Result<SegmentProfile, Box<dyn std::error::Error>> {
    let lengths = [16, 64, 256];
    let of = |length: u32| LatencyProfile::linear_ms(f64::from(length) * 0.0005, 0.2, 64);
    let segment = lengths.iter().map(|length| of(*length)).collect::<Result<Vec<_>, _>>()?;
    Ok(SegmentProfile::new(lengths.to_vec(), &vec![segment; 4])?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let whole = SegmentProfile::whole(&LatencyProfile::linear_ms(0.05, 0.2, 64)?);
    let staged = stages()?;
    let mixes: Vec<(u32, LaneMix)> = [(4, "4"), (8, "8"), (16, "4,4,8"), (32, "8,8,16")]
        .map(|(load, mix)| (load, mix.parse().unwrap_or_default()))
        .into();
    let elastic = |mixes| ElasticOptions {
        profile: whole.clone(),
        mixes,
        max_running: 32,
        ring_slots: 128,
        drop: true,
        queue_bound: QUEUE_BOUND,
        cores: None,
    };
    let options = |by_length, by_operator, by_load| StagedOptions {
        profile: staged.clone(),
        pairs: 2,
        max_batch: 64,
        by_length,
        by_operator,
        by_load,
        window: None,
        comp_wait: None,
        joining: Joining::default(),
        ring_slots: 0,
        drop: true,
        queue_bound: QUEUE_BOUND,
    };
    type Make<'a> = Box<dyn Fn() -> DeviceModel + 'a>;
    let enhanced = MixTable::enhanced(mixes)?;
    let cases: Vec<(&str, &SegmentProfile, f64, Make<'_>)> = vec![
        ("windowed, batches of up to 64", &whole, 0.06, {
            let whole = whole.clone();
            Box::new(move || {
                WindowedOptions {
                    profile: whole.clone(),
                    max_batch: 64,
                    window: Duration::ZERO,
                    fill: false,
                    drop: true,
                    queue_bound: QUEUE_BOUND,
                    ahead: 0,
                }
                .build()
            })
        }),
        ("elastic, N-Ebird", &whole, 0.04, Box::new(|| elastic(MixTable::naive(32)).build())),
        ("elastic, E-Ebird", &whole, 0.04, Box::new(|| elastic(enhanced.clone()).build())),
        ("staged, 4 stages, by load", &staged, 0.2, Box::new(|| options(false, false, true).build())),
        ("staged, 4 stages, by load and operator", &staged, 0.2, Box::new(|| options(false, true, true).build())),
        ("staged, 4 stages, by length", &staged, 0.2, Box::new(|| options(true, false, false).build())),
    ];
    println!(
        "{:42} {:>9} {:>10} {:>9} {:>12} {:>12}",
        "policy", "launches", "answered", "batch", "us a launch", "us a request"
    );
    for (name, profile, gap_ms, make) in &cases {
        let mut best: Option<(u64, u64, u64)> = None;
        for _ in 0..3 {
            let begin = cpu_nanos();
            let (launches, answered) = run(make(), profile, Duration::from_millis_f64(*gap_ms));
            let took = cpu_nanos() - begin;
            best = Some(best.filter(|(least, ..)| *least < took).unwrap_or((took, launches, answered)));
        }
        let Some((took, launches, answered)) = best else { continue };
        let us = |n: u64| took as f64 / 1e3 / n.max(1) as f64;
        let batch = answered as f64 * f64::from(profile.segments()) / launches.max(1) as f64;
        println!("{name:42} {launches:>9} {answered:>10} {batch:>9.1} {:>12.2} {:>12.2}", us(launches), us(answered));
    }
    Ok(())
}
