//! Models on partitions of the CPU: each partition is a slot of its own, and a model's work runs on
//! the cores of its partition.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_engine::{CoreSet, Topology};
use downbeat_models::registry::Registry;
use downbeat_service::options::{EngineChoice, ModelControl, ModelOptions, ServerOptions, SharesBy};
use downbeat_service::service::Service;
use serde_json::json;

use crate::serving::{Models, metric, request, send, until};

/// A core for each of two partitions; `None` on a machine with one core.
pub fn two_cores() -> Option<[String; 2]> {
    let topology = Topology::here();
    let mut cores = topology.cores_of(topology.usable()).map(|core| core.common(topology.usable()).to_string());
    let two = Option::zip(cores.next(), cores.next());
    if two.is_none() {
        println!("skipped: this machine has one core");
    }
    two.map(<[String; 2]>::from)
}

fn divide(options: &mut ServerOptions, partitions: &[String], models: &[(&str, u32)]) {
    options.device.partitions = partitions.to_vec();
    models.iter().for_each(|(name, partition)| put(options, name, &[*partition]));
}

fn put(options: &mut ServerOptions, model: &str, partitions: &[u32]) {
    let placed = ModelOptions { partitions: Some(partitions.to_vec()), ..ModelOptions::default() };
    options.models.insert(model.to_owned(), placed);
}

/// The reason why a server with these partitions does not start, whose model `m` is on `partition`.
fn refused(partitions: &[&str], partition: u32, devices: usize) -> String {
    let models = Models::new();
    models.add("m", 1, (0.0, 1.0), 4, "");
    let mut options = models.options();
    options.devices = devices;
    let partitions: Vec<String> = partitions.iter().map(|text| (*text).to_owned()).collect();
    divide(&mut options, &partitions, &[("m", partition)]);
    format!("{:#}", Registry::open(Arc::new(options)).err().expect("it is refused"))
}

#[tokio::test]
async fn partitions_run_beside_each_other_and_each_one_batch_at_a_time() {
    let Some(cores) = two_cores() else { return };
    let models = Models::new();
    models.add("slow", 1, (0.0, 4_000.0), 4, "instance_group { count: 4 }");
    models.add("behind", 1, (0.0, 1.0), 4, "");
    models.add("beside", 1, (0.0, 1.0), 4, "");
    let on = [("slow", 1), ("behind", 1), ("beside", 0)];
    let registry = models.serve(|options| divide(options, &cores, &on)).await;
    let slow = send(&registry, request("slow", 1, 4)).await;
    let behind = send(&registry, request("behind", 1, 4)).await;
    for _ in 0..3 {
        registry.infer(request("beside", 1, 4)).await.unwrap();
    }
    // The server counts a batch after its answers.
    until(|| metric(&registry, "downbeat_device_running", "") <= 1.0).await;
    assert!(!slow.is_finished(), "it takes long");
    assert!(!behind.is_finished(), "its partition has something else to do");
    assert_eq!(metric(&registry, "downbeat_device_running", "device=\"0\""), 1.0, "the CPU is one device");
    assert_eq!(metric(&registry, "downbeat_device_running", ""), 1.0);
}

#[tokio::test]
async fn a_model_on_several_partitions_has_a_batch_on_each_at_the_same_time() {
    let Some(cores) = two_cores() else { return };
    let models = Models::new();
    models.add("slow", 1, (0.0, 500.0), 4, "max_batch_size: 1");
    models.add("behind", 1, (0.0, 1.0), 4, "");
    let registry = models
        .serve(|options| {
            options.device.partitions = cores.to_vec();
            put(options, "slow", &[1, 0]);
            put(options, "behind", &[1]);
        })
        .await;
    let report = registry.devices().unwrap();
    let of = |name: &str| report.devices[0].models.iter().find(|placed| placed.model == name).unwrap();
    assert_eq!((of("slow").partition, &of("slow").partitions), (1, &vec![0, 1]));
    assert_eq!((of("behind").partition, &of("behind").partitions), (1, &vec![1]));
    let mut answers = Vec::new();
    for _ in 0..6 {
        answers.push(send(&registry, request("slow", 1, 4)).await);
    }
    answers.push(send(&registry, request("behind", 1, 4)).await);
    for answer in answers {
        answer.await.unwrap().unwrap();
    }
    assert_eq!(metric(&registry, "nv_inference_exec_count", "slow"), 6.0);
    let timeline = registry.timeline(std::time::Duration::from_secs(60)).unwrap();
    let runs = timeline
        .devices
        .iter()
        .filter(|past| past.model == "slow")
        .flat_map(|past| past.launches.iter().map(|launch| (launch.partition, launch.begin_ns, launch.end_ns)));
    let runs: Vec<_> = runs.collect();
    assert_eq!(runs.len(), 6, "each once: {runs:?}");
    let meet = |(a, b): (&(u32, u64, u64), &(u32, u64, u64))| a.1.max(b.1) < a.2.min(b.2);
    let pairs = || runs.iter().enumerate().flat_map(|(index, a)| runs[..index].iter().map(move |b| (a, b)));
    assert!(pairs().any(|(a, b)| a.0 != b.0 && meet((a, b))), "both run at the same time: {runs:?}");
    assert!(!pairs().any(|(a, b)| a.0 == b.0 && meet((a, b))), "one batch at a time on each: {runs:?}");
}

/// An exclusive model has no lanes to look at: other tests see its partition by the batches that
/// wait for each other.
#[tokio::test]
async fn a_device_policy_makes_lanes_on_the_models_partition_only() {
    let Some(cores) = two_cores() else { return };
    let models = Models::new();
    let named = [("a", 1), ("b", 0), ("c", 1)];
    named.iter().for_each(|(name, _)| models.add(name, 1, (0.0, 1.0), 4, ""));
    let registry = models
        .serve(|options| {
            divide(options, &cores, &named);
            options.device.groups = vec![crate::lanes::group(&["*"], "windowed", json!({}))];
        })
        .await;
    for (name, _) in named {
        registry.infer(request(name, 1, 4)).await.unwrap();
    }
    let timeline = registry.timeline(std::time::Duration::from_secs(60)).unwrap();
    let mut where_they_ran: Vec<_> = timeline.devices.iter().map(|d| (d.model.as_str(), d.partition)).collect();
    where_they_ran.sort_unstable();
    assert_eq!(where_they_ran, named);
    assert!(timeline.devices.iter().all(|d| d.device == 0), "the CPU is one device");
}

/// The partition of each model as `GET /v2/devices` reports it, and whether a user chose the
/// partition.
fn placed(registry: &Registry) -> Vec<(String, u32, bool)> {
    let report = registry.devices().unwrap();
    assert_eq!(report.partitions.iter().map(|part| (part.partition, part.units)).collect::<Vec<_>>(), [(0, 1), (1, 1)]);
    let models = report.devices.into_iter().flat_map(|device| device.models);
    models.map(|placed| (placed.model, placed.partition, placed.by_hand)).collect()
}

#[tokio::test]
async fn a_model_that_is_moved_by_hand_under_load_answers_each_request_once() {
    let Some(cores) = two_cores() else { return };
    let models = Models::new();
    models.add("m", 1, (0.1, 0.3), 4, "");
    let registry = models
        .serve(|options| {
            divide(options, &cores, &[("m", 0)]);
            options.device.groups = vec![crate::lanes::group(&["*"], "windowed", json!({}))];
        })
        .await;
    let (stopped, mut clients) = (Arc::new(AtomicBool::new(false)), Vec::new());
    for client in 0..4 {
        let (registry, stopped) = (registry.clone(), stopped.clone());
        clients.push(tokio::spawn(async move {
            let mut answered = 0;
            while !stopped.load(Ordering::Relaxed) {
                for _ in 0..9 {
                    registry.infer(request("m", 1, 4)).await.unwrap();
                    answered += 1;
                }
                // The client goes away, before its request is launched or after.
                let patience = std::time::Duration::from_micros(200 * client);
                answered += u32::from(tokio::time::timeout(patience, registry.infer(request("m", 1, 4))).await.is_ok());
            }
            answered
        }));
    }
    for moves in 0..20 {
        registry.set_partition("m", Some(1 - moves % 2)).await.unwrap();
        assert_eq!(placed(&registry), [("m".to_owned(), 1 - moves % 2, true)]);
        let before = metric(&registry, "nv_inference_request_success", "m");
        until(|| metric(&registry, "nv_inference_request_success", "m") >= before + 20.0).await;
    }
    stopped.store(true, Ordering::Relaxed);
    let mut answered = 0;
    for client in clients {
        answered += client.await.unwrap();
    }
    assert!(answered > 400, "{answered}");
    assert!(metric(&registry, "nv_inference_request_success", "m") >= f64::from(answered), "all are counted");
    until(|| metric(&registry, "nv_inference_pending_request_count", "m") == 0.0).await;
    assert_eq!(metric(&registry, "downbeat_batch_events_total", "event=\"switch\""), 20.0);
    // Loaded anew, the model is on the partition that the user chose. Set free, it is on the
    // earlier partition.
    registry.load("m", Default::default()).await.unwrap();
    assert_eq!(placed(&registry), [("m".to_owned(), 0, true)]);
    registry.set_partition("m", Some(1)).await.unwrap();
    registry.set_partition("m", None).await.unwrap();
    assert_eq!(placed(&registry), [("m".to_owned(), 0, false)]);
}

#[tokio::test]
async fn what_cannot_be_moved_stays_and_is_told_why() {
    let Some(cores) = two_cores() else { return };
    let models = Models::new();
    models.add("m", 1, (0.0, 1.0), 4, "");
    let registry = models.serve(|options| divide(options, &cores, &[("m", 0)])).await;
    let message = async |partition, model| registry.set_partition(model, partition).await.unwrap_err().to_string();
    assert!(message(Some(1), "m").await.contains("has the policy 'exclusive'"));
    assert_eq!(message(Some(2), "m").await, "model 'm': there is no partition 2; partitions are numbered from 0 to 1");
    assert!(message(Some(1), "n").await.contains("'n' is not found"));
    assert_eq!(placed(&registry), [("m".to_owned(), 0, false)]);
    registry.infer(request("m", 1, 4)).await.unwrap();
    let whole = models.serve(|_| ()).await;
    let error = whole.set_partition("m", Some(0)).await.unwrap_err().to_string();
    assert_eq!(error, "model 'm': the devices are not divided ([device] partitions)");
    let fixed = models.serve(|options| options.model_control = ModelControl::None).await;
    let error = fixed.set_partition("m", Some(0)).await.unwrap_err().to_string();
    assert!(error.starts_with("models cannot be moved by request with --model-control-mode none"), "{error}");
}

/// The CPUs that the first threads of the pools of `rten` may use.
fn pools() -> Vec<CoreSet> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let thread = |task: std::path::PathBuf| {
        let status = std::fs::read_to_string(task.join("status")).ok()?;
        let line = |key: &str| Some(status.lines().find_map(|line| line.strip_prefix(key))?.trim().to_owned());
        (line("Name:")? == "rten-0").then_some(line("Cpus_allowed_list:")?.parse().ok()?)
    };
    tasks.filter_map(|task| thread(task.ok()?.path())).collect()
}

#[tokio::test]
async fn a_models_threads_are_bound_to_its_partition() {
    let Some(cores) = two_cores() else { return };
    let mut options = ServerOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models"));
    options.engine = EngineChoice::Rten;
    options.profiling.enabled = false;
    options.model_control = ModelControl::Explicit { load: vec!["mlp".to_owned(), "digits".to_owned()] };
    options.device.groups = vec![crate::lanes::group(&["digits"], "windowed", json!({}))];
    divide(&mut options, &cores, &[("mlp", 1), ("digits", 0)]);
    let registry = Registry::open(Arc::new(options)).unwrap();
    for (name, partition) in [("mlp", 1), ("digits", 0)] {
        let wanted: CoreSet = cores[partition].parse().unwrap();
        assert!(!pools().contains(&wanted), "nothing has run on the CPUs {wanted}");
        registry.load_model(name, Default::default(), Arc::new(())).await.unwrap();
        assert!(pools().contains(&wanted), "{name} is warmed up on the CPUs {wanted}: {:?}", pools());
    }
}

#[test]
fn partitions_that_cannot_be_keep_the_server_from_starting() {
    let Some([first, second]) = two_cores() else { return };
    let error = refused(&[&first, &first], 0, 0);
    assert!(error.starts_with("[device] partitions: partition 1, ") && error.contains("leave it in one"), "{error}");
    let error = refused(&[&first, "1023"], 0, 0);
    assert!(error.contains("partition 1, \"1023\": CPU 1023 is not there; there are "), "{error}");
    let error = refused(&[&first, &second], 2, 0);
    assert_eq!(error, "[models.m] partition is 2; [device] partitions has 2, numbered from 0 to 1");
    let error = refused(&[], 0, 0);
    assert!(error.starts_with("[models.m] partition is 0, and the devices are not divided"), "{error}");
    let several = |on: &[u32], change: fn(&mut ServerOptions)| {
        let models = Models::new();
        models.add("m", 1, (0.0, 1.0), 4, "");
        let mut options = models.options();
        options.device.partitions = vec![first.clone(), second.clone()];
        change(&mut options);
        put(&mut options, "m", on);
        format!("{:#}", Registry::open(Arc::new(options)).err().expect("it is refused"))
    };
    let error = several(&[], |_| ());
    assert_eq!(error, "[models.m] partition names none; leave it out to have one chosen");
    let error = several(&[0, 2], |_| ());
    assert_eq!(error, "[models.m] partition is 2; [device] partitions has 2, numbered from 0 to 1");
    assert_eq!(several(&[1, 0, 1], |_| ()), "[models.m] partition has 1 twice");
    let error = several(&[0, 1], |options| options.device.shares = SharesBy::Auto);
    assert!(error.starts_with("[models.m] partition names 2, and with shares = \"auto\""), "{error}");
    let error = refused(&[&first, &second], 0, 3);
    assert!(error.starts_with("devices is 3, and [device] partitions divides the CPU, which is one device"), "{error}");
}
