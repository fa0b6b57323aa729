"""Every way to give a model to the server: files, folders, a hub, object stores, web servers."""
import hashlib
import shutil
import subprocess
import time

import boto3
import onnx
import pytest
import requests
from onnx import numpy_helper

import models
from serving import environment
from stand_ins import Hub, s3

EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")


def ask(server, name):
    """The answer of a model of `models.add` to a row of ones."""
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1.0] * 4}
    answer = requests.post(f"{server.url}/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["outputs"][0]["data"][0]


def names(server):
    """The models in service."""
    index = requests.post(f"{server.url}/v2/repository/index", timeout=60).json()
    return sorted(entry["name"] for entry in index if entry.get("state") == "READY")


def load(server, name):
    return requests.post(f"{server.url}/v2/repository/models/{name}/load", timeout=120)


@pytest.fixture(scope="session")
def added(tmp_path_factory):
    """`added(n)`: the bytes of a model that adds n."""
    folder = tmp_path_factory.mktemp("added")

    def content(constant):
        models.add(folder, f"add{constant}", constant)
        return (folder / f"add{constant}" / "1" / "model.onnx").read_bytes()

    return content


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize("files, given, name", [
    (["plus.onnx"], "plus.onnx", "plus"),
    (["mnt/models/model.onnx"], "cat=mnt/models", "cat"),
    (["mnt/models/1/model.onnx"], "cat=mnt/models", "cat"),
    (["mnt/models/other/1/model.onnx"], "cat=mnt/models", "cat"),
    (["m/model.onnx"], "m", "m"),
    (["m/1/net.onnx"], "m", "m"),
    (["m/my net.onnx"], "m", "my_net"),
], ids=str)
def test_a_layout_is_served_under_its_name(start, tmp_path, added, files, given, name):
    for file in files:
        put(tmp_path / file, added(1))
    server = start(given, engine="rten")
    assert names(server) == [name]
    assert ask(server, name) == 2


def test_several_sources_are_served_together(start, tmp_path, added):
    put(tmp_path / "folder/a.onnx", added(1))
    put(tmp_path / "folder/b/1/model.onnx", added(2))
    put(tmp_path / "c/model.onnx", added(3))
    server = start("folder", "c", "d=c/model.onnx", engine="rten")
    assert names(server) == ["a", "b", "c", "d"]
    assert [ask(server, name) for name in "abcd"] == [2, 3, 4, 4]


@pytest.fixture
def hub(monkeypatch):
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "secret")
        yield hub


def test_a_model_of_the_hub_is_downloaded_once_and_served_offline(start, hub, added):
    model = onnx.load_from_string(added(1))
    # So large that a part of it arrives before the end of the connection.
    model.doc_string = "x" * 1_000_000
    hub.files = {"onnx/model.onnx": model.SerializeToString(), "onnx/model_int8.onnx": b"x", "config.json": b"{}"}
    hub.broken = 1
    server = start("hf://org/net", engine="rten")
    assert names(server) == ["net"] and ask(server, "net") == 2
    assert "serving onnx/model.onnx of hf://org/net; other ONNX files there: onnx/model_int8.onnx" in server.log
    ranges = hub.downloads()
    assert ranges[0] is None and ranges[1].startswith("bytes=") and len(ranges) == 2, ranges
    tokens = [headers.get("authorization") for path, headers in hub.requests if path.startswith("/cdn/")]
    assert tokens == [None, None], "the token left the hub"
    assert hub.requests[0][1]["authorization"] == "Bearer secret"
    server.stop()
    hub.is_up = False
    again = start("hf://org/net", engine="rten")
    assert ask(again, "net") == 2
    assert "serving the files in the model cache, which may be old" in again.log
    offline = start("hf://org/net", "--offline", engine="rten")
    assert ask(offline, "net") == 2 and "offline: serving the files in the model cache" in offline.log
    assert len(hub.downloads()) == 2


def test_a_load_request_looks_again_and_a_failure_leaves_the_model_in_service(start, hub, added):
    hub.files = {"model.onnx": added(1)}
    server = start("plus=hf://org/net", *EXPLICIT, engine="rten")
    assert ask(server, "plus") == 2
    hub.files = {"model.onnx": added(2)}
    assert load(server, "plus").status_code == 200
    assert ask(server, "plus") == 3 and "the revision moved from" in server.log
    # A commit without a model.
    hub.files = {"README.md": b""}
    refused = load(server, "plus")
    assert refused.status_code >= 400 and "has no ONNX file; make one" in refused.text
    # A file that is no model.
    hub.files = {"model.onnx": b"\x08garbage"}
    refused = load(server, "plus")
    assert refused.status_code >= 400, refused.text
    assert ask(server, "plus") == 3
    # A hub that does not answer is no reason to refuse the model in the cache.
    hub.files = {"model.onnx": added(2)}
    assert load(server, "plus").status_code == 200
    hub.is_up = False
    assert load(server, "plus").status_code == 200
    assert ask(server, "plus") == 3


def test_weights_in_another_file_come_along(start, hub, added, tmp_path):
    model = onnx.load_from_string(added(4))
    for tensor in model.graph.initializer:
        tensor.raw_data = numpy_helper.to_array(tensor).tobytes()
        tensor.ClearField("float_data")
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    for name in ("model.onnx", "model.onnx_data"):
        hub.files[f"onnx/{name}"] = (tmp_path / name).read_bytes()
    server = start("hf://org/net", engine="onnxruntime")
    assert ask(server, "net") == 5


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of an S3 server."""
    with s3() as address:
        variables = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=address, region_name="us-east-1")
        client.create_bucket(Bucket="models")
        yield lambda key, content: client.put_object(Bucket="models", Key=key, Body=content)


def test_a_prefix_of_a_bucket_is_a_repository_that_can_be_polled(start, bucket, added):
    bucket("prod/one/1/model.onnx", added(1))
    bucket("prod/one/config.pbtxt", b"max_batch_size: 4")
    bucket("prod/two.onnx", added(2))
    server = start("s3://models/prod", "--model-control-mode", "poll", "--repository-poll-secs", "1", engine="rten")
    assert names(server) == ["one", "two"]
    assert requests.get(f"{server.url}/v2/models/one/config", timeout=60).json()["max_batch_size"] == 4
    log = server.log.count("the model is new or changed")
    bucket("prod/three/model.onnx", added(3))
    while "three" not in names(server):
        time.sleep(0.1)
    assert [ask(server, name) for name in ("one", "two", "three")] == [2, 3, 4]
    assert server.log.count("the model is new or changed") == log + 1, "the others did not change"


def failed(binary, folder, *command):
    """The last line of a server that ends at its start."""
    process = subprocess.run([binary, "serve", *command, "--engine", "rten", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"],
                             env=environment(folder, "rten"), cwd=folder, capture_output=True, text=True, timeout=120)
    assert process.returncode in (1, 2), process
    return process.stderr.strip().splitlines()[-1]


def test_each_wrong_source_is_one_line_that_says_what_to_do(binary, tmp_path, hub, bucket):
    hub.files = {"README.md": b""}
    bucket("empty/readme.md", b"x")
    put(tmp_path / "two/a.onnx", b"")
    put(tmp_path / "two/b.onnx", b"")
    put(tmp_path / "notes.txt", b"")
    for source, part in [
        ("missing.onnx", "no such file or folder"),
        ("notes.txt", "does not end in .onnx"),
        ("one=two", "has 2 models: a, b; leave 'one=' out"),
        ("hf://org/net", "optimum-cli export onnx --model org/net net && downbeat serve net"),
        ("hf://org/none", "no such repository"),
        ("hf://net", "expected hf://ORGANISATION/NAME"),
        ("ftp://host/x", "known are hf, s3, gs, az, https"),
        ("https://127.0.0.1:1/model", "a file that ends in .onnx"),
        ("http://127.0.0.1:1/model.onnx", "127.0.0.1 does not answer"),
        (f"https://127.0.0.1:{hub.port}/model.onnx", "127.0.0.1 answers without TLS; write http://"),
        ("s3://models/empty", "no ONNX file below this prefix"),
        ("s3://models/none", "no object begins with this prefix"),
        ("s3://nowhere/x", "there is no bucket 'nowhere'"),
    ]:
        line = failed(binary, tmp_path, source)
        assert part in line, f"{source}: {line}"


def test_a_full_disk_leaves_the_cache_sound(binary, start, tmp_path, hub, added):
    """A limit of the process stands for the disk."""
    hub.files = {"model.onnx": added(1) + bytes(3 << 20)}
    server = subprocess.run(["sh", "-c", 'ulimit -f 1024; exec "$0" serve hf://org/net --http-port 0 --grpc-port 0 --metrics-port 0', binary],
                            env=environment(tmp_path, "rten"), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert server.returncode == 1, server
    assert "larger than the limit of this process" in server.stderr and "--model-cache DIR" in server.stderr
    hub.files = {"model.onnx": added(1)}
    assert ask(start("hf://org/net", engine="rten"), "net") == 2


def test_a_folder_of_the_cache_may_be_given(start, tmp_path, hub, added):
    hub.files = {"model.onnx": added(1)}
    server = start("hf://org/net", "--model-cache", str(tmp_path / "kept"), engine="rten")
    assert ask(server, "net") == 2
    assert [path.name for path in (tmp_path / "kept/blobs").iterdir()] == [hashlib.sha256(added(1)).hexdigest()]
    shutil.rmtree(tmp_path / "kept")
    assert ask(server, "net") == 2, "a model in service needs no cache"
