//! `downbeat log`.

use std::path::Path;

use downbeat_core::cluster::*;
use downbeat_core::device::{DeviceRequest, DeviceScheduler};
use downbeat_core::journal::Journal;
use downbeat_core::journal::cluster::{Decision, Input};
use downbeat_core::journal::device::DeviceInput;
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
        assert!(stdout(&output).ends_with(" decisions as the log\n"), "{}", stdout(&output));
        assert_eq!(output.status.code(), Some(0));
    });
}

#[test]
fn what_is_no_log_is_said_so() {
    let version = "which this program cannot read: it reads version 5; use the downbeat that wrote the log";
    for (bytes, error) in [
        (&b"max_batch_size: 8\n"[..], "not a decision log: it does not begin with 'DBLOG'".to_owned()),
        (b"DBLOG\x03\0\0", format!("a decision log of version 3, {version}")),
        (
            b"{\"at\":0,\"begin\":\"device 0\"}\n",
            format!("the decision log of a device as lines of JSON, the form before version 4, {version}"),
        ),
    ] {
        in_file(bytes, |file| {
            for command in ["show", "replay"] {
                let output = run(&["log", command, file.to_str().unwrap()]);
                let said = stderr(&output).replace(file.to_str().unwrap(), "FILE");
                assert_eq!(said, format!("downbeat: FILE: {error}\n"));
                assert_eq!(output.status.code(), Some(1));
            }
        });
    }
}

/// The log of a device without models: model 0 goes, and a request for it comes.
fn device_log() -> Vec<u8> {
    let mut journal = Journal::on(DeviceScheduler::numbered(2));
    let request = DeviceRequest { id: RequestId(1), model: ModelId(0), deadline: Time::MAX, size: 1, length: 0 };
    journal.apply(at(5.0), DeviceInput::Model(ModelId(0), None)).unwrap();
    journal.apply(at(5.0), DeviceInput::Request(request)).unwrap_err();
    journal.apply(at(6.0), DeviceInput::Timeout).unwrap();
    let mut log = Vec::new();
    journal.take_log(&mut log);
    log
}

#[test]
fn a_log_is_shown_as_json() {
    let shown = |log: &[u8]| {
        let mut lines = Vec::new();
        in_file(log, |file| {
            let output = run(&["log", "show", "--json", file.to_str().unwrap()]);
            assert_eq!((stderr(&output).as_str(), output.status.code()), ("", Some(0)));
            lines = stdout(&output).lines().map(str::to_owned).collect();
        });
        lines
    };
    let expected = [
        r#"{"at":0,"begin":"device 2"}"#,
        r#"{"at":5000000,"told":{"model":[0,null]}}"#,
        r#"{"at":5000000,"told":{"request":{"id":1,"model":0,"deadline":18446744073709551615,"size":1,"length":0}}}"#,
        r#"{"at":5000000,"refused":"the device does not have model m0"}"#,
        r#"{"at":6000000,"told":"timeout"}"#,
    ];
    assert_eq!(shown(&device_log()), expected);
    let lines = shown(&log());
    let drop = lines.iter().find(|line| line.contains("{\"Drop\"")).unwrap();
    let detail = r#""detail":{"size":1,"deadline":16000000,"needed":6300000,"target":1}"#;
    let expected = format!(r#"{{"Drop":{{"request":5,"model":0,"reason":"Hopeless",{detail}}}}}"#);
    assert_eq!(drop, &format!(r#"{{"at":11600000,"decision":{{"Output":{expected}}}}}"#));
    assert!(
        lines.contains(&r#"{"at":12000000,"told":{"completion":{"device":0,"batch":0}}}"#.to_owned()),
        "{lines:#?}"
    );
}

#[test]
fn a_device_log_that_was_cut_off_is_shown_up_to_there() {
    let log = device_log();
    in_file(&log[..log.len() - 1], |file| {
        let output = run(&["log", "show", file.to_str().unwrap()]);
        assert_eq!((stderr(&output).as_str(), output.status.code()), ("", Some(0)));
        assert_eq!(stdout(&output).lines().count(), 4, "{}", stdout(&output));
    });
    let damaged = [&log[..log.len() - 5], &[0x3f, 0, 0, 0, 0]].concat();
    in_file(&damaged, |file| {
        let output = run(&["log", "show", file.to_str().unwrap()]);
        assert!(
            stderr(&output).contains("the log is damaged after entry "),
            "damage is told from a cut: {}",
            stderr(&output)
        );
        assert_eq!(output.status.code(), Some(1));
    });
}

#[test]
fn a_device_log_is_played_again() {
    let log = device_log();
    in_file(&log, |file| {
        let output = run(&["log", "replay", file.to_str().unwrap()]);
        assert_eq!(stdout(&output), "the replay of 3 inputs gives the same 1 decisions as the log\n");
        assert_eq!(output.status.code(), Some(0));
    });
    // A refusal, in words.
    let block = [b"\x43\x04\0\0\0".as_slice(), &6_000_000u64.to_le_bytes(), &[0; 8]].concat();
    let other = [&log[..], &block, b"\x41\x02so"].concat();
    in_file(&other, |file| {
        let output = run(&["log", "replay", file.to_str().unwrap()]);
        let said = stdout(&output);
        assert!(
            said.starts_with("after 3 inputs and 2 decisions the replay differs from the log\nentry 5, at 6 ms: "),
            "{said}"
        );
        assert!(said.ends_with("the log says 'refused: so', but now it is nothing\n"), "{said}");
        assert_eq!(output.status.code(), Some(1));
    });
}
