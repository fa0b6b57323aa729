//! Every reader of a peer's or a file's bytes, as a function of bytes. For all bytes each returns:
//! no panic, no end of the process, no wait without end. If the format has a writer, the result can
//! be written and read again.
//!
//! `just fuzz` has libFuzzer look for bytes (`fuzz_targets/`), for a minute each. `tests/it`
//! changes the files in `seeds/` at random, with the stable compiler and in seconds, whenever the
//! workspace's tests run.

mod connection;
#[allow(dead_code, missing_docs, reason = "its knobs are for tests")]
mod memory_service;
mod model_folder;
mod model_trial;
mod recipes;
#[allow(dead_code, missing_docs, reason = "its knobs are for tests")]
mod repeat;

use std::path::Path;

use bytes::Bytes;
use downbeat_core::journal::pipelines::steps_by_request;
use downbeat_core::journal::{Form, replay};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_host::groups::stored_predictor::StoredPredictor;
use downbeat_lab::device::Calibration;
use downbeat_lab::world::WorldFile;
use downbeat_models::measure::profile_store::{ProfileStore, StoredProfile};
use downbeat_models::measure::profiler::profile;
use downbeat_preprocess::PictureHeader;
use downbeat_protocol::{grpc, http, inference};
use downbeat_roles::SubClusterPlan;
use downbeat_service::options::PlacementPlan;
use downbeat_service::traces::context::Parent;
use prost::Message;

pub use connection::{compressed_body, etcd_answer, grpc_connection, http_connection};
pub use model_folder::{config_pbtxt, labels, onnx, repair};
pub use model_trial::{PROGRAM, model_trial};
pub use recipes::{recipe, tokenizer};

/// A way to read bytes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The target's name: of the function, of the program in `fuzz_targets/`, and of the folder in
    /// `seeds/`.
    pub name: &'static str,
    /// The function that reads the bytes.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: [Target; 27] = {
    macro_rules! targets {
        ($($name:ident),*) => { [$(Target { name: stringify!($name), run: $name }),*] };
    }
    targets![
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
        traceparent
    ]
};

/// The body of an inference request and of an answer, JSON alone or with tensors after it. The
/// first two bytes are the length of the JSON (little-endian; 65535: the request has no such
/// header).
///
/// # Panics
/// If a value that was read cannot be written, or then reads otherwise.
pub fn http_infer(data: &[u8]) {
    let Some((length, body)) = data.split_first_chunk() else { return };
    let header_length = match u16::from_le_bytes(*length) {
        u16::MAX => None,
        length => Some(usize::from(length)),
    };
    let body = Bytes::copy_from_slice(body);
    if let Ok((request, _)) = http::parse_request("m".into(), String::new(), body.clone(), header_length) {
        let binary = http::write_request(&request, http::RequestForm::BINARY).expect("bytes take every tensor");
        let again = http::parse_request("m".into(), String::new(), binary.bytes, binary.header_length);
        let (mut again, _) = again.expect("what was read is written so that it can be read");
        // The form says how answers are wanted, which a parsed request does not hold.
        for (output, was) in again.outputs.iter_mut().zip(&request.outputs) {
            output.parameters.clone_from(&was.parameters);
        }
        // NaN in a parameter is unlike itself.
        assert_eq!(format!("{again:?}"), format!("{request:?}"));
        let _ = http::write_request(&request, http::RequestForm::JSON);
    }
    if let Ok(response) = http::parse_response(body, header_length) {
        for binary in [false, true] {
            let _ = http::write_response(&response, &http::OutputForms::all(binary));
        }
    }
}

/// Bodies of everything but inference: requests that the server reads, answers that its clients
/// read.
pub fn http_management(data: &[u8]) {
    let _ = serde_json::from_slice::<http::IndexRequest>(data);
    let _ = serde_json::from_slice::<http::LoadRequest>(data);
    let _ = serde_json::from_slice::<http::RegisterRegionRequest>(data);
    let _ = serde_json::from_slice::<http::ModelMetadataBody>(data);
    let _ = serde_json::from_slice::<http::ServerMetadataBody>(data);
    if let Ok(statistics) = http::statistics_from_json(data) {
        let _ = http::statistics_to_json(statistics);
    }
}

/// The protocol's messages, and the requests made of them.
///
/// # Panics If a message that was read changes on its way out and in again.
pub fn grpc_messages(data: &[u8]) {
    let data = Bytes::copy_from_slice(data);
    if let Ok(message) = inference::ModelInferRequest::decode(data.clone())
        && let Ok(request) = grpc::request_from_message(message)
    {
        let again = grpc::request_from_message(grpc::request_to_message(request.clone()));
        // NaN in a parameter is unlike itself.
        assert_eq!(format!("{:?}", again.as_ref()), format!("{:?}", Ok::<_, downbeat_protocol::CodecError>(&request)));
    }
    if let Ok(message) = inference::ModelInferResponse::decode(data.clone())
        && let Ok(response) = grpc::response_from_message(message)
    {
        let again = grpc::response_from_message(grpc::response_to_message(response.clone()));
        assert_eq!(format!("{:?}", again.as_ref()), format!("{:?}", Ok::<_, downbeat_protocol::CodecError>(&response)));
    }
    let _ = inference::RepositoryModelLoadRequest::decode(data.clone());
    let _ = inference::ModelConfigResponse::decode(data.clone())
        .map(|response| response.config.map(|config| http::config_to_json(&config)));
    let _ =
        inference::ModelStatisticsResponse::decode(data).map(|response| http::statistics_to_json(response.model_stats));
}

/// `downbeat.toml`, to the options it gives.
///
/// # Panics
/// If it is refused without a word.
pub fn downbeat_toml(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Err(error) = downbeat::options_of_text(text) {
        assert!(!error.to_string().is_empty());
    }
}

/// A decision log, of a part of the scheduler, of a device or of the pipelines: shown as text and as JSON, and
/// replayed.
pub fn decision_log(data: &[u8]) {
    let steps = steps_by_request(data).unwrap_or_default();
    for form in [Form::Text, Form::Json] {
        let _ = downbeat::write_log(Path::new("log"), data, form, steps.clone(), &mut std::io::sink());
    }
    let _ = replay(data);
}

/// A world of the simulator.
pub fn world(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = WorldFile::parse(text, Path::new("world.toml"));
}

/// The most measured points that this target fits.
const MOST_MEASURED: usize = 16;

/// A calibration of the emulated device: read, fitted, written.
///
/// # Panics
/// If what was written cannot be read.
pub fn calibration(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(mut read) = Calibration::read(text) else { return };
    for model in &read.models {
        let _ = read.model(&model.name, Some(1));
    }
    if let Ok(written) = read.write() {
        Calibration::read(&written).expect("what was read is written so that it can be read");
    }
    // Fitting pairs simulates them, which takes seconds and reads nothing.
    read.pairs.clear();
    let measured: usize = read.models.iter().map(|model| model.measured.len()).sum();
    if measured <= MOST_MEASURED {
        let _ = read.fit();
    }
}

/// The most pairs of a model and a sub-cluster for which this target searches.
const MOST_SEARCHED: usize = 64;

/// A workload of `downbeat plan`: read, and planned if it is small.
pub fn workload(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(workload) = downbeat_plan::Workload::parse(text) else { return };
    let pairs = workload.models.len().saturating_mul(workload.sub_clusters);
    // Small workloads are searched, and vast ones refused. The others would take as long as their
    // limit allows.
    if pairs <= MOST_SEARCHED || pairs >= usize::MAX / 2 {
        let problem = workload.problem();
        let options = downbeat_plan::Options {
            time_limit: Duration::from_millis(1),
            seed: 0,
            method: downbeat_plan::Method::Search,
        };
        // Time passes with each look at the clock, so that the same bytes give the same result.
        let looks = std::cell::Cell::new(0);
        let elapsed = || {
            looks.set(looks.get() + 1);
            Duration::from_micros(100 * looks.get())
        };
        let _ = downbeat_plan::plan(&problem, &options, &elapsed);
    }
}

/// A stored profile, up to the latencies that the scheduler uses.
pub fn profile_cache(data: &[u8]) {
    let Ok(folder) = tempfile::tempdir() else { return };
    if std::fs::write(folder.path().join("key.json"), data).is_err() {
        return;
    }
    let store = ProfileStore::new(Some(folder.path().to_owned()));
    let Some(stored) = store.get::<StoredProfile>("key") else { return };
    let Ok(profile) = profile(&stored.measurements) else { return };
    read_latencies(&profile);
}

fn read_latencies(profile: &LatencyProfile) {
    let most = profile.max_batch();
    for batch in [0, 1, most / 2, most, u32::MAX] {
        let _ = Time::ZERO + profile.latency(batch);
        let _ = profile.largest_within(profile.latency(batch));
    }
}

/// The bytes that a frontend, a scheduler or a backend sends to another, from the first one on.
pub fn role_frames(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("there is a thread");
    runtime.block_on(downbeat_cluster::read_as_peer(data, 1 << 20));
}

/// The most bytes of memory that this target's executor shares.
const REGION: usize = 1 << 16;

/// Messages between the server and an executor process.
pub fn executor_message(data: &[u8]) {
    let _ = downbeat_engine::isolation::read_as_process(data, REGION);
}

/// Messages of a Python model's process beside its runs: answers, and calls of other models.
pub fn python_side(data: &[u8]) {
    downbeat_python::read_as_process(data);
}

/// A file with a predictor of the times of groups of operators.
///
/// # Panics
/// If it is refused without a word.
pub fn predictor(data: &[u8]) {
    let Ok(file) = tempfile::NamedTempFile::new() else { return };
    if std::fs::write(file.path(), data).is_err() {
        return;
    }
    match StoredPredictor::load(file.path()) {
        Ok(stored) => drop(stored.predictor(|_| None)),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A plan of which models run where, as `serve --plan` reads it, and as etcd keeps it for the
/// scheduler.
pub fn placement_plan(data: &[u8]) {
    let _ = serde_json::from_slice::<PlacementPlan>(data);
    let _ = serde_json::from_slice::<SubClusterPlan>(data);
}

/// The header `traceparent` of a request.
///
/// # Panics
/// If a place that was read is written otherwise.
pub fn traceparent(data: &[u8]) {
    let Some(parent) = std::str::from_utf8(data).ok().and_then(Parent::of_traceparent) else { return };
    let written = parent.place.traceparent(parent.is_sampled);
    assert_eq!(Parent::of_traceparent(&written), Some(parent), "{written}");
}

/// A picture: its header, and, where that is small, its pixels.
///
/// # Panics
/// If it is decoded to another size than its header says.
pub fn picture(data: &[u8]) {
    let Ok(header) = PictureHeader::read(data) else { return };
    if header.pixels() > 1 << 20 {
        return;
    }
    if let Ok(picture) = downbeat_preprocess::decode(data, header, 3) {
        assert_eq!((picture.width, picture.height), (header.width, header.height));
        assert_eq!(picture.samples.len() as u64, header.pixels() * 3);
    }
}
