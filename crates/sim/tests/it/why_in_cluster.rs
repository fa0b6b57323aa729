//! The story of a request by the log of a frontend of a cluster, which has no scheduler.

use downbeat_core::journal::Journal;
use downbeat_core::journal::requests::{Failure, RequestBook, RequestInput, Way, WayClaim, WayRun};
use downbeat_core::{Duration, RequestId, Time};
use downbeat_sim::why::{Asked, ClusterStory, LogFolder, NotFound};

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn came(request: u64, id: &str) -> RequestInput {
    RequestInput::Came { request: RequestId(request), model: 0, id: id.to_owned(), trace: None }
}

/// A request that arrived at `ms`, with 50 ms, and ran on the second try.
fn went(request: u64, ms: u64) -> RequestInput {
    let claim = WayClaim { backend: "east".to_owned(), epoch: 3, rank: 1, batch: 7, at: at(ms + 10) };
    let run = WayRun { device: 2, items: 8, began: at(ms + 12), ended: at(ms + 42) };
    let (arrived, deadline) = (at(ms), at(ms + 50));
    let way = Way { items: 2, arrived, deadline, returned: 1, lost: 0, claim: Some(claim), run: Some(run) };
    RequestInput::Went { request: RequestId(request), model: 0, way }
}

/// A log with these records, each in a block of its own.
fn folder(records: Vec<(u64, RequestInput)>) -> tempfile::TempDir {
    let (mut book, mut log) = (Journal::on(RequestBook::default()), Vec::new());
    book.apply(at(0), RequestInput::Model(0, "ocr".to_owned())).unwrap();
    for (ms, record) in records {
        book.apply(at(ms), record).unwrap();
        book.take_log_at(0, &mut log);
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("requests.log"), log).unwrap();
    folder
}

fn why(folder: &tempfile::TempDir, asked: Asked) -> Result<ClusterStory, NotFound> {
    let folder = LogFolder::open(folder.path()).unwrap();
    assert!(folder.is_of_frontend());
    folder.why_in_cluster(&asked, None)
}

#[test]
fn a_story_has_the_batch_and_the_phases() {
    let folder = folder(vec![(1_000, came(4, "scan-9")), (1_005, came(5, "other")), (1_043, went(4, 1_000))]);
    let story = why(&folder, Asked::Id("scan-9".to_owned())).unwrap();
    let phases = [story.queue_ms, story.fetch_ms, story.device_ms, story.answer_ms];
    assert_eq!(phases, [Some(10.0), Some(2.0), Some(30.0), Some(1.0)]);
    assert_eq!(
        (story.took_ms, story.late_ms, story.arrival.budget_ms, story.arrival.items),
        (Some(43.0), None, Some(50.0), 2)
    );
    assert_eq!(
        story.to_string(),
        "Request r4 (id \"scan-9\") for ocr came at 1000.000 ms of the log with 2 items and had 50.0 ms. It came back 1 \
         time without a run. It waited 10.0 ms until batch 3.1.7 of backend \"east\" claimed it, which scheduler 1 had \
         planned in epoch 3. The run began 2.00 ms later, as the inputs were there and the device was free. 8 items ran \
         for 30.0 ms on device 2, and the answer came 1.00 ms after that. It was done 43.0 ms after its arrival, in time."
    );
    assert_eq!(why(&folder, Asked::Number(RequestId(4))).unwrap(), story);
    let open = why(&folder, Asked::Id("other".to_owned())).unwrap().to_string();
    assert!(open.contains("The log has no end of it"), "{open}");
    assert!(matches!(why(&folder, Asked::Id("nobody".to_owned())), Err(NotFound::Nothing(_))));
    assert!(matches!(why(&folder, Asked::Number(RequestId(9))), Err(NotFound::Nothing(_))));
}

#[test]
fn a_time_finds_the_first_bad_request() {
    let (arrived, deadline, error) = (at(2_100), at(2_200), "model 'ocr': no backend has it".to_owned());
    let (request, failure) = (RequestId(8), Failure::Unavailable);
    let failed = RequestInput::Failed { request, model: 0, items: 1, arrived, deadline, failure, error: error.clone() };
    let late = went(9, 2_300);
    let folder = folder(vec![(2_043, went(7, 2_000)), (2_150, failed), (2_400, late), (4_043, went(10, 4_000))]);
    let story = why(&folder, Asked::Time(at(1_900))).unwrap();
    assert_eq!((&*story.arrival.request, story.error), ("r8", Some(error)));
    let story = why(&folder, Asked::Time(at(2_200))).unwrap();
    assert_eq!((&*story.arrival.request, story.late_ms), ("r9", Some(50.0)));
    // None was bad: the first one.
    assert_eq!(why(&folder, Asked::Time(at(3_900))).unwrap().arrival.request, "r10");
    assert!(matches!(why(&folder, Asked::Time(at(5_500))), Err(NotFound::Quiet(..))));
}
