//! `downbeat-lab slots`.

use std::path::Path;

use downbeat::profile::share_report::{MeasuredOn, ShareReport};
use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, Request, Scheduler};
use downbeat_core::journal::Journal;
use downbeat_core::journal::cluster::Input;
use downbeat_core::{DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_models::measure::share_profiler::ShareMeasurement;
use serde_json::Value;

use crate::commands::{run, stderr, stdout};

/// Models of an emulated device, with measurements on each fifth of it.
struct Measured {
    folder: tempfile::TempDir,
}

impl Measured {
    /// Each takes 30 ms and 10 ms an item on its knee or more.
    fn new(knees: &[(&str, f64)]) -> Self {
        let measured = Measured { folder: tempfile::tempdir().unwrap() };
        for (name, knee) in knees {
            measured.keep(name, *knee, 20);
        }
        measured
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn file(&self, name: &str) -> String {
        self.path(&format!("{name}.json"))
    }

    fn keep(&self, name: &str, knee: f64, step: u32) {
        let of = |units: u32, batch: u32| {
            let times = (knee * 100.0 / f64::from(units)).max(1.0);
            let ns = (f64::from(30 + 10 * batch) * times * 1e6) as u64;
            let (median_ns, p95_ns, host_ns) = (ns, ns, ns);
            let (segments_ns, by_device) = (Vec::new(), false);
            ShareMeasurement { units: Some(units), batch, runs: 3, median_ns, p95_ns, segments_ns, host_ns, by_device }
        };
        let units = (1..=100 / step).map(|n| n * step);
        let report = ShareReport {
            model: name.to_owned(),
            version: 1,
            on: MeasuredOn { engine: "emulated".to_owned(), device: "emulated".to_owned(), threads: 1 },
            item_bytes: [4, 4],
            conditions: String::new(),
            device: None,
            segments: Vec::new(),
            knees: Vec::new(),
            measurements: units.flat_map(|units| [1, 4, 16].map(|batch| of(units, batch))).collect(),
        };
        std::fs::write(self.file(name), serde_json::to_string(&report).unwrap()).unwrap();
    }

    /// Plans for models of these names; further arguments follow the first flag.
    fn plan(&self, arguments: &[&str]) -> std::process::Output {
        let names = arguments.iter().take_while(|argument| !argument.starts_with("--")).count();
        let files: Vec<String> = arguments[..names].iter().map(|name| self.file(name)).collect();
        let files: Vec<&str> = files.iter().map(|file| &**file).collect();
        run(&[&["slots"][..], &files, &arguments[names..], &["--requests", "400"]].concat())
    }
}

#[test]
fn models_with_a_knee_of_half_a_device_get_halves_that_both_run_on() {
    let measured = Measured::new(&[("a", 0.5), ("b.c", 0.5)]);
    let file = measured.path("slots.toml");
    // The device has fifths, not halves.
    measured.keep("a", 0.5, 50);
    measured.keep("b.c", 0.5, 50);
    let arguments = ["a", "b.c", "--slo-ms", "160", "--rate", "30,a=60", "--policy", "deferred", "--toml", &file];
    let output = measured.plan(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let (said, written) = (stdout(&output), std::fs::read_to_string(&file).unwrap());
    assert!(said.contains("| 50% + 50%") && said.contains("Whole devices hold ") && said.ends_with(&written), "{said}");
    let options = downbeat::options_of_text(&format!("repository = \"m\"\nengine = \"emulated\"\n{written}"));
    let options = options.unwrap();
    assert_eq!(options.device.partitions, ["50%", "50%"]);
    let on = |name: &str| options.models[name].partitions.clone();
    assert_eq!((on("a"), on("b.c")), (Some(vec![0, 1]), Some(vec![0, 1])));
    let report: Value = serde_json::from_slice(&measured.plan(&[&arguments[..], &["--json"]].concat()).stdout).unwrap();
    assert!(report["divided"].as_f64() > report["whole"].as_f64(), "{report}");
    assert_eq!((&report["rate"], &report["partitions"][1]), (&90.0.into(), &"50%".into()));
}

#[test]
fn devices_stay_whole_where_no_division_is_better() {
    let measured = Measured::new(&[("a", 1.0)]);
    let file = measured.path("slots.toml");
    let output = measured.plan(&["a", "--slo-ms", "200", "--rate", "30", "--devices", "2", "--toml", &file]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = stdout(&output);
    assert!(said.contains("Leave the devices whole: name no partitions") && !said.contains("[device]"), "{said}");
    assert!(!Path::new(&file).exists());
}

#[test]
fn slos_and_rates_come_from_a_decision_log_where_they_are_not_given() {
    let measured = Measured::new(&[("a", 0.4)]);
    let mut journal = Journal::on(Scheduler::new());
    let at = |ms| Time::ZERO + Duration::from_millis(ms);
    journal.apply(at(0), Input::AddDevice(DeviceKind(0)));
    let profile = LatencyProfile::linear_ms(1.0, 5.0, 8).unwrap();
    let options = ModelOptions::new(profile, DispatchPolicy::Eager, DropPolicy::HeadDrop);
    journal.apply(at(0), Input::AddModel(ModelId(0), Box::new(options)));
    for id in 0..=100 {
        let (model, deadline) = (ModelId(0), at(1_000 + 20 * id + 170));
        let request = Request { id: RequestId(id), model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
        journal.apply(at(1_000 + 20 * id), Input::Request(request));
    }
    let (mut log, folder) = (Vec::new(), measured.path("shard-0.log"));
    journal.take_log(&mut log);
    std::fs::write(&folder, log).unwrap();
    let plan = |more: &[&str]| measured.plan(&[&["a", "--log", &folder, "--json"], more].concat());
    let report: Value = serde_json::from_slice(&plan(&["--as", "a=m0"]).stdout).unwrap();
    let model = &report["models"][0];
    assert_eq!((&model["slo_ms"], &model["rate"]), (&170.0.into(), &50.5.into()));
    let unknown = stderr(&plan(&["--as", "a=m7"]));
    assert!(
        unknown.contains("--as a=m7: the log has no requests of a model m7; models with requests are m0"),
        "{unknown}"
    );
    let nameless = stderr(&plan(&[]));
    assert!(nameless.contains("of 'a' --slo-ms is missing: give --slo-ms a=MS, or --log and --as a=ID"), "{nameless}");
}

#[test]
fn what_cannot_be_planned_is_said_with_what_to_do() {
    let measured = Measured::new(&[("a", 0.5), ("b", 0.5)]);
    measured.keep("b", 0.5, 25);
    let refused = |arguments: &[&str], code: i32, expected: &str| {
        let output = measured.plan(arguments);
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
        assert_eq!(output.status.code(), Some(code), "{}", stdout(&output));
    };
    let given = ["--slo-ms", "160", "--rate", "30"];
    let with = |models: &[&'static str]| [models, &given].concat();
    refused(&with(&["nobody"]), 1, "cannot read ");
    refused(&with(&["a", "a"]), 1, "'a' is named twice");
    refused(
        &with(&["a", "b"]),
        1,
        "measured with emulated on 100 units in steps of 20, 'b' with emulated on 100 in steps of 25; measure both",
    );
    refused(
        &["a", "--slo-ms", "30", "--rate", "1"],
        1,
        "'a' takes 40 ms for one request on a whole device, and its SLO is 30 ms",
    );
    refused(&["a", "--slo-ms", "160"], 1, "of 'a' --rate is missing: give --rate a=RATE");
    refused(&["a", "--slo-ms", "c=160", "--rate", "1"], 1, "'c' is none of the models that are to be planned for: a");
    refused(&["a", "--slo-ms", "x"], 2, "'x' is neither NUMBER nor MODEL=NUMBER with a number above 0");
    refused(&["a", "--as", "a"], 2, "'a' is no MODEL=ID, such as resnet=m0");
    refused(&[&with(&["a"])[..], &["--policy", "clockwork"]].concat(), 1, "--policy: unknown policy 'clockwork'");
    refused(&[], 2, "<REPORT.json>");
}
