//! Simulated frontends and backends around a real `downbeat scheduler`: how many requests does it
//! take in a second, as frames on sockets? `tools/cluster_bench.py feed` runs it: `cargo run
//! --release -p downbeat-server --example feed -- ADDRESS PER_SECOND SECONDS`.
//!
//! The load is that of `downbeat-lab scheduler`: 20 models, `l(b) = 1.053 b + 5.072` ms, an SLO of
//! 100 ms, deferred. It has 64 backends of 64 devices, more than can be busy, and two frontends in
//! turns. Each millisecond a frontend hands in the due requests, and a backend reports its finished
//! batches. Requests have no tensors and backends claim no inputs: a scheduler hears of neither.

#[path = "support/peer.rs"]
#[allow(dead_code, reason = "it looks at all peers each millisecond, and waits for none")]
mod peer;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use anyhow::{Context, Result};
use downbeat_core::cluster::{DispatchPolicy, DropPolicy};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_roles::{BatchKey, HandedIn, Message, Offer, OfferedModel, QueueAlias, QueueKey, Role, Slot};
use downbeat_service::clock::Clock;
use peer::{Peer, hello};
use tokio::net::TcpStream;

const MODELS: u32 = 20;
const FRONTENDS: u64 = 2;
const BACKENDS: u64 = 64;
const DEVICES: u32 = 64;
const MAX_BATCH: u32 = 64;
const SLO: Duration = Duration::from_millis(100);
const TICK: std::time::Duration = std::time::Duration::from_millis(1);
/// Requests in a message at most, as in a frontend's messages.
const A_MESSAGE: usize = 512;
/// Time that is not counted, so that devices and rates settle.
const WARM_UP: Duration = Duration::from_millis(1_000);

fn queue(model: u32) -> QueueKey {
    QueueKey { model: format!("m{model}"), version: 1, shape: Vec::new() }
}

fn offer() -> Result<Offer> {
    let profile = LatencyProfile::linear_ms(1.053, 5.072, MAX_BATCH)?;
    let model = |model| OfferedModel {
        model: queue(model).model,
        version: 1,
        fingerprint: String::new(),
        definition: Vec::new(),
        max_batch: MAX_BATCH,
        drop: DropPolicy::WindowDrop,
        dispatch: DispatchPolicy::Deferred,
        max_wait: Duration::MAX,
        levels: Vec::new(),
        at_once: DEVICES,
        item_bytes: 0,
        may_repeat: true,
        shape: Vec::new(),
        profiles: (0..DEVICES).map(|slot| (slot, profile.clone())).collect(),
    };
    let slot = |device| Slot { hardware: "played".to_owned(), device, is_seat: false };
    let (slots, models) = ((0..DEVICES).map(slot).collect(), (0..MODELS).map(model).collect());
    Ok(Offer { slots, models, ..Offer::default() })
}

/// A batch: its end, the place of its backend, its name, its items and its latency.
type Running = (Time, usize, BatchKey, u32, Duration);

#[derive(Clone, Copy, Default)]
struct Counts {
    handed_in: u64,
    refused: u64,
    planned: u64,
    batches: u64,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, rate, seconds] = &arguments[..] else { anyhow::bail!("feed ADDRESS PER_SECOND SECONDS") };
    let (rate, seconds) = (rate.parse()?, Duration::from_secs_f64(seconds.parse()?));
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(feed(address, rate, seconds))
}

async fn feed(address: &str, rate: f64, seconds: Duration) -> Result<()> {
    let clock = Clock::start();
    let mut peers = Vec::new();
    for number in 0..FRONTENDS + BACKENDS {
        let (role, name) = if number < FRONTENDS { (Role::Frontend, "frontend") } else { (Role::Backend, "backend") };
        let stream = TcpStream::connect(address).await.context("the scheduler")?;
        peers.push(Peer::greet(stream, &hello(number, role, name, "127.0.0.1:9"), clock.now()).await?);
    }
    let (mut counts, mut knows, mut next) = (Counts::default(), 0, 0);
    let mut running: BinaryHeap<Reverse<Running>> = BinaryHeap::new();
    let mut began: Option<Time> = None;
    let mut warm: Option<(Time, Counts)> = None;
    loop {
        tokio::time::sleep(TICK).await;
        for (place, peer) in peers.iter_mut().enumerate() {
            let now = clock.now();
            for message in peer.read(now)?.into_iter().flatten() {
                match message {
                    Message::Leads(_) if place as u64 >= FRONTENDS => {
                        peer.say(now, Message::UnderWay(Vec::new()));
                        peer.say(now, Message::offer(offer()?));
                    }
                    Message::Models(_) => {
                        (0..MODELS).for_each(|model| {
                            peer.say(now, Message::Queue { alias: QueueAlias(model), key: queue(model) });
                        });
                        knows += 1;
                    }
                    Message::Refused(refused) => counts.refused += refused.len() as u64,
                    Message::Plan(plan) => {
                        counts.planned += plan.members.len() as u64;
                        counts.batches += 1;
                        let end = now + plan.starts_in + plan.expected;
                        running.push(Reverse((end, place, plan.batch, plan.size, plan.expected)));
                    }
                    _ => {}
                }
            }
        }
        let now = clock.now();
        while let Some(Reverse((_, place, batch, size, took))) = running.peek().copied().filter(|due| due.0.0 <= now) {
            running.pop();
            peers[place].say(now, Message::Completed { batch, ran: Some((size, took)), missed: Vec::new() });
        }
        if knows >= FRONTENDS {
            let since = now.since(*began.get_or_insert(now));
            let due = (since.as_secs_f64() * rate) as u64;
            let new: Vec<HandedIn> = (counts.handed_in..due).map(handed_in).collect();
            for numbers in new.chunks(A_MESSAGE) {
                peers[next % FRONTENDS as usize].say(now, Message::Requests(numbers.to_vec()));
                next += 1;
            }
            counts.handed_in = due;
            if since > WARM_UP {
                let (from, before) = *warm.get_or_insert((now, counts));
                if now.since(from) >= seconds {
                    return report(now.since(from), before, counts);
                }
            }
        }
        for peer in &mut peers {
            peer.write(now)?;
        }
    }
}

fn handed_in(number: u64) -> HandedIn {
    let queue = QueueAlias((number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32 % MODELS);
    HandedIn {
        number,
        queue,
        left: SLO,
        queue_left: Duration::MAX,
        ready_in: Duration::ZERO,
        level: 0,
        size: 1,
        tried: 0,
    }
}

#[expect(clippy::print_stdout, reason = "what it is for")]
fn report(took: Duration, before: Counts, after: Counts) -> Result<()> {
    let [handed_in, refused, planned, batches] = [
        after.handed_in - before.handed_in,
        after.refused - before.refused,
        after.planned - before.planned,
        after.batches - before.batches,
    ];
    let per_second = handed_in as f64 / took.as_secs_f64();
    println!(
        "{}",
        serde_json::json!({
            "handed_in_per_second": per_second, "planned_per_second": planned as f64 / took.as_secs_f64(),
            "handed_in": handed_in, "handed_in_in_all": after.handed_in, "refused": refused, "planned": planned, "mean_batch": planned as f64 / batches.max(1) as f64,
        })
    );
    Ok(())
}
