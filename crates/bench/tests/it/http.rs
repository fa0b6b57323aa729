//! Every request that was due ends once, however an HTTP server behaves.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use downbeat_bench::results::outcome::Failure;
use downbeat_bench::results::record::ModelRecord;

use crate::servers::{Server, assert_accounted, bench, plan, respond};

/// 300 requests nearly at once.
const BURST: [&str; 8] = ["-m", "m", "--rate", "3000", "--warmup", "0", "--duration", "0.1"];

fn offer(server: &Server, words: &[&str]) -> ModelRecord {
    let url = server.url();
    let outcome = bench(&[&BURST[..], &["--url", &url], words].concat());
    let total = outcome.record.total();
    assert_accounted(&total);
    assert!(total.scheduled > 100, "{}", total.scheduled);
    let series: u64 = outcome.record.series.iter().map(|i| i.good + i.bad).sum();
    assert_eq!(series, total.scheduled);
    total
}

fn count(record: &ModelRecord, failure: Failure) -> u64 {
    record.failures.get(&failure).map_or(0, |f| f.count)
}

#[test]
fn good_answers_count_and_connections_are_kept() {
    let seen = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&seen);
    let server = Server::http(move |head, body, stream, _| {
        assert!(head.contains("Inference-Header-Content-Length"), "{head}");
        assert!(body.ends_with(&[0; 0]) && body.len() > 16, "four FP32 at the end");
        counter.fetch_add(1, Ordering::Relaxed);
        respond(stream, "200 OK", b"{}")
    });
    let total = offer(&server, &["--max-connections", "8"]);
    assert_eq!(total.ok, total.scheduled, "{:?}", total.failures);
    assert_eq!(seen.load(Ordering::Relaxed), total.scheduled);
    // The control's connections come in addition.
    assert!(server.connections.load(Ordering::Relaxed) <= 8 + 4);
}

#[test]
fn threads_divide_the_same_load() {
    let seen = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&seen);
    let server = Server::http(move |_, _, stream, _| {
        counter.fetch_add(1, Ordering::Relaxed);
        respond(stream, "200 OK", b"{}")
    });
    let one = offer(&server, &[]);
    let three = offer(&server, &["--threads", "3"]);
    assert_eq!(one.scheduled, three.scheduled);
    assert_eq!(seen.load(Ordering::Relaxed), one.scheduled + three.scheduled);
}

#[test]
fn a_closed_loop_never_has_more_in_flight_than_clients() {
    let most = Arc::new(Mutex::new((0_u32, 0_u32)));
    let gauge = Arc::clone(&most);
    let server = Server::http(move |_, _, stream, _| {
        let enter = |by: i32| {
            let mut now = gauge.lock().expect("no panic");
            now.0 = now.0.saturating_add_signed(by);
            now.1 = now.1.max(now.0);
        };
        enter(1);
        std::thread::yield_now();
        enter(-1);
        respond(stream, "200 OK", b"{}")
    });
    let url = server.url();
    let outcome = bench(&[
        "-m",
        "m",
        "--url",
        &url,
        "--closed",
        "--connections",
        "5",
        "--threads",
        "2",
        "--requests",
        "2001",
        "--warmup",
        "0",
    ]);
    let total = outcome.record.total();
    assert_accounted(&total);
    assert_eq!((total.scheduled, total.ok), (2001, 2001), "{:?}", total.failures);
    let (_, most) = *most.lock().expect("no panic");
    assert!((1..=5).contains(&most), "{most} at once");
}

#[test]
fn models_are_counted_apart_and_by_status() {
    let server = Server::http(|head, _, stream, number| {
        if head.starts_with("POST /v2/models/bad/") {
            respond(stream, "503 Service Unavailable", b"{\"error\":\"the queue is full\"}")
        } else if number.is_multiple_of(2) {
            respond(stream, "429 Too Many Requests", b"")
        } else {
            respond(stream, "200 OK", b"{}")
        }
    });
    let url = server.url();
    let outcome =
        bench(&["-m", "good:3", "-m", "bad:1", "--url", &url, "--rate", "4000", "--warmup", "0", "--duration", "0.25"]);
    let [good, bad] = &outcome.record.models[..] else { panic!("two models") };
    assert_accounted(good);
    assert_accounted(bad);
    let share = good.scheduled as f64 / (good.scheduled + bad.scheduled) as f64;
    assert!((share - 0.75).abs() < 0.06, "{share}");
    assert!(count(good, Failure::Http(429)) > 0 && good.ok > 0);
    assert_eq!(count(bad, Failure::Http(503)), bad.scheduled);
    assert!(bad.failures[&Failure::Http(503)].example.contains("the queue is full"));
}

#[test]
fn a_server_that_hangs_costs_timeouts_and_nothing_more() {
    let server = Server::http(|_, _, stream, number| {
        // The first request of a connection is answered, the second never.
        if number == 1 {
            return respond(stream, "200 OK", b"{}");
        }
        let _ = stream.read(&mut [0; 1]);
        false
    });
    let total = offer(&server, &["--request-timeout", "0.2", "--max-connections", "16"]);
    assert!(count(&total, Failure::Timeout) > 0, "{:?}", total.failures);
    assert_eq!(total.ok + count(&total, Failure::Timeout), total.scheduled, "{:?}", total.failures);
}

#[test]
fn a_server_that_takes_no_bytes_costs_timeouts() {
    // Larger than the buffers of both sockets: the client cannot send the whole request.
    let server = Server::raw(|stream, _| {
        // Longer than any test; the thread ends with the process.
        std::thread::park_timeout(std::time::Duration::from_secs(600));
        drop(stream);
    });
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("input.json");
    let numbers = vec!["0.5"; 4_000_000].join(",");
    let text = format!(r#"{{"inputs":[{{"name":"x","datatype":"FP32","shape":[4000000],"data":[{numbers}]}}]}}"#);
    std::fs::write(&file, text).expect("written");
    let url = server.url();
    let outcome = bench(&[
        "-m",
        "m",
        "--url",
        &url,
        "--input",
        file.to_str().expect("text"),
        "--rate",
        "50",
        "--warmup",
        "0",
        "--duration",
        "0.2",
        "--request-timeout",
        "0.3",
    ]);
    let total = outcome.record.total();
    assert_accounted(&total);
    assert_eq!(count(&total, Failure::Timeout), total.scheduled, "{:?}", total.failures);
}

#[test]
fn closed_connections_and_garbage_are_told_apart() {
    let cases: [(&'static [u8], Failure); 6] = [
        (b"", Failure::Closed),
        (b"HTTP/1.1 200 OK\r\nContent-Le", Failure::Closed),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", Failure::Closed),
        (b"\x16\x03\x01garbage", Failure::Garbage),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}surplus", Failure::Garbage),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnope\r\n", Failure::Garbage),
    ];
    for (answer, failure) in cases {
        let server = Server::http(move |_, _, stream, _| {
            let _ = stream.write_all(answer);
            false
        });
        let total = offer(&server, &[]);
        assert_eq!(count(&total, failure), total.scheduled, "{answer:?}: {:?}", total.failures);
    }
}

#[test]
fn a_closed_loop_against_a_server_that_closes_pauses_instead_of_spinning() {
    let server = Server::http(|_, _, _, _| false);
    let url = server.url();
    let outcome =
        bench(&["-m", "m", "--url", &url, "--closed", "--connections", "4", "--warmup", "0", "--duration", "0.3"]);
    let total = outcome.record.total();
    assert_accounted(&total);
    // 4 clients with a pause of 10 ms each cannot begin more than 4 x 31 in 0.3 s.
    assert!((4..=124).contains(&total.scheduled), "{}", total.scheduled);
    assert_eq!(count(&total, Failure::Closed), total.scheduled);
}

#[test]
fn a_server_that_goes_away_costs_failed_connections() {
    let server = Server::http(|_, _, stream, _| respond(stream, "200 OK", b"{}"));
    let url = server.url();
    let plan = plan(&[&BURST[..], &["--url", &url]].concat()).expect("metadata");
    drop(server);
    // Until the listener has gone.
    while std::net::TcpStream::connect(plan.target.address).is_ok() {
        std::thread::yield_now();
    }
    let outcome = downbeat_bench::load::run::run(&plan, &plan.pace, Default::default(), &mut |_| {}).expect("a run");
    let total = outcome.record.total();
    assert_accounted(&total);
    assert_eq!(count(&total, Failure::Connect), total.scheduled, "{:?}", total.failures);
}

#[test]
fn connection_close_and_unsolicited_bytes_do_not_mix_up_answers() {
    let server = Server::http(|_, _, stream, number| {
        if number == 3 {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}");
            return false;
        }
        respond(stream, "200 OK", b"{}")
    });
    let total = offer(&server, &[]);
    assert_eq!(total.ok, total.scheduled, "{:?}", total.failures);
}

#[test]
fn late_answers_are_bad_but_answered() {
    let server = Server::http(|_, _, stream, _| respond(stream, "200 OK", b"{}"));
    // No answer takes less than a nanosecond.
    let total = offer(&server, &["--slo-ms", "0.000001"]);
    assert_eq!((total.late, total.bad()), (total.scheduled, total.scheduled));
}

#[test]
fn hopeless_runs_end_early_and_account_for_all() {
    let server = Server::http(|_, _, stream, _| respond(stream, "500 Internal Server Error", b""));
    let url = server.url();
    let plan =
        plan(&["-m", "m", "--url", &url, "--rate", "2000", "--warmup", "0", "--duration", "60"]).expect("metadata");
    let hopeless = downbeat_bench::load::run::Hopeless { bad: 50, over: 0, target: None };
    let outcome = downbeat_bench::load::run::run(&plan, &plan.pace, hopeless, &mut |_| {}).expect("a run");
    assert!(outcome.record.stopped);
    let total = outcome.record.total();
    assert_accounted(&total);
    assert!(total.failed() > 50 && total.scheduled < 120_000, "{}", total.scheduled);
}

#[test]
fn servers_that_do_not_help_are_named() {
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.local_addr().expect("an address").to_string()
    };
    let error = format!("{:#}", plan(&["-m", "m", "--url", &closed]).expect_err("nobody is there"));
    assert!(error.contains(&closed) && error.contains("model 'm'"), "{error}");
    let server = Server::raw(|mut stream, _| {
        crate::servers::read_request(&mut stream);
        respond(&mut stream, "404 Not Found", br#"{"error":"no model 'm'"}"#);
    });
    let error = format!("{:#}", plan(&["-m", "m", "--url", &server.url()]).expect_err("no such model"));
    assert!(error.contains("404") && error.contains("no model 'm'"), "{error}");
}

#[test]
fn statistics_of_the_server_are_read_as_differences() {
    let asked = Arc::new(AtomicU64::new(0));
    let server = Server::raw(move |mut stream, _| {
        while let Some((head, _)) = crate::servers::read_request(&mut stream) {
            let body = if head.contains("/stats") {
                let n = asked.fetch_add(1, Ordering::Relaxed) + 1;
                let phase = format!(r#"{{"count":{},"ns":{}}}"#, 10 * n, 5_000_000 * n);
                format!(
                    r#"{{"model_stats":[{{"name":"m","version":"1","inference_count":{},"execution_count":{},
                    "inference_stats":{{"queue":{phase}}},"batch_stats":[{{"batch_size":4,"compute_infer":{phase}}},
                    {{"batch_size":8,"compute_infer":{{"count":3,"ns":3}}}}]}}]}}"#,
                    40 * n,
                    10 * n
                )
            } else {
                r#"{"inputs":[{"name":"x","datatype":"FP32","shape":[-1,4]}]}"#.to_owned()
            };
            respond(&mut stream, "200 OK", body.as_bytes());
        }
    });
    let url = server.url();
    let outcome = bench(&[&BURST[..], &["--url", &url]].concat());
    let statistics = outcome.statistics[0].as_ref().expect("statistics");
    assert_eq!((statistics.requests_executed, statistics.executions, statistics.mean_batch()), (40, 10, Some(4.0)));
    assert_eq!(statistics.queue.mean_ms(), 0.5);
    let sizes: BTreeMap<u64, u64> = statistics.batches.iter().map(|(size, b)| (*size, b.executions)).collect();
    assert_eq!(sizes, BTreeMap::from([(4, 10)]), "sizes that did not occur meanwhile are left out");
}
