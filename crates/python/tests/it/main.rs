//! Tests of Python models against a real Python: `python3`, or the one that `DOWNBEAT_TEST_PYTHON`
//! names. A Python without numpy must be refused with the remedy.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::path::Path;
use std::sync::Arc;

use downbeat_core::tensor::DataType;
use downbeat_engine::{
    AskedRequest, Buffer, Engine, ErrorCode, LoadError, LoadOptions, Model, PythonOptions, State, Tensor,
};
use downbeat_python::{OnAnswer, OpenCall, PythonEngine};

const CONFIG: &str = r#"{"name": "m", "max_batch_size": 4,
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}]}"#;

/// Doubles its input. A request whose first number is negative is refused.
const CODE: &str = r#"
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = request.inputs()[0].as_numpy()
        if x.size and x.ravel()[0] < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 2)])
"#;

/// The code of these tests asks no other models.
struct NoCall;

impl OpenCall for NoCall {
    fn pull(&self) {}
}

fn python() -> String {
    std::env::var("DOWNBEAT_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

fn load(folder: &Path, code: &str, interpreter: &str) -> Result<Arc<dyn Model>, LoadError> {
    let version = folder.join("1");
    std::fs::create_dir_all(&version).expect("writes");
    std::fs::write(version.join("model.py"), code).expect("writes");
    let python = PythonOptions {
        model: "m".into(),
        version: 1,
        folder: folder.to_owned(),
        config: CONFIG.into(),
        interpreter: interpreter.into(),
        completes: true,
        ..PythonOptions::default()
    };
    let options = LoadOptions { python: Some(Arc::new(python)), ..LoadOptions::new(version.join("model.py"), 1) };
    let on_call = Arc::new(|_, mut on_answer: OnAnswer| -> Box<dyn OpenCall> {
        on_answer(None, true);
        Box::new(NoCall)
    });
    PythonEngine::new(None, Arc::new(|_, _| {}), on_call).expect("starts").load(&options)
}

/// The model of `code`; `None`: this machine's Python lacks numpy, and the error says so.
fn loaded(folder: &Path, code: &str) -> Option<Arc<dyn Model>> {
    match load(folder, code, &python()) {
        Ok(model) => Some(model),
        Err(error) => {
            let reason = error.to_string();
            assert!(reason.contains("numpy is missing in") && reason.contains("-m pip install numpy"), "{reason}");
            None
        }
    }
}

fn tensor(rows: usize, numbers: &[f32]) -> Tensor {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    Tensor { datatype: DataType::Fp32, shape: vec![rows, 2], data: Buffer::from(&bytes[..]) }
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    let (each, _) = tensor.data.as_slice().as_chunks::<4>();
    each.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn requests_of_a_batch_are_answered_each_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let Some(model) = loaded(folder.path(), CODE) else { return };
    assert!(model.takes_requests());
    assert_eq!(model.signature().inputs[0].dims, [-1, 2]);
    let mut lane = model.lane().unwrap();
    let asked = |rows: usize, numbers: &[f32]| AskedRequest {
        rows: rows as u32,
        tensors: vec![Some(tensor(rows, numbers))],
        budget: None,
        about: None,
    };
    let answers = lane.answer(vec![asked(1, &[1.0, 2.0]), asked(1, &[-1.0, 0.0]), asked(2, &[3.0, 4.0, 5.0, 6.0])]);
    let answers = answers.unwrap();
    let output = |place: usize| answers[place].as_ref().unwrap()[0].as_ref().unwrap();
    assert_eq!((numbers(output(0)), &output(0).shape[..]), (vec![2.0, 4.0], &[1, 2][..]));
    assert_eq!((numbers(output(2)), &output(2).shape[..]), (vec![6.0, 8.0, 10.0, 12.0], &[2, 2][..]));
    let refused = answers[1].as_ref().unwrap_err();
    assert_eq!((&*refused.reason, refused.code), ("negative", Some(ErrorCode::InvalidArgument)));
    let mut state = State { tensors: vec![tensor(3, &[1.0, 1.0, 2.0, 2.0, 3.0, 3.0])] };
    lane.run(0..1, &mut state).unwrap();
    assert_eq!(numbers(&state.tensors[0]), [2.0, 2.0, 4.0, 4.0, 6.0, 6.0]);
}

#[test]
fn a_process_that_ends_is_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let code = CODE.replace(
        "if x.size and",
        "if x.size and x.ravel()[0] == 7:\n            import os; os._exit(3)\n        if x.size and",
    );
    let Some(model) = loaded(folder.path(), &code) else { return };
    let mut lane = model.lane().unwrap();
    let mut run = |first: f32| {
        let mut state = State { tensors: vec![tensor(1, &[first, 0.0])] };
        lane.run(0..1, &mut state).map(|()| numbers(&state.tensors[0]))
    };
    let error = run(7.0).unwrap_err();
    assert!(error.of_executor && error.reason.contains("exit status: 3"), "{error}");
    assert!(model.executor().unwrap().comes_back());
    assert_eq!(run(1.0).unwrap(), [2.0, 0.0]);
    assert_eq!(model.executor().unwrap().restarts(), 1);
}

#[test]
fn a_model_that_is_not_needed_any_more_finalizes() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("finalized");
    let code = format!("{CODE}\n    def finalize(self):\n        open({mark:?}, 'w').close()\n");
    let Some(model) = loaded(folder.path(), &code) else { return };
    let process = format!("/proc/{}", model.executor().unwrap().pid().unwrap());
    drop(model);
    while Path::new(&process).exists() {
        std::thread::yield_now();
    }
    assert!(mark.exists());
}

#[test]
fn a_python_that_is_not_there_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = load(folder.path(), CODE, "/nonexistent/python").err().unwrap().to_string();
    assert!(error.contains("/nonexistent/python does not start") && error.contains("--python"), "{error}");
    let error = load(folder.path(), CODE, "/bin/true").err().unwrap().to_string();
    assert!(error.contains("has ended during the load"), "{error}");
}

/// Runs `lines` as a part of `initialize`: the model loads if they raise nothing.
fn initialized_with(lines: &str) {
    let folder = tempfile::tempdir().unwrap();
    let indented = lines.trim().replace('\n', "\n        ");
    let method = format!("    def initialize(self, args):\n        {indented}\n\n    def execute");
    let _ = loaded(folder.path(), &CODE.replacen("    def execute", &method, 1));
}

#[test]
fn wrong_arguments_are_refused_with_tritons_errors() {
    initialized_with(
        r#"
import numpy as np
def refuses(kind, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind:
        return
    raise AssertionError(f"{call} takes {arguments} and {named}")
inputs = [pb_utils.Tensor("X", np.zeros([1], np.int32))]
given = {"inputs": inputs, "requested_output_names": ["Y"], "model_name": "m"}
for name in given:
    refuses(TypeError, pb_utils.InferenceRequest, **{key: given[key] for key in given if key != name})
for name in (*given, "correlation_id", "request_id", "model_version", "flags"):
    refuses(TypeError, pb_utils.InferenceRequest, **{**given, name: None})
refuses(TypeError, pb_utils.InferenceRequest, **{**given, "requested_output_names": [None]})
refuses(pb_utils.TritonModelException, pb_utils.InferenceRequest, **{**given, "inputs": [None]})
refuses(TypeError, pb_utils.InferenceResponse, output_tensors=None)
refuses(pb_utils.TritonModelException, pb_utils.InferenceResponse, [None])
refuses(TypeError, pb_utils.Tensor, None, np.zeros([1], np.int32))
refuses(TypeError, pb_utils.Tensor, "X", None)
refuses(pb_utils.TritonModelException, pb_utils.Tensor.from_dlpack, "X", None)
refuses(TypeError, pb_utils.Logger.log, "message", 1)
refuses(TypeError, pb_utils.Logger.log_info, None)
request = pb_utils.InferenceRequest(**given, timeout=np.int64(5), correlation_id="c")
assert (request.timeout(), request.correlation_id(), request.requested_output_names()) == (5, "c", ["Y"])
pb_utils.InferenceRequest(inputs=[], requested_output_names=(), model_name="m")
pb_utils.Logger.log("message", pb_utils.Logger.LogLevel.WARNING)
"#,
    );
}

#[test]
fn metrics_of_the_same_labels_are_one() {
    initialized_with(
        r#"
def refuses(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except pb_utils.TritonModelException:
        return
    raise AssertionError(f"{call} takes {arguments} and {named}")
counter = pb_utils.MetricFamily("c", "first", pb_utils.MetricFamily.COUNTER)
again = pb_utils.MetricFamily("c", "second", pb_utils.MetricFamily.COUNTER)
one, other = counter.Metric({"a": "1", "b": "2"}), again.Metric({"b": "2", "a": "1"})
one.increment(2.5)
other.increment(1)
assert (one.value(), other.value(), counter.Metric().value()) == (3.5, 3.5, 0)
(change,) = (change for change in pb_utils._take_metering() if change["labels"])
assert (change["description"], change["value"]) == ("first", 3.5), change
other.increment(1)
assert [change["value"] for change in pb_utils._take_metering()] == [1]
del one, other
assert counter.Metric({"a": "1", "b": "2"}).value() == 0
refuses(pb_utils.MetricFamily, "c", "third", pb_utils.MetricFamily.GAUGE)
refuses(counter.Metric, buckets=[1])
gauge = pb_utils.MetricFamily("g", "", pb_utils.MetricFamily.GAUGE)
low, same = gauge.Metric(), gauge.Metric()
low.set(7)
same.increment(-2)
assert low.value() == 5
histogram = pb_utils.MetricFamily("h", "", pb_utils.MetricFamily.HISTOGRAM)
for buckets in (None, [2, 1], [1, 1]):
    refuses(histogram.Metric, buckets=buckets)
histogram.Metric(labels={"no": "buckets"}, buckets=[])
pb_utils._take_metering()
observed = histogram.Metric(buckets=[1, 2])
for value in (0.5, 1.5, 9):
    observed.observe(value)
(change,) = pb_utils._take_metering()
assert (change["buckets"], change["count"], change["value"]) == ([[1.0, 1], [2.0, 2]], 3, 11), change
"#,
    );
}

/// The answer of a model whose `execute` has this body, to the request `[1, 2]`.
fn answered(body: &str) -> Option<Result<Vec<f32>, String>> {
    let folder = tempfile::tempdir().unwrap();
    let indented = body.trim().replace('\n', "\n        ");
    let code = format!(
        "import asyncio, threading, time\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\
         def of(first):\n    return pb_utils.InferenceResponse([pb_utils.Tensor('Y', np.array([[first, 0]], np.float32))])\n\n\
         class TritonPythonModel:\n    {indented}\n"
    );
    let model = loaded(folder.path(), &code)?;
    let asked = AskedRequest { rows: 1, tensors: vec![Some(tensor(1, &[1.0, 2.0]))], budget: None, about: None };
    let answers = model.lane().unwrap().answer(vec![asked]);
    let answer = answers.map_err(|error| error.reason).and_then(|mut answers| {
        let answer = answers.remove(0).map_err(|error| error.reason)?;
        Ok(numbers(answer[0].as_ref().expect("the output is there")))
    });
    Some(answer)
}

#[test]
fn a_model_with_one_answer_may_send_it_before_or_after_execute_returns() {
    let sent_later = "def execute(self, requests):
    sender = requests[0].get_response_sender()
    def later():
        time.sleep(0.05)
        sender.send(of(7))
    threading.Thread(target=later).start()";
    // The sender stays alive, and the code tells no end.
    let kept = sent_later.replace("sender = ", "sender = self.sender = ");
    let task = "async def execute(self, requests):
    sender = self.sender = requests[0].get_response_sender()
    async def later():
        await asyncio.sleep(0.05)
        sender.send(of(7))
    self.task = asyncio.create_task(later())";
    let sent_and_returned = "def execute(self, requests):
    requests[0].get_response_sender().send(of(7))
    return [of(8)]";
    let returned_and_sent_again = "def execute(self, requests):
    sender = requests[0].get_response_sender()
    sender.send(of(7))
    try:
        sender.send(of(8))
    except pb_utils.TritonModelException as error:
        assert 'has been closed' in str(error)
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)";
    let failed_then = "def execute(self, requests):
    sender = requests[0].get_response_sender()
    sender.send(of(7))
    sender.send(of(8))";
    for body in [sent_later, &kept, task, sent_and_returned, returned_and_sent_again, failed_then] {
        let Some(answer) = answered(body) else { return };
        assert_eq!(answer, Ok(vec![7.0, 0.0]), "{body}");
    }
    let only_the_end = "def execute(self, requests):
    requests[0].get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)";
    let Some(answer) = answered(only_the_end) else { return };
    let error = answer.unwrap_err();
    assert!(error.contains("cannot send complete final before sending a response"), "{error}");
}
