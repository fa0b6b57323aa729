"""The server's memory for requests: bounded for all together, whatever sizes they claim and however
they stop."""
import socket

import numpy as np
import pytest
import requests
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

import models
import wire

MIB = 1 << 20
BUDGET = 64 * MIB


def peak_rss(server):
    return server.memory_bytes("VmHWM")


@pytest.fixture(scope="module")
def bounded(binary, tmp_path_factory):
    from serving import Server

    folder = tmp_path_factory.mktemp("memory")
    models.identity(folder / "models", "FP32")
    with Server(binary, folder / "models", folder, "--max-in-flight-bytes", "64M", "--shared-memory", "--no-profiling") as server:
        ask(server)
        yield server


def ask(server):
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}
    reply = requests.post(f"{server.url}/v2/models/identity_fp32/infer", json={"inputs": [tensor]})
    assert reply.status_code == 200 and reply.json()["outputs"][0]["data"] == [3.0], reply.text


def half_bodies(server, model, count, size=12 * MIB):
    """Connections that have sent `size` bytes of a body of twice that; what each was answered, None if not yet."""
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2 * size}\r\n\r\n".encode()
    connections, answers = [], []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", server.http_port), timeout=60)
        connection.sendall(head)
        connection.sendall(b" " * size)
        connections.append(connection)
        connection.settimeout(0.2)
        try:
            answers.append(connection.recv(65536))
        except TimeoutError:
            answers.append(None)
    return connections, answers


def test_half_bodies_are_bounded_by_the_budget(bounded):
    before = peak_rss(bounded)
    connections, answers = half_bodies(bounded, "identity_fp32", 40)
    refused = [answer for answer in answers if answer is not None]
    assert len(refused) >= 34, answers
    for answer in refused:
        assert b" 503 " in answer.split(b"\r\n")[0] and b"retry-after: 1" in answer.lower(), answer
        assert b"--max-in-flight-bytes" in answer
    assert bounded.metric("downbeat_in_flight_bytes_limit") == BUDGET
    assert bounded.metric("downbeat_in_flight_bytes") <= BUDGET
    assert bounded.metric("downbeat_in_flight_bytes_refused_total") >= 34
    # 480 MiB were sent. Each connection may have a buffer, and memory is not returned at once.
    assert peak_rss(bounded) - before < BUDGET + 96 * MIB
    # Small requests have room left.
    ask(bounded)
    for connection in connections:
        connection.close()
    for _ in range(600):
        if bounded.metric("downbeat_in_flight_bytes") == 0:
            break
    assert bounded.metric("downbeat_in_flight_bytes") == 0
    ask(bounded)


def test_half_bodies_for_a_model_that_does_not_exist_cost_nothing(bounded):
    before = peak_rss(bounded)
    connections, answers = half_bodies(bounded, "nothing", 20)
    assert all(answer is not None and b" 404 " in answer.split(b"\r\n")[0] for answer in answers), answers
    assert bounded.metric("downbeat_in_flight_bytes") == 0
    assert peak_rss(bounded) - before < 32 * MIB
    for connection in connections:
        connection.close()
    ask(bounded)


def test_what_a_body_becomes_is_bounded_too(bounded):
    import gzip

    before = peak_rss(bounded)
    url = f"{bounded.url}/v2/models/identity_fp32/infer"
    bomb = gzip.compress(b" " * (10 * BUDGET), 1)
    for _ in range(3):
        reply = requests.post(url, data=bomb, headers={"Content-Encoding": "gzip"})
        assert reply.status_code in (413, 503) and "--max-in-flight-bytes" in reply.json()["error"], reply.text
    # Memory that a thread has freed does not return at once, and another thread may take the next
    # body.
    assert peak_rss(bounded) - before < BUDGET + 96 * MIB
    ask(bounded)


def test_shapes_are_checked_before_shared_memory_is_copied(bounded):
    """A request of 150 bytes that names a large region: nothing is copied unless it fits the model and the budget."""
    key, size = "/downbeat-test-large", 256 * MIB
    handle = shm.create_shared_memory_region(key[1:], key, size)
    before = peak_rss(bounded)
    try:
        with httpclient.InferenceServerClient(bounded.http) as client:
            client.register_system_shared_memory("large", key, size)

            def infer(datatype, shape, expected):
                tensor = httpclient.InferInput("INPUT0", shape, datatype)
                tensor.set_shared_memory("large", size)
                with pytest.raises(InferenceServerException, match=expected):
                    client.infer("identity_fp32", [tensor])

            infer("INT8", [1, size], "INT8")
            infer("FP32", [1, 7], "expected 28")
            infer("FP32", [size // 4, 1], "batch")
            infer("FP32", [1, 1, size // 4], "shape")
            infer("FP32", [1, size // 4], "max-in-flight-bytes")
            assert peak_rss(bounded) - before < 32 * MIB
            assert bounded.metric("downbeat_in_flight_bytes") == 0
            client.unregister_system_shared_memory("large")
    finally:
        shm.destroy_shared_memory_region(handle)
    ask(bounded)


def test_large_answers_and_requests_pass_within_the_budget(bounded):
    values = np.arange(2 * MIB, dtype=np.float32).reshape(1, -1)
    with httpclient.InferenceServerClient(bounded.http) as client:
        for binary in (True, False):
            tensor = httpclient.InferInput("INPUT0", list(values.shape), "FP32")
            # 8 MiB as bytes, 20 MB as JSON, which would hold more than the budget while it is read.
            data = values if binary else values[:, : MIB // 8]
            tensor = httpclient.InferInput("INPUT0", list(data.shape), "FP32")
            tensor.set_data_from_numpy(data, binary_data=binary)
            output = httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary)
            got = client.infer("identity_fp32", [tensor], outputs=[output]).as_numpy("OUTPUT0")
            np.testing.assert_array_equal(got, data)


@pytest.mark.parametrize("model, most", [("identity_fp32", BUDGET + 96 * MIB), ("nothing", 48 * MIB)])
def test_half_grpc_messages_on_one_connection_are_bounded(bounded, model, most):
    """50 of 12 MiB, of messages of twice that: 600 MiB."""
    before = peak_rss(bounded)
    size = 12 * MIB
    start = b"\x0a" + bytes([len(model)]) + model.encode()
    message = b"\0" + (2 * size).to_bytes(4, "big") + start + b"\0" * (size - len(start))
    with wire.Http2(bounded.grpc_port) as client:
        for _ in range(50):
            client.send(client.open("/inference.GRPCInferenceService/ModelInfer"), message, wait_s=30)
        while len(client.answers) < 50 and client.read(2):
            pass
        assert len(client.answers) >= 44, len(client.answers)
        assert bounded.metric("downbeat_in_flight_bytes") <= (BUDGET if model == "identity_fp32" else 0)
        assert peak_rss(bounded) - before < most
        ask(bounded)
    for _ in range(600):
        if bounded.metric("downbeat_in_flight_bytes") == 0:
            break
    assert bounded.metric("downbeat_in_flight_bytes") == 0
