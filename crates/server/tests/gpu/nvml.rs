//! NVML's measurements and reports, in a process of its own whose loader finds the stand-in by
//! NVML's name.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cuda_stand_in::Measured;
use downbeat_frontend::connections::{ConnectionOptions, Connections, bind};
use downbeat_frontend::http::{HttpOptions, HttpState};
use downbeat_frontend::metrics_port;
use downbeat_models::registry::Registry;
use downbeat_service::error::ServiceError;
use downbeat_service::options::EngineChoice;
use downbeat_service::service::Service;
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;
use serde_json::json;
use tokio::task::JoinHandle;

use crate::http::send;
use crate::{gpus, has_ended, request, serve};

/// NVML's event numbers of an Xid, of a double-bit ECC error, and of a single-bit error.
const XID: u64 = 8;
const DOUBLE_BIT: u64 = 2;
const SINGLE_BIT: u64 = 1;

fn metrics_of(registry: &Registry) -> (SocketAddr, JoinHandle<()>) {
    let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let state = HttpState::new(Arc::new(registry.clone()), Arc::default(), HttpOptions::default());
    let connections = Connections::new(ConnectionOptions::default());
    let scraped = registry.clone();
    let metrics = std::sync::Arc::new(move || scraped.metrics());
    (address, tokio::spawn(metrics_port::serve(listener, connections, metrics, (state, Default::default()))))
}

/// A metric of the GPU with this number.
fn line(name: &str, gpu: u32, rest: &str) -> String {
    format!("{name}{{gpu_uuid=\"GPU-{:02x}000000-0000-0000-0000-000000000000\"{rest}", gpu + 1)
}

/// Asks until the server answers.
async fn until<T>(what: &str, ask: impl AsyncFn() -> Option<T>) -> T {
    for _ in 0..1_000 {
        if let Some(answer) = ask().await {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not so: {what}");
}

/// Scrapes until the metrics have a line, and gives them.
async fn scraped(metrics: SocketAddr, expected: &str) -> String {
    let ask = async || {
        let (status, text) = send(metrics, "GET", "/metrics", "").await;
        assert_eq!(status, 200, "{text}");
        text.lines().any(|line| line.starts_with(expected)).then_some(text)
    };
    until(expected, ask).await
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn gpus_are_measured_and_those_that_need_a_reset_leave_service() {
    let mut path = cuda_stand_in::folder().unwrap().into_os_string();
    if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(rest);
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", "nvml::watched", "--ignored", "--nocapture"]).env("LD_LIBRARY_PATH", path);
    let output = again.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// Not a test by itself: the test above starts it, with NVML.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by the test beside it"]
async fn watched() {
    let stand_in = gpus(4);
    let at_start =
        Measured { utilization: 37, power: 250_500, power_limit: 700_000, energy: 5_000_000, ..Measured::default() };
    (0..3).for_each(|gpu| stand_in.set_measured(gpu, at_start));
    let registry = serve(EngineChoice::Cuda, &["digits"], "exclusive", json!({})).await;
    let (metrics, _) = metrics_of(&registry);
    let text = scraped(metrics, &line("nv_gpu_memory_used_bytes", 0, "")).await;
    for (name, value) in [
        ("nv_gpu_utilization", "} 0.37"),
        ("nv_gpu_power_usage", "} 250.5"),
        ("nv_gpu_power_limit", "} 700"),
        ("nv_energy_consumption", "} 0"),
        ("nv_gpu_memory_total_bytes", "} 85899345920"),
    ] {
        assert!(text.contains(&(line(name, 0, value) + "\n")), "{name} in {text}");
    }
    assert!(!text.contains(&line("nv_gpu_memory_used_bytes", 0, "} 0\n")), "the models' memory is used: {text}");
    assert!(!text.contains(&line("nv_gpu_power_usage", 3, "")), "what cannot be measured has no value: {text}");
    stand_in.set_measured(0, Measured { energy: 5_012_500, ..at_start });
    scraped(metrics, &line("nv_energy_consumption", 0, "} 12.5")).await;

    let seed = 13;
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut ask = || registry.infer(request(&mut rng, "digits"));
    assert!(!stand_in.report(0, SINGLE_BIT, 0), "what was corrected is nobody's business");
    // An application's fault: the server counts it, and does nothing else.
    assert!(stand_in.report(0, XID, 31));
    scraped(metrics, &line("downbeat_gpu_xids_total", 0, ",xid=\"31\"} 1")).await;
    for _ in 0..8 {
        ask().await.unwrap();
    }
    // Off the bus: no call of the driver has failed yet, and the GPU gets no more requests after
    // those that find out.
    assert!(stand_in.report(0, XID, 79));
    scraped(metrics, &line("downbeat_gpu_xids_total", 0, ",xid=\"79\"} 1")).await;
    let mut failures = 0;
    for _ in 0..20 {
        match ask().await {
            Ok(_) => {}
            Err(ServiceError::Unavailable(message)) => {
                assert!(message.contains("GPU 0 is lost (Xid 79: the GPU has fallen off the bus"), "{message}");
                failures += 1;
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!((1..=2).contains(&failures), "{failures} of 20 failed: the GPU is asked no more");
    assert!(registry.is_ready(), "there are others");
    // NVML itself loses the GPU while it is measured. Its values vanish, and the other GPUs are
    // still measured.
    stand_in.set_measured(2, Measured { lost: true, ..at_start });
    let text = until("GPU 2 is lost", async || {
        let (_, text) = send(metrics, "GET", "/metrics", "").await;
        (!text.contains(&line("nv_gpu_power_usage", 2, ""))).then_some(text)
    });
    assert!(text.await.contains(&line("nv_gpu_power_usage", 1, "")));
    until("GPU 1 is watched", async || stand_in.report(1, DOUBLE_BIT, 0).then_some(())).await;
    assert!(registry.is_live(), "GPU 3 is left");
    until("GPU 3 is watched", async || stand_in.report(3, XID, 48).then_some(())).await;
    until("none of the GPUs is left", async || (!registry.is_live()).then_some(())).await;
    let error = ask().await.unwrap_err();
    assert!(matches!(&error, ServiceError::Unavailable(message) if message.contains("is lost")), "{error:?}");
    assert_eq!(stand_in.mistakes(), Vec::<String>::new());
}

/// A machine without NVML, as with another driver, lacks only the metrics.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn without_nvml_there_are_no_such_metrics() {
    let stand_in = gpus(1);
    let registry = serve(EngineChoice::Cuda, &["digits"], "exclusive", json!({})).await;
    let (metrics, port) = metrics_of(&registry);
    let text = scraped(metrics, "nv_inference_request_success").await;
    assert!(!text.contains("nv_gpu") && !text.contains("nv_energy"), "{text}");
    port.abort();
    drop(registry);
    has_ended(&stand_in).await;
}
