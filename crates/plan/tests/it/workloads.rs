//! The workload file.

use downbeat_plan::Workload;
use downbeat_plan::workload::Profile;

const GOOD: &str = r#"
sub_clusters = 2
devices = 6
device_memory_mib = 1024
max_rate = 500

[[models]]
name = "a"
rate = 100
memory_mib = 97.5
slo_ms = 25
profile = { alpha_ms = 1.0, beta_ms = 5.0 }
running_on = 1

[[models]]
name = "b"
rate = 0.5
memory_mib = 10
dynamic_memory_mib = 300
load_cost = 2.5
slo_ms = 40
profile = { points_ms = [[1, 4.0], [8, 18.0]] }
"#;

#[test]
fn a_file_is_read_with_its_defaults() {
    let workload = Workload::parse(GOOD).unwrap();
    assert_eq!((workload.sub_clusters, workload.devices, workload.max_rate), (2, Some(6), Some(500.0)));
    assert_eq!((workload.device_memory, workload.memory_weight, workload.max_disruption), (Some(1 << 30), 1.0, None));
    let [a, b] = &workload.models[..] else { panic!("{workload:?}") };
    assert_eq!((a.memory, a.dynamic_memory, a.load_cost, a.running_on), (195 << 19, 0, 1.0, Some(1)));
    assert_eq!((b.dynamic_memory, b.load_cost, b.running_on), (300 << 20, 2.5, None));
    assert_eq!(b.profile, Profile::Points { points_ms: vec![(1, 4.0), (8, 18.0)] });
    let problem = workload.problem();
    assert_eq!((problem.models[0].running, problem.max_memory), (Some(1), Some(1 << 30)));
    assert!((a.need().unwrap().devices - 100.0 * 0.007 / 2.0).abs() < 1e-12, "10 ms for one more, 7 ms to run");
}

#[test]
fn what_is_wrong_is_told_with_its_place() {
    let wrong = |from: &str, to: &str| {
        assert!(GOOD.contains(from), "{from}");
        Workload::parse(&GOOD.replacen(from, to, 1)).unwrap_err().to_string()
    };
    assert_eq!(wrong("sub_clusters = 2", "sub_clusters = 0"), "2:16: at least 1 sub-cluster is needed");
    assert!(wrong("rate = 100", "rate = -1").starts_with("9:8: -1 must be a finite number and at least 0"));
    assert!(wrong("rate = 100", "rate = nan").starts_with("9:8: NaN must be"));
    assert!(wrong("rate = 100", "rate = 'x'").starts_with("9:8: invalid type: string \"x\", expected f64"));
    assert!(wrong("rate = 100", "rat = 100").starts_with("9:1: unknown field `rat`, expected one of `name`, `rate`"));
    assert!(wrong("rate = 100\n", "").contains("missing field `rate`"));
    assert!(wrong("memory_mib = 97.5", "memory_mib = 1e30").starts_with("10:14: "));
    assert_eq!(
        wrong("slo_ms = 25", "slo_ms = 5"),
        "7:1: model 'a' cannot make its SLO of 5 ms: one request alone takes 6 ms"
    );
    assert_eq!(
        wrong("alpha_ms = 1.0, ", ""),
        "12:11: a profile is either alpha_ms and beta_ms (and max_batch), or points_ms"
    );
    assert!(wrong("alpha_ms = 1.0", "alpha_ms = -1.0").starts_with("7:1: model 'a': -1 ms must be at least 0"));
    assert!(wrong("[[1, 4.0], [8, 18.0]]", "[]").contains("model 'b': a latency profile needs at least one"));
    assert_eq!(
        wrong("name = \"b\"", "name = \"a\""),
        "15:1: two models are named 'a'; give each model a name of its own"
    );
    assert_eq!(
        Workload::parse("sub_clusters = 1\nmodels = []").unwrap_err().to_string(),
        "1:1: there are no models: add [[models]]"
    );
    assert!(Workload::parse("sub_clusters = ").unwrap_err().to_string().starts_with("1:16: "));
    assert!(Workload::parse("").unwrap_err().to_string().contains("missing field"));
}
