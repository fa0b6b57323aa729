//! `downbeat log pipelines`, and `log show`, `what-if` and `advise` of a log with pipelines.

use std::path::Path;

use downbeat_core::Duration;

use crate::command_line::{run, stderr, stdout};
use crate::pipeline_log::logs;

/// The folder of a log in which `detect` is short of devices.
fn in_folder(test: impl FnOnce(&Path, &str)) {
    let folder = tempfile::tempdir().unwrap();
    for (file, bytes) in logs(400, Duration::from_micros(4_500), 10) {
        std::fs::write(folder.path().join(file), bytes).unwrap();
    }
    test(folder.path(), folder.path().to_str().unwrap());
}

#[test]
fn the_view_shows_each_step_and_names_the_short_one() {
    in_folder(|folder, logs| {
        let (html, json) = (folder.join("page.html"), folder.join("view.json"));
        let more = ["--html", html.to_str().unwrap(), "--json", json.to_str().unwrap()];
        let output = run(&[&["log", "pipelines", logs][..], &more].concat());
        assert_eq!((stderr(&output).as_str(), output.status.code()), ("", Some(0)));
        let said = stdout(&output);
        assert!(said.starts_with("photos: 400 requests, "), "{said}");
        assert!(said.contains("| 0 decode |") && said.contains("| 1 detect |"), "{said}");
        assert!(said.contains("\nStep 1 ('detect') is short of devices: "), "{said}");
        let view: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        assert_eq!(view["pipelines"][0]["steps"][1]["model"], "detect");
        assert_eq!(view["pipelines"][0]["shortage"]["is_short"], true);
        assert!(std::fs::read_to_string(html).unwrap().contains("is short of devices"));
        let output = run(&["log", "pipelines", logs, "--pipeline", "fotos"]);
        assert!(stderr(&output).contains("the log has no request of a pipeline 'fotos'; it has requests of 'photos'"));
    });
}

#[test]
fn requests_are_shown_with_their_steps() {
    in_folder(|folder, _| {
        let shard = folder.join("shard-0.log");
        let output = run(&["log", "show", shard.to_str().unwrap()]);
        assert_eq!(stderr(&output), "");
        let said = stdout(&output);
        assert!(said.contains("request r0 of m0, due in 10 ms; step 0 ('decode') of photos #0\n"), "{said}");
        assert!(
            said.lines().any(|line| line.contains("-> drop ") && line.contains("; step 1 ('detect') of photos #")),
            "{said}"
        );
        let output = run(&["log", "show", "--json", shard.to_str().unwrap()]);
        let step = r#","step":{"pipeline":"photos","request":0,"step":0,"model":"decode"}}"#;
        assert!(stdout(&output).lines().any(|line| line.contains("\"told\":{\"request\"") && line.ends_with(step)));
        // A plain request has none.
        assert!(
            stdout(&output).lines().any(|line| line.contains("\"told\":{\"request\"") && !line.contains("\"step\""))
        );
        // Without the file beside it, or with a damaged one, the log is shown all the same.
        std::fs::write(folder.join("pipelines.log"), b"nothing").unwrap();
        let output = run(&["log", "show", shard.to_str().unwrap()]);
        assert!(stderr(&output).contains("Requests are shown without their steps: "), "{}", stderr(&output));
        assert!(output.status.success() && !stdout(&output).contains("photos"));
    });
}

#[test]
fn the_log_of_pipelines_is_shown_and_plays_again() {
    in_folder(|folder, _| {
        let file = folder.join("pipelines.log");
        let output = run(&["log", "show", file.to_str().unwrap()]);
        let said = stdout(&output);
        let spec = "pipeline p0: ensemble 'photos', version 1: step 0 'decode', step 1 'detect' after 0\n";
        assert!(said.contains(spec) && said.contains("  request #0 of p0, due in 40 ms\n"), "{said}");
        assert!(said.contains("  #0 is answered in step 0, as r0, where it ran for 1.5 ms\n"), "{said}");
        let output = run(&["log", "replay", file.to_str().unwrap()]);
        assert!(stdout(&output).ends_with(" inputs gives the same 0 decisions as the log\n"), "{}", stdout(&output));
    });
}

#[test]
fn what_if_and_advise_answer_for_the_whole_pipeline() {
    in_folder(|_, logs| {
        let output = run(&["what-if", logs, "--more", "detect=1", "--slo-ms", "photos=60", "--json", "-"]);
        assert_eq!(stderr(&output), "");
        let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        let rows = report["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 4, "the log, its replay, the SLO alone, and a device more");
        assert_eq!(rows[3]["setting"], "+1 for detect, photos in 60 ms");
        let share = |row: usize| rows[row]["flows"][0]["attainment"].as_f64().unwrap();
        assert!(share(3) > share(0), "{report}");
        let output = run(&["advise", logs]);
        assert_eq!(stderr(&output), "");
        assert!(
            stdout(&output).starts_with("Step 1 ('detect') of 'photos' is short of devices: "),
            "{}",
            stdout(&output)
        );
    });
}

#[test]
fn what_cannot_be_answered_is_refused() {
    let refuses = |arguments: &[&str], expected: &str| {
        let output = run(arguments);
        let said = stderr(&output);
        assert!(said.contains(expected) && !said.contains("panicked"), "{arguments:?}: {said}");
        assert!(!output.status.success(), "{arguments:?}");
    };
    in_folder(|folder, logs| {
        refuses(
            &["what-if", logs, "--slo-ms", "foto=5"],
            "--slo-ms foto: the log has no requests of 'foto'; it has requests of photos, detect",
        );
        refuses(
            &["what-if", logs, "--more", "foto=1"],
            "--more foto: no step of the log runs a model 'foto'; the models are decode, detect",
        );
        refuses(&["what-if", logs, "--more", "detect"], "expected MODEL=N, such as detect=1");
        refuses(&["what-if", logs, "--more", "detect=0"], "from 1 to 10000");
        refuses(&["what-if", logs, "--devices", "3"], "name a model with --more");
        refuses(&["what-if", logs, "--rate", "0"], "the rate must be from 0.001 to 1000");
        refuses(&["log", "pipelines", "no/such"], "there is no pipelines.log in no/such");
        let shard = folder.join("shard-0.log");
        refuses(&["log", "pipelines", shard.to_str().unwrap()], "there is no pipelines.log in ");
        let file = folder.join("pipelines.log");
        let bytes = std::fs::read(&file).unwrap();
        let damaged = [&bytes[..bytes.len() / 2], &[0xff; 64]].concat();
        std::fs::write(&file, damaged).unwrap();
        refuses(&["log", "pipelines", logs], "pipelines.log: the log is damaged after entry ");
    });
}
