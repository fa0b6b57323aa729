//! Files of web servers, and objects of stores.

use std::fs;
use std::path::Path;

use crate::server::{
    Reply, Request, Server, bring, file, files_below, model, model_with_weights_in, names, options, reply,
};

#[test]
fn a_file_of_a_web_server_is_one_model_with_its_weights() {
    let server = Server::start(|request| match &*request.path {
        // A signed address that allows GET alone.
        "/a/net.onnx?sig=secret" if request.method == "HEAD" => reply(403, ""),
        "/a/net.onnx?sig=secret" => file(request, &model_with_weights_in("net.onnx.data"), "\"m\""),
        "/a/net.onnx.data?sig=secret" => file(request, b"weights", "\"w\""),
        _ => reply(404, ""),
    });
    let folder = tempfile::tempdir().unwrap();
    let brought = bring(&server.at("/a/net.onnx?sig=secret"), &options(folder.path(), &[])).unwrap();
    assert_eq!(names(&brought), ["net"]);
    assert_eq!(files_below(&brought), ["model.onnx", "net.onnx.data"]);
    let again = bring(&server.at("/a/none.onnx?sig=secret"), &options(folder.path(), &[])).unwrap_err();
    assert!(again.contains("does not exist (404") && !again.contains("secret"), "{again}");
    let supply = downbeat_fetch::open(&server.at("/a/net.onnx?sig=secret"), options(folder.path(), &[])).unwrap();
    assert_eq!(supply.address(), server.at("/a/net.onnx"));
    // A new signature is no new file, and the cache keeps no signature.
    let downloads = server.downloads("/a/net.onnx");
    supply.bring().unwrap();
    assert_eq!(server.downloads("/a/net.onnx"), downloads + 1, "one look without HEAD, and no download");
    let manifests = files_below(&folder.path().join("cache/sources"));
    let manifest = manifests.iter().find(|file| file.ends_with("source.json")).unwrap();
    let kept = fs::read_to_string(folder.path().join("cache/sources").join(manifest)).unwrap();
    assert!(!kept.contains("secret"), "{kept}");
}

#[test]
fn a_server_without_validators_is_asked_each_time() {
    let server = Server::start(|request| Reply { headers: vec![], ..file(request, &model(700), "") });
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path(), &[]);
    let first = bring(&server.at("/a.onnx"), &options).unwrap();
    assert_eq!(bring(&server.at("/a.onnx"), &options).unwrap(), first, "the same content is the same snapshot");
    assert_eq!(server.downloads("/a.onnx"), 2);
}

/// The objects of a bucket, as S3 shows them.
fn s3(request: &Request, objects: &[(&str, Vec<u8>)]) -> Reply {
    let path = request.path.split('?').next().unwrap_or_default().trim_start_matches('/');
    let Some(key) = path.strip_prefix("bucket").map(|key| key.trim_start_matches('/')) else {
        return reply(
            404,
            "<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>",
        );
    };
    if request.path.contains("list-type=2") {
        let prefix = request.path.split("prefix=").nth(1).and_then(|rest| rest.split('&').next()).unwrap_or_default();
        let prefix = prefix.replace("%2F", "/");
        let listed = objects.iter().filter(|(key, _)| key.starts_with(&prefix)).map(|(key, content)| {
            let size = content.len();
            format!(
                "<Contents><Key>{key}</Key><Size>{size}</Size><ETag>\"{key}\"</ETag>\
                 <LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        });
        let listed: String = listed.collect();
        return reply(200, format!("<ListBucketResult><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>"));
    }
    match objects.iter().find(|(known, _)| *known == key) {
        Some((key, content)) => {
            let mut whole = file(request, content, &format!("\"{key}\""));
            whole.headers.push(("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT".to_owned()));
            whole
        }
        None => reply(404, "<Error><Code>NoSuchKey</Code></Error>"),
    }
}

fn bucket() -> Server {
    let objects = [
        ("models/cat/1/model.onnx", model(100)),
        ("models/cat/config.pbtxt", b"max_batch_size: 2".to_vec()),
        ("models/dog/model.onnx", model_with_weights_in("w.bin")),
        ("models/dog/w.bin", vec![1; 17 << 20]),
        ("models/dog/checkpoint.pt", vec![1; 17 << 20]),
        ("models/", Vec::new()),
        ("models/cat/", Vec::new()),
        ("models/.git/config", vec![1]),
        ("other/readme.md", vec![1]),
    ];
    Server::start(move |request| s3(request, &objects))
}

#[test]
fn a_prefix_of_an_object_store_is_a_folder() {
    let server = bucket();
    let folder = tempfile::tempdir().unwrap();
    let endpoint = server.at("");
    let options = options(folder.path(), &[("AWS_ENDPOINT_URL", &endpoint), ("AWS_SKIP_SIGNATURE", "true")]);
    let brought = bring("s3://bucket/models/", &options).unwrap();
    assert_eq!(names(&brought), ["cat", "dog"]);
    // The weights that the graph names come, and another large file does not.
    assert_eq!(
        files_below(&brought),
        ["cat/1/model.onnx", "cat/config.pbtxt", "dog/model.onnx", "dog/w.bin"].map(str::to_owned)
    );
    let before = server.seen("").len();
    assert_eq!(bring("s3://bucket/models/", &options).unwrap(), brought);
    assert_eq!(server.seen("").len(), before + 1, "one listing, no download");
    let one = bring("s3://bucket/models/dog/model.onnx", &options).unwrap();
    assert_eq!(files_below(&one), ["model.onnx", "w.bin"]);
    let name_of_folder = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!((name_of_folder(&one), name_of_folder(&brought)), ("model".to_owned(), "models".to_owned()));
    for (address, part) in [
        ("s3://bucket/none", "no object begins with this prefix"),
        ("s3://bucket/other", "no ONNX file below this prefix; there are: readme.md"),
        ("s3://bucket/none/model.onnx", "there is no such object"),
        ("s3://wrong/models", "there is no bucket 'wrong'"),
    ] {
        let error = bring(address, &options).unwrap_err();
        assert!(error.contains(part), "{address}: {error}");
    }
    assert!(fs::metadata(&brought).is_ok());
}

#[test]
fn a_store_that_refuses_names_the_variables() {
    let server = Server::start(|_| reply(403, "<Error><Code>AccessDenied</Code></Error>"));
    let folder = tempfile::tempdir().unwrap();
    let endpoint = server.at("");
    let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_ENDPOINT_URL", &*endpoint)];
    let error = bring("s3://bucket/models", &options(folder.path(), &keys)).unwrap_err();
    assert!(error.contains("access is refused") && error.contains("AWS_ACCESS_KEY_ID"), "{error}");
    assert!(server.seen("")[0].header("authorization").starts_with("AWS4-HMAC-SHA256 Credential=a/"));
}
