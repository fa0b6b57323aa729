"""One client or one model must not harm the others: exhaust memory, hold them up, have their things
run or read.

More tests of attacks: `test_connections.py` (bodies that no server reads, stray bytes, wrong heads,
idle and slow sockets, the end), `test_memory.py` (half bodies, shared memory), `test_endless.py`
(runs without end), `test_files.py` (uploaded models), `test_killed.py`. Bounds of time are against
hangs, not for speed.
"""
import concurrent.futures
import contextlib
import functools
import gzip
import json
import pathlib
import resource
import subprocess

import numpy as np
import pytest
import requests
import tritonclient.http as httpclient
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

import models
import wire
from serving import environment

# The most that a test lets a server take: a failure should not take the machine down.
ADDRESS_SPACE = 16 << 30
LIMITS = {resource.RLIMIT_AS: ADDRESS_SPACE, resource.RLIMIT_CORE: 0}

X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}
HANG_S = 60


def small(server, model="small"):
    """A request that the server must answer during any attack."""
    reply = requests.post(f"{server.url}/v2/models/{model}/infer", json=X, timeout=HANG_S)
    assert reply.status_code == 200 and reply.json()["outputs"][0]["data"] == [2.0, 3.0, 4.0, 5.0], reply.text


def model(repository, name, nodes, inputs, outputs, initializers=()):
    """Writes a model that no checker has seen."""
    graph = helper.make_graph(nodes, name, inputs, outputs, list(initializers))
    path = pathlib.Path(repository) / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())


def value(name, dims, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, dims)


@pytest.fixture
def attacked(start, repository):
    """Starts a server, within limits, with the model `small` and the other models of the
    repository."""
    models.add(repository, "small", 1)

    return functools.partial(start, repository, limits=LIMITS)


# -- memory


def test_half_messages_of_one_grpc_connection_are_bounded(attacked):
    server = attacked("--max-in-flight-bytes", "64M")
    before = server.memory_mib()
    with wire.Http2(server.grpc_port) as client:
        for _ in range(10):
            stream = client.open("/inference.GRPCInferenceService/ModelInfer")
            client.send(stream, b"\0" + (60 << 20).to_bytes(4) + bytes(30 << 20), wait_s=0.5)
            if client.ended:
                break
        # Also while the rest is still said to come.
        small(server)
        assert server.memory_mib("VmHWM") - before < 200
    small(server)


def test_a_model_file_that_declares_a_terabyte_is_refused(attacked, repository):
    model(repository, "vast", [helper.make_node("Identity", ["x"], ["y"])], [value("x", ["N", 1 << 40])], [value("y", ["N", 1 << 40])])
    server = attacked("--model-control-mode", "explicit", "--load-model", "small")
    reply = requests.post(f"{server.url}/v2/repository/models/vast/load", timeout=HANG_S)
    assert reply.status_code >= 400 and reply.json()["error"], reply.text
    small(server)


@pytest.mark.parametrize("engine", ["rten", "onnxruntime"])
def test_a_small_request_that_computes_a_large_tensor_is_refused(attacked, repository, engine):
    model(repository, "outer",
          [helper.make_node("Transpose", ["x"], ["c"], perm=[1, 0]), helper.make_node("MatMul", ["c", "x"], ["p"]),
           helper.make_node("ReduceMax", ["p"], ["y"], axes=[1], keepdims=0)],
          [value("x", [1, "T"])], [value("y", ["T"])])
    server = attacked(engine=engine)
    before = server.memory_mib()
    data = np.ones(300_000, np.float32)
    client = httpclient.InferenceServerClient(server.http, network_timeout=HANG_S)
    tensor = httpclient.InferInput("x", [1, len(data)], "FP32")
    tensor.set_data_from_numpy(data[None])
    with pytest.raises(InferenceServerException) as error:
        client.infer("outer", [tensor])
    assert error.value.message()
    small(server)
    assert server.memory_mib("VmHWM") - before < 4096
    # A tensor that fits is answered.
    tensor = httpclient.InferInput("x", [1, 16], "FP32")
    tensor.set_data_from_numpy(data[None, :16])
    assert client.infer("outer", [tensor]).as_numpy("y").tolist() == [1.0] * 16


def test_large_json_does_not_hold_up_others(attacked):
    server = attacked("--max-body-bytes", "64M")
    text = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": []}]})
    body = text.replace("[]", "[" + "1.25," * (9 << 20) + "1]").encode()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        url = f"{server.url}/v2/models/small/infer"
        large = [pool.submit(requests.post, url, data=body, timeout=3 * HANG_S)]
        rounds = 0
        while rounds < 20 or not all(reply.done() for reply in large):
            small(server)
            assert requests.get(f"{server.url}/v2/health/live", timeout=HANG_S).status_code == 200
            rounds += 1
        for reply in large:
            assert reply.result().status_code in (400, 413, 429, 503)


def test_gzip_members_are_not_read_to_the_end_for_a_client_that_has_left(attacked):
    server = attacked()
    body = gzip.compress(b"") * 1_000_000
    server.leave_during_work(wire.post("/v2/models/small/infer", body, "Content-Encoding: gzip"))
    small(server)


def test_a_large_body_is_not_read_to_the_end_for_a_client_that_has_left(attacked):
    server = attacked("--max-body-bytes", "64M")
    text = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 10 << 20], "data": []}]})
    body = text.replace("[]", "[" + "1.25," * ((10 << 20) - 1) + "1]").encode()
    server.leave_during_work(wire.post("/v2/models/small/infer", body))
    small(server)


# -- files


def test_the_working_folder_is_no_source_of_programs(binary, tmp_path):
    folder = tmp_path / "untrusted"
    folder.mkdir()
    for name in ("pip.py", "venv.py", "platform.py", "sitecustomize.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    unreachable = "http://127.0.0.1:9/"
    env = environment(tmp_path) | {"PIP_INDEX_URL": unreachable, "PIP_RETRIES": "0", "PIP_TIMEOUT": "1", "https_proxy": unreachable}
    env.pop("ORT_DYLIB_PATH")
    for command in (["engine", "install"], ["engine", "list"]):
        subprocess.run([binary, *command], cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=HANG_S)
    assert not (tmp_path / "ran").exists()


def test_options_inside_the_repository_do_not_open_model_control(start, repository, tmp_path):
    models.add(repository, "small", 1)
    log = tmp_path / "log-of-the-repository"
    (repository / "downbeat.toml").write_text(f'decision_log = "{log}"\n[model_control]\nmode = "explicit"\nload = ["small"]\n')
    server = start(repository, wait=False)
    with contextlib.suppress(AssertionError):
        server.wait_ready()
    if server.process.poll() is None:
        assert requests.post(f"{server.url}/v2/repository/models/small/unload", timeout=HANG_S).status_code >= 400
        small(server)
    else:
        # Refused at start, in words.
        assert "downbeat.toml" in server.log
    assert not log.exists()
