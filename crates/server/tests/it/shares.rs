//! Devices whose models move by themselves: the share of the CPU that each model has as models come
//! and go. No move loses a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_models::registry::Registry;
use downbeat_service::options::{BatchesBy, ModelControl, ModelOptions, ServerOptions, SharesBy};
use downbeat_service::report::device_report::PlacedModel;
use downbeat_service::service::Service;
use serde_json::json;
use tokio::task::JoinHandle;

use crate::partitions::two_cores;
use crate::serving::{Models, metric, ms, request, until};

/// A server with `names` in service. Its partitions are two CPUs, each by itself and both together.
/// `change` sets the rest of the options.
async fn serve(
    models: &Models,
    names: &[&str],
    change: impl FnOnce(&mut ServerOptions),
) -> Option<(Registry, JoinHandle<()>)> {
    let [first, second] = two_cores()?;
    for name in ["a", "b", "c"] {
        models.add(name, 1, (0.1, 0.4), 4, "");
    }
    let registry = models
        .serve(|options| {
            options.model_control =
                ModelControl::Explicit { load: names.iter().map(|name| (*name).to_owned()).collect() };
            options.device.groups = vec![crate::lanes::group(&["*"], "windowed", json!({}))];
            options.device.partitions = vec![first.clone(), second.clone(), format!("{first},{second}")];
            options.device.shares = SharesBy::Auto;
            options.device.share_hold_down = downbeat_core::Duration::from_millis(200);
            change(options);
        })
        .await;
    let looks = registry.clone();
    let looks = tokio::spawn(async move {
        loop {
            looks.divide_devices();
            tokio::time::sleep(ms(10)).await;
        }
    });
    Some((registry, looks))
}

fn placed(registry: &Registry, name: &str) -> Option<PlacedModel> {
    let devices = registry.devices().unwrap().devices;
    devices.into_iter().flat_map(|device| device.models).find(|placed| placed.model == name)
}

/// The partition of a model, and the number of units that it has alone.
fn share(registry: &Registry, name: &str) -> Option<(u32, u32)> {
    let placed = placed(registry, name)?;
    Some((placed.partition, placed.share?.units))
}

fn are_apart(registry: &Registry, one: &str, other: &str) -> bool {
    let shares = [share(registry, one), share(registry, other)];
    shares == [Some((0, 1)), Some((1, 1))] || shares == [Some((1, 1)), Some((0, 1))]
}

/// Clients of a model, which give up some of their requests. Returns how many were answered.
fn clients(registry: &Registry, name: &'static str, stopped: &Arc<AtomicBool>) -> Vec<JoinHandle<u32>> {
    let client = |number: u64| {
        let (registry, stopped) = (registry.clone(), stopped.clone());
        tokio::spawn(async move {
            let mut answered = 0;
            while !stopped.load(Ordering::Relaxed) {
                for _ in 0..5 {
                    registry.infer(request(name, 1, 4)).await.unwrap();
                    answered += 1;
                }
                let patience = std::time::Duration::from_micros(300 * number);
                let _ = tokio::time::timeout(patience, registry.infer(request(name, 1, 4))).await;
            }
            answered
        })
    };
    (0..3).map(client).collect()
}

#[tokio::test]
async fn models_that_come_and_go_share_the_cores_and_no_request_is_lost() {
    let models = Models::new();
    let Some((registry, looks)) = serve(&models, &["a"], |_| {}).await else { return };
    until(|| share(&registry, "a") == Some((2, 2))).await;
    let (all, some) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let of_a = clients(&registry, "a", &all);
    for round in 0..4 {
        registry.load("b", Default::default()).await.unwrap();
        some.store(false, Ordering::Relaxed);
        let of_b = clients(&registry, "b", &some);
        until(|| are_apart(&registry, "a", "b")).await;
        assert!(
            placed(&registry, "b").unwrap().share.unwrap().reason.unwrap().contains("it has come"),
            "round {round}"
        );
        some.store(true, Ordering::Relaxed);
        for client in of_b {
            assert!(client.await.unwrap() > 0);
        }
        registry.unload("b").await.unwrap();
        until(|| share(&registry, "a") == Some((2, 2))).await;
    }
    all.store(true, Ordering::Relaxed);
    for client in of_a {
        assert!(client.await.unwrap() > 0);
    }
    looks.abort();
    until(|| metric(&registry, "nv_inference_pending_request_count", "") == 0.0).await;
    assert_eq!(metric(&registry, "downbeat_share_units", "model=\"a\""), 2.0);
    assert_eq!(metric(&registry, "downbeat_share_changes_total", "reason=\"other_went\""), 4.0);
    assert_eq!(metric(&registry, "downbeat_batch_events_total", "event=\"prepare_failed\""), 0.0);
}

#[tokio::test]
async fn a_share_that_is_set_by_hand_stays_and_the_others_make_room() {
    let models = Models::new();
    let Some((registry, looks)) = serve(&models, &["a", "b"], |_| {}).await else { return };
    until(|| are_apart(&registry, "a", "b")).await;
    for to in [1, 0, 1] {
        registry.set_partition("a", Some(to)).await.unwrap();
        assert_eq!(share(&registry, "a"), Some((to, 1)));
        assert!(placed(&registry, "a").unwrap().by_hand);
    }
    let error = registry.set_partition("a", Some(2)).await.unwrap_err().to_string();
    assert!(error.contains("a share of 2 units: expected a multiple of 1 from 1 to 1"), "{error}");
    assert_eq!(share(&registry, "a"), Some((1, 1)));
    registry.load("a", Default::default()).await.unwrap();
    until(|| share(&registry, "a") == Some((1, 1))).await;
    // A model alone would have both units.
    registry.unload("b").await.unwrap();
    tokio::time::sleep(ms(300)).await;
    assert_eq!(share(&registry, "a"), Some((1, 1)));
    registry.set_partition("a", None).await.unwrap();
    until(|| share(&registry, "a") == Some((2, 2))).await;
    registry.infer(request("a", 1, 4)).await.unwrap();
    assert!(!placed(&registry, "a").unwrap().by_hand);
    looks.abort();
}

#[tokio::test]
async fn a_model_whose_knee_is_known_asks_for_that_when_it_comes() {
    let models = Models::new();
    let shares = |options: &mut ServerOptions| options.device.partitions = vec!["25%".to_owned(), "75%".to_owned()];
    let Some((registry, looks)) = serve(&models, &[], shares).await else { return };
    for (name, knee) in [("a", "knee = 0.2\n"), ("b", "knee = 0.75\n"), ("c", "")] {
        let file = models.path().join(name).join("1/model.emulated.toml");
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(file, format!("{knee}{text}")).unwrap();
    }
    for name in ["a", "b"] {
        registry.load(name, Default::default()).await.unwrap();
    }
    // Each model would ask for as much as the other.
    until(|| (share(&registry, "a"), share(&registry, "b")) == (Some((0, 25)), Some((1, 75)))).await;
    registry.load("c", Default::default()).await.unwrap();
    until(|| share(&registry, "c").is_some()).await;
    let knees = ["a", "b", "c"].map(|name| placed(&registry, name).unwrap().share.unwrap().knee);
    assert_eq!(knees, [Some(20), Some(75), None]);
    looks.abort();
}

#[tokio::test]
async fn batches_of_windowed_models_grow_as_long_as_they_are_in_time() {
    let models = Models::new();
    let slab = |options: &mut ServerOptions| {
        options.device.share_batches = BatchesBy::Slab;
        options.device.groups =
            vec![crate::lanes::group(&["a"], "windowed", json!({})), crate::lanes::group(&["b"], "elastic", json!({}))];
        let slo = Some(downbeat_core::Duration::from_millis(60_000));
        options.models.insert("a".to_owned(), ModelOptions { slo, ..ModelOptions::default() });
    };
    let Some((registry, looks)) = serve(&models, &["a", "b"], slab).await else { return };
    let limit = |name: &str| placed(&registry, name)?.share?.batch_limit;
    until(|| limit("a") == Some(1) && placed(&registry, "b").is_some_and(|placed| placed.share.is_some())).await;
    let stopped = Arc::new(AtomicBool::new(false));
    let answered = clients(&registry, "a", &stopped);
    until(|| limit("a") == Some(8)).await;
    stopped.store(true, Ordering::Relaxed);
    for client in answered {
        assert!(client.await.unwrap() > 0);
    }
    assert_eq!(metric(&registry, "downbeat_share_batch_limit", "model=\"a\""), 8.0);
    assert_eq!(limit("b"), None, "it is no policy whose batches can be limited");
    registry.unload("a").await.unwrap();
    until(|| metric(&registry, "downbeat_share_batch_limit", "model=\"a\"") == 0.0).await;
    looks.abort();
}

#[tokio::test]
async fn who_has_no_share_runs_on_all_of_the_device() {
    let models = Models::new();
    let exclusive = |options: &mut ServerOptions| {
        options.device.groups = vec![crate::lanes::group(&["a", "b"], "windowed", json!({}))];
    };
    let Some((registry, looks)) = serve(&models, &["a", "b", "c"], exclusive).await else { return };
    until(|| are_apart(&registry, "a", "b")).await;
    assert_eq!((share(&registry, "c"), placed(&registry, "c").unwrap().partition), (None, 2), "exclusive");
    let error = registry.set_partition("c", Some(1)).await.unwrap_err().to_string();
    assert!(error.contains("another device policy than exclusive"), "{error}");
    looks.abort();
    let Some((registry, looks)) = serve(&models, &["a", "b", "c"], |_| {}).await else { return };
    let shares = || ["a", "b", "c"].into_iter().filter_map(|name| share(&registry, name));
    until(|| shares().filter(|(_, units)| *units == 1).count() == 2 && shares().count() == 3).await;
    let left = ["a", "b", "c"].into_iter().find(|name| share(&registry, name) == Some((2, 0))).expect("one has none");
    assert!(
        placed(&registry, left).unwrap().share.unwrap().reason.unwrap().contains("there is no share for the model")
    );
    registry.infer(request(left, 1, 4)).await.unwrap();
    let gone = ["a", "b", "c"].into_iter().find(|name| *name != left).unwrap();
    registry.unload(gone).await.unwrap();
    until(|| share(&registry, left).is_some_and(|(_, units)| units == 1)).await;
    looks.abort();
}
