"""Bounds: full queues, deadlines, priorities, cancelled requests. On models whose runs end when a test says so."""
import concurrent.futures
import contextlib
import json
import socket
import sys
import threading
import time

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import models
from serving import Server

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
PATIENCE_S = 120
FIRST_OF_TWO_PRIORITIES = "dynamic_batching { priority_levels: 2 default_priority_level: 2 }"
AT_MOST_4_WAIT = "dynamic_batching { default_queue_policy { max_queue_size: 4 } }"
AT_MOST_5_MS_WAIT = "dynamic_batching { default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 5000 } }"


def infer_url(server, model):
    return f"{server.url}/v2/models/{model}/infer"


def body(**parameters):
    return dict(BODY, parameters=parameters)


def inputs(module=grpcclient):
    tensor = module.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    return [tensor]


def until(what, done):
    """Waits for a condition. A busy machine takes its time."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.005)


class Held:
    """A server with models whose runs last until the test ends them."""

    def __init__(self, server, pool):
        self.server, self.pool = server, pool

    def post(self, model, sent=BODY):
        """A request from a thread of its own."""
        return self.pool.submit(requests.post, infer_url(self.server, model), json=sent, timeout=PATIENCE_S)

    def ask_grpc(self, model, **options):
        """A request over gRPC from a thread of its own. Its result is "OK" or the status."""
        def ask():
            with grpcclient.InferenceServerClient(self.server.grpc) as client:
                try:
                    client.infer(model, inputs(), **options)
                    return "OK"
                except InferenceServerException as error:
                    return error.status()

        return self.pool.submit(ask)

    def waiting(self, model):
        return self.server.metric("nv_inference_pending_request_count", model=model)

    def runs(self, model):
        with httpclient.InferenceServerClient(self.server.http) as client:
            return client.get_inference_statistics(model)["model_stats"][0]["inference_count"]

    @contextlib.contextmanager
    def busy(self, model):
        """One request of the model runs until the block ends, and is answered then."""
        folder = self.server.repository / model
        (folder / "hold").touch()
        first = self.post(model)

        def runs():
            nonlocal first
            # Its wait may have passed `brief`'s limit on a busy machine.
            if first.done() and first.result().status_code == 504:
                first = self.post(model)
            return (folder / "runs").exists()

        try:
            until("the first request runs", runs)
            yield
        finally:
            (folder / "hold").unlink()
        assert first.result().status_code == 200, first.result().text
        (folder / "runs").unlink()


@pytest.fixture(scope="module")
def held(binary, tmp_path_factory):
    """`held`, `bounded` (at most 4 requests wait), `brief` (5 ms at most) and `levels` (two priorities)."""
    folder = tmp_path_factory.mktemp("held")
    repository = folder / "models"
    models.held(repository, "held")
    models.held(repository, "bounded", AT_MOST_4_WAIT)
    models.held(repository, "brief", AT_MOST_5_MS_WAIT)
    models.held(repository, "levels", FIRST_OF_TWO_PRIORITIES)
    # However long the requests wait on a busy machine.
    with Server(binary, repository, folder, "--max-queue-wait", "3600", "--python", sys.executable) as server:
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            yield Held(server, pool)


def first_answers(calls, count):
    """The results of the calls that end first, and the calls that go on."""
    ended = []
    for call in concurrent.futures.as_completed(calls, timeout=PATIENCE_S):
        ended.append(call)
        if len(ended) == count:
            break
    return [call.result() for call in ended], [call for call in calls if call not in ended]


def test_over_http_a_full_queue_answers_503_with_retry_after(held):
    with held.busy("bounded"):
        refused, others = first_answers([held.post("bounded") for _ in range(24)], 20)
        for reply in refused:
            assert reply.status_code == 503 and int(reply.headers["Retry-After"]) >= 1
            assert "4" in reply.json()["error"], reply.text
        # Each refusal came while the first request ran, and four wait.
        assert held.waiting("bounded") == 4
    assert [call.result().status_code for call in others] == [200] * 4


def test_over_grpc_a_full_queue_answers_resource_exhausted(held):
    with held.busy("bounded"):
        refused, others = first_answers([held.ask_grpc("bounded") for _ in range(24)], 20)
        assert refused == ["StatusCode.RESOURCE_EXHAUSTED"] * 20
    assert [call.result() for call in others] == ["OK"] * 4


def test_a_request_is_dropped_while_the_device_is_busy(held):
    with held.busy("held"):
        calls = [held.post("held", body(timeout=200_000)) for _ in range(11)]
        for call in calls:
            assert call.result().status_code == 504 and call.result().json()["error"]


def test_over_grpc_a_drop_is_deadline_exceeded(held):
    with held.busy("held"):
        calls = [held.ask_grpc("held", timeout=200_000) for _ in range(11)]
        assert {call.result() for call in calls} == {"StatusCode.DEADLINE_EXCEEDED"}


def test_the_grpc_deadline_of_a_client_is_kept(held):
    with held.busy("held"):
        calls = [held.ask_grpc("held", client_timeout=0.2) for _ in range(8)]
        assert {call.result() for call in calls} == {"StatusCode.DEADLINE_EXCEEDED"}
    with grpcclient.InferenceServerClient(held.server.grpc) as client:
        assert client.infer("held", inputs()).as_numpy("y")[0, 0] == 1.0


def test_a_wrong_timeout_or_priority_is_refused_with_its_name(held):
    for name, value in [("timeout", "soon"), ("timeout", -5), ("priority", "high"), ("priority", -1)]:
        reply = requests.post(infer_url(held.server, "held"), json=body(**{name: value}))
        assert reply.status_code == 400 and name in reply.json()["error"], (name, value, reply.text)


def test_cancelled_grpc_requests_leave_the_queue(held):
    before = held.runs("held")
    with grpcclient.InferenceServerClient(held.server.grpc) as client:
        with held.busy("held"):
            calls = [client.async_infer("held", inputs(), callback=lambda result, error: None) for _ in range(12)]
            until("all wait", lambda: held.waiting("held") == 12)
            for call in calls:
                call.cancel()
            until("none waits", lambda: held.waiting("held") == 0)
    assert held.runs("held") - before == 1, "only the request that held the device ran"


def test_clients_that_hang_up_leave_the_queue(held):
    before = held.runs("held")
    text = json.dumps(BODY).encode()
    request = (b"POST /v2/models/held/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
               b"Content-Length: %d\r\n\r\n" % len(text)) + text
    with held.busy("held"):
        sockets = [socket.create_connection(("127.0.0.1", held.server.http_port)) for _ in range(12)]
        for s in sockets:
            s.sendall(request)
        until("all wait", lambda: held.waiting("held") == 12)
        for s in sockets:
            s.close()
        until("none waits", lambda: held.waiting("held") == 0)
    assert held.runs("held") - before == 1, "only the request that held the device ran"


def test_priorities_overtake(held):
    order, lock = [], threading.Lock()

    def ask(name, priority):
        def done(result, error):
            with lock:
                order.append((name, error))
        client.async_infer("levels", inputs(), callback=done, priority=priority)

    with grpcclient.InferenceServerClient(held.server.grpc) as client:
        with held.busy("levels"):
            for i in range(6):
                ask(f"low{i}", 2)
            until("the low requests wait", lambda: held.waiting("levels") == 6)
            ask("high", 1)
            until("all wait", lambda: held.waiting("levels") == 7)
        until("all are answered", lambda: len(order) == 7)
    assert all(error is None for _, error in order), order
    assert order[0][0] == "high", order


def test_a_configured_queue_timeout_fires_while_the_device_is_busy(held):
    with held.busy("brief"):
        calls = [held.post("brief") for _ in range(7)]
        assert {call.result().status_code for call in calls} == {504}


def test_an_oversize_body_is_refused(start, repository):
    models.add(repository, "one", 1)
    server = start(repository)
    with socket.create_connection(("127.0.0.1", server.http_port)) as s:
        s.sendall(b"POST /v2/models/one/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{")
        s.settimeout(30)
        assert b" 413 " in s.recv(4096).split(b"\r\n")[0]
    assert requests.get(f"{server.url}/v2/health/ready").status_code == 200
