"""KServe: what its storage initializer leaves in /mnt/models is served with the arguments of deploy/kubernetes/kserve, and
asked by KServe's own client. The initializer is the one of the package kserve-storage, as in KServe's image."""
import os
import pathlib
import subprocess
import sys
import tarfile

import boto3
import pytest
import requests
import yaml

import models
import stand_ins
from serving import ROOT, Server, environment

RUNTIMES = ROOT / "deploy" / "kubernetes" / "kserve" / "runtime.yaml"
SESSION = pathlib.Path(__file__).with_name("kserve_session.py")
# The name of the InferenceService, which no folder and no file has.
NAME = "sums-of-two"
# The main part of the initializer's own program, /storage-initializer/scripts/initializer-entrypoint in its image.
INITIALIZER = "import sys; from kserve_storage import Storage; Storage.download_files(sys.argv[1::2], sys.argv[2::2])"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def s3():
    with stand_ins.s3() as address:
        yield address


def upload(s3, bucket, folder):
    client = boto3.client("s3", endpoint_url=s3, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    for path in folder.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), bucket, str(path.relative_to(folder)))


@pytest.fixture
def made(tmp_path):
    """The folder of a model of the tests, `simple`, in Triton's layout: config.pbtxt and 1/model.onnx."""
    models.add_sub(tmp_path / "made", "simple")
    return tmp_path / "made" / "simple"


@pytest.fixture
def initialize(tmp_path):
    """Runs the storage initializer; the folder that it fills, which stands for /mnt/models."""

    def run(uri, **variables):
        mounted = tmp_path / "mnt" / "models"
        mounted.mkdir(parents=True)
        env = dict(os.environ, HF_HOME=str(tmp_path / "hf"), **variables)
        done = subprocess.run([sys.executable, "-c", INITIALIZER, uri, mounted], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return mounted

    return run


def arguments(runtime, mounted):
    """The arguments of a runtime, with the values that KServe sets in the place of its templates."""
    spec, = [document["spec"] for document in yaml.safe_load_all(RUNTIMES.read_text()) if document["metadata"]["name"] == runtime]
    role, *rest = spec["containers"][0]["args"]
    assert role == "serve"
    return [argument.replace("{{.Name}}", NAME).replace("/mnt/models", str(mounted)) for argument in rest if not argument.startswith(("--host=", "--http-port=", "--grpc-port=", "--metrics-port="))]


@pytest.fixture
def serve(binary, tmp_path):
    """A server with the arguments of a runtime, on other ports; it must end cleanly."""
    running = []

    def start(runtime, mounted):
        *flags, place = arguments(runtime, mounted)
        server = Server(binary, place, tmp_path, *flags, engine="rten")
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop()


def ask(server, name=NAME):
    """Both protocols, by KServe's client."""
    done = subprocess.run([sys.executable, SESSION, server.url, server.grpc, name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stderr}\n{server.log}"
    assert [model["name"] for model in requests.post(f"{server.url}/v2/repository/index", timeout=10).json()] == [name]


# Where the model is in the address, by the layout that comes out of it.
def file_of(made, tmp_path):
    return f"file://{made / '1' / 'model.onnx'}"


def file_of_any_name(made, tmp_path):
    (made / "1" / "model.onnx").rename(tmp_path / "sums.onnx")
    return f"file://{tmp_path / 'sums.onnx'}"


def folder_of_a_version(made, tmp_path):
    return f"file://{made / '1'}"


def folder_of_a_model(made, tmp_path):
    return f"file://{made}"


def repository_of_one(made, tmp_path):
    return f"file://{made.parent}"


def archive(made, tmp_path):
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as tar:
        tar.add(made / "1" / "model.onnx", "model.onnx")
    return f"file://{tmp_path / 'model.tar.gz'}"


@pytest.mark.parametrize("layout", [file_of, file_of_any_name, folder_of_a_version, folder_of_a_model, repository_of_one, archive])
def test_each_layout_of_one_model_has_the_services_name(initialize, serve, made, tmp_path, layout):
    """Local addresses give links, as the addresses of claims do."""
    mounted = initialize(layout(made, tmp_path))
    ask(serve("downbeat", mounted))


@pytest.mark.parametrize("path", ["", "simple", "simple/1", "simple/1/model.onnx"])
def test_a_model_from_s3_has_the_services_name(s3, initialize, serve, made, path):
    bucket = f"one-{len(path)}"
    upload(s3, bucket, made.parent)
    mounted = initialize(f"s3://{bucket}/{path}", AWS_ENDPOINT_URL=s3, **KEYS)
    ask(serve("downbeat", mounted))


@pytest.mark.parametrize("path", ["model.onnx", "onnx/model.onnx"])
def test_a_model_from_the_hub_has_the_services_name(initialize, serve, made, path):
    files = {path: (made / "1" / "model.onnx").read_bytes(), "README.md": b"# A model\n", ".gitattributes": b"*.onnx filter=lfs\n", "config.json": b"{}\n"}
    with stand_ins.Hub("someone/sums", files) as hub:
        mounted = initialize("hf://someone/sums", HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1")
    assert (mounted / ".cache").is_dir() and (mounted / path).is_file()
    ask(serve("downbeat", mounted))


def test_a_repository_keeps_its_own_names(s3, initialize, serve, made):
    models.add(made.parent, "one", 1)
    upload(s3, "many", made.parent)
    server = serve("downbeat-repository", initialize("s3://many", AWS_ENDPOINT_URL=s3, **KEYS))
    assert sorted(model["name"] for model in requests.post(f"{server.url}/v2/repository/index", timeout=10).json()) == ["one", "simple"]
    done = subprocess.run([sys.executable, SESSION, server.url, server.grpc, "simple"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_name_for_several_models_is_refused(binary, tmp_path, made):
    models.add(made.parent, "one", 1)
    done = subprocess.run([binary, "serve", *arguments("downbeat", made.parent), "--http-port=0", "--grpc-port=off", "--metrics-port=off"],
                          env=environment(tmp_path, "rten"), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and NAME in done.stderr and "one" in done.stderr, done.stderr


def test_the_first_protocol_of_kserve_is_not_there(initialize, serve, made):
    """docs/guide/from_kserve.md says so."""
    server = serve("downbeat-repository", initialize(f"file://{made.parent}"))
    assert requests.post(f"{server.url}/v1/models/simple:predict", json={"instances": [[1]]}, timeout=10).status_code == 404
