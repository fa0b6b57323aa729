//! How long `downbeat log why` takes on a long log.
//!
//!     cargo run --release -p downbeat-sim --example log_why -- FOLDER [REQUESTS]
//!
//! Writes the log of a simulated server, with 3.6 million requests at 1,000 a second unless told
//! otherwise, each with an id. Then asks for the first, the middle and the last one, for an id that is
//! not there, and for a time.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use downbeat_core::cluster::{ModelOptions, Reject, Request, Scheduler};
use downbeat_core::journal::cluster::{Input, Reply};
use downbeat_core::journal::requests::{RequestBook, RequestInput};
use downbeat_core::journal::{Journal, Machine, QueueName};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_sim::why::{Asked, LogFolder};
use downbeat_sim::{Arrivals, ClusterScheduler, Decision, Load, Pace, Policy, Simulation};

/// As the driver hands logs over.
const BUFFER: usize = 64 << 10;
/// Any wall clock.
const ZERO: u64 = 1_795_874_700_000_000_000;

/// A scheduler that writes its log, and the ids of its requests, to files.
struct Written {
    scheduler: Journal<Scheduler>,
    requests: Journal<RequestBook>,
    files: [File; 2],
}

fn hand_over<M: Machine>(journal: &mut Journal<M>, file: &mut File, least: usize) {
    if journal.pending() >= least {
        let mut bytes = Vec::with_capacity(journal.pending());
        journal.take_log_at(ZERO, &mut bytes);
        // The folder was made now: there is nothing better to do about a full disk than to end.
        file.write_all(&bytes).unwrap_or_else(|error| panic!("the log cannot be written: {error}"));
    }
}

impl Written {
    fn hand_over(&mut self, least: usize) {
        hand_over(&mut self.scheduler, &mut self.files[0], least);
        hand_over(&mut self.requests, &mut self.files[1], least);
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        self.hand_over(1);
    }
}

impl ClusterScheduler for Written {
    fn add_model(&mut self, now: Time, options: ModelOptions, _slo: Duration, _rate: f64) -> ModelId {
        let Reply::Model(model) = self.scheduler.apply(now, Input::AddModel(ModelId(0), Box::new(options))) else {
            unreachable!("a scheduler gives the model's id")
        };
        let name = QueueName { model: format!("model-{}", model.0), version: "1".to_owned(), ..QueueName::default() };
        // The book takes the names of models in order.
        let _ = self.requests.apply(now, RequestInput::Model(model.0, name.model.clone()));
        self.scheduler.apply(now, Input::Name(model, Box::new(name)));
        model
    }

    fn add_device(&mut self, now: Time, kind: DeviceKind) -> DeviceId {
        match self.scheduler.apply(now, Input::AddDevice(kind)) {
            Reply::Device(device) => device,
            other => unreachable!("{other:?}"),
        }
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        let (id, model) = (format!("order-{}", request.id.0), request.model.0);
        let _ = self.requests.apply(now, RequestInput::Came { request: request.id, model, id, trace: None });
        let taken = self.scheduler.handle_request(now, request).map(drop);
        self.hand_over(BUFFER);
        taken
    }

    fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        self.scheduler.handle_completion(now, device, batch);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.scheduler.handle_timeout(now);
    }

    fn poll_decision(&mut self) -> Option<Decision> {
        self.scheduler.poll_output().map(Decision::from)
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.scheduler.machine().poll_timeout().map(|(at, _)| at)
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        self.scheduler.recycle(members);
    }
}

/// Two models on five devices, which are 90% busy: bursts make some requests late.
fn write(folder: &Path, requests: u64) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir_all(folder)?;
    let policy: Policy = "eager+head".parse()?;
    let load = |alpha, beta, slo, rate| {
        let slo = Duration::from_millis(slo);
        let profile = LatencyProfile::linear_ms(alpha, beta, 16)?;
        let options = ModelOptions::new(profile, policy.dispatch(slo), policy.drop());
        Ok::<_, Box<dyn Error>>(Load { options, slo, arrivals: Arrivals::Poisson, rate, pace: Pace::default() })
    };
    let simulation = Simulation {
        loads: vec![load(2.0, 4.0, 40, 600.0)?, load(1.0, 2.0, 25, 400.0)?],
        devices: 2,
        warm_up: Duration::ZERO,
        span: Duration::from_millis(requests),
        ..Simulation::default()
    };
    let files = [File::create(folder.join("scheduler.log"))?, File::create(folder.join("requests.log"))?];
    let (scheduler, requests) = (Journal::on(Scheduler::new()), Journal::on(RequestBook::default()));
    let report = simulation.run_on(Written { scheduler, requests, files })?;
    println!("{} requests in time", report.good());
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "a measurement")]
fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("give a folder")?;
    let requests: u64 = arguments.next().map_or(Ok(3_600_000), |number| number.parse())?;
    let folder = Path::new(&folder);
    if !folder.exists() {
        write(folder, requests)?;
    }
    for file in std::fs::read_dir(folder)? {
        let file = file?;
        println!("{}: {} MB", file.file_name().to_string_lossy(), file.metadata()?.len() / 1_000_000);
    }
    let id = |number: u64| Asked::Id(format!("order-{number}"));
    let middle = Asked::Time(Time::ZERO + Duration::from_millis(requests / 2));
    for asked in [id(0), id(requests / 2), id(requests * 9 / 10), id(u64::MAX), middle] {
        let begin = Instant::now();
        let told = LogFolder::open(folder)?.why(&asked, None);
        let took = begin.elapsed();
        match told {
            Ok(story) => println!("{took:?}: {story}\n"),
            Err(error) => println!("{took:?}: {error}\n"),
        }
    }
    Ok(())
}
