//! Configurations that come with a load request instead of from the disk.

use std::fs;

use downbeat_core::Duration;
use downbeat_repository::ModelRepository;

fn repository() -> (tempfile::TempDir, ModelRepository) {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("m/1")).unwrap();
    fs::write(folder.path().join("m/1/model.onnx"), b"").unwrap();
    fs::write(folder.path().join("m/config.pbtxt"), "max_batch_size: 3").unwrap();
    let repository = ModelRepository::open(folder.path()).unwrap();
    (folder, repository)
}

#[test]
fn json_stands_in_for_the_file_in_both_spellings() {
    let (_folder, repository) = repository();
    for config in [
        r#"{"max_batch_size": 8, "dynamic_batching": {"max_queue_delay_microseconds": 100},
            "parameters": {"slo_ms": {"string_value": "20"}}}"#,
        r#"{"maxBatchSize": 8, "dynamicBatching": {"maxQueueDelayMicroseconds": "100"},
            "parameters": {"slo_ms": {"stringValue": "20"}}}"#,
        r#"max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 100 }
           parameters { key: "slo_ms" value { string_value: "20" } }"#,
    ] {
        let definition = repository.definition("m", Some(config)).unwrap();
        assert_eq!(definition.batching.max_batch_size, 8);
        assert_eq!(definition.batching.max_queue_delay, Duration::from_micros(100));
        assert_eq!(definition.slo, Some(Duration::from_millis(20)));
    }
    assert_eq!(repository.definition("m", None).unwrap().batching.max_batch_size, 3);
}

#[test]
fn wrong_json_is_answered_with_its_place() {
    let (_folder, repository) = repository();
    let message = |config: &str| repository.definition("m", Some(config)).unwrap_err().to_string();
    assert_eq!(
        message("{\n  \"max_batchsize\": 8\n}"),
        "configuration of the load request:2:17: unknown field 'max_batchsize'; did you mean 'max_batch_size'?"
    );
    assert_eq!(
        message("{\"max_batch_size\": 8"),
        "configuration of the load request:1:20: EOF while parsing an object"
    );
    assert_eq!(
        message("{\"max_batch_size\": -1}"),
        "configuration of the load request: max_batch_size: is -1; must be 0 (no batch dimension) or larger"
    );
    assert_eq!(message("{} {}"), "configuration of the load request:1:4: trailing characters");
}

#[test]
fn the_newest_fields_of_the_schema_are_known_in_json() {
    let (_folder, repository) = repository();
    for config in [
        r#"{"model_metrics": {"metric_control": [{"metric_identifier": {"family": "f"}, "histogram_options": {"buckets": [1, 2.5]}}]}}"#,
        r#"{"modelMetrics": {"metricControl": [{"metricIdentifier": {"family": "f"}, "histogramOptions": {"buckets": [1, 2.5]}}]}}"#,
    ] {
        let definition = repository.definition("m", Some(config)).unwrap();
        let warnings: Vec<String> = definition.warnings.iter().map(ToString::to_string).collect();
        assert_eq!(
            warnings,
            [
                "configuration of the load request: model_metrics: is not supported, and ignored: histograms have the same buckets for every \
              model (see docs/guide/triton.md#fields-without-effect)"
            ]
        );
    }
    let ensemble = r#"{"platform": "ensemble", "ensemble_scheduling": {"max_inflight_requests": 4}}"#;
    let error = repository.definition("m", Some(ensemble)).unwrap_err().to_string();
    assert!(error.contains("ensemble_scheduling: has no step"), "{error}");
    let error = repository.definition("m", Some(r#"{"model_metric": {}}"#)).unwrap_err().to_string();
    assert!(error.contains("unknown field 'model_metric'; did you mean 'model_metrics'?"), "{error}");
}
