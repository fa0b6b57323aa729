//! Frontends and backends read each other's large tensors by UCX, over UCX's own shared memory,
//! since one machine has no RDMA. Without UCX, or the feature `ucx`, these tests are ignored,
//! unless DOWNBEAT_REQUIRE_UCX is set.

use crate::cluster::{Cluster, MANY, Member, UNMEASURED, large_digits, large_request, tensor_bytes, transports, until};
use crate::command_line::downbeat;
use crate::serve::http;

/// Variables that set UCX's transport, and make UCX close failed connections.
fn by(transport: &str) -> [(&str, &str); 4] {
    [
        ("DOWNBEAT_UCX", "always"),
        ("UCX_TLS", transport),
        ("UCX_MM_ERROR_HANDLING", "y"),
        ("UCX_WARN_UNUSED_ENV_VARS", "n"),
    ]
}

/// Whether all tensors between a process and its peers go by UCX.
fn are_by_ucx(member: &Member) -> bool {
    let transports = transports(member);
    !transports.is_empty() && transports.iter().all(|transport| transport == "ucx")
}

#[test]
#[cfg_attr(not(has_ucx), ignore = "needs libucp.so.0 and the feature ucx")]
fn large_tensors_are_read_by_ucx() {
    let body = large_request();
    for transport in ["posix,self", "sysv,self", "cma,posix"] {
        let cluster = Cluster::of_variables(large_digits(), &[UNMEASURED], &[], &by(transport));
        // A backend connects to a frontend with its first batch of the frontend's requests.
        assert_eq!(cluster.infer().0, 200);
        let answer = http(cluster.frontend.http, "POST", "/v2/models/digits/infer", &body);
        assert_eq!(answer.0, 200, "{transport}: {}", answer.1);
        assert!(are_by_ucx(&cluster.frontend), "{transport}: {:?}", transports(&cluster.frontend));
        // More tensors, if a batch was given back on a busy machine.
        assert!(tensor_bytes(&cluster.frontend, "ucx") >= (MANY * 64 * 4) as f64, "{transport}");
        assert_eq!(tensor_bytes(&cluster.frontend, "shared_memory"), 0.0, "{transport}");
        let outputs: f64 = cluster.backends.iter().map(|backend| tensor_bytes(backend, "ucx")).sum();
        assert!(outputs >= (MANY * 10 * 4) as f64, "{transport}: {outputs}");
        // Without UCX the tensors are the same, bit for bit.
        let list = ["--schedulers", &cluster.list, "--listen", "127.0.0.1:0"];
        let other = Member::start("frontend", &list);
        until("ready", || other.get("/v2/health/ready").0 == 200);
        assert!(http(other.http, "POST", "/v2/models/digits/infer", &body) == answer, "{transport}: another answer");
        assert_eq!(tensor_bytes(&other, "ucx"), 0.0, "it was told nothing of UCX");
    }
}

#[test]
#[cfg_attr(not(has_ucx), ignore = "needs libucp.so.0 and the feature ucx")]
fn processes_that_are_killed_while_ucx_reads_cost_the_others_nothing() {
    let body = large_request();
    for transport in ["posix,self", "sysv,self"] {
        let mut cluster = Cluster::of_variables(large_digits(), &[UNMEASURED], &[], &by(transport));
        let backend = cluster.backends.remove(0);
        let statuses = cluster.under_load_of(&body, 8, || backend.signal("-KILL"));
        assert_eq!(statuses.iter().filter(|status| **status != 200).count(), 0, "{transport}: {statuses:?}");
        until("the other backend serves it by UCX", || are_by_ucx(&cluster.frontend));
        // A frontend goes in the midst of its requests. Another frontend is still served as before.
        let list = ["--schedulers", &cluster.list, "--listen", "127.0.0.1:0"];
        let other = Member::within("frontend", &list, &by(transport));
        until("ready", || other.get("/v2/health/ready").0 == 200);
        let old = std::mem::replace(&mut cluster.frontend, other);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                // The request ends without an answer.
                scope.spawn(|| std::panic::catch_unwind(|| http(old.http, "POST", "/v2/models/digits/infer", &body)));
            }
            let statuses = cluster.under_load_of(&body, 8, || old.signal("-KILL"));
            assert_eq!(statuses.iter().filter(|status| **status != 200).count(), 0, "{transport}: {statuses:?}");
        });
        until("the frontend is missed", || transports(&cluster.backends[0]) == ["ucx"]);
        assert!(tensor_bytes(&cluster.frontend, "ucx") > 0.0);
    }
}

#[test]
#[cfg_attr(not(has_ucx), ignore = "needs libucp.so.0 and the feature ucx")]
fn ucx_that_would_end_the_process_with_a_peer_is_refused_at_the_start() {
    let mut frontend = downbeat(&["frontend"]);
    frontend.args(["--schedulers", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--host", "127.0.0.1"]);
    frontend.args(["--http-port", "0", "--metrics-port", "0", "--grpc-port", "off"]);
    let output = frontend.envs(by("tcp")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("UCX_TLS has tcp"), "{said}");
}

#[cfg(not(feature = "ucx"))]
#[test]
fn a_build_without_ucx_that_is_asked_for_it_says_how_to_get_it() {
    for role in [&["frontend", "--schedulers", "127.0.0.1:1"][..], &["serve", "."]] {
        let output = downbeat(role).args(["--ucx", "auto"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("`cargo build --release --features ucx` adds it"), "{said}");
    }
}
