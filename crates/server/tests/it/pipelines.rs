//! Ensembles of emulated models: the weights of their steps, and batches that leave early.

use std::sync::Arc;

use downbeat_models::registry::Registry;
use downbeat_service::error::ServiceError;
use downbeat_service::options::{DispatchPolicy, ServerOptions};
use downbeat_service::service::{LoadOverrides, Service};

use crate::serving::{Models, metric, ms, request, send, with_timeout};

/// An ensemble of steps `(model, input, output)`, which takes `x` and gives the last output.
fn add_ensemble(models: &Models, name: &str, slo_ms: u32, steps: &[(&str, &str, &str)]) {
    let step = |(model, input, output): &(&str, &str, &str)| {
        format!(
            "{{ model_name: \"{model}\" model_version: -1 input_map {{ key: \"x\" value: \"{input}\" }} \
             output_map {{ key: \"y\" value: \"{output}\" }} }}"
        )
    };
    let steps: Vec<String> = steps.iter().map(step).collect();
    let config = format!(
        "name: \"{name}\" platform: \"ensemble\" max_batch_size: 8\n\
         input [ {{ name: \"x\" data_type: TYPE_FP32 dims: [ 4 ] }} ]\n\
         output [ {{ name: \"y\" data_type: TYPE_FP32 dims: [ 1 ] }} ]\n\
         parameters {{ key: \"slo_ms\" value {{ string_value: \"{slo_ms}\" }} }}\n\
         ensemble_scheduling {{ step [ {} ] }}\n",
        steps.join(", ")
    );
    std::fs::create_dir_all(models.path().join(name).join("1")).unwrap();
    std::fs::write(models.path().join(name).join("config.pbtxt"), config).unwrap();
}

/// The models `a` and `b` run the steps of `e`, on a device each. An item takes 100 ms in each. The
/// fixed rule gives each step half of the time, so that `a` gives up the requests that are not done
/// after half of it. Yet `b` is as quick as `a`, and needs far less time.
fn uneven() -> Models {
    let models = Models::new();
    models.add("a", 1, (100.0, 0.0), 4, "max_batch_size: 8");
    models.add("b", 1, (100.0, 0.0), 1, "max_batch_size: 8");
    add_ensemble(&models, "e", 10_000, &[("a", "x", "mid"), ("b", "mid", "y")]);
    models
}

fn on_two_devices(options: &mut ServerOptions) {
    options.devices = 2;
    options.placement = [("a", vec![0]), ("b", vec![1])].map(|(name, on)| (name.to_owned(), on)).into();
    options.dispatch = DispatchPolicy::Eager;
    options.rehearsal_cpu = 0.9;
}

fn weight(registry: &Registry, ensemble: &str, step: &str) -> f64 {
    metric(registry, "downbeat_pipeline_step_weight", &format!("ensemble=\"{ensemble}\",model=\"{step}\""))
}

fn trials(registry: &Registry) -> f64 {
    metric(registry, "downbeat_pipeline_weight_trials_total", "")
}

/// Weighs and asks `model` until `condition` holds, however slow the trials on this machine are. The
/// rehearsal notes no request before it has heard of the ensemble.
async fn weighed_until(registry: &Registry, model: &str, condition: impl Fn() -> bool) {
    for _ in 0..3_000 {
        registry.weigh_steps();
        if condition() {
            return;
        }
        burst(registry, model).await;
        tokio::time::sleep(ms(200)).await;
    }
    panic!("no such weights within 10 minutes, after {} trials", trials(registry));
}

/// 264 items at once, for which the weights can be rehearsed. No answer is waited for.
async fn burst(registry: &Registry, model: &str) {
    for _ in 0..33 {
        send(registry, request(model, 8, 4)).await.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_whose_fixed_weights_are_wrong_get_better_ones() {
    let models = uneven();
    let registry = models.serve(on_two_devices).await;
    assert_eq!([weight(&registry, "e", "a"), weight(&registry, "e", "b")], [0.5, 0.5]);
    weighed_until(&registry, "e", || metric(&registry, "downbeat_pipeline_weight_changes_total", "") >= 1.0).await;
    registry.weigh_steps();
    let weights = [weight(&registry, "e", "a"), weight(&registry, "e", "b")];
    assert!(weights[0] > 0.6 && (weights[0] + weights[1] - 1.0).abs() < 1e-9, "{weights:?}");
    // The ensemble leaves with a model of its steps, and comes back.
    registry.unload_model("b").await.unwrap();
    assert_eq!(metric(&registry, "downbeat_pipeline_step_weight", "ensemble=\"e\""), 0.0, "the gauges are gone");
    registry.weigh_steps();
    registry.load_model("b", LoadOverrides::default(), Arc::new(())).await.unwrap();
    registry.weigh_steps();
    assert!(weight(&registry, "e", "a") > 0.0);
    let answer = registry.infer(request("e", 1, 4)).await.unwrap();
    assert_eq!(answer.outputs[0].shape, [1, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_that_come_and_go_during_trials_harm_no_request() {
    let models = uneven();
    models.add("c", 1, (100.0, 0.0), 1, "max_batch_size: 8");
    add_ensemble(&models, "f", 10_000, &[("a", "x", "mid"), ("c", "mid", "y")]);
    let registry = models.serve(on_two_devices).await;
    registry.weigh_steps();
    for _ in 0..4 {
        burst(&registry, "e").await;
        burst(&registry, "f").await;
        registry.unload_model("c").await.unwrap();
        registry.weigh_steps();
        assert!(registry.infer(request("f", 1, 4)).await.is_err());
        assert_eq!(weight(&registry, "f", "c"), 0.0);
        registry.load_model("c", LoadOverrides::default(), Arc::new(())).await.unwrap();
        registry.weigh_steps();
    }
    weighed_until(&registry, "e", || trials(&registry) >= 1.0).await;
    for model in ["e", "f"] {
        assert_eq!(registry.infer(request(model, 1, 4)).await.unwrap().outputs[0].shape, [1, 1]);
    }
}

/// Whether batches of a model leave early, and the policy for larger waits.
fn dispatch(registry: &Registry, model: &str) -> DispatchPolicy {
    let model = registry.serving().get(model).unwrap();
    model.versions.values().next().unwrap().last_queue().unwrap().dispatch()
}

#[tokio::test(flavor = "multi_thread")]
async fn only_models_that_serve_steps_leave_early() {
    let models = uneven();
    models.add("plain", 1, (1.0, 1.0), 4, "max_batch_size: 8");
    let adaptive = DispatchPolicy::Adaptive { consolidate: false };
    let registry = models.serve(|options| options.dispatch = DispatchPolicy::Adaptive { consolidate: false }).await;
    registry.weigh_steps();
    assert_eq!(dispatch(&registry, "plain"), adaptive);
    for model in ["a", "b"] {
        assert_eq!(dispatch(&registry, model), adaptive.clone().of_step(50), "two steps share the devices");
    }
    registry.unload_model("e").await.unwrap();
    registry.weigh_steps();
    assert_eq!([dispatch(&registry, "a"), dispatch(&registry, "b")], [adaptive.clone(), adaptive]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_ensemble_nothing_is_rehearsed() {
    let models = Models::new();
    models.add("a", 1, (1.0, 1.0), 4, "max_batch_size: 8");
    let registry = models.serve(on_two_devices).await;
    registry.weigh_steps();
    for _ in 0..300 {
        registry.infer(request("a", 1, 4)).await.unwrap();
    }
    registry.weigh_steps();
    assert_eq!(trials(&registry), 0.0);
    assert_eq!(dispatch(&registry, "a"), DispatchPolicy::Eager);
    assert!(registry.driver.take_weights().is_none());
}

/// `a` takes 3.9 s of the whole's 4.577 s, and its local deadline comes 74 ms too early: its weight is
/// 0.836. The second try has half of the time that `b` does not need, 335 ms more. A busy machine may
/// lose some of them, so that one of several requests has to be in time.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_misses_its_local_deadline_tries_again() {
    let models = Models::new();
    models.add("a", 1, (3_900.0, 0.0), 4, "max_batch_size: 8");
    models.add("b", 1, (80.0, 0.0), 1, "max_batch_size: 8");
    add_ensemble(&models, "e", 4_577, &[("a", "x", "mid"), ("b", "mid", "y")]);
    add_ensemble(&models, "short", 4_200, &[("a", "x", "mid"), ("b", "mid", "y")]);
    let registry = models.serve(on_two_devices).await;
    // Of 4.2 s `a` gets 3.511 s, and in its second try 3.816 s: it is not begun.
    for _ in 0..3 {
        let refused = registry.infer(request("short", 1, 4)).await.unwrap_err();
        assert!(matches!(refused, ServiceError::DeadlineExceeded(_)), "{refused}");
    }
    for _ in 0..20 {
        if registry.infer(request("e", 1, 4)).await.is_ok() {
            return;
        }
    }
    panic!("no request was in time in its second try");
}

/// A nested ensemble: its steps are steps of the outer one, and each has a weight there.
#[tokio::test(flavor = "multi_thread")]
async fn the_steps_of_an_ensemble_within_an_ensemble_have_weights() {
    let models = uneven();
    models.add("c", 1, (200.0, 0.0), 1, "max_batch_size: 8");
    add_ensemble(&models, "outer", 10_000, &[("e", "x", "mid"), ("c", "mid", "y")]);
    let registry = models.serve(on_two_devices).await;
    registry.weigh_steps();
    let of_step = |label: &str| {
        metric(&registry, "downbeat_pipeline_step_weight", &format!("ensemble=\"outer\",model=\"{label}\""))
    };
    let (a, b, c) = (of_step("a\",step=\"0.0"), of_step("b\",step=\"0.1"), of_step("c\",step=\"1"));
    assert!((a + b + c - 1.0).abs() < 1e-9 && a == b && c > 0.0, "{a}, {b}, {c}");
    assert_eq!(registry.infer(request("outer", 2, 4)).await.unwrap().outputs[0].shape, [2, 1]);
    // The outer ensemble has 10 s, and its steps need 400 ms alone: 350 ms are known to be too few.
    let hasty = with_timeout(request("outer", 1, 4), ms(350));
    let error = registry.infer(hasty).await.unwrap_err().to_string();
    assert!(error.contains("step 0 ('e') of ensemble 'outer'"), "{error}");
}

/// An output without labels of its own has those of the model that makes the output, also through an ensemble.
#[tokio::test(flavor = "multi_thread")]
async fn an_ensemble_has_the_labels_of_its_steps() {
    let models = Models::new();
    models.add("a", 1, (1.0, 0.0), 4, "max_batch_size: 8");
    let output = "output [ { name: \"y\" data_type: TYPE_FP32 dims: [ 1 ] label_filename: \"labels.txt\" } ]";
    models.add("b", 1, (1.0, 0.0), 1, &format!("max_batch_size: 8\n{output}"));
    add_ensemble(&models, "inner", 10_000, &[("a", "x", "mid"), ("b", "mid", "y")]);
    add_ensemble(&models, "outer", 10_000, &[("inner", "x", "y")]);
    add_ensemble(&models, "own", 10_000, &[("inner", "x", "y")]);
    std::fs::write(models.path().join("b").join("labels.txt"), "cat\ndog\n").unwrap();
    let config = models.path().join("own").join("config.pbtxt");
    let text = std::fs::read_to_string(&config).unwrap();
    let labelled = text.replace("dims: [ 1 ]", "dims: [ 1 ] label_filename: \"own.txt\"");
    std::fs::write(config, labelled).unwrap();
    std::fs::write(models.path().join("own").join("own.txt"), "bird\n").unwrap();
    let registry = models.serve(|_| {}).await;
    for ensemble in ["inner", "outer"] {
        assert_eq!(registry.labels(ensemble, "", "y"), ["cat", "dog"], "{ensemble}");
    }
    assert_eq!(registry.labels("own", "", "y"), ["bird"]);
    assert!(registry.labels("outer", "", "z").is_empty());
    // A load of the step's model brings its new labels.
    std::fs::write(models.path().join("b").join("labels.txt"), "cow\n").unwrap();
    registry.load_model("b", LoadOverrides::default(), Arc::new(())).await.unwrap();
    assert_eq!(registry.labels("outer", "", "y"), ["cow"]);
}
