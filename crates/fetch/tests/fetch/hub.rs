//! Repositories of a hub: the choice of the file, redirects, revisions, tokens.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::server::{
    Reply, Server, bring, description, file, model, model_with_weights_in, names, options, reply, sha256,
};

const ONE: &str = "1111111111111111111111111111111111111111";
const TWO: &str = "2222222222222222222222222222222222222222";

/// A redirect.
fn to(status: u16, location: String) -> Reply {
    Reply { headers: vec![("location", location)], ..reply(status, "") }
}

/// A hub that redirects downloads to another host, as the real hub does.
fn hub(description: Vec<u8>, content: Vec<u8>) -> Server {
    let port = Arc::new(AtomicUsize::new(0));
    let own = port.clone();
    let server = Server::start(move |request| match &*request.path {
        path if path.starts_with("/api/models/old/net/") => to(307, path.replace("/old/", "/org/")),
        path if path.starts_with("/api/models/org/net/revision/") => reply(200, description.clone()),
        path if path.starts_with("/cdn/") => file(request, &content, "\"cdn\""),
        path if path.contains("/resolve/") => {
            to(302, format!("http://localhost:{}/cdn{path}", own.load(Ordering::Relaxed)))
        }
        _ => reply(404, ""),
    });
    port.store(server.at("").rsplit(':').next().unwrap().parse().unwrap(), Ordering::Relaxed);
    server
}

#[test]
fn the_usual_file_is_chosen_and_comes_from_another_host_without_the_token() {
    let content = model(5000);
    let digest = sha256(&content);
    let listed = [
        ("onnx/model_int8.onnx", 9, None),
        ("onnx/model.onnx", 5000, Some(&*digest)),
        ("model.safetensors", 1 << 40, None),
        ("tokenizer.json", 5000, None),
    ];
    let server = hub(description(ONE, &listed), content.clone());
    let folder = tempfile::tempdir().unwrap();
    let endpoint = server.at("");
    let options = options(folder.path(), &[("HF_ENDPOINT", &endpoint), ("HF_TOKEN", "secret")]);
    // The repository had another name once.
    let brought = bring("hf://old/net", &options).unwrap();
    assert!(brought.ends_with("net"), "{brought:?}");
    assert_eq!(fs::read(brought.join("model.onnx")).unwrap(), content);
    assert!(brought.join("tokenizer.json").is_file());
    assert_eq!(names(&brought), ["net"]);
    let described = &server.seen("/api/models/org")[0];
    assert_eq!(described.header("authorization"), "Bearer secret");
    assert!(described.path.contains("/revision/main?blobs=true"));
    let downloads = server.seen("/cdn/");
    assert_eq!(downloads.len(), 2);
    assert!(downloads.iter().all(|request| request.header("authorization").is_empty()), "the token left the hub");
    assert!(downloads[0].path.contains(&format!("/resolve/{ONE}/")), "{}", downloads[0].path);
    // Nothing changed: nothing comes twice, and models stay where they are.
    assert_eq!(bring("hf://old/net", &options).unwrap(), brought);
    assert_eq!(server.downloads("/cdn/"), 2);
}

#[test]
fn a_moved_revision_is_another_snapshot_and_the_old_one_stays() {
    let state = Arc::new(Mutex::new((ONE, model(100))));
    let now = state.clone();
    let server = Server::start(move |request| {
        let (commit, content) = now.lock().unwrap().clone();
        match request.path.contains("/api/") {
            true => reply(200, description(commit, &[("model.onnx", content.len() as u64, Some(&sha256(&content)))])),
            false if request.path.contains(commit) => file(request, &content, "\"x\""),
            false => reply(404, ""),
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let endpoint = server.at("");
    let options = options(folder.path(), &[("HF_ENDPOINT", &endpoint)]);
    let supply = downbeat_fetch::open("hf://org/net", options.clone()).unwrap();
    let first = supply.bring().unwrap();
    *state.lock().unwrap() = (TWO, model(200));
    let second = supply.bring().unwrap();
    assert_ne!(first, second);
    assert_eq!(fs::read(second.join("model.onnx")).unwrap(), model(200));
    // A model in service may still read its file.
    assert_eq!(fs::read(first.join("model.onnx")).unwrap(), model(100));
    // A commit that moved is a fault of the server.
    let error = bring(&format!("hf://org/net@{ONE}"), &options).unwrap_err();
    assert!(error.contains(&format!("about the commit {TWO}, and not about {ONE}")), "{error}");
    // After the process that used it, the old snapshot goes.
    drop(supply);
    bring("hf://org/net", &options).unwrap();
    assert!(!first.exists() && second.exists());
}

#[test]
fn each_refusal_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let error = |described: Reply, address: &str, token: &str| {
        let server = Server::start(move |_| described.clone());
        let endpoint = server.at("");
        bring(address, &options(folder.path(), &[("HF_ENDPOINT", &endpoint), ("HF_TOKEN", token)])).unwrap_err()
    };
    let code =
        |status: u16, code: &str| Reply { headers: vec![("x-error-code", code.to_owned())], ..reply(status, "") };
    let listed = |files: &[(&str, u64, Option<&str>)]| reply(200, description(ONE, files));
    for (described, address, token, part) in [
        (code(401, "RepoNotFound"), "hf://org/net", "", "no such repository, or it is private"),
        (code(401, "RepoNotFound"), "hf://org/net", "x", "the token in use may not read it"),
        (code(403, "GatedRepo"), "hf://org/net", "x", "the owner asks for an agreement; accept it on http"),
        (code(404, "RevisionNotFound"), "hf://org/net@v9", "", "the repository has no such revision"),
        (reply(403, ""), "hf://org/net", "x", "check HF_TOKEN"),
        (
            listed(&[("README.md", 1, None)]),
            "hf://org/net",
            "",
            "optimum-cli export onnx --model org/net net && downbeat serve net",
        ),
        (
            listed(&[("a.onnx", 1, None), ("b.onnx", 1, None)]),
            "hf://org/net",
            "",
            "name one, such as hf://org/net/a.onnx",
        ),
        (listed(&[("a.onnx", 1, None)]), "hf://org/net/c.onnx", "", "has no file c.onnx; its ONNX files: a.onnx"),
        (reply(200, "<html>"), "hf://org/net", "", "the hub's answer cannot be read"),
        (reply(200, description("../../x", &[])), "hf://org/net", "", "has no commit"),
        (listed(&vec![("a.onnx", 1, None); 10_001]), "hf://org/net", "", "names more than 10000 files"),
        (
            listed(&[("model.onnx", 1 << 60, None)]),
            "hf://org/net",
            "",
            "free; free space there, or choose another folder",
        ),
    ] {
        let message = error(described, address, token);
        assert!(message.contains(part), "{part}: {message}");
        assert!(!message.contains('\n'), "one line: {message}");
    }
}

#[test]
fn weights_in_other_files_come_with_their_model() {
    let graph = model_with_weights_in("net.weights");
    let served = graph.clone();
    let server = Server::start(move |request| match &*request.path {
        path if path.contains("/api/") => {
            let mut listed = vec![("onnx/model.onnx", served.len() as u64, None), ("net.weights", 1, None)];
            if path.contains("/whole/") {
                listed.push(("onnx/net.weights", 7, None));
            }
            reply(200, description(ONE, &listed))
        }
        path if path.ends_with("/onnx/net.weights") => file(request, b"weights", "\"w\""),
        _ => file(request, &served, "\"m\""),
    });
    let folder = tempfile::tempdir().unwrap();
    let endpoint = server.at("");
    let options = options(folder.path(), &[("HF_ENDPOINT", &endpoint)]);
    let brought = bring("hf://org/whole", &options).unwrap();
    assert_eq!(fs::read(brought.join("model.onnx")).unwrap(), graph);
    assert_eq!(fs::read(brought.join("net.weights")).unwrap(), b"weights");
    let error = bring("hf://org/part", &options).unwrap_err();
    assert!(error.contains("keeps weights in the file 'net.weights', which the repository does not have"), "{error}");
}

#[test]
fn the_cache_of_the_hubs_own_client_is_used() {
    let content = model(3000);
    let digest = sha256(&content);
    let listed = description(ONE, &[("model.onnx", 3000, Some(&digest))]);
    let server = Server::start(move |request| match request.path.contains("/api/") {
        true => reply(200, listed.clone()),
        false => reply(500, ""),
    });
    let folder = tempfile::tempdir().unwrap();
    let blobs = folder.path().join("hf/hub/models--org--net/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(&digest), &content).unwrap();
    fs::write(folder.path().join("hf/token"), "from-file\n").unwrap();
    let (endpoint, home) = (server.at(""), folder.path().join("hf").display().to_string());
    let brought = bring("hf://org/net", &options(folder.path(), &[("HF_ENDPOINT", &endpoint), ("HF_HOME", &home)]));
    assert_eq!(fs::read(brought.unwrap().join("model.onnx")).unwrap(), content);
    assert_eq!(server.downloads("/resolve/"), 0);
    assert_eq!(server.seen("/api/")[0].header("authorization"), "Bearer from-file");
}
