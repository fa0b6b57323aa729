"""Loading, unloading and replacing models while others are served."""
import json
import shutil
import threading

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import models

EXPLICIT = ("--model-control-mode", "explicit")
X = np.ones((1, 4), np.float32)


def ask(client, model, version="", module=httpclient):
    tensor = module.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(X)
    return client.infer(model, [tensor], model_version=version).as_numpy("y")[0, 0]


def state_of(client, name):
    return {entry.get("version", ""): entry.get("state", "") for entry in client.get_model_repository_index() if entry["name"] == name}


@pytest.mark.parametrize("module", [pytest.param(httpclient, id="http"), pytest.param(grpcclient, id="grpc")])
def test_load_and_unload(start, repository, module):
    models.add(repository, "one", 1)
    models.add(repository, "two", 2)
    server = start(repository, *EXPLICIT, "--load-model", "one")
    with module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client:
        assert ask(client, "one", module=module) == 2
        assert not client.is_model_ready("two")
        with pytest.raises(InferenceServerException, match="two"):
            ask(client, "two", module=module)
        client.load_model("two")
        assert client.is_model_ready("two") and ask(client, "two", module=module) == 3
        client.unload_model("one")
        assert not client.is_model_ready("one") and ask(client, "two", module=module) == 3
        client.load_model("one")
        assert ask(client, "one", module=module) == 2
        with pytest.raises(InferenceServerException, match="three"):
            client.load_model("three")


def test_the_index_lists_loaded_and_unloaded_models(start, repository):
    models.add(repository, "one", 1)
    models.add(repository, "two", 2)
    server = start(repository, *EXPLICIT, "--load-model", "one", "--profiling-budget", "0")
    with httpclient.InferenceServerClient(server.http) as client:
        # Also while the model is measured behind the service.
        assert state_of(client, "one") == {"1": "READY"}
        assert state_of(client, "two").get("1", "") != "READY" and "two" in {e["name"] for e in client.get_model_repository_index()}
        client.unload_model("one")
        assert state_of(client, "one").get("1") == "UNAVAILABLE"
    ready = requests.post(f"{server.url}/v2/repository/index", json={"ready": True}).json()
    assert ready == []


def test_without_explicit_control_loading_is_refused(examples):
    with httpclient.InferenceServerClient(examples.http) as client:
        with pytest.raises(InferenceServerException) as error:
            client.unload_model("mlp")
        assert "explicit" in error.value.message().lower()
        assert client.is_model_ready("mlp")


def test_a_load_can_bring_its_own_configuration_and_files(start, repository):
    models.add(repository, "one", 1)
    other = models.add(repository.parent / "elsewhere", "one", 5) / "1" / "model.onnx"
    server = start(repository, *EXPLICIT, "--load-model", "one")
    with httpclient.InferenceServerClient(server.http) as client:
        client.load_model("one", config=json.dumps({"max_batch_size": 3}))
        assert client.get_model_config("one")["max_batch_size"] == 3
        client.load_model("one")
        assert client.get_model_config("one")["max_batch_size"] == 3, "it holds, as on Triton, until the files change"
        client.unload_model("one")
        client.load_model("one")
        assert client.get_model_config("one")["max_batch_size"] != 3
        client.load_model("one", config=json.dumps({"backend": "onnxruntime"}), files={"file:1/model.onnx": other.read_bytes()})
        assert ask(client, "one") == 6
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.load_model("one", config=json.dumps({"max_batch_size": 5}))
        assert client.get_model_config("one").config.max_batch_size == 5
        with pytest.raises(InferenceServerException):
            client.load_model("one", config="{ not json")
        with pytest.raises(InferenceServerException):
            client.load_model("one", config=json.dumps({"backend": "onnxruntime"}), files={"file:../../escape": b"x"})
        assert not (repository.parent / "escape").exists()
        assert ask(client, "one", module=grpcclient) == 2


def test_version_policy_and_version_in_the_request(start, repository):
    for version in (1, 2, 3):
        models.add(repository, "all", 10 * version, version)
        models.add(repository, "latest", 10 * version, version)
        models.add(repository, "some", 10 * version, version)
    (repository / "all" / "config.pbtxt").write_text("version_policy: { all: { } }")
    (repository / "some" / "config.pbtxt").write_text("version_policy: { specific: { versions: [ 1, 3 ] } }")
    server = start(repository)
    with httpclient.InferenceServerClient(server.http) as client:
        assert [ask(client, "all", str(v)) for v in (1, 2, 3)] == [11, 21, 31]
        assert ask(client, "all") == 31 and ask(client, "latest") == 31 and ask(client, "some") == 31
        assert client.get_model_metadata("some")["versions"] == ["1", "3"]
        for name in ("latest", "some"):
            with pytest.raises(InferenceServerException, match="2"):
                ask(client, name, "2")
        with pytest.raises(InferenceServerException):
            ask(client, "all", "newest")


class Load:
    """Sends requests from four threads until it is stopped, and collects the answers and the
    refusals."""

    def __init__(self, server, model):
        self.answers, self.errors, self.ended = [], [], threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(server, model)) for _ in range(4)]

    def _run(self, server, model):
        with grpcclient.InferenceServerClient(server.grpc) as client:
            while not self.ended.is_set():
                try:
                    self.answers.append(ask(client, model, module=grpcclient))
                except InferenceServerException as error:
                    self.errors.append(str(error))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def wait_for(self, count):
        """Waits until `count` more answers have come."""
        target, waited = len(self.answers) + count, threading.Event()
        for _ in range(6000):
            if len(self.answers) >= target or self.errors:
                return
            waited.wait(0.01)
        raise AssertionError("no answers any more")


def test_a_new_version_takes_over_without_an_error(start, repository):
    models.add(repository, "one", 1)
    server = start(repository, *EXPLICIT, "--load-model", "one")
    with httpclient.InferenceServerClient(server.http) as client, Load(server, "one") as load:
        load.wait_for(50)
        models.add(repository, "one", 2, version=2)
        client.load_model("one")
        assert ask(client, "one") == 3
        load.wait_for(50)
    assert load.errors == []
    assert set(load.answers) == {2, 3} and load.answers[-1] == 3


def test_a_broken_version_leaves_the_old_one_serving(start, repository):
    models.add(repository, "one", 1)
    server = start(repository, *EXPLICIT, "--load-model", "one")
    with httpclient.InferenceServerClient(server.http) as client, Load(server, "one") as load:
        load.wait_for(20)
        broken = repository / "one" / "2" / "model.onnx"
        broken.parent.mkdir()
        broken.write_bytes(b"this is not a model" * 1000)
        with pytest.raises(InferenceServerException) as error:
            client.load_model("one")
        assert "model.onnx" in error.value.message() or "one" in error.value.message()
        load.wait_for(20)
        assert client.is_model_ready("one") and client.is_server_ready()
        shutil.rmtree(broken.parent)
        (repository / "one" / "config.pbtxt").write_text("max_batch_sise: 4")
        with pytest.raises(InferenceServerException) as error:
            client.load_model("one")
        assert "max_batch_sise" in error.value.message() or "config.pbtxt" in error.value.message()
        load.wait_for(20)
    assert load.errors == [] and set(load.answers) == {2}


def test_polling_follows_the_folder(start, repository):
    models.add(repository, "one", 1)
    server = start(repository, "--model-control-mode", "poll", "--repository-poll-secs", "1")
    with httpclient.InferenceServerClient(server.http) as client, Load(server, "one") as load:
        load.wait_for(20)
        # Into place by a rename, as deployments do.
        models.add(repository.parent / "staging", "two", 2)
        (repository.parent / "staging" / "two").rename(repository / "two")
        waiting = threading.Event()
        for _ in range(600):
            if client.is_model_ready("two"):
                break
            waiting.wait(0.1)
        assert ask(client, "two") == 3
        shutil.rmtree(repository / "two")
        for _ in range(600):
            if not client.is_model_ready("two"):
                break
            waiting.wait(0.1)
        assert not client.is_model_ready("two")
        load.wait_for(20)
    assert load.errors == []


def test_loading_while_others_are_served(start, repository):
    """Many loads over HTTP, and another model's requests are answered all the while."""
    models.add(repository, "one", 1)
    for i in range(5):
        models.add(repository, f"extra{i}", i)
    server = start(repository, *EXPLICIT, "--load-model", "one")
    with httpclient.InferenceServerClient(server.http) as client, Load(server, "one") as load:
        for i in range(5):
            client.load_model(f"extra{i}")
            load.wait_for(5)
            client.unload_model(f"extra{i}")
    assert load.errors == []
