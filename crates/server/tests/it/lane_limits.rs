//! Device policies in the server at their limits: full queues, deadlines, cancelled clients,
//! batches that fail, models that come and go.

use std::sync::Arc;

use downbeat_core::device::DeviceOutput;
use downbeat_core::journal::device::{DeviceInput, DeviceRecords};
use downbeat_core::journal::{Form, MachineKind, Record, read, replay, show};
use downbeat_models::registry::Registry;
use downbeat_service::error::ServiceError;
use downbeat_service::options::{AutoscaleOptions, DeviceGroup, ModelControl, PolicyName, ServerOptions};
use downbeat_service::service::{LoadOverrides, Service};
use serde_json::json;

use crate::lanes::{drained, encoder_request, group, no_lane_ran_two_launches_at_once};
use crate::serving::{Models, metric, ms, request, send, until, with_timeout};

const POLICIES: [&str; 3] = ["windowed", "elastic", "staged"];

fn by(policy: &str) -> impl Fn(&mut ServerOptions) {
    move |options| options.device.policy = policy.parse().unwrap()
}

#[tokio::test]
async fn requests_are_answered_and_counted_by_every_policy() {
    for policy in POLICIES {
        let models = Models::new();
        models.add("m", 1, (1.0, 5.0), 4, "");
        let registry = models.serve(by(policy)).await;
        let answer = registry.infer(request("m", 3, 4)).await.unwrap();
        assert_eq!(answer.outputs[0].shape, [3, 1], "{policy}");
        registry.infer(request("m", 1, 4)).await.unwrap();
        let statistics = &registry.statistics("m", "").unwrap()[0];
        assert_eq!((statistics.inference_count, statistics.execution_count), (4, 2), "{policy}");
        assert_eq!(metric(&registry, "nv_inference_request_success", "m"), 2.0, "{policy}");
        assert!(metric(&registry, "nv_inference_compute_infer_duration_us", "m") >= 10_000.0, "{policy}");
        assert!(metric(&registry, "downbeat_device_busy_seconds_total", "") >= 0.01, "{policy}");
        assert!(metric(&registry, "downbeat_lane_busy_seconds_total", "m") >= 0.01, "{policy}");
        assert!(metric(&registry, "downbeat_launches_total", "m") >= 2.0, "{policy}");
        assert_eq!(metric(&registry, "downbeat_batch_events_total", "event=\"new\""), 2.0, "{policy}");
        let slots = metric(&registry, "downbeat_ring_slots", "m");
        assert_eq!(slots > 0.0, policy != "windowed", "{policy}: {slots}");
        assert!(metric(&registry, "downbeat_lanes", "m") >= 1.0, "{policy}");
        drained(&registry).await;
    }
}

/// The server needs only a policy's line in the table: it knows no policy by name.
#[tokio::test]
async fn every_policy_of_the_table_serves() {
    for policy in PolicyName::all() {
        let models = Models::new();
        models.add("m", 1, (1.0, 1.0), 4, "max_batch_size: 8");
        let registry = models.serve(|options| options.device.policy = policy).await;
        registry.infer(request("m", 3, 4)).await.unwrap();
        let lanes = metric(&registry, "downbeat_lanes", "model=\"m\"");
        assert_eq!(lanes > 0.0, policy.makes_batches(), "{policy}: {lanes} lanes of its own");
    }
}

#[tokio::test]
async fn what_is_computed_beside_what_is_asked_for_is_counted() {
    let models = Models::new();
    models.add("m", 1, (1.0, 1.0), 4, "max_batch_size: 8");
    let group = group(&["m"], "windowed", json!({ "fill": true }));
    let registry = models.serve(|options| options.device.groups = vec![group]).await;
    registry.infer(request("m", 3, 4)).await.unwrap();
    assert_eq!(metric(&registry, "downbeat_launch_items_total", "kind=\"asked\""), 3.0);
    assert_eq!(metric(&registry, "downbeat_launch_items_total", "kind=\"computed\""), 8.0);
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_back() {
    for policy in POLICIES {
        let models = Models::new();
        models.add("m", 1, (1.0, 300.0), 4, "max_batch_size: 1");
        let registry = models
            .serve(|options| {
                by(policy)(options);
                options.max_queue_size = 2;
            })
            .await;
        let mut answers = Vec::new();
        // As many requests as run at once, two that wait, and one too many.
        let error = loop {
            let answer = send(&registry, request("m", 1, 4)).await;
            if answer.is_finished() {
                break answer.await.unwrap().unwrap_err();
            }
            answers.push(answer);
        };
        let ServiceError::QueueFull { message, retry_after } = error else { panic!("{policy}: {error:?}") };
        assert_eq!(message, "Exceeds maximum queue size: the queue of model 'm' holds at most 2; try again later");
        assert!(retry_after > downbeat_core::Duration::ZERO);
        assert!((3..8).contains(&answers.len()), "{policy}: {}", answers.len());
        for answer in answers {
            answer.await.unwrap().unwrap();
        }
        assert_eq!(metric(&registry, "downbeat_requests_not_answered_total", "queue_full"), 1.0, "{policy}");
        drained(&registry).await;
    }
}

#[tokio::test]
async fn deadlines_are_judged_when_requests_come_and_while_they_wait() {
    for policy in POLICIES {
        let models = Models::new();
        models.add("m", 1, (1.0, 200.0), 4, "max_batch_size: 1");
        let registry = models.serve(by(policy)).await;
        let error = registry.infer(with_timeout(request("m", 1, 4), ms(150))).await.unwrap_err();
        assert!(error.to_string().contains("even on an idle device"), "{policy}: {error}");
        let mut running = Vec::new();
        for _ in 0..6 {
            running.push(send(&registry, request("m", 1, 4)).await);
        }
        // No request ends before that: under every policy, six are enough to delay another.
        let error = registry.infer(with_timeout(request("m", 1, 4), ms(210))).await.unwrap_err();
        assert!(error.to_string().contains("could no longer finish by its deadline"), "{policy}: {error}");
        assert!(!running[0].is_finished(), "{policy}: said as soon as it was known");
        for answer in running {
            answer.await.unwrap().unwrap();
        }
        assert_eq!(metric(&registry, "downbeat_requests_not_answered_total", "deadline_hopeless"), 1.0, "{policy}");
        drained(&registry).await;
    }
}

#[tokio::test]
async fn clients_that_go_leave_nothing_behind() {
    for policy in POLICIES {
        let models = Models::new();
        models.add("m", 1, (1.0, 60.0), 4, "max_batch_size: 2");
        let registry = models.serve(by(policy)).await;
        let mut answers = Vec::new();
        for _ in 0..9 {
            answers.push(send(&registry, request("m", 1, 4)).await);
        }
        // Some of the requests run, some wait.
        for answer in answers.iter().step_by(2) {
            answer.abort();
        }
        for (index, answer) in answers.into_iter().enumerate() {
            let answer = answer.await;
            match index % 2 {
                0 => assert!(answer.is_err() || answer.is_ok_and(|answer| answer.is_ok()), "{policy}"),
                _ => {
                    answer.unwrap().unwrap();
                }
            }
        }
        drained(&registry).await;
        let counted = metric(&registry, "nv_inference_request_success", "m");
        let cancelled = metric(&registry, "downbeat_requests_not_answered_total", "cancelled");
        assert_eq!(counted + cancelled, 9.0, "{policy}: {counted} answered, {cancelled} cancelled");
        assert!(cancelled >= 3.0, "{policy}: {cancelled}");
    }
}

#[tokio::test]
async fn a_request_that_fails_costs_no_other_its_answer() {
    for policy in POLICIES {
        let settings = match policy {
            "elastic" => json!({ "pad": true, "max_length": 16 }),
            _ => json!({ "pad": true, "max_length": 16, "window_ms": 30 }),
        };
        let registry = crate::lanes::serve(&["encoder"], policy, settings).await;
        // Ids end at 999.
        let wrong: [&[i64]; 2] = [&[5, 1_000_000, 7], &[5, 6, 7, 8]];
        let first = send(&registry, encoder_request(&[3, 4, 5])).await;
        let mut answers = Vec::new();
        for ids in [wrong[0], wrong[1], &[9, 8]] {
            let (registry, request) = (registry.clone(), encoder_request(ids));
            answers.push(tokio::spawn(async move { registry.infer(request).await }));
        }
        first.await.unwrap().unwrap();
        let mut failed = 0;
        for answer in answers {
            match answer.await.unwrap() {
                Ok(answer) => assert_eq!(answer.outputs.len(), 2),
                Err(error) => {
                    assert!(error.to_string().starts_with("model 'encoder' failed on this request: "), "{error}");
                    failed += 1;
                }
            }
        }
        assert_eq!(failed, 1, "{policy}");
        assert_eq!(metric(&registry, "downbeat_requests_not_answered_total", "engine_error"), 1.0, "{policy}");
        drained(&registry).await;
    }
}

#[tokio::test]
async fn requests_that_cannot_be_padded_are_refused() {
    let settings = json!({ "pad": true, "max_length": 4 });
    let registry = crate::lanes::serve(&["encoder"], "windowed", settings).await;
    let error = registry.infer(encoder_request(&[1, 2, 3, 4, 5])).await.unwrap_err();
    assert!(error.to_string().contains("is 5 long; this model takes at most 4 (max_length)"), "{error}");
    let mut uneven = encoder_request(&[1, 2, 3]);
    uneven.inputs[1] = encoder_request(&[1, 2]).inputs.remove(1);
    let error = registry.infer(uneven).await.unwrap_err();
    assert!(error.to_string().contains("all inputs of a request must have one length"), "{error}");
    let error = registry.infer(encoder_request(&[])).await.unwrap_err();
    assert!(error.to_string().contains("has a length of 0"), "{error}");
    registry.infer(encoder_request(&[1, 2, 3, 4])).await.unwrap();
}

#[tokio::test]
async fn a_model_is_reloaded_without_a_gap_and_unloaded_after_its_last_answer() {
    for policy in POLICIES {
        let models = Models::new();
        models.add("m", 1, (1.0, 20.0), 4, "");
        let registry = models.serve(by(policy)).await;
        let its = registry.clone();
        let client = tokio::spawn(async move {
            for _ in 0..30 {
                its.infer(request("m", 1, 4)).await.unwrap();
            }
        });
        while !client.is_finished() {
            registry.load("m", LoadOverrides::default()).await.unwrap();
            tokio::time::sleep(ms(30)).await;
        }
        client.await.unwrap();
        let running = send(&registry, request("m", 1, 4)).await;
        registry.unload("m").await.unwrap();
        assert!(running.is_finished(), "{policy}");
        running.await.unwrap().unwrap();
        let error = registry.infer(request("m", 1, 4)).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "Request for unknown model: 'm' has no available versions: UNAVAILABLE: unloaded"
        );
        let devices = registry.timeline(ms(60_000)).unwrap().devices;
        assert!(devices.iter().all(|past| past.policy == policy && past.complete), "{devices:?}");
        let launches = devices.iter().flat_map(|past| &past.launches);
        let ran: std::collections::BTreeSet<u64> = launches.flat_map(|launch| launch.requests.clone()).collect();
        assert_eq!(ran.len(), 31, "{policy}: launches stay after reloads and the unload");
        assert!(!registry.metrics().unwrap().contains("downbeat_lanes{"), "its gauges are gone");
    }
}

#[tokio::test]
async fn a_request_goes_to_the_device_that_will_be_done_first() {
    let models = Models::new();
    models.add("m", 1, (600.0, 50.0), 4, "");
    let registry = models
        .serve(|options| {
            by("windowed")(options);
            options.devices = 2;
        })
        .await;
    // 4 items to the first device, 3 to the second. So the next request goes to the second, too,
    // and the last to the first.
    let mut answers = Vec::new();
    for rows in [4, 3, 2, 1] {
        answers.push(send(&registry, request("m", rows, 4)).await);
    }
    for answer in answers {
        answer.await.unwrap().unwrap();
    }
    no_lane_ran_two_launches_at_once(&registry);
    let rows = registry.timeline(ms(10_000)).unwrap().devices.into_iter();
    let rows: Vec<Vec<u32>> = rows.map(|device| device.launches.iter().map(|l| l.rows).collect()).collect();
    assert_eq!(rows, [[4, 1], [3, 2]]);
}

/// For all policies and models: the timeline holds every batch that ran on a device, and the device
/// counted as busy for as long as anything ran.
#[tokio::test]
async fn a_device_is_busy_while_something_runs_on_it_of_whatever_models() {
    let models = Models::new();
    let names = ["exclusive", "windowed", "staged"];
    names.iter().for_each(|name| models.add(name, 1, (0.0, 40.0), 4, ""));
    let registry = models
        .serve(|options| {
            options.device.groups =
                vec![group(&["windowed"], "windowed", json!({})), group(&["staged"], "staged", json!({}))];
        })
        .await;
    let mut answers = Vec::new();
    for name in names.iter().cycle().take(12) {
        answers.push(send(&registry, request(name, 1, 4)).await);
    }
    for answer in answers {
        answer.await.unwrap().unwrap();
    }
    drained(&registry).await;
    no_lane_ran_two_launches_at_once(&registry);
    let devices = registry.timeline(ms(60_000)).unwrap().devices;
    let mut shown: Vec<(&str, &str)> = devices.iter().map(|its| (its.model.as_str(), its.policy.as_str())).collect();
    shown.sort_unstable();
    assert_eq!(shown, [("exclusive", "exclusive"), ("staged", "staged"), ("windowed", "windowed")]);
    let mut ran: Vec<(u64, u64)> =
        devices.iter().flat_map(|its| &its.launches).map(|l| (l.begin_ns, l.end_ns)).collect();
    ran.sort_unstable();
    let first = ran[0].0;
    let (mut busy, mut until, mut sum) = (0, 0, 0);
    for (begin, end) in ran {
        busy += end.saturating_sub(begin.max(until));
        until = until.max(end);
        sum += end - begin;
    }
    let counted = metric(&registry, "downbeat_device_busy_seconds_total", "");
    // A thread that loses its core between the clock and the lock lengthens a launch a little.
    let (busy_s, all_s) = (busy as f64 / 1e9, (until - first) as f64 / 1e9);
    assert!((busy_s - 1e-6..=all_s + 1e-6).contains(&counted), "{counted} s of {busy_s} s and {all_s} s");
    assert!(sum > busy, "some ran at the same time: {sum} and {busy}");
    assert_eq!(metric(&registry, "downbeat_device_running", ""), 0.0);
}

/// Two models make their batches on the devices, and the scheduler makes the batches of a third.
/// All count when a request is sent to a device.
#[tokio::test]
async fn devices_share_what_there_is_to_do_of_all_models() {
    let models = Models::new();
    let names = ["exclusive", "first", "second"];
    names.iter().for_each(|name| models.add(name, 1, (0.0, 400.0), 4, "max_batch_size: 1"));
    let registry = models
        .serve(|options| {
            options.devices = 2;
            options.device.groups =
                vec![group(&["first"], "windowed", json!({})), group(&["second"], "windowed", json!({}))];
        })
        .await;
    let mut answers = Vec::new();
    for name in names.iter().cycle().take(6) {
        answers.push(send(&registry, request(name, 1, 4)).await);
    }
    for answer in answers {
        answer.await.unwrap().unwrap();
    }
    let devices = registry.timeline(ms(60_000)).unwrap().devices;
    let on = |device: usize| -> usize {
        devices.iter().filter(|its| its.device == device).map(|its| its.launches.len()).sum()
    };
    assert_eq!((on(0), on(1)), (3, 3), "{devices:?}");
    let routed = devices.iter().find(|its| its.model == "first" && its.device == 1).unwrap();
    assert!(!routed.launches.is_empty(), "the scheduler's batch is on device 0: {devices:?}");
}

/// The begin and the end of each launch of a model on a device.
fn spans(registry: &Registry, model: &str, device: usize) -> Vec<(u64, u64)> {
    let devices = registry.timeline(ms(60_000)).unwrap().devices;
    let its = devices.iter().filter(|its| its.device == device && its.model == model);
    its.flat_map(|its| &its.launches).map(|launch| (launch.begin_ns, launch.end_ns)).collect()
}

#[tokio::test]
async fn the_scheduler_prefers_a_device_that_runs_nothing_of_other_policies() {
    let models = Models::new();
    models.add("windowed", 1, (0.0, 200.0), 4, "max_batch_size: 1");
    models.add("exclusive", 1, (0.0, 1.0), 4, "max_batch_size: 1");
    let registry = models
        .serve(|options| {
            options.devices = 2;
            options.device.groups =
                vec![group(&["windowed"], "windowed", json!({})), group(&["exclusive"], "exclusive", json!({}))];
        })
        .await;
    let mut late = 0;
    loop {
        let running = send(&registry, request("windowed", 1, 4)).await;
        registry.infer(request("exclusive", 1, 4)).await.unwrap();
        running.await.unwrap().unwrap();
        if !spans(&registry, "exclusive", 1).is_empty() {
            break;
        }
        // This happens only on a busy machine, if the windowed model's batch was over before. The
        // test then tries again.
        let (_, end) = *spans(&registry, "windowed", 0).last().unwrap();
        let (begin, _) = *spans(&registry, "exclusive", 0).last().unwrap();
        assert!(begin >= end, "on the device that is busy");
        late += 1;
        assert!(late < 50, "never while the windowed model's batch ran");
    }
    registry.unload("windowed").await.unwrap();
    registry.infer(request("exclusive", 1, 4)).await.unwrap();
    assert_eq!(spans(&registry, "exclusive", 0).len(), late + 1, "the first device, where nothing else runs now");
}

/// Two windowed models and an exclusive one run on two devices. A device is idle while no model runs
/// there, and busy once however many run at a time.
#[tokio::test]
async fn the_advice_counts_what_models_of_all_policies_run() {
    let models = Models::new();
    let names = ["exclusive", "first", "second"];
    names.iter().for_each(|name| models.add(name, 1, (0.0, 30.0), 4, "max_batch_size: 1"));
    let registry = models
        .serve(|options| {
            options.devices = 2;
            options.device.groups =
                vec![group(&["first"], "windowed", json!({})), group(&["second"], "windowed", json!({}))];
            let window = downbeat_core::Duration::from_millis(1);
            options.autoscale =
                Some(AutoscaleOptions { grow_window: window, shrink_window: window, ..AutoscaleOptions::default() });
        })
        .await;
    let clock = || registry.timeline(ms(1_000)).unwrap().now_ns;
    // Each call takes a sample. The window begins with the first one, since there are just two.
    let begin = clock();
    assert_eq!(registry.autoscale().unwrap().idle_fraction, None);
    let begun = clock();
    for _ in 0..4 {
        let mut answers = Vec::new();
        for name in names {
            answers.push(send(&registry, request(name, 1, 4)).await);
        }
        for answer in answers {
            answer.await.unwrap().unwrap();
        }
    }
    let end = clock();
    let told = registry.autoscale().unwrap();
    let ended = clock();
    assert_eq!((told.devices, told.bad_rate), (2, Some(0.0)));
    // A thread that loses its core between the clock and the lock lengthens the busy time a little.
    // A device is busy at most from its first launch to the end of its last.
    let (mut least, mut most) = (0, 0);
    for device in [0, 1] {
        let mut ran: Vec<(u64, u64)> = names.iter().flat_map(|name| spans(&registry, name, device)).collect();
        ran.sort_unstable();
        let (first, mut until) = (ran[0].0, 0);
        for (begin, end) in ran {
            least += end.saturating_sub(begin.max(until));
            until = until.max(end);
        }
        most += until - first;
    }
    // Nothing runs any more, so that the counter has what the advice has seen.
    let busy = metric(&registry, "downbeat_device_busy_seconds_total", "");
    let (least, most) = (least as f64 / 1e9 - 1e-6, most as f64 / 1e9 + 1e-6);
    assert!((least..=most).contains(&busy), "{busy} s of {least} s to {most} s");
    let idle = |length: u64| 1.0 - busy / (2.0 * length as f64 / 1e9);
    let range = (idle(end - begun) - 1e-6)..=(idle(ended - begin) + 1e-6);
    let part = told.idle_fraction.unwrap();
    assert!(range.contains(&part), "{part} is idle, not {range:?}");
}

#[tokio::test]
async fn a_group_of_a_model_that_is_not_there_is_refused_at_start() {
    let models = Models::new();
    models.add("digits", 1, (1.0, 1.0), 4, "");
    let mut options = models.options();
    let group = |name: &str| DeviceGroup { models: vec![name.to_owned()], policy: None, settings: Default::default() };
    options.device.groups = vec![group("digit")];
    let error = Registry::open(Arc::new(options.clone())).err().unwrap().to_string();
    assert!(error.contains("has no model 'digit'; did you mean 'digits'?"), "{error}");
    // Where models come on request, the model may come later.
    options.model_control = ModelControl::Explicit { load: Vec::new() };
    assert!(Registry::open(Arc::new(options.clone())).is_ok());
    options.model_control = ModelControl::None;
    options.device.groups = vec![group("digits"), group("*")];
    assert!(Registry::open(Arc::new(options)).is_ok());
}

#[tokio::test]
async fn models_without_batches_and_with_strings_are_refused_at_load() {
    let models = Models::new();
    models.add("m", 1, (1.0, 1.0), 4, "");
    let folder = models.path().join("m");
    let model = |input: &str| {
        format!(
            "alpha_ms = 1.0\nbeta_ms = 1.0\nmax_batch = 8\n[[inputs]]\nname = \"x\"\n{input}\n\
             [[outputs]]\nname = \"y\"\ndatatype = \"FP32\"\ndims = [-1, 1]\n"
        )
    };
    let load = async |input: &str, policy: &str, pad: bool| {
        std::fs::write(folder.join("1/model.emulated.toml"), model(input)).unwrap();
        let settings = json!({ "pad": pad, "max_length": 8 });
        let mut options = self::models_options(folder.parent().unwrap());
        options.device.groups = vec![group(&["m"], policy, settings)];
        let registry = Registry::open(Arc::new(options)).unwrap();
        registry.load_model("m", LoadOverrides::default(), Arc::new(())).await.map_err(|error| error.to_string())
    };
    let strings = "datatype = \"BYTES\"\ndims = [-1, 2]";
    let error = load(strings, "elastic", false).await.unwrap_err();
    assert!(error.contains("input 'x' holds BYTES, whose size varies"), "{error}");
    load(strings, "windowed", false).await.unwrap();
    load(strings, "staged", false).await.unwrap();
    let error = load("datatype = \"BYTES\"\ndims = [-1, -1]", "windowed", true).await.unwrap_err();
    assert!(error.contains("BYTES, which have no zero to be padded with"), "{error}");
    let error = load("datatype = \"FP32\"\ndims = [-1, -1, -1]", "windowed", true).await.unwrap_err();
    assert!(error.contains("has 2 dimensions that vary beside the batch"), "{error}");
    let error = load("datatype = \"FP32\"\ndims = [-1, 299, 299, 3]", "elastic", false).await.unwrap_err();
    assert!(error.contains("is larger than 1024 MiB"), "{error}");
    std::fs::write(folder.join("config.pbtxt"), "backend: \"downbeat_emulated\" max_batch_size: 0").unwrap();
    let error = load("datatype = \"FP32\"\ndims = [1, 4]", "windowed", false).await.unwrap_err();
    assert!(error.contains("the model has no batch dimension"), "{error}");
}

fn models_options(repository: &std::path::Path) -> ServerOptions {
    let mut options = ServerOptions::new(repository.to_owned());
    options.engine = downbeat_service::options::EngineChoice::Emulated;
    options.profiling.enabled = false;
    options
}

#[tokio::test]
async fn what_a_device_policy_is_told_and_decides_is_written_down() {
    for policy in POLICIES {
        let models = Models::new();
        models.add("m", 1, (1.0, 20.0), 4, "");
        let folder = models.path().join("decisions");
        let registry = models
            .serve(|options| {
                by(policy)(options);
                options.decision_log = Some(folder.clone());
            })
            .await;
        for _ in 0..3 {
            registry.infer(request("m", 2, 4)).await.unwrap();
        }
        let cancelled = send(&registry, request("m", 1, 4)).await;
        cancelled.abort();
        registry.infer(with_timeout(request("m", 1, 4), ms(1))).await.unwrap_err();
        drained(&registry).await;
        registry.close_decision_log();
        let log = std::fs::read(folder.join("device-0.log")).unwrap();
        let (machine, entries) = read::<DeviceRecords>(&log).unwrap();
        assert_eq!(machine, MachineKind::Device(0));
        let records: Vec<Record<DeviceRecords>> = entries.map(|entry| entry.unwrap().record).collect();
        let times =
            records.iter().filter_map(|record| if let Record::Input(at, _) = record { Some(*at) } else { None });
        assert!(times.is_sorted(), "time never goes back");
        let count = |wanted: fn(&Record<DeviceRecords>) -> bool| records.iter().filter(|record| wanted(record)).count();
        let told = |wanted: fn(&DeviceInput) -> bool| {
            records.iter().filter(|record| matches!(record, Record::Input(_, input) if wanted(input))).count()
        };
        assert_eq!(told(|input| matches!(input, DeviceInput::Request(_))), 5, "{policy}");
        assert_eq!(count(|record| matches!(record, Record::Refused(_))), 1, "{policy}");
        let replies = count(|record| matches!(record, Record::Decision(DeviceOutput::Reply { .. })));
        let cancelled = told(|input| matches!(input, DeviceInput::Cancel(..)));
        // On a busy machine the fourth request may be answered before its client leaves.
        assert!(replies >= 3 && replies + cancelled == 4, "{policy}: {replies} replies, {cancelled} left");
        let launches = count(|record| matches!(record, Record::Decision(DeviceOutput::Launch(_))));
        assert_eq!(launches, told(|input| matches!(input, DeviceInput::Completion { .. })), "{policy}");
        let replayed = replay(&log).unwrap();
        assert_eq!(replayed.divergence, None, "{policy}");
        assert!(replayed.decisions >= (replies + launches) as u64, "{policy}: {replayed:?}");
        let shown: Vec<String> = show(&log, Form::Text).unwrap().map(Result::unwrap).collect();
        assert!(shown.iter().any(|line| line.contains(&format!("m comes: m 1 with the policy {policy}"))), "{shown:?}");
        assert!(shown.iter().any(|line| line.contains("request r0: 2 items")), "{shown:?}");
        assert!(shown.iter().any(|line| line.contains("-> launch x0 on l")), "{shown:?}");
    }
}

#[tokio::test]
async fn a_request_of_more_items_than_may_wait_is_told_so() {
    for policy in POLICIES {
        let models = Models::new();
        models.add("m", 1, (1.0, 1.0), 4, "");
        let registry = models
            .serve(|options| {
                by(policy)(options);
                options.max_queue_size = 2;
            })
            .await;
        let error = registry.infer(request("m", 3, 4)).await.unwrap_err();
        assert!(matches!(error, ServiceError::InvalidArgument(_)), "{error:?}");
        assert!(
            error.to_string().contains("Exceeds maximum queue size: a request of 3 items can never wait for model 'm', whose queue holds at most 2"),
            "{error}"
        );
        registry.infer(request("m", 2, 4)).await.unwrap();
    }
}

/// The former version answers its accepted requests, by its own policy.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_policy_changes_by_a_reload_loses_no_request() {
    let models = Models::new();
    models.add("m", 1, (1.0, 5.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let client = || {
        let (registry, stop) = (registry.clone(), stop.clone());
        tokio::spawn(async move {
            let mut answered = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                registry.infer(request("m", 1, 4)).await.expect("no request is lost");
                answered += 1;
            }
            answered
        })
    };
    let clients: Vec<_> = (0..8).map(|_| client()).collect();
    let policies = || -> std::collections::BTreeSet<String> {
        registry.timeline(ms(60_000)).unwrap().devices.into_iter().map(|device| device.policy).collect()
    };
    let mut loaded = policies();
    for policy in ["windowed", "exclusive", "staged", "elastic", "windowed", "exclusive"] {
        let before = metric(&registry, "nv_inference_request_success", "\"m\"");
        models.add(
            "m",
            1,
            (1.0, 5.0),
            4,
            &format!("parameters {{ key: \"device_policy\" value {{ string_value: \"{policy}\" }} }}"),
        );
        registry.load("m", LoadOverrides::default()).await.unwrap();
        let shown = policies();
        loaded.insert(policy.to_owned());
        assert!(shown.contains(policy) && shown.is_subset(&loaded), "{policy}: {shown:?}");
        until(|| metric(&registry, "nv_inference_request_success", "\"m\"") > before + 32.0).await;
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    for client in clients {
        assert!(client.await.unwrap() > 0);
    }
    assert_eq!(metric(&registry, "downbeat_requests_not_answered_total", "\"m\""), 0.0);
}
