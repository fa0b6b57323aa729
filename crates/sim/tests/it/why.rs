//! The story of a request, by the logs of a scheduler and of the requests of clients.

use std::path::Path;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, Output, Request, Scheduler};
use downbeat_core::journal::cluster::{Decision, Input};
use downbeat_core::journal::requests::{Failure, RequestBook, RequestInput, Trace};
use downbeat_core::journal::{Journal, QueueName};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_sim::why::{Asked, LogFolder, NotFound, Outcome, Remedy, Span, Story, Window};

/// 2026-11-28 14:05:00 UTC.
const ZERO: u64 = 1_795_874_700_000_000_000;
const MODEL: ModelId = ModelId(0);
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

/// A server with a device and the model `encoder`, which takes 5 ms and 1 ms for each item.
struct Server {
    scheduler: Journal<Scheduler>,
    requests: Journal<RequestBook>,
    logs: [Vec<u8>; 2],
    /// Batches that run, and their ends.
    running: Vec<(Time, DeviceId, BatchId)>,
}

impl Server {
    fn new(drop: DropPolicy) -> Server {
        let (scheduler, requests) = (Journal::on(Scheduler::new()), Journal::on(RequestBook::default()));
        let mut server = Server { scheduler, requests, logs: Default::default(), running: Vec::new() };
        let profile = LatencyProfile::linear_ms(1.0, 5.0, 8).unwrap();
        let options = ModelOptions::new(profile, DispatchPolicy::Eager, drop);
        server.scheduler.apply(at(0), Input::AddDevice(DeviceKind(0)));
        server.scheduler.apply(at(0), Input::AddModel(MODEL, Box::new(options)));
        let name = QueueName { model: "encoder".into(), version: "1".into(), shape: "[1,128]".into(), is_lent: false };
        server.scheduler.apply(at(0), Input::Name(MODEL, Box::new(name)));
        server.requests.apply(at(0), RequestInput::Model(0, "encoder".into())).unwrap();
        server.take();
        server
    }

    /// The driver takes the logs: a block ends.
    fn take(&mut self) {
        self.scheduler.take_log_at(ZERO, &mut self.logs[0]);
        self.requests.take_log_at(ZERO, &mut self.logs[1]);
    }

    fn poll(&mut self, now: Time) {
        while let Some(decision) = self.scheduler.poll() {
            if let Decision::Output(Output::Dispatch { batch, device, start, expected, .. }) = decision {
                // This device is twice as slow as the profile says.
                self.running.push((start.max(now) + expected + expected, device, batch));
            }
        }
    }

    /// Lets time pass.
    fn until(&mut self, now: Time) {
        while let Some(place) = self.running.iter().position(|(end, ..)| *end <= now) {
            let (end, device, batch) = self.running.remove(place);
            self.scheduler.apply(end, Input::Completion { device, batch });
            self.poll(end);
        }
    }

    fn ask(&mut self, now: u64, number: u64, budget: u64, id: &str, trace: Option<Trace>) {
        self.until(at(now));
        let request = RequestId(number);
        if !id.is_empty() || trace.is_some() {
            let came = RequestInput::Came { request, model: 0, id: id.to_owned(), trace };
            self.requests.apply(at(now), came).unwrap();
        }
        let (deadline, queue_expiry) = (at(now + budget), Time::MAX);
        let request = Request { id: request, model: MODEL, deadline, queue_expiry, level: 0, size: 1 };
        self.scheduler.apply(at(now), Input::Request(request));
        self.poll(at(now));
    }

    fn write(mut self, folder: &Path) {
        self.until(at(10_000));
        self.take();
        std::fs::write(folder.join("scheduler.log"), &self.logs[0]).unwrap();
        std::fs::write(folder.join("requests.log"), &self.logs[1]).unwrap();
    }
}

/// Four requests of which the second and the third are late, in a log of several blocks.
fn late() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(DropPolicy::None);
    server.ask(1_000, 1, 50, "first", None);
    server.take();
    server.ask(1_002, 2, 20, "second", TRACE.parse().ok());
    server.ask(1_003, 3, 21, "twice", None);
    server.take();
    server.ask(5_000, 4, 50, "twice", None);
    server.write(folder.path());
    folder
}

fn why(folder: &Path, asked: &Asked) -> Result<Story, NotFound> {
    LogFolder::open(folder).unwrap().why(asked, None)
}

fn id(id: &str) -> Asked {
    Asked::Id(id.to_owned())
}

#[test]
fn a_late_request_has_a_story() {
    let folder = late();
    let story = why(folder.path(), &id("second")).unwrap();
    // The first batch runs from 1,000 to 1,012 ms. The second batch has two items: 7 ms by the
    // profile, 14 ms on this device. It ends at 1,026 ms.
    assert_eq!((story.outcome, story.arrival.model.as_str()), (Outcome::Late, "encoder [1,128]"));
    assert_eq!((story.arrival.budget_ms, story.took_ms, story.late_ms), (Some(20.0), Some(24.0), Some(4.0)));
    let batch = story.batch.as_ref().unwrap();
    assert_eq!((batch.requests, batch.items, batch.left_after_ms), (2, 2, 10.0));
    assert_eq!((batch.bound.as_deref(), batch.expected_ms, batch.took_ms), (Some("device"), Some(7.0), Some(14.0)));
    let text = story.to_string();
    for part in [
        format!("Request r2 (id \"second\", trace {TRACE}) for encoder [1,128] came at 2026-11-28T14:05:01.002000Z"),
        "with 1 item and had 20.0 ms.".to_owned(),
        "No request waited before it; there ran 1 batch of encoder [1,128], the first of them for another 10.0 ms."
            .to_owned(),
        "After 10.0 ms batch b1 took it to d0, with 1 other request and 2 items in all".to_owned(),
        "The batch took 14.0 ms; its profile says 7.00 ms.".to_owned(),
        "It was done 24.0 ms after its arrival: 4.00 ms late.".to_owned(),
        "a deadline 4.00 ms later (24.0 ms in all), with the same decisions".to_owned(),
    ] {
        assert!(text.contains(&part), "{part}\n\n{text}");
    }
}

#[test]
fn a_trace_and_a_number_and_a_time_find_the_same_request() {
    let folder = late();
    let second = why(folder.path(), &id("second")).unwrap();
    let trace = why(folder.path(), &Asked::Trace(TRACE.parse().unwrap())).unwrap();
    let number = why(folder.path(), &Asked::Number(RequestId(2))).unwrap();
    let time = why(folder.path(), &Asked::Time(at(900))).unwrap();
    assert_eq!(
        (&trace.arrival.request, &number.arrival.request, &time.arrival.request),
        (&second.arrival.request, &second.arrival.request, &second.arrival.request)
    );
    assert_eq!(time.span, Some((3, 2)), "three requests came in that second, and two were late");
    assert!(time.to_string().starts_with("In the second from that time on came 3 requests; 2 got no answer in time."));
}

#[test]
fn of_several_requests_with_one_id_the_last_is_told() {
    let folder = late();
    let story = why(folder.path(), &id("twice")).unwrap();
    assert_eq!((story.arrival.request.as_str(), story.outcome, story.others), ("r4", Outcome::InTime, 1));
    assert!(story.to_string().ends_with(" One earlier request has this id too."), "{story}");
    assert_eq!(story.remedies, [], "nothing was amiss");
}

#[test]
fn a_name_that_the_log_does_not_have_is_an_error() {
    let folder = late();
    let error = |asked| why(folder.path(), &asked).unwrap_err().to_string();
    assert_eq!(error(id("third")), "the log has no request with the id \"third\"");
    // A part of an id is no id.
    assert_eq!(error(id("secon")), "the log has no request with the id \"secon\"");
    assert_eq!(error(Asked::Number(RequestId(77))), "the log has no request with the number r77");
    assert_eq!(error(Asked::Time(at(3_000))), "no request came in the 1 s from that time on");
    let folder = LogFolder::open(folder.path()).unwrap();
    let of = folder.why(&id("second"), Some("digits")).unwrap_err().to_string();
    assert_eq!(of, "the log has no request with the id \"second\" of model 'digits'");
    assert!(folder.why(&id("second"), Some("encoder")).is_ok());
}

/// A dropped request needs a later deadline, or a device more: a replay says so.
#[test]
fn one_device_more_is_a_replay() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(DropPolicy::HeadDrop);
    for burst in 0..20 {
        for place in 0..2 {
            let number = 2 * burst + place;
            server.ask(1_000 + 100 * burst + place, number, 14, &format!("id {number}"), None);
        }
    }
    server.write(folder.path());
    // The first batch of a burst takes 12 ms, twice as long as its profile says. At its end the second
    // request has 3 ms left.
    let story = why(folder.path(), &id("id 39")).unwrap();
    assert_eq!(story.outcome, Outcome::DeadlineHopeless, "{story}");
    assert_eq!(story.because.as_deref(), Some("alone on an idle device it needs 6.00 ms, and 3.00 ms were left"));
    assert!(
        story.remedies.iter().any(|remedy| matches!(
            remedy,
            Remedy::LaterDeadline { by_ms, slo_ms, is_least: true } if (*by_ms, *slo_ms) == (3.0, 17.0)
        )),
        "{story}"
    );
    let more = story.remedies.iter().find_map(|remedy| match remedy {
        Remedy::MoreDevices(more) => Some(more),
        _ => None,
    });
    let more = more.unwrap();
    assert_eq!((more.devices, more.saves), (1, Some(true)), "{story}");
    assert!(more.bad_with_one_more < more.bad_as_it_was, "{story}");
}

/// A request that was refused before any queue is in `requests.log` alone.
#[test]
fn a_refused_request_has_the_error_of_its_client() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(DropPolicy::None);
    server.ask(1_000, 1, 50, "", None);
    let (request, id) = (RequestId(2), "\"quoted\"\n".to_owned());
    server.requests.apply(at(1_001), RequestInput::Came { request, model: 0, id: id.clone(), trace: None }).unwrap();
    let error = "model 'encoder': all devices are busy for 30 ms".to_owned();
    let failed = RequestInput::Failed {
        request,
        model: 0,
        items: 3,
        arrived: at(1_001),
        deadline: at(1_011),
        failure: Failure::Deadline,
        error: error.clone(),
    };
    server.requests.apply(at(1_002), failed).unwrap();
    server.write(folder.path());
    let story = why(folder.path(), &Asked::Id(id)).unwrap();
    assert_eq!(
        (story.outcome, story.arrival.items, story.arrival.budget_ms),
        (Outcome::DeadlineImpossible, 3, Some(10.0))
    );
    assert_eq!(story.because, Some(error));
    assert!(story.to_string().contains(r#"(id "\"quoted\"\n")"#), "the id is escaped: {story}");
}

/// The server writes while the log is read: the last block may be cut anywhere.
#[test]
fn a_log_that_is_being_written_is_read_up_to_its_end() {
    let folder = late();
    let file = folder.path().join("scheduler.log");
    let whole = std::fs::read(&file).unwrap();
    for length in (1..40).map(|cut| whole.len() - cut) {
        std::fs::write(&file, &whole[..length]).unwrap();
        assert_eq!(why(folder.path(), &id("second")).unwrap().outcome, Outcome::Late, "{length} bytes");
    }
    std::fs::write(&file, &whole[..2]).unwrap();
    assert!(LogFolder::open(folder.path()).unwrap_err().to_string().contains("not a decision log"));
}

#[test]
fn a_window_has_the_requests_of_its_span() {
    let folder = late();
    let folder = LogFolder::open(folder.path()).unwrap();
    let span = folder.span().unwrap();
    assert!(span.until >= at(5_000), "{span:?}");
    assert_eq!(folder.instant(ZERO + 1_000_000_000), Some(at(1_000)));
    let window = Window::read(&folder, Span { from: at(4_000), until: at(6_000) }).unwrap();
    let last = window.requests.last().unwrap();
    assert_eq!(
        (last.id.as_deref(), last.queue.as_str()),
        (Some("twice"), "encoder [1,128]"),
        "the name came long before"
    );
}

/// A file of the folder may be damaged, or no log at all: the answer is a story or an error.
#[test]
fn a_damaged_log_does_no_harm() {
    let folder = late();
    let mut random = 1u64;
    let mut draw = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    for name in ["scheduler.log", "requests.log"] {
        let file = folder.path().join(name);
        let whole = std::fs::read(&file).unwrap();
        let (mut told, mut refused) = (0, 0);
        for _ in 0..300 {
            let mut damaged = whole.clone();
            for _ in 0..=draw(3) {
                // Behind the options of the model, which the replay takes as they are.
                damaged[whole.len() / 2 + draw(whole.len() / 2)] = draw(256) as u8;
            }
            std::fs::write(&file, &damaged).unwrap();
            let Ok(folder) = LogFolder::open(folder.path()) else { continue };
            for asked in [id("second"), id("twice"), Asked::Time(at(900)), Asked::Number(RequestId(2))] {
                match folder.why(&asked, None) {
                    Ok(story) => told += usize::from(!story.to_string().is_empty()),
                    Err(error) => refused += usize::from(!error.to_string().is_empty()),
                }
            }
            let _ = folder.span();
        }
        assert!(told > 0 && refused > 0, "{told} stories and {refused} errors");
        std::fs::write(&file, &whole).unwrap();
    }
}

/// A log that goes on in further files, of which the first is gone.
#[test]
fn a_further_file_can_be_read_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(DropPolicy::None);
    server.ask(1_000, 1, 50, "first", None);
    server.until(at(2_000));
    server.take();
    let mut further = [Vec::new(), Vec::new()];
    server.scheduler.begin_file(ZERO, &mut further[0]);
    server.requests.begin_file(ZERO, &mut further[1]);
    let before = std::mem::replace(&mut server.logs, further);
    server.ask(3_000, 2, 10, "second", None);
    server.write(folder.path());
    let story = why(folder.path(), &id("second")).unwrap();
    assert_eq!((story.outcome, story.arrival.model.as_str()), (Outcome::Late, "encoder [1,128]"));
    assert!(why(folder.path(), &id("first")).is_err(), "that file is gone");
    let file = folder.path().join("scheduler.log");
    let error = downbeat_core::journal::replay(&std::fs::read(&file).unwrap()).unwrap_err().to_string();
    assert!(error.starts_with("the begin of the log is gone"), "{error}");
    // With the file before, the log is whole.
    for (name, bytes) in ["scheduler", "requests"].iter().zip(&before) {
        std::fs::write(folder.path().join(format!("{name}.000001.log")), bytes).unwrap();
    }
    let whole = downbeat_sim::what_if::whole_log(&file).unwrap();
    let replayed = downbeat_core::journal::replay(&whole).unwrap();
    assert_eq!((replayed.divergence, replayed.inputs), (None, 7), "the setup of the further file is no input");
    assert_eq!(why(folder.path(), &id("first")).unwrap().outcome, Outcome::InTime);
    assert_eq!(why(folder.path(), &id("second")).unwrap().outcome, Outcome::Late);
}
