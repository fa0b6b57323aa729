//! The decision log of pipelines' requests: it is read as it was written, and a damaged file does no
//! harm.

use downbeat_core::journal::cluster::ClusterRecords;
use downbeat_core::journal::pipelines::{
    End, PipelineBook, PipelineInput, PipelineRecords, PipelineSpec, StepSpec, steps_by_request,
};
use downbeat_core::journal::{Journal, LogError, MachineKind, read};
use downbeat_core::{Duration, RequestId, Time};
use proptest::prelude::*;

use crate::journal_checks::{check, does_no_harm, taken};

fn step(model: &str, after: &[u32]) -> StepSpec {
    StepSpec { model: model.to_owned(), after: after.to_vec() }
}

fn spec(is_code: bool) -> PipelineSpec {
    let steps = if is_code { Vec::new() } else { vec![step("decode", &[]), step("detect", &[0])] };
    PipelineSpec { name: "photos".to_owned(), version: "1".to_owned(), is_code, steps }
}

fn any_input() -> impl Strategy<Value = PipelineInput> {
    let request = 0..4u64;
    let end = prop::sample::select(vec![
        End::Answered,
        End::Late,
        End::Hopeless,
        End::Dropped,
        End::Full,
        End::TimedOut,
        End::Failed,
        End::Cancelled,
    ]);
    let deadline = prop_oneof![Just(Time::MAX), (0..1_000_000u64).prop_map(Time::from_nanos)];
    prop_oneof![
        (0..3u32, any::<bool>()).prop_map(|(number, code)| PipelineInput::Pipeline(number, Box::new(spec(code)))),
        (0..3u32).prop_map(|number| PipelineInput::Callee(number, step("classify", &[]))),
        (request.clone(), 0..3u32, deadline.clone(), 1..3u32, prop::option::of((0..4u64, 0..3u32))).prop_map(
            |(request, pipeline, deadline, size, within)| {
                PipelineInput::Request { request, pipeline, deadline, size, within }
            }
        ),
        (request.clone(), 0..3u32, deadline).prop_map(|(request, step, deadline)| PipelineInput::Reached {
            request,
            step,
            deadline
        }),
        (request.clone(), 0..3u32, prop::option::of(0..9u64), prop::option::of(0..1_000u64), end.clone()).prop_map(
            |(request, step, asked, began, end)| {
                let (asked, began) = (asked.map(RequestId), began.map(Time::from_nanos));
                PipelineInput::Done { request, step, asked, began, end }
            }
        ),
        (request, end, prop::option::of(0..3u32)).prop_map(|(request, end, step)| PipelineInput::End {
            request,
            end,
            step
        }),
    ]
}

proptest! {
    #[test]
    fn what_is_written_is_read_and_replays_alike(
        inputs in prop::collection::vec((0..1_000_000u64, any_input()), 1..60),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut journal = Journal::on(PipelineBook::new());
        for (at, input) in inputs {
            // Threads may write in another order than they read the clock.
            let _ = journal.apply(Time::from_nanos(at), input);
        }
        let log = taken(journal);
        check(PipelineBook::new(), &log);
        let damaged = [&log[..log.len() / 2], &bytes].concat();
        does_no_harm(&damaged);
        let _ = steps_by_request(&damaged);
    }
}

#[test]
fn requests_of_other_logs_are_named_by_their_steps() {
    let mut journal = Journal::on(PipelineBook::new());
    let at = |ms| Time::ZERO + Duration::from_millis(ms);
    let (deadline, asked) = (at(60), Some(RequestId(17)));
    for (ms, input) in [
        (0, PipelineInput::Pipeline(0, Box::new(spec(false)))),
        (0, PipelineInput::Request { request: 3, pipeline: 0, deadline, size: 1, within: None }),
        (0, PipelineInput::Reached { request: 3, step: 0, deadline }),
        (5, PipelineInput::Done { request: 3, step: 0, asked, began: Some(at(2)), end: End::Answered }),
    ] {
        journal.apply(at(ms), input).unwrap();
    }
    let log = taken(journal);
    let steps = steps_by_request(&log).unwrap();
    let named: Vec<String> = steps.iter().map(|(id, step)| format!("{id}: {step}")).collect();
    assert_eq!(named, ["r17: step 0 ('decode') of photos #3"]);
    let error = read::<ClusterRecords>(&log).map(drop).unwrap_err();
    assert_eq!(error, LogError::Machine(MachineKind::Pipelines));
    assert!(read::<PipelineRecords>(&log).is_ok());
}
