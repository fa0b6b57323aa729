"""Triton's generate extension with real clients: curl, requests that read server-sent events, and tritonclient's stream."""
import json
import queue
import socket
import subprocess
import time

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient

import models
from serving import Server


@pytest.fixture(scope="module")
def server(binary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    repository = folder / "models"
    for datatype in ("BYTES", "FP32", "BOOL"):
        models.identity(repository, datatype)
    models.add_sub(repository)
    models.slow(repository)
    with Server(binary, repository, folder) as server:
        yield server


def events(response):
    """The events of a response, as they come."""
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    for block in response.iter_lines(delimiter=b"\n\n"):
        if block:
            assert block.startswith(b"data: ")
            yield json.loads(block[len(b"data: "):])


def simple(**others):
    return {"INPUT0": list(range(16)), "INPUT1": [1] * 16, **others}


def expected(**others):
    return {**others, "model_name": "simple", "model_version": "1", "OUTPUT0": [i + 1 for i in range(16)], "OUTPUT1": [i - 1 for i in range(16)]}


def test_curl(server):
    """The forms that Triton's documentation shows."""
    url = f"{server.url}/v2/models/simple/generate"
    body = json.dumps(simple(id="42", parameters={"stream": False, "temperature": 0}))
    answer = subprocess.run(["curl", "-sSf", "-X", "POST", url, "-d", body], check=True, capture_output=True, timeout=60).stdout
    assert json.loads(answer) == expected(id="42")
    answer = subprocess.run(["curl", "-sSfN", f"{url}_stream", "-d", body], check=True, capture_output=True, timeout=60).stdout
    assert answer.startswith(b"data: {") and answer.endswith(b"}\n\n") and answer.count(b"\n") == 2
    assert json.loads(answer[len(b"data: "):]) == expected(id="42")


@pytest.mark.parametrize("path", ["simple", "simple/versions/1"])
def test_one_answer_in_both_forms(server, path):
    url = f"{server.url}/v2/models/{path}"
    response = requests.post(f"{url}/generate", json=simple())
    assert response.headers["Content-Type"] == "application/json"
    assert response.json() == expected()
    with requests.post(f"{url}/generate_stream", json=simple(), stream=True) as response:
        assert list(events(response)) == [expected()]
    # Two rows: the shape follows from the number of elements.
    two = requests.post(f"{url}/generate", json={name: 2 * value for name, value in simple().items()}).json()
    assert two["OUTPUT0"] == 2 * expected()["OUTPUT0"]


@pytest.mark.parametrize("datatype, value", [
    ("BYTES", "h\u00e9llo \"world\""), ("BYTES", ["a", "", "b\n\ndata: c"]), ("FP32", 1.5), ("FP32", [1, -2.5]), ("BOOL", [True, False]), ("BOOL", True),
])
def test_single_values_and_flat_lists(server, datatype, value):
    url = f"{server.url}/v2/models/identity_{datatype.lower()}"
    assert requests.post(f"{url}/generate", json={"INPUT0": value}).json()["OUTPUT0"] == value
    with requests.post(f"{url}/generate_stream", json={"parameters": {"INPUT0": value}}, stream=True) as response:
        (event,) = events(response)
    assert event["OUTPUT0"] == value


def test_errors_have_the_status_of_infer(server):
    for path in ("generate", "generate_stream"):
        def refused(body, status, model="simple"):
            response = requests.post(f"{server.url}/v2/models/{model}/{path}", data=body if isinstance(body, str) else json.dumps(body))
            assert (response.status_code, response.headers["Content-Type"]) == (status, "application/json"), response.text
            return response.json()["error"]

        assert "unknown model" in refused({}, 404, model="nowhere")
        assert "expected" in refused({}, 400) and "expected" in refused({"INPUT0": [1] * 16}, 400)
        assert "INPUT1" in refused({"INPUT0": [1] * 16, "input1": 3}, 400)
        assert "can not convert input 'INPUT0'" in refused(simple(INPUT0=[1] * 15), 400)
        assert "a list within a list" in refused(simple(INPUT0=[[1] * 16]), 400)
        assert "input 'INPUT0'" in refused(simple(INPUT0="text"), 400)
        assert "parameter 'x' has invalid type" in refused(simple(x=[1]), 400)
        assert "already exists in request" in refused('{"INPUT0": 1, "INPUT0": 1}'.replace("1", str([1] * 16)), 400)
    assert requests.get(f"{server.url}/v2/models/simple/generate").status_code == 405


def test_requests_of_a_stream_are_marked_as_final(server):
    """tritonclient's stream to a model with one answer: each answer is the final one, with or without the wish for an empty one."""
    answers = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        tensors = [grpcclient.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        for tensor in tensors:
            tensor.set_data_from_numpy(np.ones((1, 16), np.int32))
        for i, empty in enumerate((False, True)):
            client.async_stream_infer("simple", tensors, request_id=str(i), enable_empty_final_response=empty)
        for i in range(2):
            result, error = answers.get(timeout=60)
            assert error is None
            response = result.get_response()
            assert response.id == str(i) and response.parameters["triton_final_response"].bool_param
            assert (result.as_numpy("OUTPUT0") == 2).all()
        client.stop_stream()
    assert answers.empty()


def test_a_client_that_leaves_ends_the_work(server):
    body = json.dumps({"x": [0.5]}).encode()
    assert requests.post(f"{server.url}/v2/models/slow/generate", data=body, timeout=60).status_code == 200
    head = f"POST /v2/models/slow/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"

    def cancelled():
        return server.metric("downbeat_requests_not_answered_total", model="slow", reason="cancelled")

    # Others are in the queue first, so that the request waits.
    before, deadline = cancelled(), time.monotonic() + 120
    while cancelled() == before:
        assert time.monotonic() < deadline, "the work went on for a client that had left"
        clients = [socket.create_connection(("127.0.0.1", server.http_port), timeout=60) for _ in range(8)]
        for client in clients:
            client.sendall(head.encode() + body)
        time.sleep(0.05)
        for client in clients:
            client.close()
        time.sleep(0.2)
    assert requests.post(f"{server.url}/v2/models/simple/generate", json=simple(), timeout=60).json() == expected()
