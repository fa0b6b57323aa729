//! The requests of pipelines in a decision log: where the time went, and what other settings do.

use std::path::Path;

use downbeat_core::Duration;
use downbeat_sim::what_if::pipelines::{
    BadPipelines, PipelineComparison, PipelineLog, PipelineSetting, PipelineViews, RecordedPipelines,
};

use crate::pipeline_log::logs;

fn in_folder<T>(files: &[(&str, Vec<u8>)], test: impl FnOnce(&Path) -> T) -> T {
    let name = std::thread::current().name().unwrap_or_default().replace("::", "-");
    let folder = std::env::temp_dir().join(format!("downbeat-sim-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (file, bytes) in files {
        std::fs::write(folder.join(file), bytes).unwrap();
    }
    let result = test(&folder);
    std::fs::remove_dir_all(&folder).unwrap();
    result
}

fn busy() -> [(&'static str, Vec<u8>); 2] {
    logs(600, Duration::from_micros(3_600), 0)
}

#[test]
fn the_step_that_is_short_of_devices_is_named() {
    let views = in_folder(&busy(), |folder| PipelineViews::read(folder).unwrap());
    let [photos] = &views.pipelines[..] else { panic!("{views:?}") };
    assert_eq!((photos.pipeline.as_str(), photos.requests, photos.open), ("photos", 600, 0));
    assert_eq!(photos.in_time + photos.late + photos.lost.values().sum::<u64>(), 600, "{photos:?}");
    let [decode, detect] = &photos.steps[..] else { panic!("{photos:?}") };
    assert_eq!((decode.requests, decode.model.as_str(), detect.model.as_str()), (600, "decode", "detect"));
    assert!((decode.share + detect.share - 1.0).abs() < 1e-9);
    let [idle, short] = [decode, detect].map(|step| step.devices.clone().unwrap());
    assert!(idle.load < 0.5 && short.load > 0.9 && short.places == 1, "{idle:?} {short:?}");
    let said = photos.shortage.to_string();
    assert!(said.starts_with("Step 1 ('detect') is short of devices: waiting for one takes "), "{said}");
    assert!(photos.shortage.is_short && photos.shortage.lost > 0.0, "{said}");
    let shown = views.to_string();
    assert!(shown.contains("| 1 detect |") && shown.contains(&said), "{shown}");
}

#[test]
fn no_step_is_short_of_devices_that_are_idle() {
    let files = logs(200, Duration::from_millis(30), 0);
    let views = in_folder(&files, |folder| PipelineViews::read(folder).unwrap());
    let photos = &views.pipelines[0];
    assert_eq!((photos.in_time, photos.lost.len()), (200, 0));
    assert!(!photos.shortage.is_short, "{}", photos.shortage);
    assert!(photos.shortage.to_string().starts_with("No step is short of devices: "), "{}", photos.shortage);
    let [decode, detect] = &photos.steps[..] else { panic!("{photos:?}") };
    let ran = |step: &downbeat_sim::what_if::pipelines::StepView| step.running.unwrap().p50_ms;
    assert_eq!((ran(decode), ran(detect)), (1.5, 9.0), "each request runs alone");
}

#[test]
fn a_cut_log_is_read_up_to_its_end() {
    let [scheduler, (name, bytes)] = busy();
    let whole = PipelineLog::read(&bytes).unwrap().requests.len();
    let cut = bytes[..bytes.len() / 2].to_vec();
    let views = in_folder(&[scheduler, (name, cut)], |folder| PipelineViews::read(folder).unwrap());
    let photos = &views.pipelines[0];
    assert!((photos.requests as usize) < whole && photos.open > 0, "{photos:?}");
    assert!(views.notes.iter().any(|note| note.contains("had not ended at the end of the log")), "{:?}", views.notes);
}

#[test]
fn a_log_without_pipelines_says_so() {
    let [scheduler, (name, bytes)] = logs(0, Duration::from_millis(1), 0);
    in_folder(std::slice::from_ref(&scheduler), |folder| {
        let error = PipelineViews::read(folder).unwrap_err();
        assert!(matches!(error, BadPipelines::NoFile(_)), "{error}");
    });
    in_folder(&[scheduler, (name, bytes)], |folder| {
        let error = PipelineViews::read(folder).unwrap_err();
        assert!(
            error.to_string().ends_with(
                "pipelines.log has no request: no client asked an ensemble, and no code called another model"
            ),
            "{error}"
        );
        assert!(RecordedPipelines::read(folder).unwrap_err().is_without_ensembles());
    });
    let error = in_folder(&[("pipelines.log", b"max_batch_size: 8".to_vec())], |folder| {
        PipelineViews::read(folder).unwrap_err()
    });
    let said = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_else(|| error.to_string());
    assert!(said.contains("not a decision log") || error.to_string().contains("pipelines.log"), "{error}: {said}");
}

#[test]
fn a_replay_repeats_the_log_and_answers_for_the_whole_pipeline() {
    let recorded =
        in_folder(&logs(600, Duration::from_micros(4_500), 10), |folder| RecordedPipelines::read(folder).unwrap());
    let names: Vec<&str> = recorded.flows.iter().map(|flow| flow.name.as_str()).collect();
    assert_eq!(names, ["photos", "detect"], "requests of the model itself are a pipeline of one step");
    assert_eq!(recorded.pools.iter().map(|pool| pool.devices).collect::<Vec<_>>(), [1, 1]);
    let unchanged = PipelineSetting::unchanged();
    let detect = recorded.model("detect").unwrap();
    let photos = recorded.flow("photos").unwrap();
    let settings = [
        unchanged.clone(),
        PipelineSetting { more: [(detect, 1)].into(), ..unchanged.clone() },
        PipelineSetting { more: [(recorded.model("decode").unwrap(), 1)].into(), ..unchanged.clone() },
        PipelineSetting { rate: 2.0, ..unchanged.clone() },
        PipelineSetting { slos: [(photos, Duration::from_millis(5))].into(), ..unchanged.clone() },
    ];
    let comparison = PipelineComparison::of(&recorded, &settings, 1, |_| true).unwrap();
    let share = |row: usize| comparison.rows[row].flows[photos].attainment;
    let happened = &comparison.rows[0].flows[photos];
    assert_eq!((happened.requests, comparison.rows[1].flows[photos].requests), (600, 600));
    assert!(happened.attainment < 0.95, "the log lost requests: {happened:?}");
    assert_eq!(comparison.rows[1].flows[1].requests, 60);
    assert!(
        share(2) > 0.999 && share(2) > share(3) + 0.05,
        "one device more helps only where devices are short: {comparison}"
    );
    assert!(share(4) < share(1), "twice the rate: {comparison}");
    assert_eq!(share(5), 0.0, "9 ms do not fit into 5: {comparison}");
    assert_eq!(comparison.rows[2].setting, "+1 for detect");
    for row in &comparison.rows {
        let flow = &row.flows[photos];
        let interval = flow.interval.unwrap();
        assert!(interval.low <= flow.attainment && flow.attainment <= interval.high, "{flow:?}");
    }
    assert!(comparison.to_string().contains("95% sure"), "{comparison}");
    assert_eq!(comparison.rows[2].pools.iter().map(|pool| pool.devices).collect::<Vec<_>>(), [1, 2]);
    assert!(recorded.notes.iter().any(|note| note.starts_with("Assumed: ")), "{:?}", recorded.notes);
}

#[test]
fn plain_requests_load_the_devices_of_a_step() {
    let share = |plain_every: u64| {
        let files = logs(600, Duration::from_millis(8), plain_every);
        let recorded = in_folder(&files, |folder| RecordedPipelines::read(folder).unwrap());
        let row = recorded.run(&PipelineSetting::unchanged()).unwrap();
        (row.pools[1].busy, row.flows[0].attainment)
    };
    let (alone, shared) = (share(0), share(1));
    assert!(shared.0 > alone.0 && shared.1 <= alone.1, "{alone:?} {shared:?}");
}

#[test]
fn the_advice_names_the_step_that_is_short() {
    let recorded = in_folder(&busy(), |folder| RecordedPipelines::read(folder).unwrap());
    let goes_on = |_, _| true;
    let advice = recorded.advise(&PipelineSetting::unchanged(), (0.99, 8, None), 1, &goes_on).unwrap();
    assert!(advice.holds, "{advice}");
    assert!(advice.added.iter().all(|added| added.model == "detect") && !advice.added.is_empty(), "{advice}");
    let said = advice.to_string();
    assert!(
        said.starts_with("Step 1 ('detect') of 'photos' is short of devices: with one more for 'detect', "),
        "{said}"
    );
    let enough = logs(200, Duration::from_millis(12), 0);
    let recorded = in_folder(&enough, |folder| RecordedPipelines::read(folder).unwrap());
    let advice = recorded.advise(&PipelineSetting::unchanged(), (0.99, 8, Some(3.6)), 1, &goes_on).unwrap();
    assert!(advice.holds && advice.added.is_empty(), "{advice}");
    let short = advice.short.clone().unwrap();
    assert!(short.model == "detect" && short.rate > 1.0, "at a higher rate the same step is short first: {advice}");
    // 200 requests in 199 times 12 ms on two devices; 3.6 for an hour are a thousandth for a second.
    let hours = 2.0 * 199.0 * 0.012 / 3_600.0 / 200.0 * 1e6;
    assert!((advice.before.device_hours_per_million - hours).abs() < 1e-6, "{advice}");
    assert!(advice.to_string().contains("A million requests in time cost 23.9: 6.63 hours of a device."), "{advice}");
}

#[test]
fn unknown_names_are_told_with_the_known_ones() {
    let recorded = in_folder(&busy(), |folder| RecordedPipelines::read(folder).unwrap());
    let error = recorded.flow("foto").unwrap_err().to_string();
    assert_eq!(error, "the log has no requests of 'foto'; it has requests of photos");
    let error = recorded.model("foto").unwrap_err().to_string();
    assert_eq!(error, "no step of the log runs a model 'foto'; the models are decode, detect");
    let devices = PipelineSetting { devices: Some(4), ..PipelineSetting::unchanged() };
    assert!(recorded.run(&devices).unwrap_err().to_string().contains("2 sets of devices"));
}
