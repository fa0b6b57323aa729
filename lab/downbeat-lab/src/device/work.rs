//! The work of a launch on a device, and its time alone.

use downbeat_core::Duration;
use rand_distr::{Distribution, Normal};
use rand_pcg::Pcg64;

use super::limits::DeviceLimits;

/// The whole bandwidth of a device, in the parts in which kernels draw bandwidth.
pub const WHOLE_BANDWIDTH: u32 = 1 << 16;

/// One operator of a launch as the device sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Kernel {
    /// The host's time to issue the kernel when no other launch issues.
    pub issue: Duration,
    /// The kernel's time alone.
    pub run: Duration,
    /// The compute units that the kernel keeps busy, at least 1 and at most its partition's.
    pub units: u32,
    /// The memory bandwidth that the kernel draws when nothing slows it down, in parts of
    /// [`WHOLE_BANDWIDTH`].
    pub draw: u32,
}

/// The work of a launch: time on the host, its kernels one after another, time on the host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// The host's time before it issues the first kernel.
    pub overhead: Duration,
    /// The kernels, in order.
    pub kernels: Vec<Kernel>,
    /// The host's time after the last kernel. The lane is free only then (GSLICE §3.3, figure 5b).
    pub after: Duration,
}

impl Work {
    /// Returns the launch's time alone on a device.
    pub fn alone(&self, limits: &DeviceLimits) -> Duration {
        let (mut issued, mut ends) = (self.overhead, Vec::with_capacity(self.kernels.len()));
        for (index, kernel) in self.kernels.iter().enumerate() {
            let end = |before: usize| ends.get(index.wrapping_sub(before)).copied();
            issued = issued.max(end(limits.ahead as usize + 1).unwrap_or(Duration::ZERO)) + kernel.issue;
            let ready = end(1).map_or(Duration::ZERO, |end| end + limits.gap);
            ends.push(issued.max(ready) + kernel.run);
        }
        ends.last().copied().unwrap_or(self.overhead) + self.after
    }

    /// Stretches or shortens all kernels by one factor drawn from `noise`, because runs of the same
    /// launch differ.
    pub(crate) fn vary(&mut self, noise: &Normal<f64>, rng: &mut Pcg64) {
        let factor = noise.sample(rng).max(0.01);
        for kernel in &mut self.kernels {
            kernel.run = Duration::from_secs_f64(kernel.run.as_secs_f64() * factor);
        }
    }
}
