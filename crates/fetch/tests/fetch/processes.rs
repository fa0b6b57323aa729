//! Several processes at one cache, and processes that end in the middle.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::{env, fs};

use crate::server::{Reply, Server, bring, file, model, options};

/// The part of the child process: brings what the parent's variables say.
#[test]
fn child_brings() {
    let (Ok(address), Ok(folder)) = (env::var("BRING_ADDRESS"), env::var("BRING_FOLDER")) else { return };
    match bring(&address, &options(folder.as_ref(), &[])) {
        Ok(path) => fs::write(env::var("BRING_RESULT").unwrap(), path.display().to_string()).unwrap(),
        Err(error) => panic!("{error}"),
    }
}

fn child(address: &str, folder: &std::path::Path, shell: &str) -> Child {
    let result = folder.join(format!("result-{}", RESULTS.fetch_add(1, Ordering::Relaxed)));
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{shell} exec \"$0\" --exact processes::child_brings --nocapture"));
    command.arg(env::current_exe().unwrap());
    command.env("BRING_ADDRESS", address).env("BRING_FOLDER", folder).env("BRING_RESULT", result);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

static RESULTS: AtomicUsize = AtomicUsize::new(0);

/// A gate that opens once.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn pass(&self) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
}

#[test]
fn two_processes_download_once() {
    let (asked, may_answer) = (Arc::new(Gate::default()), Arc::new(Gate::default()));
    let (told, allowed) = (asked.clone(), may_answer.clone());
    let server = Server::start(move |request| {
        if request.method == "GET" {
            told.open();
            allowed.pass();
        }
        file(request, &model(90_000), "\"a\"")
    });
    let folder = tempfile::tempdir().unwrap();
    let address = server.at("/a.onnx");
    let first = child(&address, folder.path(), "");
    asked.pass();
    let second = child(&address, folder.path(), "");
    may_answer.open();
    for child in [first, second] {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(server.downloads("/a.onnx"), 1);
}

#[test]
fn a_killed_download_goes_on_in_the_next_process() {
    let (sent, is_first) = (Arc::new(Gate::default()), Arc::new(AtomicBool::new(true)));
    let (told, first) = (sent.clone(), is_first.clone());
    let server = Server::start(move |request| {
        let whole = file(request, &model(200_000), "\"a\"");
        if request.method == "GET" && first.swap(false, Ordering::Relaxed) {
            told.open();
            return Reply { cut: Some(120_000), hangs: true, ..whole };
        }
        whole
    });
    let folder = tempfile::tempdir().unwrap();
    let address = server.at("/a.onnx");
    let mut killed = child(&address, folder.path(), "");
    sent.pass();
    let came = || {
        let sources = fs::read_dir(folder.path().join("cache/sources")).into_iter().flatten().flatten();
        let partial = sources.flat_map(|source| fs::read_dir(source.path().join("partial")).into_iter().flatten());
        partial.flatten().filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum::<u64>()
    };
    while came() == 0 {
        std::thread::yield_now();
    }
    // SIGKILL.
    killed.kill().unwrap();
    killed.wait().unwrap();
    let brought = bring(&address, &options(folder.path(), &[])).unwrap();
    assert_eq!(fs::read(brought.join("model.onnx")).unwrap(), model(200_000));
    let last = server.seen("/a.onnx").pop().unwrap();
    assert!(last.header("range").starts_with("bytes="), "{last:?}");
}

#[test]
fn a_limit_of_file_sizes_is_an_error_and_no_end_of_the_process() {
    let server = Server::start(|request| file(request, &model(4_000_000), "\"a\""));
    let folder = tempfile::tempdir().unwrap();
    let address = server.at("/a.onnx");
    // In blocks of 512 or 1024 bytes.
    let output = child(&address, folder.path(), "ulimit -f 1000;").wait_with_output().unwrap();
    let said =
        [output.stderr.clone(), output.stdout.clone()].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.code().is_some(), "a signal ended the process: {output:?}");
    assert!(said.contains("larger than the limit of this process"), "{said}");
    assert!(said.contains("--model-cache DIR"), "{said}");
    // The cache is sound: without the limit the model comes.
    let brought = bring(&address, &options(folder.path(), &[])).unwrap();
    assert_eq!(fs::read(brought.join("model.onnx")).unwrap(), model(4_000_000));
}
