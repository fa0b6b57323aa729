"""Bounds: full queues, deadlines, priorities, cancelled requests. On a model whose runs take long enough to queue behind."""
import concurrent.futures
import socket
import threading
import time

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import models

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}


def infer_url(server, model):
    return f"{server.url}/v2/models/{model}/infer"


def body(**parameters):
    return dict(BODY, parameters=parameters)


def slow_inputs(module=grpcclient):
    tensor = module.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    return [tensor]


def at_once(count, function):
    """Calls `function(i)` from `count` threads; the results in the order of their ends, each with its second of ending."""
    barrier, started = threading.Barrier(count), time.monotonic()

    def run(i):
        barrier.wait()
        result = function(i)
        return time.monotonic() - started, result

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return sorted(pool.map(run, range(count)), key=lambda pair: pair[0])


def run_seconds(server, model="slow"):
    """How long one request takes on an idle device: the median of five."""
    taken = []
    for _ in range(5):
        started = time.monotonic()
        assert requests.post(infer_url(server, model), json=BODY).status_code == 200
        taken.append(time.monotonic() - started)
    return sorted(taken)[2]


def idle(server):
    """Waits until nothing is queued or running any more: a request is then answered at once."""
    assert requests.post(infer_url(server, "slow"), json=BODY).status_code == 200


def test_over_http_a_full_queue_answers_503_with_retry_after(made):
    replies = [reply for _, reply in at_once(24, lambda _: requests.post(infer_url(made, "bounded"), json=BODY))]
    codes = [reply.status_code for reply in replies]
    assert set(codes) == {200, 503}, codes
    # At least one runs and four wait; how many more get in depends on how many runs end meanwhile.
    assert codes.count(200) >= 5 and codes.count(503) >= 1
    refused = next(reply for reply in replies if reply.status_code == 503)
    assert int(refused.headers["Retry-After"]) >= 1
    assert "4" in refused.json()["error"], refused.text
    # Refused at admission, not after waiting: the first refusal comes before the last answer.
    assert codes.index(503) < len(codes) - 1 - codes[::-1].index(200)


def test_over_grpc_a_full_queue_answers_resource_exhausted(made):
    def ask(_):
        with grpcclient.InferenceServerClient(made.grpc) as client:
            try:
                client.infer("bounded", slow_inputs())
                return "OK"
            except InferenceServerException as error:
                return error.status()

    statuses = {status for _, status in at_once(24, ask)}
    assert statuses == {"OK", "StatusCode.RESOURCE_EXHAUSTED"}


def test_a_request_that_cannot_make_its_timeout_is_dropped_at_once(made):
    seconds = run_seconds(made)
    # Twelve wait for a device that does one at a time, and each allows three runs.
    timeout_us = int(3.5 * seconds * 1e6)
    replies = at_once(12, lambda _: requests.post(infer_url(made, "slow"), json=body(timeout=timeout_us)))
    codes = [reply.status_code for _, reply in replies]
    assert set(codes) == {200, 504}, codes
    dropped = next(reply for _, reply in replies if reply.status_code == 504)
    assert "error" in dropped.json() and dropped.json()["error"]
    # While the device was busy: a drop is answered before the last that got through.
    assert codes.index(504) < len(codes) - 1 - codes[::-1].index(200)
    idle(made)


def test_over_grpc_a_drop_is_deadline_exceeded(made):
    seconds = run_seconds(made)

    def ask(_):
        with grpcclient.InferenceServerClient(made.grpc) as client:
            try:
                client.infer("slow", slow_inputs(), timeout=int(3.5 * seconds * 1e6))
                return "OK"
            except InferenceServerException as error:
                return error.status()

    assert {status for _, status in at_once(12, ask)} == {"OK", "StatusCode.DEADLINE_EXCEEDED"}
    idle(made)


def test_the_grpc_deadline_of_a_client_is_kept(made):
    def ask(_):
        with grpcclient.InferenceServerClient(made.grpc) as client:
            try:
                client.infer("slow", slow_inputs(), client_timeout=0.05)
                return "OK"
            except InferenceServerException as error:
                return error.status()

    assert "StatusCode.DEADLINE_EXCEEDED" in {status for _, status in at_once(8, ask)}
    idle(made)
    with grpcclient.InferenceServerClient(made.grpc) as client:
        assert client.infer("slow", slow_inputs()).as_numpy("y")[0, 0] == pytest.approx(1.0)


def test_a_wrong_timeout_or_priority_is_refused_with_its_name(made):
    for name, value in [("timeout", "soon"), ("timeout", -5), ("priority", "high"), ("priority", -1)]:
        reply = requests.post(infer_url(made, "slow"), json=body(**{name: value}))
        assert reply.status_code == 400 and name in reply.json()["error"], (name, value, reply.text)


def executions(server, model):
    with httpclient.InferenceServerClient(server.http) as client:
        return client.get_inference_statistics(model)["model_stats"][0]["inference_count"]


def test_cancelled_grpc_requests_leave_the_queue(made):
    before = executions(made, "slow")
    with grpcclient.InferenceServerClient(made.grpc) as client:
        results = []
        calls = [client.async_infer("slow", slow_inputs(), callback=lambda result, error: results.append(error)) for _ in range(12)]
        for call in calls[1:]:
            call.cancel()
        idle(made)
    ran = executions(made, "slow") - before
    # The first request, the request of `idle`, and those that had begun before their cancellation:
    # far from all.
    assert ran <= 6, f"{ran} of 12 ran although 11 were cancelled"


def test_clients_that_hang_up_leave_the_queue(made):
    import json

    before = executions(made, "slow")
    text = json.dumps(BODY).encode()
    request = (b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
               b"Content-Length: %d\r\n\r\n" % len(text)) + text
    sockets = [socket.create_connection(("127.0.0.1", made.http_port)) for _ in range(12)]
    for s in sockets:
        s.sendall(request)
    for s in sockets:
        s.close()
    idle(made)
    ran = executions(made, "slow") - before
    assert ran <= 6, f"{ran} of 12 ran although all hung up"


def test_priorities_overtake(start, repository):
    queue = """dynamic_batching {
      priority_levels: 2
      default_priority_level: 2
    }"""
    models.slow(repository, dynamic_batching=queue)
    # However long the requests wait on a busy machine.
    server = start(repository, "--max-queue-wait", "3600")
    order, lock = [], threading.Lock()

    def ask(name, priority):
        def done(result, error):
            with lock:
                order.append((name, error))
        client.async_infer("slow", slow_inputs(), callback=done, priority=priority)

    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.infer("slow", slow_inputs())
        for i in range(6):
            ask(f"low{i}", 2)
        # The low requests are in the queue once the device is busy with the first.
        time.sleep(0.02)
        ask("high", 1)
        for _ in range(6000):
            if len(order) == 7:
                break
            time.sleep(0.01)
    assert all(error is None for _, error in order), order
    names = [name for name, _ in order]
    assert names.index("high") <= 3, names


def test_a_configured_queue_timeout_fires_while_the_device_is_busy(start, repository):
    queue = """dynamic_batching {
      default_queue_policy { timeout_action: REJECT default_timeout_microseconds: %d }
    }"""
    models.slow(repository, dynamic_batching=queue % 5000)
    server = start(repository)
    assert requests.post(infer_url(server, "slow"), json=BODY).status_code == 200
    replies = at_once(8, lambda _: requests.post(infer_url(server, "slow"), json=BODY))
    codes = [reply.status_code for _, reply in replies]
    # One request gets the device. A request that waits for more than five milliseconds times out,
    # long before the device is free again.
    assert codes.count(200) >= 1 and codes.count(504) >= 1 and set(codes) == {200, 504}, codes
    assert codes.index(504) < codes.index(200)


def test_an_oversize_body_is_refused(start, repository):
    models.add(repository, "one", 1)
    server = start(repository)
    with socket.create_connection(("127.0.0.1", server.http_port)) as s:
        s.sendall(b"POST /v2/models/one/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{")
        s.settimeout(30)
        assert b" 413 " in s.recv(4096).split(b"\r\n")[0]
    assert requests.get(f"{server.url}/v2/health/ready").status_code == 200
