//! `downbeat log`.

use std::path::Path;

use downbeat_core::cluster::*;
use downbeat_core::journal::Journal;
use downbeat_core::journal::cluster::{Decision, Input};
use downbeat_core::{DeviceKind, DeviceProfiles, Duration, LatencyProfile, ModelId, RequestId, Time};

use crate::command_line::{run, stderr, stdout};

fn at(ms: f64) -> Time {
    Time::ZERO + Duration::from_millis_f64(ms)
}

/// Two kinds of devices, a network, and each sort of decision.
fn log() -> Vec<u8> {
    let mut journal = Journal::on(Scheduler::new());
    let profile = |alpha, beta| LatencyProfile::linear_ms(alpha, beta, 16).unwrap();
    let kinds = [(DeviceKind(0), profile(1.0, 5.0)), (DeviceKind(1), profile(2.0, 20.0))];
    let options = |profiles: DeviceProfiles, dispatch| ModelOptions {
        profiles,
        max_batch: 4,
        drop: DropPolicy::WindowDrop,
        dispatch,
        max_in_flight: u32::MAX,
        shares_limit: None,
        max_wait: Duration::MAX,
        levels: Vec::new(),
    };
    let [control, data, reply] = [0.2, 0.1, 1.0].map(Duration::from_millis_f64);
    let m0 = options(DeviceProfiles::by_kind(kinds).unwrap(), DispatchPolicy::Deferred);
    let m1 = options(profile(2.0, 8.0).into(), DispatchPolicy::Eager);
    for input in [
        Input::AddDevice(DeviceKind(0)),
        Input::SetNetwork(NetworkBudget { control, data, reply }),
        Input::AddModel(ModelId(0), Box::new(m0)),
        Input::AddModel(ModelId(1), Box::new(m1)),
    ] {
        journal.apply(at(0.0), input);
    }
    let request = |id, model, deadline| {
        let (id, model, deadline) = (RequestId(id), ModelId(model), at(deadline));
        Input::Request(Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 })
    };
    let mut batches = Vec::new();
    for (now, input) in [
        (1.0, Some(request(1, 0, 13.0))),
        (2.0, Some(request(2, 0, 14.0))),
        (3.0, Some(request(3, 0, 6.0))),
        (3.6, Some(Input::Timeout)),
        (4.6, Some(Input::Timeout)),
        (5.0, Some(request(4, 1, 90.0))),
        (5.0, Some(request(5, 0, 17.0))),
        (11.6, Some(Input::Timeout)),
        (12.0, None),
        (13.0, Some(Input::AddDevice(DeviceKind(1)))),
        (14.0, Some(Input::RemoveModel(ModelId(0)))),
    ] {
        let input = input.unwrap_or_else(|| {
            let (device, batch) = batches.remove(0);
            Input::Completion { device, batch }
        });
        journal.apply(at(now), input);
        while let Some(decision) = journal.poll() {
            if let Decision::Output(Output::Dispatch { batch, device, .. }) = decision {
                batches.push((device, batch));
            }
        }
    }
    let mut log = Vec::new();
    journal.take_log(&mut log);
    log
}

fn in_file(log: &[u8], test: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("decisions.dblog");
    std::fs::write(&file, log).unwrap();
    test(&file);
}

#[test]
fn a_log_is_shown_with_the_reasons() {
    in_file(&log(), |file| {
        let output = run(&["log", "show", file.to_str().unwrap()]);
        assert_eq!(stderr(&output), "");
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/log_command.txt");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(golden, stdout(&output)).unwrap();
        }
        assert_eq!(stdout(&output), std::fs::read_to_string(golden).unwrap());
    });
}

#[test]
fn a_log_plays_again() {
    in_file(&log(), |file| {
        let output = run(&["log", "replay", file.to_str().unwrap()]);
        assert_eq!(stderr(&output), "");
        assert!(stdout(&output).ends_with(" decisions again\n"), "{}", stdout(&output));
        assert_eq!(output.status.code(), Some(0));
    });
}

#[test]
fn what_is_no_log_is_said_so() {
    in_file(b"max_batch_size: 8\n", |file| {
        for command in ["show", "replay"] {
            let output = run(&["log", command, file.to_str().unwrap()]);
            let said = stderr(&output).replace(file.to_str().unwrap(), "FILE");
            assert_eq!(said, "downbeat: FILE: not a decision log: it does not begin with 'DBLOG'\n");
            assert_eq!(output.status.code(), Some(1));
        }
    });
}

#[test]
fn a_device_log_that_was_cut_off_is_shown_up_to_there() {
    let head = r#"{"at":0,"begin":"device 0"}"#;
    let log = format!("{head}\n{{\"at\":5,\"told\":\"timeout\"}}\n{{\"at\":6,\"inp");
    in_file(log.as_bytes(), |file| {
        let output = run(&["log", "show", file.to_str().unwrap()]);
        assert_eq!((stderr(&output).as_str(), output.status.code()), ("", Some(0)));
        assert_eq!(stdout(&output).lines().count(), 2, "{}", stdout(&output));
    });
    in_file(format!("{head}\n{{\"at\":6,\"inp\n").as_bytes(), |file| {
        let output = run(&["log", "show", file.to_str().unwrap()]);
        assert!(stderr(&output).contains("line 2: "), "damage is told from a cut: {}", stderr(&output));
        assert_eq!(output.status.code(), Some(1));
    });
}

#[test]
fn a_device_log_is_played_again() {
    let told = r#"{"at":5,"told":{"model":[0,null]}}"#;
    let log = format!("{{\"at\":0,\"begin\":\"device 0\"}}\n{told}\n");
    in_file(log.as_bytes(), |file| {
        let output = run(&["log", "replay", file.to_str().unwrap()]);
        assert_eq!(stdout(&output), "1 inputs give the same 0 decisions again\n");
        assert_eq!(output.status.code(), Some(0));
    });
    let other = format!("{log}{{\"at\":5,\"refused\":\"so\"}}\n");
    in_file(other.as_bytes(), |file| {
        let output = run(&["log", "replay", file.to_str().unwrap()]);
        let said = stdout(&output);
        assert!(
            said.contains("after 1 inputs and 0 decisions the log and its replay part\nline 3 of the log:"),
            "{said}"
        );
        assert!(said.ends_with("-> refused: so\nreplay: nothing\n"), "{said}");
        assert_eq!(output.status.code(), Some(1));
    });
}
