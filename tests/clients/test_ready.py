"""A server is ready before it has measured its models, holds little memory, and measures behind its requests."""
import json
import pathlib
import shutil
import time

import pytest
import requests

from serving import EXAMPLES, START_TIMEOUT_S, Server

MODELS = {"digits": (1, 8, 8), "mlp": (784,)}
# Three times what the examples take, as builds differ in the size of their code.
MOST_OWN_MIB = 60


def profiles(folder):
    """The stored latency profiles of a server, by the name of the model."""
    files = (folder / "cache" / "downbeat" / "profiles").glob("*.json")
    stored = [json.loads(file.read_text()) for file in files]
    return {each["model"].split("/")[-3]: each for each in stored if "measurements" in each}


def until(condition, what):
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def infer(server, model):
    metadata = requests.get(f"{server.url}/v2/models/{model}", timeout=60).json()
    tensor = metadata["inputs"][0]
    shape = [max(size, 1) for size in tensor["shape"]]
    count = 1
    for size in shape:
        count *= size
    body = {"inputs": [{"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape, "data": [0] * count}]}
    return requests.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=60)


@pytest.fixture
def first(start, tmp_path):
    """The first start on this machine, without a millisecond for measurements before the server is ready."""
    return start(EXAMPLES / "models", "--profiling-budget", "0", engine="rten")


def test_models_serve_before_they_are_measured_and_are_measured_behind(first, tmp_path):
    # The server has said that it is ready.
    for model in MODELS:
        assert infer(first, model).status_code == 200
    until(lambda: first.metric("downbeat_models_to_measure") < 3, first.log)
    sizes = lambda: {name: len(each["measurements"]) for name, each in profiles(tmp_path).items()}
    until(lambda: all(sizes().get(model, 0) > 1 for model in MODELS), f"{sizes()}: {first.log}")
    for model in MODELS:
        until(lambda: f"measured behind the service model={model}" in first.log, first.log)
        assert infer(first, model).status_code == 200


def test_a_server_of_the_examples_is_one_process_and_small(first):
    for model in MODELS:
        assert infer(first, model).status_code == 200
    assert first.memory_mib("RssAnon") < MOST_OWN_MIB
    # Trial processes have ended.
    assert first.children() == []


def test_a_model_that_breaks_before_it_is_measured_goes_on_serving(binary, tmp_path):
    repository = tmp_path / "models"
    shutil.copytree(EXAMPLES / "models", repository)
    with Server(binary, repository, tmp_path, "--profiling-budget", "0", engine="rten") as server:
        (repository / "mlp" / "1" / "model.onnx").write_bytes(b"no model")
        until(lambda: any("could not be measured behind" in line and "model=mlp" in line for line in server.log.splitlines()), server.log)
        for model in MODELS:
            assert infer(server, model).status_code == 200
        assert requests.get(f"{server.url}/v2/health/ready", timeout=60).status_code == 200
