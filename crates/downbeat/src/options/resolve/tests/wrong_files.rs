//! Tests of the errors for wrong files, their places, and groups of models with a policy of their
//! own.

use super::*;

#[test]
fn wrong_device_groups_are_refused() {
    let group = |text: &str| refused(&format!("[[device.groups]]\n{text}"), &["m"]);
    assert!(group("models = []").contains("a group names no model"));
    assert!(group("models = ['a', 'a']").contains("model 'a' is named twice"));
    assert!(group("models = ['a']\n[[device.groups]]\nmodels = ['a']").contains("model 'a' is named twice"));
    assert!(group("models = ['a']\nstages = 0").contains("at least 1"));
    assert!(group("models = ['a']\nstages = 2\ncut_at = ['x']").contains("leave one of them out"));
    assert!(
        group("models = ['a']\nmixes = { 4 = '3' }").contains("of 'a': mixes: a lane's batch size is a power of two")
    );
    assert!(group("models = ['a']\nmixes = { four = '4' }").contains("'four' is not a load"));
    assert!(group("models = ['a']\nmixes = 'gone.toml'").contains("cannot read the mixes in gone.toml"));
    let both = group("models = ['a']\npolicy = 'elastic'\n[models.a]\nscheduler = 'eager'");
    assert!(
        both.starts_with("model 'a': the device policy 'elastic' and the scheduler 'eager' would both make"),
        "{both}"
    );
    assert!(refused("scheduler = 'route'", &["m"]).contains("another device policy"));
    assert_eq!(merged("", &["m", "--device-policy", "windowed"]).device.policy.name(), "windowed");
    let error = error("[[device.groups]]\nmodels = ['a']\nload = 'yes'");
    assert!(error.starts_with("3:8: 'yes' is not true, false or \"auto\""), "{error}");
}

#[test]
fn a_setting_foreign_to_its_groups_policy_is_refused_at_its_place() {
    let error = |text: &str| error(&format!("[[device.groups]]\nmodels = ['a']\n{text}"));
    let other = error("stages = 2\npolicy = 'windowed'");
    assert!(
        other.starts_with("3:1: unknown setting 'stages': the policy windowed does not know it, only staged"),
        "{other}"
    );
    assert!(error("policy = 'exclusive'\npad = true").starts_with("4:1: unknown setting 'pad'"));
    assert_eq!(error("policy = 'windowed'\nwindo_ms = 2"), "4:1: unknown option 'windo_ms'; did you mean 'window_ms'?");
    assert_eq!(error("polcy = 'windowed'"), "3:1: unknown option 'polcy'; did you mean 'policy'?");
    assert!(error("zzzz = 2").starts_with("3:1: unknown setting 'zzzz'; here are allowed: ahead, buffer_pairs"));
    assert!(
        error("policy = 'windowd'").starts_with("3:10: unknown device policy 'windowd'; expected one of: exclusive, ")
    );
    assert!(error("window_ms = -1").starts_with("3:13: -1 ms: must be between 0 and a day"));
    assert!(error("mixes = 5").starts_with("3:9: mixes is \"naive\", a file, or a table of lanes by load"));
    assert!(error("exits = [{ outputs = 'a' }]").starts_with("3:9: unknown field `outputs`"));
}

/// A line in the table makes a policy known everywhere: this test and the ones of `sim` and
/// `server` go through the table.
#[test]
fn configuration_and_command_line_know_every_policy_of_the_table() {
    for policy in PolicyName::all() {
        let name = policy.name();
        assert_eq!(merged("", &["m", "--device-policy", name]).device.policy, policy);
        assert_eq!(merged(&format!("[device]\npolicy = '{name}'"), &["m"]).device.policy, policy);
        let text = format!("[[device.groups]]\nmodels = ['a']\npolicy = '{name}'");
        assert_eq!(merged(&text, &["m"]).chosen_policy("a", None).unwrap().name, policy);
        for key in policy.keys() {
            let error = error(&format!("{text}\n{key} = [[1]]"));
            assert!(error.starts_with("4:") && !error.contains("unknown"), "{name} {key}: {error}");
        }
        let help = <ServeFlags as clap::Args>::augment_args(clap::Command::new("serve")).render_long_help().to_string();
        assert!(help.contains(&format!("{name} ({})", policy.about())), "{help}");
    }
}

#[test]
fn lanes_are_read_from_a_file_beside_the_options() {
    let folder = tempfile::tempdir().unwrap();
    let (options, lanes) = (folder.path().join("downbeat.toml"), folder.path().join("lanes.toml"));
    std::fs::write(&options, "repository = 'm'\n[[device.groups]]\nmodels = ['a']\nmixes = 'lanes.toml'").unwrap();
    std::fs::write(&lanes, "[mixes]\n4 = '4'\n16 = '4,4,8'").unwrap();
    let resolved = resolve(&flags(&[]), Process::Server, folder.path()).unwrap();
    assert_eq!(resolved.options.device.groups[0].settings["mixes"], json!({ "4": "4", "16": "4,4,8" }));
    std::fs::write(&lanes, "[mixes]\n4 = '5'").unwrap();
    let error = resolve(&flags(&[]), Process::Server, folder.path()).unwrap_err();
    assert!(format!("{error:#}").contains("lanes.toml: a lane's batch size is a power of two"), "{error:#}");
}

#[test]
fn a_wrong_file_is_answered_with_the_place_and_what_was_meant() {
    assert_eq!(error("\nhttp_prot = 1"), "2:1: unknown option 'http_prot'; did you mean 'http_port'?");
    assert_eq!(error("[models.m]\n slo = 5"), "2:2: unknown option 'slo'; did you mean 'slo_ms'?");
    assert!(error("[models.m]\nzzzz = 5").contains(
        "allowed here: slo_ms, scheduler, drop, max_queue_size, max_queue_wait_s, threads, batching, engine, isolation, preprocess, gpu_memory_mb, partition"
    ));
    assert!(
        error("http_port = 99999").starts_with("1:13: '99999' is not a port: 0 to 65535, or off (false in a file)")
    );
    assert!(error("scheduler = 'egaer'").starts_with("1:13: unknown dispatch policy 'egaer'"));
    let undivided = refused("[models.m]\npartition = 0", &["models"]);
    assert!(undivided.starts_with("[models.m] partition is 0, and the devices are not divided"), "{undivided}");
    assert!(error("[models.m]\npartition = [0, -1]").starts_with("2:"));
    assert!(error("[models.m]\ngpu_memory_mb = 0").starts_with("2:17: 0: must be at least 1"));
    assert!(error("slo_ms = -1").starts_with("1:10: -1 ms: must be more than 0"));
    assert!(error("max_body_bytes = '1T'").contains("is not a size"));
    assert!(error("model_memory_bytes = 'all'").contains("'all' is not a size"));
    assert!(error("model_memory_bytes = -1").contains("'-1' is not a size"));
    assert!(error("a = [").starts_with("1:"));
}
