//! Every target on its seeds, changed at random. A failure names the seed and the file with the
//! bytes: `DOWNBEAT_FUZZ_SEED=N cargo test -p downbeat-fuzz NAME` repeats it,
//! `DOWNBEAT_FUZZ_ROUNDS=N` goes on for longer.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod mutation;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use downbeat_engine::ExecutorProgram;
use downbeat_fuzz::{TARGETS, Target};
use mutation::Mutator;

/// Changed files a target: a second or two, in all not half a minute on two slow cores.
const ROUNDS: u64 = 500;
/// Changed files of the target that starts a process for each.
const PROCESSES: u64 = 100;
/// The seed of the first file, unless a variable sets it.
const SEED: u64 = 11;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Panics of this process, on any thread: a server's task that panics ends nothing but its
/// connection.
static PANICS: AtomicU64 = AtomicU64::new(0);

fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // The library panics on some tokenizers, which the reader of recipes makes an error.
            let of_tokenizers = info.location().is_some_and(|place| place.file().contains("/tokenizers-"));
            if !of_tokenizers {
                PANICS.fetch_add(1, SeqCst);
                print(info);
            }
        }));
    });
}

fn seeds(target: &Target) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target.name);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

fn try_one(target: &Target, data: &[u8], what: &str) {
    // If the process ends, this file has the bytes that ended it.
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{}", target.name));
    std::fs::write(&file, data).unwrap();
    let before = PANICS.load(SeqCst);
    let ended = catch_unwind(AssertUnwindSafe(|| (target.run)(data)));
    let panicked = ended.is_err() || PANICS.load(SeqCst) > before;
    assert!(!panicked, "{} panicked on {what}: {}", target.name, file.display());
}

fn try_many(name: &str) {
    count_panics();
    downbeat_fuzz::PROGRAM.get_or_init(|| ExecutorProgram {
        program: std::env::current_exe().unwrap(),
        arguments: ["--exact", "model_process", "--ignored", "--nocapture"].map(Into::into).to_vec(),
        worker: None,
    });
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let seeds = seeds(target);
    try_one(target, b"", "nothing");
    for (index, data) in seeds.iter().enumerate() {
        try_one(target, data, &format!("file {index} of its seeds"));
    }
    let rounds = number("DOWNBEAT_FUZZ_ROUNDS").unwrap_or(if name == "model_trial" { PROCESSES } else { ROUNDS });
    let first = number("DOWNBEAT_FUZZ_SEED").unwrap_or(SEED);
    println!("{name}: {rounds} rounds from seed {first}");
    for seed in first..first.saturating_add(rounds) {
        let data = Mutator::new(seed).change(&seeds);
        try_one(target, &data, &format!("what seed {seed} makes"));
    }
}

macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { try_many(stringify!($name)); })*

        #[test]
        fn every_target_is_tried() {
            assert_eq!(TARGETS.map(|target| target.name), [$(stringify!($name)),*]);
        }
    };
}

tests!(
    http_connection,
    http_infer,
    http_management,
    grpc_messages,
    onnx,
    repair,
    config_pbtxt,
    downbeat_toml,
    decision_log,
    calibration,
    world,
    workload,
    profile_cache,
    picture,
    role_frames,
    compressed_body,
    grpc_connection,
    etcd_answer,
    executor_message,
    python_side,
    labels,
    recipe,
    tokenizer,
    predictor,
    placement_plan,
    model_trial,
    traceparent,
);

/// The process of [`model_trial`]: this program, with this test alone.
#[test]
#[ignore = "it is for processes that model_trial starts"]
fn model_process() {
    downbeat_engine::isolation::serve(&downbeat_engine_ort::of_executor).unwrap();
}

/// If no frame were read, the fuzzer would not try the protocol. `tools/record_roles.py` records
/// the messages of today.
#[test]
fn recorded_messages_are_of_the_protocol_of_today() {
    let target = TARGETS.iter().find(|target| target.name == "role_frames").unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for (index, data) in seeds(target).iter().enumerate() {
        let frames = runtime.block_on(downbeat_cluster::read_as_peer(data, 1 << 20));
        assert!(frames > 5, "{frames} frames in file {index}");
    }
}
