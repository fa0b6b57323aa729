//! The rollout of a new version in a model's configuration.

use std::fs;

use downbeat_core::rollout::{RollBackRule, RolloutTerms};
use downbeat_repository::{ModelDefinition, ModelRepository};

/// The definition of a model with three versions, and this parameter `rollout`.
fn definition(rollout: &str, rest: &str) -> Result<ModelDefinition, String> {
    let folder = tempfile::tempdir().unwrap();
    for version in ["1", "2", "3"] {
        fs::create_dir_all(folder.path().join("m").join(version)).unwrap();
        fs::write(folder.path().join("m").join(version).join("model.onnx"), b"").unwrap();
    }
    let repository = ModelRepository::open(folder.path()).unwrap();
    let config = format!("parameters {{ key: \"rollout\" value {{ string_value: '{rollout}' }} }} {rest}");
    repository.definition("m", Some(&config)).map_err(|error| error.to_string())
}

#[test]
fn the_terms_are_json_and_the_versions_are_the_two_newest() {
    let text = r#"{"share": 0.05, "header": "x-canary", "roll_back": {"least_attainment": 0.9}}"#;
    let definition = definition(text, "").unwrap();
    let rule = RollBackRule { least_attainment: 0.9, ..RollBackRule::default() };
    let expected = RolloutTerms {
        share: 0.05,
        header: Some("x-canary".to_owned()),
        roll_back: Some(rule),
        ..RolloutTerms::default()
    };
    assert_eq!(definition.rollout, Some(expected));
    assert_eq!(definition.versions.iter().map(|(version, _)| *version).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn a_version_policy_wins_and_null_means_never_back() {
    let text = r#"{"version": 1, "share": 1, "roll_back": null}"#;
    let definition = definition(text, "version_policy { all {} }").unwrap();
    assert_eq!(definition.rollout.unwrap().roll_back, None);
    assert_eq!(definition.versions.len(), 3);
}

#[test]
fn wrong_terms_are_refused_with_their_place() {
    let message = |rollout: &str, rest: &str| definition(rollout, rest).unwrap_err();
    let wrong = message(r#"{"shar": 0.05}"#, "");
    assert!(wrong.contains("parameters[\"rollout\"]: is no rollout: unknown field `shar`"), "{wrong}");
    assert!(wrong.contains(r#"an example is {"share": 0.05, "header": "x-canary"}"#), "{wrong}");
    assert!(message("", "").contains("is no rollout"));
    assert!(message(r#"{"share": 2}"#, "").contains("share is 2; must be from 0 to 1"));
    let decoupled = "model_transaction_policy { decoupled: true }";
    assert!(message(r#"{"share": 1}"#, decoupled).contains("cannot have a rollout"));
}
