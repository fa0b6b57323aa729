//! Models on partitions of the CPU: each is a slot of its own, and what runs there runs on its cores.

use std::path::Path;
use std::sync::Arc;

use downbeat_engine::{CoreSet, Topology};
use downbeat_server::options::{EngineChoice, ModelOptions, ServerOptions};
use downbeat_server::registry::Registry;
use downbeat_server::service::Service;
use serde_json::json;

use crate::serving::{Models, metric, request, send, until};

/// A core each; `None` where there are not two.
fn two_cores() -> Option<[String; 2]> {
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
    for (name, partition) in models {
        let model = ModelOptions { partition: Some(*partition), ..ModelOptions::default() };
        options.models.insert((*name).to_owned(), model);
    }
}

/// Why a server with these partitions, whose model `m` is on `partition`, does not start.
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
    // It counts a batch after its answers.
    until(|| metric(&registry, "downbeat_device_running", "") <= 1.0).await;
    assert!(!slow.is_finished(), "it takes long");
    assert!(!behind.is_finished(), "its partition has something else to do");
    assert_eq!(metric(&registry, "downbeat_device_running", "device=\"0\""), 1.0, "the CPU is one device");
    assert_eq!(metric(&registry, "downbeat_device_running", ""), 1.0);
}

/// That of exclusive is to be seen only by what waits for what.
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
    options.model_control =
        downbeat_server::options::ModelControl::Explicit { load: vec!["mlp".to_owned(), "digits".to_owned()] };
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
    let error = refused(&[&first, &second], 0, 3);
    assert!(error.starts_with("devices is 3, and [device] partitions divides the CPU, which is one device"), "{error}");
}
