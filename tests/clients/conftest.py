"""Fixtures: the binary, and servers on the examples and on models made for the tests."""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
# The wheel's Python package.
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "packaging/wheel/python"))

import models  # noqa: E402
from serving import EXAMPLES, ROOT, Server  # noqa: E402


@pytest.fixture(scope="session")
def binary():
    """The `downbeat` program: `DOWNBEAT_BIN`, or a release build made now."""
    if "DOWNBEAT_BIN" in os.environ:
        return pathlib.Path(os.environ["DOWNBEAT_BIN"]).resolve()
    subprocess.run(["cargo", "build", "--release", "-p", "downbeat"], cwd=ROOT, check=True)
    metadata = subprocess.run(["cargo", "metadata", "--format-version", "1", "--no-deps"], cwd=ROOT, check=True, capture_output=True)
    return pathlib.Path(json.loads(metadata.stdout)["target_directory"]) / "release" / "downbeat"


@pytest.fixture(scope="session")
def helps(binary):
    """The `--help` of each role."""
    texts = {}
    for role in ("frontend", "scheduler", "backend", "serve"):
        done = subprocess.run([binary, role, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"there is no `downbeat {role}`: {done.stderr}"
        texts[role] = done.stdout
    return texts


@pytest.fixture(scope="session")
def examples(binary, tmp_path_factory):
    """A server on examples/models with ONNX Runtime and shared memory; models are loaded and unloaded elsewhere."""
    with Server(binary, EXAMPLES / "models", tmp_path_factory.mktemp("examples"), "--shared-memory") as server:
        yield server


@pytest.fixture(scope="session")
def examples_rten(binary, tmp_path_factory):
    """A server on examples/models with the embedded engine."""
    with Server(binary, EXAMPLES / "models", tmp_path_factory.mktemp("examples-rten"), engine="rten") as server:
        yield server


@pytest.fixture(scope="session")
def made(binary, tmp_path_factory):
    """A server on an identity model of every datatype, `simple`, `slow` and `bounded` (slow, at most 4 requests wait)."""
    folder = tmp_path_factory.mktemp("made")
    repository = folder / "models"
    for datatype in models.DATATYPES:
        models.identity(repository, datatype)
    models.add_sub(repository)
    models.slow(repository)
    models.slow(repository, "bounded", dynamic_batching="dynamic_batching { default_queue_policy { max_queue_size: 4 } }")
    with Server(binary, repository, folder, "--shared-memory") as server:
        yield server


@pytest.fixture
def start(binary, tmp_path):
    """Starts servers: `start(repository, *flags, ...)`. Each must end cleanly."""
    started = []

    def start_server(repository, *flags, **options):
        server = Server(binary, repository, tmp_path, *flags, **options)
        started.append(server)
        return server

    yield start_server
    for server in started:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture
def repository(tmp_path):
    """An empty model repository."""
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def copied_examples(repository):
    """A repository with copies of the examples."""
    shutil.copytree(EXAMPLES / "models", repository, dirs_exist_ok=True)
    return repository
