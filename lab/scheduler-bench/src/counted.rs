//! The scheduler with a fixed number of requests, so that its instructions can be counted: one
//! thread, virtual time, no clock.

use anyhow::Result;

use crate::single_thread::World;
use crate::workload::Workload;

/// The single-threaded scheduler after its warm-up. Equal workloads make equal decisions.
///
/// Count the instructions of a run of N requests and of a run of 2N. The difference divided by N is
/// the cost of a request, without the warm-up. The cost includes drawing the request
/// (`Requests::draw`) and the emulated devices (one heap).
pub struct CountedScheduler(World);

impl CountedScheduler {
    /// Runs the warm-up.
    pub fn new(workload: &Workload) -> Self {
        CountedScheduler(World::warmed_up(workload))
    }

    /// Hands the scheduler this many more requests, with all events due meanwhile.
    ///
    /// # Errors
    /// If a request is lost or answered twice.
    #[inline(never)]
    pub fn serve(&mut self, requests: u64) -> Result<()> {
        let until = self.0.counts.requests + requests;
        while self.0.counts.requests < until {
            self.0.step();
        }
        self.0.check()
    }
}
