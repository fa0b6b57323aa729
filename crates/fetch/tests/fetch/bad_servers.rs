//! Servers that break off, lie, refuse or keep silent. The cache stays sound.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use crate::server::{Reply, Server, bring, description, file, files_below, model, options, reply, sha256};

#[test]
fn a_download_goes_on_where_it_broke_off() {
    let content = model(100_000);
    let (served, tries) = (content.clone(), AtomicUsize::new(0));
    let server = Server::start(move |request| {
        let whole = file(request, &served, "\"v1\"");
        let is_first = request.method == "GET" && tries.fetch_add(1, Ordering::Relaxed) == 0;
        if is_first { Reply { cut: Some(40_000), ..whole } } else { whole }
    });
    let folder = tempfile::tempdir().unwrap();
    let brought = bring(&server.at("/net.onnx"), &options(folder.path(), &[])).unwrap();
    assert_eq!(fs::read(brought.join("model.onnx")).unwrap(), content);
    let gets: Vec<_> = server.seen("/net").into_iter().filter(|request| request.method == "GET").collect();
    assert_eq!(gets.len(), 2);
    assert!(gets[1].header("range").starts_with("bytes="), "{:?}", gets[1]);
    assert_eq!(gets[1].header("if-range"), "\"v1\"");
}

#[test]
fn a_file_that_changes_between_two_tries_is_brought_as_it_is_now() {
    let version = Arc::new(AtomicUsize::new(1));
    let now = version.clone();
    let server = Server::start(move |request| {
        let version = now.load(Ordering::Relaxed);
        let whole = file(request, &model(10_000 * version), &format!("\"v{version}\""));
        if request.method == "GET" && version == 1 {
            now.store(2, Ordering::Relaxed);
            return Reply { cut: Some(3_000), ..whole };
        }
        whole
    });
    let folder = tempfile::tempdir().unwrap();
    let brought = bring(&server.at("/net.onnx"), &options(folder.path(), &[])).unwrap();
    assert_eq!(fs::read(brought.join("model.onnx")).unwrap(), model(20_000));
}

#[test]
fn a_truncated_download_is_no_model_and_the_next_start_goes_on() {
    let content = model(50_000);
    let (served, is_mended) = (content.clone(), Arc::new(Mutex::new(false)));
    let mended = is_mended.clone();
    let server = Server::start(move |request| {
        let whole = file(request, &served, "\"v1\"");
        let range: usize =
            request.header("range").trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap_or(0);
        if request.method == "GET" && !*mended.lock().unwrap() {
            return Reply { cut: Some(20_000_usize.saturating_sub(range)), ..whole };
        }
        whole
    });
    let folder = tempfile::tempdir().unwrap();
    let (address, options) = (server.at("/net.onnx"), options(folder.path(), &[]));
    let error = bring(&address, &options).unwrap_err();
    assert!(error.contains("the download broke off after") && error.contains("goes on from there"), "{error}");
    assert!(files_below(&folder.path().join("cache/blobs")).is_empty());
    *is_mended.lock().unwrap() = true;
    let before = server.downloads("/net");
    assert_eq!(fs::read(bring(&address, &options).unwrap().join("model.onnx")).unwrap(), content);
    let last = server.seen("/net").into_iter().filter(|request| request.method == "GET").nth(before).unwrap();
    assert!(last.header("range").starts_with("bytes="), "{last:?}");
}

#[test]
fn a_file_of_another_checksum_is_not_kept() {
    let (good, bad) = (model(4_000), model(3_999).into_iter().chain([0]).collect::<Vec<u8>>());
    let is_bad = Arc::new(Mutex::new(true));
    let (listed, wrong, right) = (sha256(&good), is_bad.clone(), good.clone());
    let commit = "1".repeat(40);
    let server = Server::start(move |request| match request.path.contains("/api/") {
        true => reply(200, description(&commit, &[("model.onnx", 4_000, Some(&listed))])),
        false if *wrong.lock().unwrap() => file(request, &bad, "\"x\""),
        false => file(request, &right, "\"x\""),
    });
    let folder = tempfile::tempdir().unwrap();
    let endpoint = server.at("");
    let options = options(folder.path(), &[("HF_ENDPOINT", &endpoint)]);
    let error = bring("hf://org/net", &options).unwrap_err();
    assert!(error.contains("the checksum is") && error.contains("the file was not kept"), "{error}");
    assert!(files_below(&folder.path().join("cache/blobs")).is_empty());
    *is_bad.lock().unwrap() = false;
    assert_eq!(fs::read(bring("hf://org/net", &options).unwrap().join("model.onnx")).unwrap(), good);
}

#[test]
fn answers_in_the_place_of_a_model_are_told() {
    for (answer, part) in [
        (reply(403, ""), "access is refused (403"),
        (reply(401, ""), "access is refused (401"),
        (reply(404, ""), "does not exist (404"),
        (reply(503, ""), "the server failed (503"),
        (reply(200, "<!DOCTYPE html><p>Log in"), "the server sent a web page"),
        (reply(200, "version https://git-lfs.github.com/spec/v1\n"), "a git-lfs pointer"),
        (reply(200, ""), "the file is empty"),
        (Reply { headers: vec![("location", "/a.onnx".to_owned())], ..reply(302, "") }, "redirect"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start(move |_| answer.clone());
        let error = bring(&server.at("/a.onnx"), &options(folder.path(), &[])).unwrap_err();
        assert!(error.contains(part), "{part}: {error}");
        assert!(files_below(&folder.path().join("cache/blobs")).is_empty(), "{part}");
    }
}

#[test]
fn a_host_that_does_not_answer_is_told_and_the_cache_serves() {
    let folder = tempfile::tempdir().unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = closed.local_addr().unwrap().port();
    drop(closed);
    let error = bring(&format!("http://127.0.0.1:{port}/a.onnx"), &options(folder.path(), &[])).unwrap_err();
    assert!(error.contains("127.0.0.1 does not answer"), "{error}");
    let silent = Server::start(|_| Reply { hangs: true, cut: Some(0), ..reply(200, "x") });
    let quick = downbeat_fetch::FetchOptions { timeout: Duration::from_millis(200), ..options(folder.path(), &[]) };
    let error = bring(&silent.at("/a.onnx"), &quick).unwrap_err();
    assert!(error.contains("no answer in time"), "{error}");

    let is_up = Arc::new(Mutex::new(true));
    let up = is_up.clone();
    let server = Server::start(move |request| match *up.lock().unwrap() {
        true => file(request, &model(900), "\"a\""),
        false => reply(502, ""),
    });
    let (address, options) = (server.at("/a.onnx"), options(folder.path(), &[]));
    let brought = bring(&address, &options).unwrap();
    *is_up.lock().unwrap() = false;
    assert_eq!(bring(&address, &options).unwrap(), brought);
    let offline = downbeat_fetch::FetchOptions { offline: true, ..options };
    let asked = server.seen("").len();
    assert_eq!(bring(&address, &offline).unwrap(), brought);
    assert_eq!(server.seen("").len(), asked, "offline asks nobody");
    // A cache without the file does not serve.
    let error = bring(&server.at("/b.onnx"), &offline).unwrap_err();
    assert!(error.contains("the cache does not have all files, and the server is started offline"), "{error}");
}

#[test]
fn a_file_that_was_changed_in_the_cache_is_brought_again() {
    let server = Server::start(|request| file(request, &model(900), "\"a\""));
    let folder = tempfile::tempdir().unwrap();
    let (address, options) = (server.at("/a.onnx"), options(folder.path(), &[]));
    let brought = bring(&address, &options).unwrap().join("model.onnx");
    let blob = folder.path().join("cache/blobs").join(sha256(&model(900)));
    // The link in the snapshot is the same file.
    fs::set_permissions(&blob, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(&blob, vec![8; 900]).unwrap();
    fs::File::options().write(true).open(&blob).unwrap().set_modified(UNIX_EPOCH).unwrap();
    assert_ne!(fs::read(&brought).unwrap(), model(900));
    let brought_again = bring(&address, &options).unwrap().join("model.onnx");
    assert_eq!(brought_again, brought);
    assert_eq!(fs::read(brought_again).unwrap(), model(900));
    assert_eq!(server.downloads("/a.onnx"), 2);
    // A file that is gone, too.
    fs::remove_file(&blob).unwrap();
    bring(&address, &options).unwrap();
    assert_eq!(server.downloads("/a.onnx"), 3);
}

#[test]
fn a_path_that_leads_out_of_the_cache_is_never_written() {
    let commit = "1".repeat(40);
    let server = Server::start(move |request| match &*request.path {
        path if path.contains("/api/") => {
            let listed =
                [("model.onnx", 900, None), ("../../../../evil.onnx", 900, None), ("/etc/evil.onnx", 900, None)];
            reply(200, description(&commit, &listed))
        }
        path if path.contains("list-type") => {
            let object = |key: &str| {
                format!(
                    "<Contents><Key>{key}</Key><Size>900</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>\"a\"</ETag></Contents>"
                )
            };
            let objects = object("models/a.onnx") + &object("models/../../../evil.onnx");
            reply(200, format!("<ListBucketResult><IsTruncated>false</IsTruncated>{objects}</ListBucketResult>"))
        }
        _ => file(request, &model(900), "\"a\""),
    });
    let folder = tempfile::tempdir().unwrap();
    let endpoint = server.at("");
    let of_s3 = [("AWS_ENDPOINT_URL", &*endpoint), ("AWS_SKIP_SIGNATURE", "true"), ("HF_ENDPOINT", &*endpoint)];
    let options = options(folder.path(), &of_s3);
    bring("hf://org/net", &options).unwrap();
    assert!(bring("s3://bucket/models", &options).is_err());
    let strange = |files: Vec<String>| files.into_iter().any(|file| file.contains("evil"));
    assert!(!strange(files_below(folder.path())));
    assert!(!folder.path().parent().unwrap().join("evil.onnx").exists());
}
