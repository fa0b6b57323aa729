//! Lanes on some cores: where their threads and the engine's threads may run, as the kernel reports
//! for each thread.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_engine::{CoreSet, Cut, Engine, LoadOptions, Model, Place, Rten, Share, Topology};

use crate::engines::{engines, onnxruntime};
use crate::support::{Random, copy, example, run};

/// The threads of the process with this name, and the CPUs that each may use. A thread has the name
/// of the thread that started it.
fn threads(name: &str) -> Vec<(PathBuf, CoreSet)> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("the kernel says what threads there are");
    let thread = |task: PathBuf| {
        // The thread may have ended meanwhile.
        let status = std::fs::read_to_string(task.join("status")).ok()?;
        let line = |key: &str| Some(status.lines().find_map(|line| line.strip_prefix(key))?.trim().to_owned());
        (line("Name:")? == name).then_some((task, line("Cpus_allowed_list:")?.parse().ok()?))
    };
    tasks.filter_map(|task| thread(task.ok()?.path())).collect()
}

/// Runs a function on a thread with this name.
fn on_thread<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, work);
        thread.expect("there is a thread").join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The first and the last CPU of the machine; both are the same on a machine with one CPU.
fn ends() -> [CoreSet; 2] {
    let usable: Vec<usize> = Topology::here().usable().iter().collect();
    [usable.first(), usable.last()].map(|cpu| cpu.copied().into_iter().collect())
}

fn load(engine: &dyn Engine, name: &str, threads: usize, share: Share, cut: Cut) -> Arc<dyn Model> {
    let options = LoadOptions { share, cut, ..LoadOptions::new(example(name), threads) };
    engine.load(&options).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn threads_of_every_stage_are_bound_to_their_models_cores() {
    let Some(engine) = onnxruntime() else { return };
    for (index, (cores, cut)) in ends().into_iter().zip([Cut::Whole, Cut::Stages(3)]).enumerate() {
        let name = format!("ort-bound-{index}");
        let model = on_thread(&name, || load(&engine, "encoder", 3, Share::Cores(cores), cut));
        // Each session has two threads beside the one that runs it.
        let expected = 2 * model.segments();
        // The thread that loaded the model has ended, and the system may list it for a moment more.
        for _ in 0..1_000_000 {
            if threads(&name).len() <= expected {
                break;
            }
            std::thread::yield_now();
        }
        let there = threads(&name);
        assert_eq!(there.len(), expected, "{there:?}");
        assert!(there.iter().all(|(_, allowed)| *allowed == cores), "{cores}: {there:?}");
        let inputs = Random::new("bound").inputs(model.signature(), |_, _| 4);
        let mut lane = model.lane().expect("it is where its threads are");
        let mut state = downbeat_engine::State { tensors: inputs };
        lane.run(0..model.segments(), &mut state).expect("it runs there");
        assert_eq!(threads(&name).len(), there.len(), "no other thread is started for it");
    }
}

#[test]
fn threads_of_rten_are_bound_to_the_cores_of_their_lane() {
    let model = load(&Rten::new(), "mlp", 0, Share::Whole, Cut::Whole);
    let inputs = Random::new("rten_bound").inputs(model.signature(), |_, _| 2);
    // The first thread of each pool.
    let known = || threads("rten-0").into_iter().collect::<BTreeSet<_>>();
    for cores in ends() {
        let before: BTreeSet<PathBuf> = known().into_iter().map(|(task, _)| task).collect();
        let mut lane = model.lane_at(Place { device: 0, share: Share::Cores(cores) }).expect("there is a lane");
        run(&mut *lane, copy(&inputs)).expect("it runs there");
        let after = known();
        let made = after.iter().filter(|(task, allowed)| !before.contains(task) && *allowed == cores);
        assert!(made.count() > 0, "{cores}: {after:?}");
    }
}

/// The mask of the thread after the run does not count: the thread may use all cores again.
#[test]
fn a_lane_runs_on_its_cores_whatever_thread_runs_it() {
    for (index, engine) in engines().into_iter().enumerate() {
        let [_, cores] = ends();
        let model = load(&*engine, "digits", 1, Share::Cores(cores), Cut::Whole);
        let mut lane = model.lane().expect("there is a lane");
        let inputs = Random::new("any_thread").inputs(model.signature(), |_, _| 8);
        let (name, seen) = (format!("any-{index}"), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let runs = || {
                let before = Topology::here().usable();
                // The first runs are enough to see the thread, as it does nothing else.
                for _ in 0..20_000 {
                    if seen.load(Ordering::Relaxed) {
                        break;
                    }
                    run(&mut *lane, copy(&inputs)).expect("it runs there");
                }
                assert_eq!(Topology::here().usable(), before, "the thread is as it was");
            };
            let runner = std::thread::Builder::new().name(name.clone()).spawn_scoped(scope, runs);
            let runner = runner.expect("there is a thread");
            while !runner.is_finished() {
                if threads(&name).iter().any(|(_, allowed)| *allowed == cores) {
                    seen.store(true, Ordering::Relaxed);
                }
            }
        });
        assert!(seen.into_inner(), "{}: never bound to {cores} while it ran", engine.info().name);
    }
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_lane_on_other_cores_than_its_models_threads_is_refused() {
    let Some(engine) = onnxruntime() else { return };
    let [first, last] = ends();
    if first == last {
        return;
    }
    let other = Place { device: 0, share: Share::Cores(last) };
    let model = load(&engine, "mlp", 2, Share::Cores(first), Cut::Whole);
    let error = model.lane_at(other).err().expect("its threads are elsewhere").to_string();
    assert!(error.contains("its threads are bound to other cores"), "{error}");
    let model = load(&engine, "mlp", 1, Share::Cores(first), Cut::Whole);
    assert!(model.lane_at(other).is_ok(), "it has no threads of its own");
}

#[test]
fn answers_do_not_depend_on_the_cores() {
    for engine in engines() {
        let whole = load(&*engine, "digits", 2, Share::Whole, Cut::Whole);
        let inputs = Random::new("no_matter").inputs(whole.signature(), |_, _| 3);
        let expected = run(&mut *whole.lane().expect("a lane"), copy(&inputs)).expect("it runs");
        for cores in ends() {
            let bound = load(&*engine, "digits", 2, Share::Cores(cores), Cut::Whole);
            let answers = run(&mut *bound.lane().expect("a lane"), copy(&inputs)).expect("it runs");
            crate::support::assert_close(engine.info().name, &answers, &expected, 1e-5);
        }
    }
}
