//! Models in processes of their own: the same answers, and the fate of requests when such a process
//! ends.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use downbeat_engine::{
    Cut, Emulated, Engine, ExecutorProgram, Isolated, LoadOptions, Model, RunError, State, Stop, Tensor,
};

use crate::engines::engines;
use crate::support::{Random, copy, example, lane, load, run, try_load};

/// The executor process of the tests below: this program, with this test alone.
#[test]
#[ignore = "it is for processes that other tests start"]
fn executor_process() {
    downbeat_engine::isolation::serve(&downbeat_engine_ort::of_executor).unwrap();
}

fn isolated(engine: Arc<dyn Engine>) -> Isolated {
    let arguments = ["--exact", "isolation::executor_process", "--ignored", "--nocapture"];
    let program = ExecutorProgram {
        program: std::env::current_exe().expect("is a file"),
        arguments: arguments.iter().map(Into::into).collect(),
        worker: None,
    };
    Isolated::new(engine, 1, program).expect("starts")
}

fn pid(model: &dyn Model) -> Option<u32> {
    model.executor()?.pid()
}

fn kill(pid: u32) {
    let status = std::process::Command::new("kill").args(["-KILL", &pid.to_string()]).status();
    assert!(status.is_ok_and(|status| status.success()));
}

/// Runs the model until its process has come back.
fn run_again(model: &dyn Model, mut run: impl FnMut() -> Result<Vec<Tensor>, RunError>) -> Vec<Tensor> {
    loop {
        match run() {
            Ok(outputs) => return outputs,
            Err(error) => assert!(error.of_executor, "{error}"),
        }
        assert!(model.executor().is_some());
        std::thread::yield_now();
    }
}

fn bytes(tensors: &[Tensor]) -> Vec<&[u8]> {
    tensors.iter().map(|tensor| tensor.data.as_slice()).collect()
}

#[test]
fn a_process_gives_the_answers_of_the_engine_whole_and_between_segments() {
    let mut random = Random::new("a_process_gives_the_answers");
    for engine in engines() {
        let apart = isolated(engine.clone());
        let path = example("digits");
        let (here, there) = (load(&*engine, &path), load(&apart, &path));
        assert_eq!(here.signature(), there.signature());
        for rows in [1, 7, 300] {
            let inputs = random.inputs(here.signature(), |_, axis| if axis == 0 { rows } else { 1 });
            let expected = run(&mut *lane(&*here), copy(&inputs)).unwrap();
            let got = run(&mut *lane(&*there), inputs).unwrap();
            assert_eq!(bytes(&expected), bytes(&got));
            assert_eq!(expected[0].shape, got[0].shape);
        }
        let cut = |engine: &dyn Engine, cut: Cut| engine.load(&LoadOptions::new(&path, 1).with_cut(cut)).unwrap();
        // The measurement decides where the halves part, which may differ the next time.
        let here = cut(&*engine, Cut::Stages(2));
        let there = cut(&apart, Cut::At(here.segment_info()[0].live.iter().map(|live| live.name.clone()).collect()));
        assert_eq!(there.segments(), 2);
        assert_eq!(there.segment_info()[0].live, here.segment_info()[0].live);
        assert_eq!(there.operators().is_some(), here.operators().is_some());
        let inputs = random.inputs(here.signature(), |_, axis| if axis == 0 { 4 } else { 1 });
        let expected = run(&mut *lane(&*load(&*engine, &path)), copy(&inputs)).unwrap();
        let (mut one, mut other) = (lane(&*there), lane(&*there));
        let mut state = State { tensors: inputs };
        one.run(0..1, &mut state).unwrap();
        let mut parts = state.split(&[1, 3]).unwrap();
        parts.iter_mut().for_each(|part| other.run(1..2, part).unwrap());
        let joined = State::join(parts).unwrap();
        crate::support::assert_close("digits", &expected, &joined.tensors, 1e-5);
        let too_many = one.run(0..3, &mut State::default()).unwrap_err();
        assert!(!too_many.of_executor && too_many.reason.starts_with("there are 2 segments"), "{too_many}");
    }
}

#[test]
fn a_killed_process_fails_its_runs_and_restarts_with_its_lanes() {
    let apart = isolated(Arc::new(downbeat_engine::Rten::new()));
    let (model, other) = (load(&apart, &example("digits")), load(&apart, &example("digits")));
    let inputs = Random::new("killed").inputs(model.signature(), |_, axis| if axis == 0 { 2 } else { 1 });
    let mut lanes = [lane(&*model), lane(&*model)];
    let mut beside = lane(&*other);
    let expected = run(&mut *lanes[0], copy(&inputs)).unwrap();
    let first = pid(&*model).unwrap();
    kill(first);
    let error = run(&mut *lanes[0], copy(&inputs)).unwrap_err();
    assert!(error.of_executor && error.reason.contains("(signal 9 (SIGKILL))"), "{error}");
    assert!(model.executor().unwrap().down().is_some_and(|reason| reason == error.reason));
    assert_eq!(bytes(&run(&mut *beside, copy(&inputs)).unwrap()), bytes(&expected), "the other goes on");
    for lane in &mut lanes {
        let got = run_again(&*model, || run(&mut **lane, copy(&inputs)));
        assert_eq!(bytes(&got), bytes(&expected));
    }
    assert!(pid(&*model).is_some_and(|pid| pid != first));
    assert_eq!((model.executor().unwrap().restarts(), other.executor().unwrap().restarts()), (1, 0));
    assert!(!Path::new(&format!("/proc/{first}")).exists(), "what has ended is waited for");
    run(&mut *lane(&*model), inputs).unwrap();
}

#[test]
fn a_run_that_does_not_end_ends_with_its_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("slow.emulated.toml");
    let tensor = |what: &str| format!("[[{what}]]\nname = \"{what}\"\ndatatype = \"FP32\"\ndims = [-1]\n");
    let text = format!("alpha_ms = 0.0\nbeta_ms = 3600000.0\nmax_batch = 4\n{}{}", tensor("inputs"), tensor("outputs"));
    std::fs::write(&path, text).unwrap();
    let apart = isolated(Arc::new(Emulated::new()));
    let model = load(&apart, &path);
    assert!(model.profile(downbeat_engine::Share::Whole).is_some());
    let inputs = Random::new("does_not_end").inputs(model.signature(), |_, _| 1);
    let (sender, stops) = mpsc::channel();
    let mut runs = lane(&*model);
    let thread = std::thread::spawn(move || {
        sender.send(Stop::of_this_thread()).unwrap();
        run(&mut *runs, inputs).unwrap_err()
    });
    let stop = stops.recv().unwrap();
    while stop.run_in_progress().is_none() {
        std::thread::yield_now();
    }
    while !stop.kill() {
        std::thread::yield_now();
    }
    let error = thread.join().unwrap();
    assert!(error.of_executor, "{error}");
}

#[test]
fn a_model_that_cannot_be_loaded_says_the_engines_own_reason() {
    let folder = tempfile::tempdir().unwrap();
    let (missing, wrong) = (folder.path().join("missing.onnx"), folder.path().join("wrong.onnx"));
    std::fs::write(&wrong, b"no model").unwrap();
    let engine: Arc<dyn Engine> = Arc::new(downbeat_engine::Rten::new());
    let apart = isolated(engine.clone());
    for path in [missing, wrong] {
        let reason = |engine: &dyn Engine| try_load(engine, &path).err().unwrap().to_string();
        assert_eq!(reason(&apart), reason(&*engine));
    }
    let none = ExecutorProgram { program: "/nonexistent/downbeat".into(), arguments: Vec::new(), worker: None };
    let none = Isolated::new(engine.clone(), 1, none).unwrap();
    let said = try_load(&none, &example("digits")).err().unwrap().to_string();
    assert!(said.contains("the model's executor process /nonexistent/downbeat does not start: No such file"), "{said}");
    let other = ExecutorProgram { program: "/bin/true".into(), arguments: Vec::new(), worker: None };
    let said = try_load(&Isolated::new(engine, 1, other).unwrap(), &example("digits")).err().unwrap().to_string();
    assert!(said.contains("the model's executor process has ended during the load (exit status: 0)"), "{said}");
}

#[test]
fn a_model_that_nobody_has_any_more_leaves_no_process() {
    let apart = isolated(Arc::new(downbeat_engine::Rten::new()));
    let model = load(&apart, &example("digits"));
    let mut last = lane(&*model);
    let pid = pid(&*model).unwrap();
    let inputs = Random::new("leaves_no_process").inputs(model.signature(), |_, _| 1);
    drop(model);
    run(&mut *last, inputs).expect("a lane keeps it");
    drop(last);
    let patience = Duration::from_millis(20);
    while Path::new(&format!("/proc/{pid}")).exists() {
        // The test fails by never ending.
        std::thread::park_timeout(patience);
    }
}
