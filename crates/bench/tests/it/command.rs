//! The command line: all flags exist, and an error about a wrong value names the flag.

use clap::CommandFactory;

use crate::servers::{Command, Server, plan, respond};

#[test]
fn the_command_line_is_consistent_and_every_flag_is_explained() {
    let command = Command::command();
    command.clone().debug_assert();
    for argument in command.get_arguments() {
        assert!(argument.get_help().is_some(), "{}", argument.get_id());
    }
}

#[test]
fn wrong_values_are_refused_by_flag() {
    let server = Server::http(|_, _, stream, _| respond(stream, "200 OK", b"{}"));
    let url = server.url();
    let cases: [&[&str]; 19] = [
        &["--rate", "0"],
        &["--rate", "nan"],
        &["--duration", "0"],
        &["--duration", "inf"],
        &["--warmup=-1"],
        &["--request-timeout", "0"],
        &["--slo-ms", "0"],
        &["--threads", "0"],
        &["--batch", "0"],
        &["--variants", "0"],
        &["--closed", "--connections", "0"],
        &["--header", "no colon"],
        &["--header", "bad name: x"],
        &["--header", "x: a\r\nb"],
        &["--shape", "nobody:4"],
        &["--input", "/nowhere/at/all.json"],
        &["--capacity", "--precision", "0"],
        &["--capacity", "--target-bad-percent", "100"],
        &["--capacity", "--target-p99-ms", "0"],
    ];
    for words in cases {
        let error = plan(&[&["-m", "m", "--url", &url], words].concat()).expect_err(&words.join(" "));
        let flag = if words[0] == "--closed" || words[0] == "--capacity" { words[1] } else { words[0] };
        let flag = flag.split('=').next().unwrap_or(flag);
        assert!(format!("{error:#}").contains(flag), "{words:?}: {error:#}");
    }
    for model in ["", ":1", "m:x", "m:0", "m:-1", "m:nan", "@1"] {
        let error = plan(&["-m", model, "--url", &url]).expect_err(model);
        assert!(format!("{error:#}").contains("model"), "{model}: {error:#}");
    }
    for url in ["https://127.0.0.1", "127.0.0.1:1/path", "http://", "no such host:1"] {
        let error = plan(&["-m", "m", "--url", url]).expect_err(url);
        assert!(format!("{error:#}").contains("--url"), "{url}: {error:#}");
    }
}
