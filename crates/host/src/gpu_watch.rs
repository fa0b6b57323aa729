//! The thread that reads the GPUs' state from NVML. It sets Triton's `nv_gpu_*` metrics, and takes
//! GPUs out of service once the driver reports an Xid that needs a reset. NVML may be slow for a
//! failing GPU, so it has its own thread; scrapes get the last measurements.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;

use downbeat_core::Duration;
use downbeat_engine_ort::GpuInfo;
use downbeat_engine_ort::cuda::condemn;
use downbeat_engine_ort::cuda::nvml::{Nvml, NvmlEvent, NvmlEvents, NvmlGpu};
use downbeat_service::metrics::gpu_metrics::GpuMetrics;

/// How often GPUs are checked if no metrics are wanted.
const LOOK_EVERY: Duration = Duration::from_millis(5_000);

/// How often waiting for reports may fail in a row. It fails if a GPU is lost.
const MOST_FAILURES: u32 = 3;

/// Xids of NVIDIA's catalogue. A GPU is used no more if the catalogue asks for a reset of the GPU
/// or a restart of the machine, with two exceptions. Errors of links to other GPUs (74, 136, 155)
/// are exempt: the server uses no such links, and a failing GPU causes these on its neighbours. 109
/// is exempt, as an application can cause it.
const XIDS: [(u64, &str, Health); 25] = [
    (13, "an application's kernel failed", Health::Unharmed),
    (31, "an application used memory that is not its own", Health::Unharmed),
    (43, "an application was stopped", Health::Unharmed),
    (45, "an application was cleaned up after", Health::Unharmed),
    (46, "the GPU stopped processing", Health::NeedsReset),
    (48, "memory has an error of two bits", Health::NeedsReset),
    (62, "the GPU's micro-controller halted", Health::NeedsReset),
    (63, "memory that failed was remapped", Health::Unharmed),
    (64, "memory that failed could not be remapped", Health::NeedsReset),
    (68, "a video decoder failed", Health::Unharmed),
    (74, "a link to another GPU failed (NVLink)", Health::Unharmed),
    (79, "the GPU has fallen off the bus", Health::NeedsReset),
    (92, "memory has many errors of one bit", Health::Unharmed),
    (94, "a memory error was contained to one application", Health::Unharmed),
    (95, "a memory error was not contained", Health::NeedsReset),
    (109, "a change of context took too long", Health::Unharmed),
    (110, "a security fault", Health::NeedsReset),
    (119, "the GPU's system processor does not answer", Health::NeedsReset),
    (120, "the GPU's system processor failed", Health::NeedsReset),
    (136, "a link to another GPU could not be trained", Health::Unharmed),
    (140, "memory has an error that was not recovered from", Health::NeedsReset),
    (143, "the GPU could not be initialised", Health::NeedsReset),
    (155, "a link to another GPU is down", Health::Unharmed),
    (156, "a part of the GPU is to be retired", Health::NeedsReset),
    (158, "the GPU timed out and does not recover", Health::NeedsReset),
];

/// The state of a GPU after an Xid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Health {
    /// The GPU goes on; only the failed work is lost.
    Unharmed,
    /// The GPU must be reset before it is used again.
    NeedsReset,
}

fn meaning(xid: u64) -> (&'static str, Health) {
    let known = XIDS.iter().find(|(number, ..)| *number == xid);
    known.map_or(("see NVIDIA's catalogue of Xids", Health::Unharmed), |(_, words, health)| (words, *health))
}

/// The running thread; it ends some time after this is dropped.
pub struct GpuWatch {
    ended: Arc<AtomicBool>,
    thread: Thread,
}

impl GpuWatch {
    /// Watches these GPUs. `every`: how often they are measured; zero: not for metrics.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn start(gpus: &[GpuInfo], metrics: GpuMetrics, every: Duration) -> std::io::Result<GpuWatch> {
        let ended = Arc::new(AtomicBool::new(false));
        let (stop, gpus) = (ended.clone(), gpus.to_vec());
        let work = move || match Nvml::start() {
            Ok(nvml) => Work { nvml, gpus: Vec::new(), metrics, every, ended: stop }.watch(&gpus),
            Err(error) => tracing::info!("no nv_gpu_* metrics, and Xids are not watched for: {error}"),
        };
        let thread = std::thread::Builder::new().name("gpu-watch".to_owned()).spawn(work)?;
        Ok(GpuWatch { ended, thread: thread.thread().clone() })
    }
}

impl Drop for GpuWatch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }
}

struct Work {
    nvml: Arc<Nvml>,
    gpus: Vec<Watched>,
    metrics: GpuMetrics,
    every: Duration,
    ended: Arc<AtomicBool>,
}

struct Watched {
    ordinal: u32,
    gpu: NvmlGpu,
    /// The energy that it had used at the last measurement, joules.
    energy: Option<f64>,
    lost: bool,
}

impl Work {
    fn watch(mut self, gpus: &[GpuInfo]) {
        for info in gpus {
            match NvmlGpu::find(&self.nvml, &info.uuid) {
                Ok(gpu) => self.gpus.push(Watched { ordinal: info.ordinal, gpu, energy: None, lost: false }),
                Err(error) => {
                    tracing::info!("GPU {}: no nv_gpu_* metrics, and Xids are not watched for: {error}", info.ordinal);
                }
            }
        }
        let limit = if self.every == Duration::ZERO { LOOK_EVERY } else { self.every };
        let (mut events, mut failures) = (self.events(), 0);
        while !self.ended.load(Ordering::Relaxed) {
            self.measure();
            let Some(waiting) = &events else {
                std::thread::park_timeout(limit.into());
                continue;
            };
            match waiting.wait(limit) {
                Ok(Some((uuid, event))) => self.report(&uuid, event),
                Ok(None) => failures = 0,
                Err(error) if failures == MOST_FAILURES => {
                    tracing::warn!("Xids are not watched for any more: {error}");
                    events = None;
                }
                // Which GPU is lost, measuring tells; the others are watched on.
                Err(_) => {
                    failures += 1;
                    std::thread::park_timeout(limit.into());
                    self.measure();
                    drop(events.take());
                    events = self.events();
                }
            }
        }
    }

    /// Reports of all GPUs that have some; `None`: none has.
    fn events(&self) -> Option<NvmlEvents> {
        let events = NvmlEvents::new(&self.nvml);
        let events = events.inspect_err(|error| tracing::info!("Xids are not watched for: {error}")).ok()?;
        let mut added = 0;
        for Watched { ordinal, gpu, .. } in self.gpus.iter().filter(|watched| !watched.lost) {
            match events.add(gpu) {
                Ok(()) => added += 1,
                Err(error) => tracing::info!("GPU {ordinal}: Xids are not watched for: {error}"),
            }
        }
        (added > 0).then_some(events)
    }

    fn measure(&mut self) {
        let Self { gpus, metrics, every, .. } = self;
        for Watched { ordinal, gpu, energy, lost } in gpus.iter_mut().filter(|watched| !watched.lost) {
            let sample = match gpu.sample() {
                Ok(sample) => sample,
                Err(error) => {
                    *lost = true;
                    metrics.forget(gpu.uuid());
                    condemn(*ordinal, "NVML", &error.to_string());
                    continue;
                }
            };
            if *every > Duration::ZERO {
                let before = std::mem::replace(energy, sample.energy);
                metrics.set(gpu.uuid(), &sample, sample.energy.zip(before).map_or(0.0, |(now, before)| now - before));
            }
        }
    }

    fn report(&self, uuid: &str, event: NvmlEvent) {
        let Some(Watched { ordinal, .. }) = self.gpus.iter().find(|watched| watched.gpu.uuid() == uuid) else { return };
        let (name, words, health) = match event {
            NvmlEvent::Xid(xid) => {
                let (words, health) = meaning(xid);
                (format!("Xid {xid}"), words, health)
            }
            NvmlEvent::DoubleBitError => {
                let (words, health) = meaning(48);
                ("double-bit ECC error".to_owned(), words, health)
            }
        };
        match health {
            Health::Unharmed => tracing::warn!(gpu = ordinal, uuid, "{name}: {words}"),
            Health::NeedsReset => {
                tracing::error!(
                    gpu = ordinal,
                    uuid,
                    "{name}: {words}; the GPU has to be reset, or the machine restarted"
                );
                condemn(*ordinal, &name, words);
            }
        }
        if let NvmlEvent::Xid(xid) = event {
            self.metrics.count_xid(uuid, xid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_xid_takes_a_gpu_out_of_service_only_where_it_has_to_be_reset() {
        for xid in [48, 62, 64, 79, 95, 119, 120, 140] {
            assert_eq!(meaning(xid).1, Health::NeedsReset, "{xid}");
        }
        // Errors that applications cause, errors of one application, errors of links, and unknown
        // ones.
        for xid in [13, 31, 43, 45, 63, 74, 94, 109, 9_999] {
            assert_eq!(meaning(xid).1, Health::Unharmed, "{xid}");
        }
        assert!(XIDS.is_sorted_by_key(|(xid, ..)| *xid));
    }
}
