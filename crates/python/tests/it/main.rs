//! Tests of Python models against a real Python: `python3`, or the one that `DOWNBEAT_TEST_PYTHON`
//! names. A Python without numpy must be refused with the remedy.

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
