//! Clients that each keep one launch under way on a device and start the next at once. In this way
//! the papers measure how models slow each other down.

use downbeat_core::device::{LaneId, SegmentRange};
use downbeat_core::{Duration, Time};

use super::contended::{Completed, ContendedDevice};
use super::limits::DeviceLimits;
use super::model::EmulatedModel;
use super::work::Work;

/// A client that repeats one launch.
#[derive(Clone, Debug)]
pub struct Client {
    /// The work that the client launches, over and over.
    pub work: Work,
    /// The items of a launch.
    pub batch: u32,
    /// The client's partition.
    pub partition: usize,
}

impl Client {
    /// Makes a client of a network for a partition of this many units, its own or shared.
    pub fn new(model: &EmulatedModel, batch: u32, partition: usize, units: u32) -> Self {
        let work = model.work(SegmentRange::new(0, model.segment_count()), batch, 64, units);
        Client { work, batch, partition }
    }
}

/// The results of a client.
#[derive(Clone, Debug, PartialEq)]
pub struct Served {
    /// Items a second.
    pub throughput: f64,
    /// The time of each launch in milliseconds, in order.
    pub latencies_ms: Vec<f64>,
}

impl Served {
    /// Returns the mean time of a launch in milliseconds; NaN if none ended.
    pub fn mean_ms(&self) -> f64 {
        self.latencies_ms.iter().sum::<f64>() / self.latencies_ms.len() as f64
    }
}

/// Runs clients, one lane each, for `span` on a device that is divided into `partitions`. Also
/// returns the share of that time in which some kernel ran.
pub fn closed_loop(limits: DeviceLimits, partitions: &[u32], clients: &[Client], span: Duration) -> (Vec<Served>, f64) {
    let (mut busy, mut end) = (Duration::ZERO, Time::ZERO);
    let served = closed_loop_watched(limits, partitions, clients, span, |device, from, to| {
        if device.used_units() > 0 {
            busy += to.since(from);
        }
        end = to;
    });
    (served, busy.as_secs_f64() / end.since(Time::ZERO).as_secs_f64())
}

/// Like [`closed_loop`]. `watch` sees the device in every span of time in which nothing on the
/// device changes.
pub(super) fn closed_loop_watched(
    limits: DeviceLimits,
    partitions: &[u32],
    clients: &[Client],
    span: Duration,
    mut watch: impl FnMut(&ContendedDevice, Time, Time),
) -> Vec<Served> {
    let mut device = ContendedDevice::new(limits, clients.len());
    for (partition, units) in partitions.iter().enumerate() {
        device.set_units(Time::ZERO, partition, *units);
    }
    let mut served = vec![(Time::ZERO, Vec::new()); clients.len()];
    let start = |device: &mut ContendedDevice, now, index: usize| {
        let Client { work, partition, .. } = &clients[index];
        device.launch_in(now, *partition, LaneId(index as u32), 0, work.clone());
    };
    (0..clients.len()).for_each(|index| start(&mut device, Time::ZERO, index));
    let end = Time::ZERO + span;
    let mut now = Time::ZERO;
    while let Some(next) = device.next_event().filter(|next| *next <= end) {
        watch(&device, now, next);
        now = next;
        for completed in device.advance(now) {
            let Completed::Launch { lane: LaneId(lane), .. } = completed else { continue };
            let index = lane as usize;
            let (began, latencies) = &mut served[index];
            latencies.push(now.since(*began).as_millis_f64());
            *began = now;
            start(&mut device, now, index);
        }
    }
    let of = |((_, latencies_ms), client): ((Time, Vec<f64>), &Client)| {
        let items = f64::from(client.batch) * latencies_ms.len() as f64;
        Served { throughput: items / span.as_secs_f64(), latencies_ms }
    };
    served.into_iter().zip(clients).map(of).collect()
}
