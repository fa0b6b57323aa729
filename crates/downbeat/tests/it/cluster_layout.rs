//! Sub-clusters of real processes: the scheduler divides models among backends, and moves models
//! while clients send requests.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use crate::cluster::{Member, under_load, until};
use crate::cluster_etcd::Etcd;
use crate::ports::free_addresses;
use crate::serve::{REQUEST, digits, http};

/// The repository has the same model under each of these names.
const MODELS: [&str; 4] = ["a", "b", "c", "d"];
/// Bytes of the file of each model. Loaded it takes 78 kB, and a run 66 kB.
const FILE: u64 = 38_959;
/// Bytes that hold three of the models with their runs, and not four.
const MEMORY_OF_THREE: &str = "450000";
/// Timeouts so long that on a busy machine a scheduler loses the lead only if its process is gone.
const PATIENT: [&str; 4] = ["--takeover-after-ms", "2000", "--lost-after-ms", "3000"];

fn repository() -> tempfile::TempDir {
    let repository = digits();
    let original = repository.path().join("digits");
    for name in MODELS {
        let folder = repository.path().join(name);
        std::fs::create_dir_all(folder.join("1")).unwrap();
        std::fs::copy(original.join("1/model.onnx"), folder.join("1/model.onnx")).unwrap();
        std::fs::copy(original.join("labels.txt"), folder.join("labels.txt")).unwrap();
        let config = std::fs::read_to_string(original.join("config.pbtxt")).unwrap();
        std::fs::write(folder.join("config.pbtxt"), config.replace("\"digits\"", &format!("\"{name}\""))).unwrap();
    }
    std::fs::remove_dir_all(original).unwrap();
    repository
}

/// Schedulers that divide models between two sub-clusters. Its methods start backends and
/// frontends.
struct SubClusters {
    schedulers: Vec<Member>,
    /// `--sub-clusters`.
    count: &'static str,
    /// More flags of the backends.
    limits: &'static [&'static str],
    /// The addresses of all schedulers.
    list: String,
    repository: tempfile::TempDir,
}

impl SubClusters {
    fn start(schedulers: usize, flags: &[&str]) -> SubClusters {
        let mut cluster = SubClusters::without_schedulers(schedulers);
        cluster.start_schedulers(flags);
        cluster
    }

    /// A cluster of which no process runs.
    fn without_schedulers(schedulers: usize) -> SubClusters {
        let addresses = free_addresses::<2>().map(|address| address.to_string());
        let (count, limits) = ("2", &[][..]);
        let list = addresses[..schedulers].join(",");
        SubClusters { schedulers: Vec::new(), count, limits, list, repository: repository() }
    }

    fn start_schedulers(&mut self, flags: &[&str]) {
        let scheduler = |(rank, address): (usize, &str)| {
            let own = ["--schedulers", &self.list, "--rank", &rank.to_string(), "--listen", address];
            let divides = ["--sub-clusters", self.count, "--plan-every-s", "0"];
            Member::start("scheduler", &[&own, &divides[..], &PATIENT, flags].concat())
        };
        self.schedulers = self.list.split(',').enumerate().map(scheduler).collect();
    }

    fn backend(&self, name: &str) -> Member {
        let own = ["--schedulers", &self.list, "--node-name", name, "--model-control-mode", "explicit"];
        let engine = ["--engine", "rten", "--profiling-budget", "0"];
        // The SLOs are so long that a slow machine keeps them.
        let slos: Vec<String> = MODELS.iter().map(|model| format!("--slo-ms={model}=60000")).collect();
        let slos: Vec<&str> = slos.iter().map(String::as_str).collect();
        let models = [self.repository.path().to_str().unwrap()];
        Member::start("backend", &[&own[..], &engine, self.limits, &slos, &PATIENT, &models].concat())
    }

    fn frontend(&self) -> Member {
        Member::start("frontend", &[&["--schedulers", &self.list, "--listen", "127.0.0.1:0"], &PATIENT[..]].concat())
    }

    /// By sub-cluster, its models and its backends, as the leader reports once no model is missing.
    fn layout(&self) -> Vec<(Vec<String>, Vec<String>)> {
        let Some(leader) = self.schedulers.iter().find(|scheduler| scheduler.leads()) else { return Vec::new() };
        let status = leader.cluster();
        let names = |values: &serde_json::Value| {
            let values = values.as_array().unwrap().iter();
            values.map(|value| value.as_str().unwrap_or_default().to_owned()).collect::<Vec<String>>()
        };
        let groups = status["sub_clusters"].as_array().cloned().unwrap_or_default();
        let of = |group: &serde_json::Value| {
            let backends = group["backends"].as_array().unwrap();
            let is_whole = backends.iter().all(|backend| backend["missing"].as_array().unwrap().is_empty());
            let mut members: Vec<String> = backends.iter().map(|b| b["name"].as_str().unwrap().to_owned()).collect();
            members.sort();
            is_whole.then(|| (names(&group["models"]), members))
        };
        groups.iter().map(of).collect::<Option<_>>().unwrap_or_default()
    }

    /// Waits until the two sub-clusters have so many backends, and each backend serves exactly the
    /// models of its sub-cluster. Returns the models by backend.
    fn settled(&self, backends: &[&Member], sizes: [usize; 2]) -> Vec<BTreeSet<String>> {
        until("each sub-cluster has its models, and no backend another", || {
            let layout = self.layout();
            let mut members: Vec<usize> = layout.iter().map(|(_, members)| members.len()).collect();
            members.sort_unstable();
            let models: usize = layout.iter().map(|(models, _)| models.len()).sum();
            let is_divided = models == MODELS.len() && layout.iter().all(|(models, _)| !models.is_empty());
            let loaded: usize = backends.iter().map(|backend| ready(backend).len()).sum();
            let wanted: usize = layout.iter().map(|(models, members)| models.len() * members.len()).sum();
            members == sizes && is_divided && loaded == wanted
        });
        backends.iter().map(|backend| ready(backend)).collect()
    }
}

/// The models that a backend serves.
fn ready(backend: &Member) -> BTreeSet<String> {
    let is_ready = |model: &&&str| backend.get(&format!("/v2/models/{model}/ready")).0 == 200;
    MODELS.iter().filter(is_ready).map(|model| (*model).to_owned()).collect()
}

fn all_answered(statuses: &[u16]) {
    let other = statuses.iter().filter(|status| **status != 200).count();
    assert_eq!(other, 0, "of {}", statuses.len());
}

#[test]
fn section_4_4_models_are_divided_and_move_under_load_without_a_refusal() {
    let cluster = SubClusters::start(1, &[]);
    let (first, frontend) = (cluster.backend("first"), cluster.frontend());
    until("a lone backend has all", || ready(&first).len() == MODELS.len());
    until("all are served", || MODELS.iter().all(|m| frontend.get(&format!("/v2/models/{m}/ready")).0 == 200));
    let body = std::fs::read_to_string(REQUEST).unwrap();
    let under_load = |happens: &mut dyn FnMut()| {
        all_answered(&under_load(frontend.http, &MODELS, &body, 50, happens));
    };
    // Another backend joins, and takes half of the models.
    let (mut second, mut third) = (None, None);
    under_load(&mut || {
        let joins = second.insert(cluster.backend("second"));
        let loaded = cluster.settled(&[&first, joins], [1, 1]);
        assert!(loaded[0].is_disjoint(&loaded[1]), "{loaded:?}");
    });
    let Some(second) = second else { return };
    // A third backend joins a sub-cluster, and loads the models that the other backend there has.
    under_load(&mut || {
        let joins = third.insert(cluster.backend("third"));
        cluster.settled(&[&first, &second, joins], [1, 2]);
    });
    let Some(third) = third else { return };
    // The first backend is stopped in good order: it ends once others have its models.
    let mut first = first;
    under_load(&mut || {
        first.signal("-TERM");
        assert!(first.child.wait().unwrap().success());
        cluster.settled(&[&second, &third], [1, 1]);
    });
    // A user asks for another plan, which may be the same.
    under_load(&mut || {
        let (status, said) = http(cluster.schedulers[0].http, "POST", "/v2/cluster/plan", "");
        assert_eq!(status, 200, "{said}");
        cluster.settled(&[&second, &third], [1, 1]);
    });
    let (status, said) = http(frontend.http, "POST", "/v2/cluster/plan", "");
    assert_eq!(status, 404, "{said}");
}

#[test]
fn a_new_leader_goes_on_with_the_layout_that_is_there() {
    let mut cluster = SubClusters::start(2, &[]);
    let backends = [cluster.backend("first"), cluster.backend("second")];
    let frontend = cluster.frontend();
    let refs: Vec<&Member> = backends.iter().collect();
    until("two have come", || cluster.layout().len() == 2);
    let before = cluster.settled(&refs, [1, 1]);
    until("all are served", || MODELS.iter().all(|m| frontend.get(&format!("/v2/models/{m}/ready")).0 == 200));
    let rank = cluster.schedulers.iter().position(Member::leads).unwrap();
    let leader = cluster.schedulers.remove(rank);
    let (status, said) = http(cluster.schedulers[0].http, "POST", "/v2/cluster/plan", "");
    assert_eq!(status, 503, "{said}");
    let body = std::fs::read_to_string(REQUEST).unwrap();
    let statuses = under_load(frontend.http, &MODELS, &body, 50, || {
        leader.signal("-KILL");
        until("the other leads", || cluster.schedulers[0].leads());
        assert_eq!(cluster.settled(&refs, [1, 1]), before, "nothing moves");
    });
    all_answered(&statuses);
}

#[test]
#[cfg_attr(not(has_etcd), ignore = "needs etcd on the path")]
fn a_plan_that_etcd_has_outlives_all_processes() {
    let etcd = Etcd::start();
    // The backends come before the scheduler. A scheduler waits a while for backends. If only one
    // comes in that time, the scheduler makes a plan for one.
    let start = |names: [&str; 2]| {
        let mut cluster = SubClusters::without_schedulers(1);
        let backends = names.map(|name| cluster.backend(name));
        cluster.start_schedulers(&["--etcd", &etcd.clients]);
        (cluster, backends)
    };
    let of = |cluster: &SubClusters, backends: &[Member; 2]| {
        until("two have come", || cluster.layout().len() == 2);
        let models = cluster.settled(&backends.iter().collect::<Vec<_>>(), [1, 1]);
        models.into_iter().collect::<BTreeSet<_>>()
    };
    let (mut cluster, backends) = start(["first", "second"]);
    let before = of(&cluster, &backends);
    for scheduler in cluster.schedulers.drain(..) {
        scheduler.signal("-KILL");
    }
    // The test swaps two models, one of each sub-cluster. The new plan is as even as the old one,
    // and the scheduler would not make it anew.
    let [one, other] = &before.iter().collect::<Vec<_>>()[..] else { panic!("{before:?}") };
    let server: SocketAddr = etcd.clients.strip_prefix("http://").unwrap().parse().unwrap();
    let ask = |what: &str, body: serde_json::Value| -> serde_json::Value {
        let (status, said) = http(server, "POST", &format!("/v3/kv/{what}"), &body.to_string());
        assert_eq!(status, 200, "{said}");
        serde_json::from_str(&said).unwrap()
    };
    let key = BASE64_STANDARD.encode("downbeat/plan");
    let kept = ask("range", serde_json::json!({ "key": key }))["kvs"][0]["value"].as_str().unwrap().to_owned();
    let mut plan: serde_json::Value = serde_json::from_slice(&BASE64_STANDARD.decode(kept).unwrap()).unwrap();
    let (goes, comes) = (one.first().unwrap(), other.first().unwrap());
    let swapped = (plan["models"][comes].clone(), plan["models"][goes].clone());
    (plan["models"][goes], plan["models"][comes]) = swapped;
    ask("put", serde_json::json!({ "key": key, "value": BASE64_STANDARD.encode(plan.to_string()) }));
    let swap = |models: &BTreeSet<String>, goes: &String, comes: &String| {
        models.iter().map(|model| if model == goes { comes.clone() } else { model.clone() }).collect()
    };
    let expected = BTreeSet::from([swap(one, goes, comes), swap(other, comes, goes)]);
    // New processes, which no scheduler has told anything yet.
    let (anew, backends) = start(["third", "fourth"]);
    assert_eq!(of(&anew, &backends), expected);
    // A scheduler ends if another one has its rank and lives.
    drop(anew);
    // A stored value that is no plan costs only a line in the log.
    ask("put", serde_json::json!({ "key": key, "value": BASE64_STANDARD.encode("nothing") }));
    let (mut last, backends) = start(["fifth", "sixth"]);
    last.schedulers[0].wait_for("is not a plan of sub-clusters");
    of(&last, &backends);
}

/// Symphony appendix A: the first plan knows the sizes of files alone. Backends then cannot load all,
/// and tell what they measured.
#[test]
fn appendix_a_sub_clusters_are_as_many_as_devices_need() {
    let mut cluster = SubClusters::without_schedulers(1);
    (cluster.count, cluster.limits) = ("auto", &["--model-memory-bytes", MEMORY_OF_THREE]);
    cluster.start_schedulers(&["--plan-load-s", "100"]);
    let (first, second, frontend) = (cluster.backend("first"), cluster.backend("second"), cluster.frontend());
    let models = cluster.settled(&[&first, &second], [1, 1]);
    assert!(models.iter().all(|models| (1..=3).contains(&models.len())), "{models:?}");
    until("all are served", || MODELS.iter().all(|m| frontend.get(&format!("/v2/models/{m}/ready")).0 == 200));
    let groups = cluster.schedulers[0].cluster()["sub_clusters"].clone();
    let memory = groups[0]["memory_bytes"].as_u64().unwrap();
    assert!((FILE..=MEMORY_OF_THREE.parse().unwrap()).contains(&memory), "{groups}");
}

#[test]
fn a_model_that_cannot_be_loaded_is_said_and_the_others_are_served() {
    let cluster = SubClusters::start(1, &[]);
    std::fs::write(cluster.repository.path().join("d/1/model.onnx"), b"nothing").unwrap();
    let (mut backend, frontend) = (cluster.backend("only"), cluster.frontend());
    backend.wait_for("an order of the scheduler was not carried out");
    until("the others are served", || {
        MODELS[..3].iter().all(|m| frontend.get(&format!("/v2/models/{m}/ready")).0 == 200)
    });
    let missing = || cluster.schedulers[0].cluster()["sub_clusters"][0]["backends"][0]["missing"].clone();
    until("what is missing is said", || missing() == serde_json::json!(["d"]));
    // The repaired model is loaded with the next plan.
    std::fs::copy(cluster.repository.path().join("a/1/model.onnx"), cluster.repository.path().join("d/1/model.onnx"))
        .unwrap();
    assert_eq!(http(cluster.schedulers[0].http, "POST", "/v2/cluster/plan", "").0, 200);
    until("it is served", || frontend.get("/v2/models/d/ready").0 == 200);
}
