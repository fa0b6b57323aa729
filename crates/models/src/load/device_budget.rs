//! The GPU memory that a model may take, and has taken: measured while it loads, and logged.
//!
//! The memory of an engine's session is unknown beforehand: handles of libraries, workspaces,
//! recorded graphs. So the budget reads the free memory of the device before and after. Memory that
//! other models take at the same time is counted in; models are loaded one after another where
//! possible.

use downbeat_engine::{DeviceMemory, DeviceShare, Engine, Model};

/// A model without a limit leaves this part of a device's memory to others: 1/64.
const RESERVE_PART: u64 = 64;
/// The reserve is at least this, bytes: the present models may still take memory in their runs.
const LEAST_RESERVE: u64 = 256 << 20;
/// The most batch sizes that a log line names.
const MOST_NAMED: usize = 16;

/// The memory that one model may take on each device.
pub struct DeviceBudget<'a> {
    engine: &'a dyn Engine,
    /// By device; `None`: the device has no memory of its own, or does not work.
    devices: Vec<Option<OnDevice>>,
}

/// The memory that a model may take on one device.
#[derive(Clone, Copy, Debug)]
struct OnDevice {
    /// The device's memory before the model came.
    before: DeviceMemory,
    /// The bytes that the model may take.
    may: u64,
    /// Whether the user set the limit.
    is_limit: bool,
    /// The model's memory before its serving lanes were made.
    lanes_from: DeviceShare,
}

impl<'a> DeviceBudget<'a> {
    /// Reads the memory of a model's future devices before it is loaded. `limit`: the bytes that it
    /// may take of each; else the free memory, less a reserve.
    pub fn before(engine: &'a dyn Engine, devices: &[usize], limit: Option<u64>) -> Self {
        let on = |device| {
            let before = engine.device_memory(device)?;
            let free = before.free.saturating_sub(reserve(before.total));
            let may = limit.map_or(free, |limit| limit.min(before.free));
            Some(OnDevice { before, may, is_limit: limit.is_some(), lanes_from: DeviceShare::default() })
        };
        let all = devices.iter().max().map_or(0, |last| last + 1);
        DeviceBudget {
            engine,
            devices: (0..all).map(|device| on(device).filter(|_| devices.contains(&device))).collect(),
        }
    }

    /// Notes that the serving lanes are made from now on.
    pub fn begin_lanes(&mut self, model: &dyn Model) {
        for (device, on) in self.devices.iter_mut().enumerate() {
            if let Some(on) = on {
                on.lanes_from = model.device_share(device).unwrap_or_default();
            }
        }
    }

    /// The bytes that the model has taken of a device so far.
    fn taken(&self, device: usize) -> u64 {
        let (Some(Some(on)), Some(now)) = (self.devices.get(device), self.engine.device_memory(device)) else {
            return 0;
        };
        on.before.free.saturating_sub(now.free)
    }

    /// Runs `warm_up` with sizes of `sizes`, as long as they run and there is memory for the next
    /// one. The memory must suffice for this lane and for `others`, later lanes as large as this
    /// one. Returns the sizes with enough memory, the largest first.
    ///
    /// # Errors
    /// The error of `warm_up`.
    pub fn warm_up(
        &self,
        model: &dyn Model,
        device: usize,
        sizes: &[usize],
        others: f64,
        mut warm_up: impl FnMut(usize) -> anyhow::Result<bool>,
    ) -> anyhow::Result<Vec<usize>> {
        let Some(Some(on)) = self.devices.get(device) else {
            for size in sizes {
                if !warm_up(*size)? {
                    break;
                }
            }
            return Ok(sizes.to_vec());
        };
        let made = || model.device_share(device).unwrap_or_default().session_bytes;
        let begin = self.taken(device);
        // By size: the bytes of its session, and the bytes of its runs.
        let mut run: Vec<(usize, u64, u64)> = Vec::new();
        for size in spread(sizes) {
            let (before, made_before) = (self.taken(device), made());
            // The estimate: a session as large as the next larger size's, and a part of the memory
            // of its runs.
            let next = run.iter().filter(|(larger, ..)| *larger > size).min();
            let likely = next.map_or(0, |(larger, session, runs)| session + runs / *larger as u64 * size as u64);
            let of_lane = before.saturating_sub(begin) + likely;
            if !run.is_empty() && before + likely + (of_lane as f64 * others) as u64 > on.may {
                break;
            }
            if !warm_up(size)? {
                return Ok(sizes.to_vec());
            }
            let session = made() - made_before;
            run.push((size, session, self.taken(device).saturating_sub(before + session)));
        }
        let mut run: Vec<usize> = run.into_iter().map(|(size, ..)| size).collect();
        run.sort_unstable_by(|a, b| b.cmp(a));
        Ok(run)
    }

    /// Checks that a model does not take more than it may.
    ///
    /// # Errors
    /// If it does, with the numbers.
    pub fn check(&self, model: &dyn Model, device: usize) -> anyhow::Result<()> {
        let Some(Some(on)) = self.devices.get(device) else { return Ok(()) };
        let takes = self.taken(device);
        if takes <= on.may {
            return Ok(());
        }
        let why = if on.is_limit {
            "gpu_memory_mb".to_owned()
        } else {
            let [free, reserve] = [on.before.free, reserve(on.before.total)].map(mib);
            format!("{free} MiB were free, and {reserve} MiB are left to others; gpu_memory_mb sets another limit")
        };
        let parts = parts(takes, &model.device_share(device).unwrap_or_default());
        anyhow::bail!(
            "it takes {} MiB of GPU {} ({parts}), and may take {} MiB ({why}). Serve it with a smaller max_batch_size or in fewer lanes, serve fewer models, or \
             use a larger GPU",
            mib(takes),
            on.before.ordinal,
            on.may >> 20
        );
    }

    /// Logs the memory of a model on each device with `lanes` lanes, and the wanted sizes that did
    /// not run for lack of memory.
    pub fn say(&self, name: &str, model: &dyn Model, lanes: usize, [wanted, run]: [&[usize]; 2]) {
        for (device, on) in self.devices.iter().enumerate() {
            let Some(on) = on.filter(|_| model.lost(device).is_none()) else { continue };
            let takes = self.taken(device);
            let share = model.device_share(device).unwrap_or_default();
            let sessions = DeviceShare {
                sessions: share.sessions - on.lanes_from.sessions,
                session_bytes: share.session_bytes - on.lanes_from.session_bytes,
                ..share
            };
            tracing::info!(
                "{name} on GPU {}: {}, {}, {}: {} MiB ({}) of the {} MiB that it may take",
                on.before.ordinal,
                count(lanes, "lane"),
                count(model.segments(), "segment"),
                count(run.len(), "size"),
                mib(takes),
                parts(takes, &sessions),
                on.may >> 20
            );
        }
        let left_out: Vec<usize> = wanted.iter().copied().filter(|size| !run.contains(size)).collect();
        if self.devices.iter().any(Option::is_some) && !left_out.is_empty() {
            tracing::warn!(
                model = name,
                "there is no memory for batches of {}: they are filled up to the next of {}, or run as they come. A larger gpu_memory_mb, fewer lanes or a smaller \
                 max_batch_size makes all of them fast",
                named(&left_out),
                named(run)
            );
        }
    }
}

fn reserve(total: u64) -> u64 {
    (total / RESERVE_PART).max(LEAST_RESERVE)
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

fn parts(takes: u64, share: &DeviceShare) -> String {
    let rest = takes.saturating_sub(share.weights + share.session_bytes);
    let [weights, sessions, rest] = [share.weights, share.session_bytes, rest].map(mib);
    format!("weights {weights}, {} {sessions}, runs {rest}", count(share.sessions as usize, "session"))
}

fn count(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn named(sizes: &[usize]) -> String {
    let named: Vec<String> = sizes.iter().take(MOST_NAMED).map(usize::to_string).collect();
    format!("{}{}", named.join(", "), if sizes.len() > MOST_NAMED { ", ..." } else { "" })
}

/// Orders the sizes so that any first few are spread over all: the largest, the smallest, the one
/// in the middle, and so on.
fn spread(sizes: &[usize]) -> Vec<usize> {
    let mut order = Vec::with_capacity(sizes.len());
    let last = sizes.len().saturating_sub(1);
    order.extend(sizes.first().copied());
    order.extend(sizes.get(1..).and_then(|rest| rest.last()).copied());
    let mut gaps = std::collections::VecDeque::from([(0usize, last)]);
    while let Some((from, to)) = gaps.pop_front() {
        let middle = from.midpoint(to);
        if middle == from {
            continue;
        }
        order.extend(sizes.get(middle).copied());
        gaps.extend([(from, middle), (middle, to)]);
    }
    order
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use downbeat_core::tensor::Signature;
    use downbeat_engine::{EngineInfo, Lane, LoadError, LoadOptions, Place};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A fake device with `taken` bytes of memory in use, and a model on it.
    #[derive(Default)]
    struct Fake {
        taken: AtomicU64,
        sessions: AtomicU64,
        signature: Signature,
    }

    impl Fake {
        /// A session for batches of `size`: 60 MiB, and 1 MiB a row in its runs.
        fn run(&self, size: usize) {
            self.sessions.fetch_add(1, Ordering::Relaxed);
            self.taken.fetch_add((60 + size as u64) * MIB, Ordering::Relaxed);
        }
    }

    impl Engine for Fake {
        fn info(&self) -> EngineInfo {
            EngineInfo { name: "fake", version: String::new(), device: String::new(), library: None }
        }

        fn load(&self, _options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError> {
            unreachable!("the model is there")
        }

        fn device_memory(&self, device: usize) -> Option<DeviceMemory> {
            let free = (20_000 * MIB).saturating_sub(self.taken.load(Ordering::Relaxed));
            (device == 0).then_some(DeviceMemory { ordinal: 7, total: 20_000 * MIB, free })
        }
    }

    impl Model for Fake {
        fn signature(&self) -> &Signature {
            &self.signature
        }

        fn lane_at(&self, _place: Place) -> Result<Box<dyn Lane>, LoadError> {
            unreachable!("nothing is run")
        }

        fn device_share(&self, _device: usize) -> Option<DeviceShare> {
            let sessions = self.sessions.load(Ordering::Relaxed);
            Some(DeviceShare { weights: 100 * MIB, sessions, session_bytes: sessions * 60 * MIB })
        }
    }

    const SIZES: [usize; 7] = [64, 32, 16, 8, 4, 2, 1];

    /// The sizes that a model warms up within `limit`, beside `others` lanes, and the MiB that it
    /// has taken then.
    fn warmed(limit: u64, others: f64) -> (Vec<usize>, u64) {
        let fake = Fake::default();
        let budget = DeviceBudget::before(&fake, &[0], Some(limit * MIB));
        // The bytes of its weights.
        fake.taken.fetch_add(100 * MIB, Ordering::Relaxed);
        let run = |size| {
            fake.run(size);
            Ok(true)
        };
        let sizes = budget.warm_up(&fake, 0, &SIZES, others, run).unwrap();
        (sizes, fake.taken.load(Ordering::Relaxed) / MIB)
    }

    #[test]
    fn as_many_sizes_are_set_up_as_there_is_memory_for() {
        // 100 of weights, 7 x 60 of sessions, 127 rows.
        assert_eq!(warmed(647, 0.0), (SIZES.to_vec(), 647));
        assert_eq!(warmed(646, 0.0).0, [64, 32, 16, 8, 4, 1]);
        // 64, 1 and 8: 100 + 3 x 60 + 73.
        assert_eq!(warmed(353, 0.0), (vec![64, 8, 1], 353));
        assert_eq!(warmed(352, 0.0).0, [64, 1]);
        // Another lane as large takes the sessions and the rows again.
        assert_eq!(warmed(606, 1.0).0, [64, 8, 1]);
        assert_eq!(warmed(605, 1.0).0, [64, 1]);
        // The largest size runs in any case: its memory is known only after that.
        assert_eq!(warmed(50, 0.0), (vec![64], 224));
    }

    #[test]
    fn a_model_that_takes_more_than_it_may_is_refused_with_the_numbers() {
        let fake = Fake::default();
        let limited = DeviceBudget::before(&fake, &[0, 1], Some(200 * MIB));
        let unlimited = DeviceBudget::before(&fake, &[0, 1], None);
        fake.taken.fetch_add(100 * MIB, Ordering::Relaxed);
        fake.run(64);
        let error = limited.check(&fake, 0).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "it takes 224 MiB of GPU 7 (weights 100, 1 session 60, runs 64), and may take 200 MiB (gpu_memory_mb)"
            ),
            "{error}"
        );
        assert!(unlimited.check(&fake, 0).is_ok() && limited.check(&fake, 1).is_ok(), "the other device has no memory");
        // A 64th of the device is left to others.
        fake.taken.store(19_688 * MIB, Ordering::Relaxed);
        let error = unlimited.check(&fake, 0).unwrap_err().to_string();
        assert!(error.contains("may take 19687 MiB (20000 MiB were free, and 313 MiB are left to others"), "{error}");
    }

    #[test]
    fn sizes_are_spread_however_many_there_is_memory_for() {
        assert_eq!(spread(&[64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]), [64, 1, 12, 32, 4, 48, 24, 8, 3, 16, 6, 2]);
        assert_eq!(spread(&[4, 1]), [4, 1]);
        assert_eq!(spread(&[4]), [4]);
        assert!(spread(&[]).is_empty());
    }
}
