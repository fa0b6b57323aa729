//! Streams, and events in streams.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration as StdDuration;

use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys::{self, CUdeviceptr, CUevent_flags, CUevent_wait_flags, CUresult};
use downbeat_core::Duration;
use downbeat_engine::StreamPriority;

use super::partition::Partition;
use super::{CudaError, Device};

/// The time for which a thread polls an event before it sleeps. Waking up takes about as long, and
/// so do the shortest launches.
const SPIN: StdDuration = StdDuration::from_micros(50);

/// An ordered queue of a device's work. Work of two streams may overlap, and no call here waits for
/// the whole device.
pub struct Stream {
    device: Arc<Device>,
    raw: sys::CUstream,
    /// The partition on whose compute units it runs; `None`: on all units.
    partition: Option<Arc<Partition>>,
    /// Memory that was given back while a graph is recorded; `None`: no graph is being recorded.
    freed: Mutex<Option<Vec<CUdeviceptr>>>,
}

// SAFETY: a stream may be used from any thread; the driver synchronises its calls.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream on all compute units of a device.
    ///
    /// # Errors
    /// If the device is lost or out of memory.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Stream>, CudaError> {
        Stream::with_priority(device, None, StreamPriority::Default)
    }

    /// A stream with a priority among those of the device, on the compute units of a partition of
    /// the device, or on all.
    ///
    /// # Errors
    /// As [`Stream::new`].
    pub fn with_priority(
        device: &Arc<Device>,
        partition: Option<&Arc<Partition>>,
        priority: StreamPriority,
    ) -> Result<Arc<Stream>, CudaError> {
        let priority = device.priority(priority)?;
        if let Some(partition) = partition {
            return Ok(Stream::of(device.clone(), partition.stream(priority)?, Some(partition.clone())));
        }
        // Not blocking: the stream does not wait for work on the process's default stream, a
        // library's for example.
        let made = result::stream::create_with_priority(StreamKind::NonBlocking, priority);
        let raw = device.check("making a stream", made)?;
        Ok(Stream::of(device.clone(), raw, None))
    }

    fn of(device: Arc<Device>, raw: sys::CUstream, partition: Option<Arc<Partition>>) -> Arc<Stream> {
        Arc::new(Stream { device, raw, partition, freed: Mutex::default() })
    }

    /// Gives memory back in the order of the stream. Another thread may drop a tensor while the
    /// lane's thread records a graph. The memory is no part of that graph, and is then given back
    /// after the recording.
    pub(super) fn free(&self, address: CUdeviceptr) {
        let mut freed = self.freed.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *freed {
            Some(freed) => freed.push(address),
            // SAFETY: taken in this stream, and the caller ensures that it is given back once.
            None => self.device.release(|| unsafe { result::free_async(address, self.raw) }),
        }
    }

    /// Holds back memory that is given back from now on until [`Stream::end_recording`].
    pub(super) fn begin_recording(&self) {
        self.freed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default();
    }

    pub(super) fn end_recording(&self) {
        let freed = self.freed.lock().unwrap_or_else(PoisonError::into_inner).take();
        freed.into_iter().flatten().for_each(|address| self.free(address));
    }

    /// The stream's device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The partition on whose compute units it runs; `None`: on all units.
    pub fn partition(&self) -> Option<&Arc<Partition>> {
        self.partition.as_ref()
    }

    /// The driver's handle. Valid as long as `self`.
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Marks the end of all work enqueued so far with `event`.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: both are alive.
        self.device.check("recording an event", unsafe { result::event::record(event.raw, self.raw) })
    }

    /// Makes all later work of the stream wait for `event`, where it was last recorded. Does not
    /// block the caller.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        self.device.bind()?;
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        self.device.check("waiting for an event", unsafe { result::stream::wait_event(self.raw, event.raw, flags) })
    }

    /// Blocks the caller until all enqueued work is over. It is for error paths and the end of a
    /// load. Launches wait for an event.
    ///
    /// # Errors
    /// If the device is lost, or some enqueued work fails.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: it is alive.
        self.device.check("waiting for a stream", unsafe { result::stream::synchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by this type, destroyed once; enqueued work still runs to its end.
        match &self.partition {
            Some(partition) => unsafe { partition.destroy(self.raw) },
            None => self.device.release(|| unsafe { result::stream::destroy(self.raw) }),
        }
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.partition {
            Some(partition) => write!(f, "Stream({:?}, {} units)", self.device, partition.compute_units()),
            None => write!(f, "Stream({:?})", self.device),
        }
    }
}

/// A mark in a stream.
pub struct Event {
    device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: an event may be used from any thread; the driver synchronises its calls.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Makes an event to wait for.
    ///
    /// # Errors
    /// If the device is lost or out of memory.
    pub fn new(device: &Arc<Device>) -> Result<Event, CudaError> {
        Event::with_flags(device, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Makes an event that also records its time.
    ///
    /// # Errors
    /// As [`Event::new`].
    pub fn timed(device: &Arc<Device>) -> Result<Event, CudaError> {
        Event::with_flags(device, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(device: &Arc<Device>, timing: CUevent_flags) -> Result<Event, CudaError> {
        device.bind()?;
        let flags = timing as u32 | CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is written if the call succeeds.
        device.check("making an event", unsafe { sys::cuEventCreate(&raw mut raw, flags).result() })?;
        Ok(Event { device: device.clone(), raw })
    }

    /// Whether all work before the event is over.
    ///
    /// # Errors
    /// If the device is lost, or earlier work failed.
    pub fn is_over(&self) -> Result<bool, CudaError> {
        self.device.bind()?;
        // SAFETY: it is alive.
        match unsafe { result::event::query(self.raw) } {
            Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => self.device.check("running", answer).map(|()| true),
        }
    }

    /// Blocks the caller until all work before the event is over: first it polls, then it sleeps.
    ///
    /// # Errors
    /// If the device is lost, or earlier work failed.
    #[expect(clippy::disallowed_methods, reason = "decides only whether to sleep, and no deadline")]
    pub fn wait(&self) -> Result<(), CudaError> {
        let begin = std::time::Instant::now();
        while begin.elapsed() < SPIN {
            if self.is_over()? {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.sleep()
    }

    /// Blocks the caller, asleep, until all work before the event is over.
    pub(super) fn sleep(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: it is alive.
        self.device.check("running", unsafe { result::event::synchronize(self.raw) })
    }

    /// The time from `earlier` to this event, both timed and over; zero if this event came first.
    ///
    /// # Errors
    /// If one of them is not timed or not over.
    pub fn since(&self, earlier: &Event) -> Result<Duration, CudaError> {
        self.nanos_since(earlier).map(|nanos| Duration::from_nanos(nanos.max(0).unsigned_abs()))
    }

    /// Nanoseconds from `other` to this event, both timed and over; below zero if this event came
    /// first. The driver counts in steps of half a microsecond and returns a float. The steps are
    /// longer if the events are more than some seconds apart.
    pub(super) fn nanos_since(&self, other: &Event) -> Result<i64, CudaError> {
        self.device.bind()?;
        // SAFETY: both are alive.
        let millis = self.device.check("reading a time", unsafe { result::event::elapsed(other.raw, self.raw) })?;
        Ok((f64::from(millis) * 1e6).round() as i64)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by this type, destroyed once; the driver keeps the parts that it still
        // needs.
        self.device.release(|| unsafe { result::event::destroy(self.raw) });
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event({:?})", self.device)
    }
}
