//! The command's answers to wrong command lines and missing things: one clear line, the right exit
//! status.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models");

/// A search of a capacity that takes a fraction of a second in a debug build.
const CAPACITY: [&str; 6] = ["simulate", "capacity", "--model=A,1,2,20", "--devices=1", "--span=0.2", "--warm-up=0"];

/// The built command, without the environment's own options.
pub fn downbeat(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_downbeat"));
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DOWNBEAT_") {
            command.env_remove(name);
        }
    }
    command
}

/// This folder, and then the folders of `LD_LIBRARY_PATH`. The solver's library may be in such a
/// folder.
pub fn library_path(folder: &Path) -> OsString {
    let mut path = folder.as_os_str().to_owned();
    if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(rest);
    }
    path
}

pub fn run(arguments: &[&str]) -> Output {
    downbeat(arguments).output().unwrap()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Asserts the exit status and that standard error says `expected`.
fn refuses(arguments: &[&str], code: i32, expected: &str) {
    let output = run(arguments);
    let said = stderr(&output);
    assert!(said.contains(expected), "{arguments:?}: {said}");
    assert!(!said.contains("panicked"), "{said}");
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
}

#[test]
fn version_and_help_are_there() {
    let output = run(&["--version"]);
    assert_eq!(stdout(&output), format!("downbeat {}\n", env!("CARGO_PKG_VERSION")));
    for command in ["serve", "infer", "config"] {
        let help = stdout(&run(&[command, "--help"]));
        assert!(help.contains("Usage: downbeat"), "{help}");
        let repository = help.lines().find(|line| line.contains("Model repository")).unwrap_or_default();
        assert!(!repository.contains("[default"), "there is none: {repository}");
    }
}

#[test]
fn a_wrong_command_line_is_status_2() {
    refuses(&["sevre"], 2, "similar subcommand exists: 'serve'");
    refuses(&["serve", "--htpp-port", "1"], 2, "similar argument exists: '--http-port'");
    refuses(&["serve", "m", "--http-port", "99999"], 2, "'99999' is not a port: 0 to 65535, or off");
    refuses(
        &["serve", "m", "--scheduler", "egaer"],
        2,
        "unknown dispatch policy 'egaer'; expected one of: deferred, eager",
    );
    refuses(&["serve", "m", "--slo-ms", "digits=-5"], 2, "must be more than 0 and at most a day");
    refuses(&["infer"], 2, "required arguments were not provided");
    refuses(&["bench"], 2, "required arguments were not provided");
    refuses(&["infer", "digits", "--top", "0"], 2, "0 is not in 1..=1000");
    refuses(&["infer", "digits", "a.npy", "--example", "curl"], 2, "cannot be used with '--example");
}

#[test]
fn options_that_contradict_each_other_are_status_2() {
    let folder = tempfile::tempdir().unwrap();
    let output = downbeat(&["serve"]).current_dir(&folder).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).starts_with("downbeat: no models are given: downbeat serve SOURCE"));

    refuses(&["serve", "m", "--http-port", "8001"], 2, "HTTP and gRPC both have port 8001");
    refuses(&["serve", "m", "--config", "/nonexistent/downbeat.toml"], 2, "cannot read /nonexistent/downbeat.toml");

    std::fs::write(folder.path().join("downbeat.toml"), "\n\nhttp_prot = 1\n").unwrap();
    let output = downbeat(&["serve", "m"]).current_dir(&folder).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        stderr(&output).trim(),
        "downbeat: downbeat.toml:3:1: unknown option 'http_prot'; did you mean 'http_port'?"
    );
}

#[test]
fn the_environment_stands_between_the_file_and_the_flags() {
    let folder = tempfile::tempdir().unwrap();
    let serve = |flags: &[&str], env: &str| {
        let mut arguments = vec!["serve", "m", "--grpc-port", "7001"];
        arguments.extend(flags);
        // The server refuses equal ports with their number: this shows which setting won.
        stderr(&downbeat(&arguments).current_dir(&folder).env("DOWNBEAT_HTTP_PORT", env).output().unwrap())
    };
    std::fs::write(folder.path().join("downbeat.toml"), "http_port = 9000\nmetrics_port = 7002\n").unwrap();
    assert!(serve(&[], "7001").contains("both have port 7001"), "the environment wins over the file");
    assert!(
        serve(&["--http-port", "7002"], "7001").contains("both have port 7002"),
        "a flag wins over the environment"
    );
}

#[test]
fn an_unreachable_server_is_named_and_so_is_what_to_do() {
    // A port that was free a moment ago and has no listener.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let picture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/digit.png");
    let url = format!("http://127.0.0.1:{port}");
    refuses(&["infer", "digits", picture, "--url", &url], 1, "is `downbeat serve` running there?");
    refuses(&["infer", "digits", "--url", &url], 1, "is `downbeat serve` running there?");
    refuses(&["infer", "digits", picture, "--url", "ftp://localhost"], 1, "starts with http:// or https://");
}

#[test]
fn files_that_are_not_what_they_should_be_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.png");
    std::fs::write(&text, "not a picture").unwrap();
    let text = text.to_str().unwrap();
    refuses(&["infer", "m", "/nonexistent.png"], 1, "cannot read /nonexistent.png: No such file");
    refuses(
        &["infer", "m", text],
        1,
        "text.png is not a picture that can be read: the picture is neither a JPEG nor a PNG",
    );
    refuses(&["infer", "m", "--request", text], 1, "text.png is not JSON: expected ident at line 1 column 2");
}

#[test]
fn manual_pages_and_completions_know_the_flags() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    assert!(run(&["man", pages.to_str().unwrap()]).status.success());
    let page = std::fs::read_to_string(pages.join("downbeat-serve.1")).unwrap();
    assert!(page.contains("max\\-queue\\-wait") && !page.contains("sagemaker"), "{page}");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = stdout(&run(&["completions", shell]));
        assert!(script.contains("max-queue-wait"), "{shell}: {script}");
    }
    let script = stdout(&run(&["completions", "bash"]));
    for choices in
        ["deferred eager latest timeout", "auto cuda tensorrt", "exclusive windowed", "text json", "exit cpu"]
    {
        assert!(script.contains(choices), "{choices}: {script}");
    }
    refuses(&["completions", "dash"], 2, "invalid value 'dash'");
}

/// Streams that share a queue to the GPU wait for each other in the queue.
#[test]
fn the_driver_of_gpus_begins_with_as_many_queues_as_it_can_have() {
    let folder = tempfile::tempdir().unwrap();
    let (source, driver) = (folder.path().join("driver.rs"), folder.path().join("libcuda.so.1"));
    let functions = [
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetUuid_v2",
        "cuDeviceTotalMem_v2",
        "cuDeviceGetAttribute",
    ];
    let idle = |name: &&str| format!("#[unsafe(no_mangle)] pub extern \"C\" fn {name}() -> i32 {{ 0 }}\n");
    let says = r#"
        #[unsafe(no_mangle)] pub extern "C" fn cuDriverGetVersion(to: *mut i32) -> i32 { unsafe { *to = 13000 }; 0 }
        #[unsafe(no_mangle)] pub extern "C" fn cuInit(_: u32) -> i32 {
            eprintln!("queues: {:?}", std::env::var("CUDA_DEVICE_MAX_CONNECTIONS"));
            100
        }
    "#;
    std::fs::write(&source, functions.iter().map(idle).collect::<String>() + says).unwrap();
    let rustc = ["--edition=2024", "--crate-type=cdylib", "--crate-name=driver", "-o"];
    let made = Command::new("rustc").args(rustc).arg(&driver).arg(&source).output().unwrap();
    assert!(made.status.success(), "{}", stderr(&made));
    let queues = |asked: Option<&str>| {
        let mut command = downbeat(&["engine", "list"]);
        command.env("LD_LIBRARY_PATH", library_path(folder.path())).env_remove("CUDA_DEVICE_MAX_CONNECTIONS");
        let said = stderr(&command.envs(asked.map(|n| ("CUDA_DEVICE_MAX_CONNECTIONS", n))).output().unwrap());
        said.lines().find_map(|line| line.strip_prefix("queues: ").map(str::to_owned)).unwrap_or(said)
    };
    assert_eq!(queues(None), "Ok(\"32\")");
    assert_eq!(queues(Some("4")), "Ok(\"4\")", "what somebody has set stays");
}

/// As after `downbeat ... | head -1`: the reader has seen enough.
#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let profile = ["profile", "digits", "--batch", "1", "--repository", EXAMPLES, "--engine", "rten", "--budget", "0"];
    for arguments in [
        &profile[..],
        &[&profile[..], &["--json"]].concat(),
        &CAPACITY,
        &[&CAPACITY[..], &["--json"]].concat(),
        &["engine", "list"],
        &["completions", "bash"],
        &["config", "check", EXAMPLES],
        &["--help"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = downbeat(arguments).stdout(writer).output().unwrap();
        assert_eq!(stderr(&output), "", "{arguments:?}");
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        // A reader of both streams that has gone is no failure either.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = downbeat(arguments).stdout(writer.try_clone().unwrap()).stderr(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
    }
}

/// The file of `--json` may be left out, so the flag takes the next word as its file.
#[test]
fn what_json_takes_for_its_file_is_named_where_it_is_missing() {
    for command in ["plan", "profile", "simulate capacity --quiet"] {
        let arguments: Vec<&str> = command.split(' ').chain(["--json", "mine"]).collect();
        refuses(&arguments, 2, "for JSON on standard output write 'mine --json'");
    }
    assert!(!stderr(&run(&["plan", "--json"])).contains("standard output"));
}

/// The lab's program has the commands that users do not need.
#[test]
fn a_command_that_moved_to_the_lab_is_named_there() {
    refuses(&["slice", "digits", "--stages", "2"], 2, "it is 'downbeat-lab slice' now");
    refuses(&["profile", "digits", "--beside", "mlp"], 2, "it is 'downbeat-lab pairs' now");
    assert!(!stderr(&run(&["profile", "slice", "--besides"])).contains("downbeat-lab"));
}

/// `--json` without a file prints JSON in place of the text, `--json FILE` does both. The test
/// covers every command that reports measurements.
#[test]
fn json_means_the_same_in_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json").to_str().unwrap().to_owned();
    let rten = ["--repository", EXAMPLES, "--engine", "rten"];
    let workload = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/workload.toml");
    for arguments in [
        &[&["profile", "digits", "--batch", "1", "--budget", "0"], &rten[..]].concat()[..],
        &[&["profile", "digits", "--segments", "2", "--batch", "1", "--budget", "0"], &rten[..]].concat(),
        &["plan", workload, "--time-limit", "1", "--method", "search"],
        &CAPACITY,
    ] {
        let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).is_ok();
        let printed = stdout(&run(&[arguments, &["--json"]].concat()));
        assert!(json(&printed), "{arguments:?}: {printed}");
        let printed = stdout(&run(&[arguments, &["--json", &file]].concat()));
        assert!(!json(&printed) && printed.lines().count() > 3, "{arguments:?}: {printed}");
        assert!(json(&std::fs::read_to_string(&file).unwrap()), "{arguments:?}");
        std::fs::remove_file(&file).unwrap();
    }
}
