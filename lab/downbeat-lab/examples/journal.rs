//! Measures the cost of the decision log: CPU time and bytes a request, by the difference between
//! runs with and without it.
//!
//! ```text
//! cargo run --release -p downbeat-lab --example journal [FILE]
//! ```
//!
//! Each row is measured five times in turns and the fastest of each printed: a busy neighbour can
//! only make it slower. With FILE the log of the last row is written there, for `downbeat log`.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, Reject, Request, Scheduler};
use downbeat_core::journal::cluster::{Input, Reply};
use downbeat_core::journal::{Journal, replay};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_sim::{Arrivals, ClusterScheduler, Decision, Load, Pace, Simulation};
use rustix::time::{ClockId, clock_gettime};

/// A scheduler with its journal, which writes to `log`.
struct Written<'a> {
    journal: Journal<Scheduler>,
    log: &'a mut Vec<u8>,
    /// Reused, as a file's buffer would be.
    buffer: Vec<u8>,
    keep: bool,
}

impl Written<'_> {
    fn flush(&mut self) {
        self.journal.take_log(&mut self.buffer);
        if self.keep {
            self.log.append(&mut self.buffer);
        }
        self.buffer.clear();
    }
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        self.flush();
    }
}

impl ClusterScheduler for Written<'_> {
    fn add_model(&mut self, now: Time, options: ModelOptions, _slo: Duration, _rate: f64) -> ModelId {
        match self.journal.apply(now, Input::AddModel(ModelId(0), Box::new(options))) {
            Reply::Model(model) => model,
            other => unreachable!("a scheduler adds a model, but said {other:?}"),
        }
    }

    fn add_device(&mut self, now: Time, kind: DeviceKind) -> DeviceId {
        match self.journal.apply(now, Input::AddDevice(kind)) {
            Reply::Device(device) => device,
            other => unreachable!("a scheduler adds a device, but said {other:?}"),
        }
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        if self.journal.pending() > 1 << 16 {
            self.flush();
        }
        self.journal.handle_request(now, request).map(drop)
    }

    fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        self.journal.handle_completion(now, device, batch);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.journal.handle_timeout(now);
    }

    fn poll_decision(&mut self) -> Option<Decision> {
        self.journal.poll_output().map(Decision::from)
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.journal.machine().poll_timeout().map(|(at, _)| at)
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        self.journal.recycle(members);
    }
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let header = ["cluster", "requests", "off, ns", "on, ns", "bytes each"];
    println!("{:44} {:>10} {:>10} {:>10} {:>11}", header[0], header[1], header[2], header[3], header[4]);
    let cases = [
        ("1 model, 8 devices, 5,000/s", 1, 8, 5e3),
        ("1 model, 8 devices, 8,000/s (overload)", 1, 8, 8e3),
        ("20 models, 1,024 devices, 600,000/s", 20, 1024, 600e3),
    ];
    let mut log = Vec::new();
    for (name, models, devices, rate) in cases {
        let options = ModelOptions::new(
            LatencyProfile::linear_ms(1.053, 5.072, 64)?,
            DispatchPolicy::Deferred,
            DropPolicy::WindowDrop,
        );
        let load = Load {
            options,
            slo: Duration::from_millis(25),
            arrivals: Arrivals::Poisson,
            rate: rate / f64::from(models),
            pace: Pace::steady(),
        };
        let simulation = Simulation {
            loads: vec![load; models as usize],
            devices,
            warm_up: Duration::ZERO,
            span: Duration::from_secs_f64(1e6 / rate),
            ..Simulation::default()
        };
        let mut requests = 0;
        let mut run = |journal: Journal<Scheduler>, log: &mut Vec<u8>, keep: bool| {
            let before = cpu_seconds();
            let report = simulation.run_on(Written { journal, log, buffer: Vec::new(), keep })?;
            requests = report.models.iter().map(|model| model.offered).sum();
            Ok::<f64, Box<dyn std::error::Error>>(cpu_seconds() - before)
        };
        let (mut off, mut on) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..5 {
            off = off.min(run(Journal::off(Scheduler::new()), &mut log, false)?);
            on = on.min(run(Journal::on(Scheduler::new()), &mut log, false)?);
        }
        log.clear();
        run(Journal::on(Scheduler::new()), &mut log, true)?;
        let each = |seconds: f64| seconds * 1e9 / requests as f64;
        let bytes = log.len() as f64 / requests as f64;
        println!("{name:44} {requests:10} {:10.1} {:10.1} {bytes:11.1}", each(off), each(on));
        assert_eq!(replay(&log)?.divergence, None, "the log plays again");
    }
    if let Some(file) = std::env::args_os().nth(1) {
        std::fs::write(file, log)?;
    }
    Ok(())
}
