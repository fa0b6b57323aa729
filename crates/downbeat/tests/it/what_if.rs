//! `downbeat what-if` and `downbeat advise`.

use std::path::Path;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, Output, Request, Scheduler};
use downbeat_core::journal::cluster::{Decision, Input};
use downbeat_core::journal::{Journal, QueueName};
use downbeat_core::{DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};

use crate::command_line::{run, stderr, stdout};

/// Requests, one every 10 ms, of a model that takes 6 ms alone, on two devices.
fn log(requests: u64) -> Vec<u8> {
    named(requests, None)
}

/// As [`log`], with this name of the model.
fn named(requests: u64, name: Option<&str>) -> Vec<u8> {
    let mut journal = Journal::on(Scheduler::new());
    let at = |ms| Time::ZERO + Duration::from_millis(ms);
    let profile = LatencyProfile::linear_ms(1.0, 5.0, 8).unwrap();
    let options = ModelOptions::new(profile, DispatchPolicy::Eager, DropPolicy::HeadDrop);
    for input in [Input::AddDevice(DeviceKind(0)), Input::AddDevice(DeviceKind(0))] {
        journal.apply(at(0), input);
    }
    journal.apply(at(0), Input::AddModel(ModelId(0), Box::new(options)));
    if let Some(name) = name {
        let name = QueueName { model: name.to_owned(), version: "1".to_owned(), shape: String::new(), is_lent: false };
        journal.apply(at(0), Input::Name(ModelId(0), Box::new(name)));
    }
    for id in 0..requests {
        let now = at(1_000 + 10 * id);
        let deadline = now + Duration::from_millis(20);
        let (id, model) = (RequestId(id), ModelId(0));
        let request = Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
        journal.apply(now, Input::Request(request));
        while let Some(decision) = journal.poll() {
            if let Decision::Output(Output::Dispatch { batch, device, expected, .. }) = decision {
                journal.apply(now + expected, Input::Completion { device, batch });
            }
        }
    }
    let mut log = Vec::new();
    journal.take_log(&mut log);
    log
}

/// The folder of a server's log.
fn in_folder(log: &[u8], test: impl FnOnce(&Path, &str)) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("shard-0.log"), log).unwrap();
    std::fs::write(folder.path().join("device-0.log"), b"DBLOG\x05\x03\0").unwrap();
    test(folder.path(), folder.path().to_str().unwrap());
}

#[test]
fn settings_stand_beside_what_happened() {
    in_folder(&log(50), |folder, logs| {
        let html = folder.join("page.html");
        let settings = ["--devices=1,2", "--policy=eager+head,deferred", "--rate=4"];
        let more = ["--json", "--html", html.to_str().unwrap()];
        let output = run(&[&["what-if", logs][..], &settings, &more].concat());
        assert_eq!(stderr(&output), "");
        let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        let rows = report["rows"].as_array().unwrap();
        let of = |row: &serde_json::Value| format!("{} {} {}", row["source"], row["policy"], row["devices"]);
        assert_eq!(rows.len(), 5);
        assert_eq!(of(&rows[0]), r#""log" "as recorded" 2"#);
        assert_eq!(of(&rows[2]), r#""simulated" "eager+head" 2"#);
        assert_eq!((&rows[0]["all"]["in_time"], &rows[0]["all"]["attainment"]), (&50.into(), &1.0.into()));
        assert!(rows[1]["busy"].as_f64() > rows[2]["busy"].as_f64(), "one device is busier than two");
        let page = std::fs::read_to_string(&html).unwrap();
        assert!(page.contains("eager+head") && page.contains("as recorded"), "{page}");

        let output = run(&["what-if", logs, "--rates=0.5,1,40", "--json"]);
        let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        let of = |row: &serde_json::Value| (row["rate"].as_f64().unwrap(), row["all"]["attainment"].as_f64().unwrap());
        let curve: Vec<(f64, f64)> = report["rows"].as_array().unwrap().iter().skip(1).map(of).collect();
        assert_eq!(curve[..2], [(0.5, 1.0), (1.0, 1.0)]);
        assert!(curve[2].0 == 40.0 && curve[2].1 < 0.9, "{curve:?}");
        let output = run(&["what-if", logs, "--rates=1,0"]);
        assert!(stderr(&output).contains("--rates is 0; the rate must be from 0.001 to 1000"));

        let output = run(&["what-if", logs, "--slo-ms=m0=5"]);
        assert!(
            stdout(&output).contains("| simulated   | as recorded |       2 |    1 | all   |       50 |   0.00% |")
        );
        let several = ["--rates=1,4,8", "--devices=1,2", "--html", html.to_str().unwrap()];
        let output = run(&[&["what-if", logs][..], &several].concat());
        assert_eq!(stdout(&output).matches("| simulated ").count(), 6, "{}", stdout(&output));
        let page = std::fs::read_to_string(&html).unwrap();
        assert!(page.contains("In time, by rate") && page.contains("In time, by devices"), "{page}");
    });
}

#[test]
fn the_cheapest_setting_is_told() {
    in_folder(&log(50), |_, logs| {
        let output = run(&["advise", logs, "--policy", "eager+head"]);
        assert_eq!(stderr(&output), "");
        let said = stdout(&output);
        let settings =
            "1 device (the log has 2) answers 99% of each model's requests in time with scheduler eager, drop head";
        assert!(said.contains(settings), "{said}");
        assert!(said.contains("95 of 100 logs like this one (50 requests in 0.5 s) would have"), "{said}");
    });
}

/// A model for `downbeat config check`.
const EMULATED: &str = "alpha_ms = 1.0\nbeta_ms = 5.0\nmax_batch = 8\n[[inputs]]\nname = \"x\"\ndatatype = \"FP32\"\ndims = [-1, 1]\n\
                        [[outputs]]\nname = \"y\"\ndatatype = \"FP32\"\ndims = [-1, 1]\n";

/// A server takes the recommended lines of each policy.
#[test]
fn the_advice_is_a_configuration_that_can_be_pasted() {
    in_folder(&named(50, Some("two words")), |folder, logs| {
        let model = folder.join("models/two words/1");
        std::fs::create_dir_all(&model).unwrap();
        std::fs::write(model.join("model.emulated.toml"), EMULATED).unwrap();
        let file = folder.join("downbeat.toml");
        let (models, config) = (folder.join("models"), file.to_str().unwrap());
        for (policy, expected) in [
            ("deferred@fair", "scheduler = \"deferred\"\n"),
            ("consolidating", "drop = \"adaptive\"\n"),
            ("latest+none", "drop = \"none\"\n"),
            ("timeout:10%", "# config.pbtxt needs: dynamic_batching { max_queue_delay_microseconds: 2000 }\n"),
        ] {
            let output =
                run(&["advise", logs, "--policy", policy, "--slo-ms", "two words=20", "--target", "0.5", "--json"]);
            let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
            let lines = report["config"].as_str().unwrap();
            assert!(lines.starts_with("devices = 1    # the log has 2"), "{policy}: {lines}");
            assert!(lines.contains("[models.\"two words\"]\n") && lines.contains(expected), "{policy}: {lines}");
            assert!(lines.ends_with("slo_ms = 20\n"), "{policy}: {lines}");
            assert_eq!(lines.contains("order = \"fair\""), policy.ends_with("@fair"), "{policy}: {lines}");
            std::fs::write(&file, lines).unwrap();
            let check = run(&["config", "check", models.to_str().unwrap(), "--engine", "emulated", "--config", config]);
            assert!(check.status.success(), "{policy}: {lines}{}{}", stdout(&check), stderr(&check));
        }
    });
}

#[test]
fn settings_are_ordered_by_the_wish() {
    in_folder(&log(50), |folder, logs| {
        let html = folder.join("advice.html");
        let best = |flags: &[&str]| {
            let output = run(&[&["advise", logs, "--json", "--html", html.to_str().unwrap()], flags].concat());
            assert_eq!(stderr(&output), "");
            let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
            (report["candidates"][0].clone(), report)
        };
        let (fewest, _) = best(&[]);
        assert_eq!(fewest["devices"], 1);
        let (quick, report) = best(&["--by", "latency"]);
        assert_eq!((&quick["devices"], &report["goal"]), (&2.into(), &"latency".into()));
        let (strong, _) = best(&["--by", "headroom", "--max-devices", "3"]);
        assert_eq!(strong["devices"], 3);
        assert!(strong["margin"].as_f64() > fewest["margin"].as_f64(), "{strong}");
        // One device runs 50 requests in 0.49 s, and an hour costs 3.60.
        let (cheap, _) = best(&["--price", "3.6"]);
        let price = cheap["price_per_million"].as_f64().unwrap();
        assert!((price - 0.49 / 50.0 * 3.6 / 3_600.0 * 1e6).abs() < 1e-6, "{price}");
        let page = std::fs::read_to_string(&html).unwrap();
        for expected in ["In time, by rate", "knee ", "In time, by devices", "price per million in time"] {
            assert!(page.contains(expected), "{expected}: {page}");
        }
        let refuses = |flags: &[&str], expected: &str| {
            let said = stderr(&run(&[&["advise", logs], flags].concat()));
            assert!(said.contains(expected), "{said}");
        };
        refuses(&["--by", "speed"], "devices, latency, headroom, price");
        refuses(&["--price", "-1"], "--price is -1; the price of an hour must be above 0");
    });
}

#[test]
fn what_cannot_be_played_is_refused() {
    let refuses = |arguments: &[&str], expected: &str| {
        for command in ["what-if", "advise"] {
            let output = run(&[&[command], arguments].concat());
            let said = stderr(&output);
            assert!(said.contains(expected) && !said.contains("panicked"), "{command} {arguments:?}: {said}");
            assert!(!output.status.success());
        }
    };
    refuses(&["no/such.log"], "downbeat: cannot read no/such.log: No such file");
    in_folder(b"max_batch_size: 8\n", |folder, logs| {
        refuses(&[logs], "shard-0.log: not a decision log: it does not begin with 'DBLOG'");
        std::fs::remove_file(folder.join("shard-0.log")).unwrap();
        refuses(&[logs], "there is no decision log in ");
    });
    in_folder(&log(2), |folder, _| {
        refuses(
            &[folder.join("device-0.log").to_str().unwrap()],
            "device-0.log is the log of a device; the command replays the requests",
        );
    });
    in_folder(&log(0), |_, logs| refuses(&[logs], "there is no request in the log"));
    in_folder(&log(2), |_, logs| {
        refuses(
            &[logs, "--slo-ms", "m7=5"],
            "--slo-ms m7: the log has no requests of a model m7; models with requests are m0",
        );
        refuses(&[logs, "--slo-ms", "m0"], "expected MODEL=MS, such as encoder=30");
        refuses(&[logs, "--slo-ms", "m0=0"], "must be more than 0");
        for rate in ["0", "-1", "nan", "inf"] {
            refuses(&[logs, "--rate", rate], "the rate must be from 0.001 to 1000");
        }
        refuses(&[logs, "--policy", "lazy"], "unknown policy 'lazy'");
        for target in ["0", "nan", "1.5"] {
            let output = run(&["advise", logs, "--target", target]);
            assert!(stderr(&output).contains("the target must be above 0 and at most 1"), "{}", stderr(&output));
        }
    });
}

#[test]
fn device_policies_need_a_log_of_devices_and_no_other_question() {
    in_folder(&log(50), |_, logs| {
        let refuses = |arguments: &[&str], expected: &str| {
            let output = run(&[&["advise", logs], arguments].concat());
            let said = stderr(&output);
            assert!(said.contains(expected) && !said.contains("panicked"), "{arguments:?}: {said}");
            assert!(!output.status.success());
        };
        refuses(&["--device-policies"], "the log has no request that can be replayed");
        refuses(&["--device-policies", "--target", "0.9"], "cannot be used with");
        refuses(&["--device-policies", "--together", "m=3"], "from 0.1 to 2");
        refuses(&["--write", "downbeat.toml"], "--device-policies");
    });
}
