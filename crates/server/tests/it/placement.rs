//! Models that are kept to some of the devices, on the emulated engine.

use std::sync::Arc;

use downbeat_models::registry::Registry;
use downbeat_service::options::{PlacementPlan, PlannedSubCluster, ServerOptions};
use downbeat_service::service::Service;

use crate::serving::{Models, metric, request, until};

/// The models `a`, `b` and `c`, each of which takes a while.
fn models() -> Models {
    let models = Models::new();
    for name in ["a", "b", "c"] {
        models.add(name, 1, (0.0, 5.0), 4, "max_batch_size: 1");
    }
    models
}

fn place(options: &mut ServerOptions, devices: usize, models: &[(&str, &[usize])]) {
    options.devices = devices;
    options.placement = models.iter().map(|(name, on)| ((*name).to_owned(), on.to_vec())).collect();
}

/// Sends `model` sixteen requests at once, and returns the devices that they kept busy.
async fn used(registry: &Registry, model: &'static str, devices: usize) -> Vec<usize> {
    let busy = |device: usize| {
        let label = format!("device=\"{device}\"");
        metric(registry, "downbeat_device_busy_seconds_total", &label)
    };
    // A device counts a batch after its answers.
    let at_rest = async || until(|| metric(registry, "downbeat_device_running", "") == 0.0).await;
    at_rest().await;
    let before: Vec<f64> = (0..devices).map(busy).collect();
    let requests = (0..16).map(|_| registry.infer(request(model, 1, 4)));
    for answer in futures_util::future::join_all(requests).await {
        answer.unwrap();
    }
    at_rest().await;
    (0..devices).filter(|device| busy(*device) > before[*device]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_scheduler_sends_a_model_only_to_its_devices() {
    let registry = models().serve(|options| place(options, 4, &[("a", &[2]), ("b", &[1, 2])])).await;
    assert_eq!(used(&registry, "a", 4).await, [2]);
    let b = used(&registry, "b", 4).await;
    assert!(!b.is_empty() && b.iter().all(|device| [1, 2].contains(device)), "{b:?}");
    // A model that is not placed is on all devices.
    assert_eq!(used(&registry, "c", 4).await, [0, 1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_policy_has_lanes_only_on_the_models_devices() {
    let placed = |options: &mut ServerOptions| {
        place(options, 3, &[("a", &[1])]);
        options.device.policy = "windowed".parse().unwrap();
    };
    let registry = models().serve(placed).await;
    assert_eq!(used(&registry, "a", 3).await, [1]);
    let lanes = |device: usize| metric(&registry, "downbeat_lanes{", &format!("device=\"{device}\",model=\"a\""));
    assert_eq!([0, 1, 2].map(lanes), [0.0, 1.0, 0.0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_placed_model_takes_is_learned_where_it_is() {
    let registry = models().serve(|options| place(options, 2, &[("a", &[1])])).await;
    // More requests than it takes to replace the profile.
    for _ in 0..8 {
        assert_eq!(used(&registry, "a", 2).await, [1]);
    }
}

/// The reason why a server does not start with these options.
fn refused(change: impl FnOnce(&mut ServerOptions)) -> String {
    let models = models();
    let mut options = models.options();
    change(&mut options);
    format!("{:#}", Registry::open(Arc::new(options)).err().expect("it is refused"))
}

#[tokio::test]
async fn a_device_that_there_is_not_is_refused_with_those_that_there_are() {
    let error = refused(|options| place(options, 2, &[("a", &[0]), ("b", &[2])]));
    assert_eq!(error, "[placement]: model 'b' is to be on device 2, and there are only devices 0 to 1");
    let error = refused(|options| place(options, 2, &[("a", &[])]));
    assert!(error.contains("'a' is on no device"), "{error}");
    let error = refused(|options| place(options, 2, &[("aa", &[0])]));
    assert!(error.contains("[placement]: the repository") && error.contains("has no model 'aa'"), "{error}");
}

fn plan(sub_clusters: &[&[&str]]) -> Option<PlacementPlan> {
    let sub_cluster = |(index, models): (usize, &&[&str])| PlannedSubCluster {
        index,
        models: models.iter().map(|name| (*name).to_owned()).collect(),
        devices_needed: 0.5,
    };
    Some(PlacementPlan { sub_clusters: sub_clusters.iter().enumerate().map(sub_cluster).collect() })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_wins_over_the_file_and_says_how_many_devices_there_are() {
    let planned = |options: &mut ServerOptions| {
        place(options, 0, &[("a", &[1])]);
        options.plan = plan(&[&["a"], &["b"], &["c"]]);
    };
    let registry = models().serve(planned).await;
    for (device, model) in ["a", "b", "c"].into_iter().enumerate() {
        assert_eq!(used(&registry, model, 3).await, [device], "{model}");
    }
}

#[tokio::test]
async fn a_plan_for_other_models_is_refused_with_their_names() {
    let error = refused(|options| options.plan = plan(&[&["a", "x"], &["y"]]));
    for unknown in ["x", "y"] {
        assert!(
            error.contains("--plan: the repository ") && error.contains(&format!("no model '{unknown}'")),
            "{error}"
        );
    }
}
