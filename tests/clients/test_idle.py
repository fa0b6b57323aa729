"""A server without requests: it does nothing, and holds little memory."""
import collections
import os
import socket
import time

import pytest
import requests

import models
import wire
from serving import free_ports

CONNECTIONS = 2_000
KIB = 1 << 10
WITHIN_S = 60


@pytest.fixture
def one(start, repository):
    """Starts a server on one small model: `one(*flags)`. Nothing is measured again while the test waits."""
    models.add(repository, "one", 1)
    return lambda *flags: start(repository, *flags, "--no-profiling", engine="rten")


def infer(client):
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}
    client.sendall(wire.post("/v2/models/one/infer", body))
    answer = b""
    while not answer.endswith(b"}"):
        answer += client.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200"), answer


def assert_none_ran(server, rested):
    """No thread has had a core since. A thread that a pool no longer needs may have ended."""
    assert server.threads().items() <= rested.items(), (server.threads(), rested)


def test_no_thread_of_an_idle_server_runs(one):
    (health,) = free_ports(1)
    server = one("--health-port", str(health))
    assert requests.get(f"http://127.0.0.1:{health}/v2/health/live", timeout=WITHIN_S).status_code == 200
    # The server begins threads for large bodies, which then sleep.
    long = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 100_000], "data": [1.25] * 100_000}]}
    assert requests.post(f"{server.url}/v2/models/one/infer", json=long, timeout=WITHIN_S).status_code == 400
    assert {"health", "large"} <= {name for name, _ in server.threads().values()}
    rested = server.rest()
    # Ten times the longest interval at which anything looked before.
    time.sleep(10)
    assert_none_ran(server, rested)
    # The server wakes for a request, watches it, and rests again.
    with wire.connect(server.http_port) as client:
        infer(client)
        assert server.threads() != rested
        assert {name for name, _ in server.rest().values()} >= {name for name, _ in rested.values()} - {"tokio-rt-worker"}
        infer(client)


def test_no_thread_runs_for_idle_connections(one):
    server = one()
    held = [wire.idle_client(server, protocol, is_used) for protocol in ("http", "grpc") for is_used in (True, False)]
    rested = server.rest()
    time.sleep(5)
    assert_none_ran(server, rested)
    for client in held:
        client.close()


def test_the_threads_of_a_server_have_a_reason(one):
    server = one()
    cores = len(os.sched_getaffinity(0))
    deadline = time.monotonic() + 60
    while True:
        names = collections.Counter(name for name, _ in server.threads().values())
        # The process that tried the model ends soon after the model is ready.
        if "executor" not in names or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    most = {"frontend": cores, "server": min(cores, 4), "watchdog": 1, "rehearsal": 1, "alarm": 1, "alarm-0": 1, "lane-0": 2, "starter": 1, "log": 1, "executors": 1}
    main = server.process.args[0].rsplit("/", 1)[1][:15]
    for name, count in names.items():
        if not name.startswith("rten-"):
            assert count <= most.get(name, int(name == main)), names
    # Of the built-in engine: a pool for a run on one core and some for runs on all.
    assert sum(count for name, count in names.items() if name.startswith("rten-")) <= 2 + 2 * cores, names


@pytest.mark.parametrize("protocol, is_used, most", [("http", False, 6), ("http", True, 18), ("grpc", False, 6), ("grpc", True, 48)])
def test_an_idle_connection_holds_little_memory(one, protocol, is_used, most):
    """KiB of the process: its socket, its place in the table, its task."""
    server = one()
    # The first connections pay for the table and for other things made once.
    held = [wire.idle_client(server, protocol, is_used) for _ in range(200)]
    server.rest()
    before = server.memory_bytes()
    held += [wire.idle_client(server, protocol, is_used) for _ in range(CONNECTIONS)]
    server.rest()
    grown = (server.memory_bytes() - before) / CONNECTIONS / KIB
    print(f"{grown:.2f} KiB a connection over {protocol}, used: {is_used}")
    assert grown <= most
    for client in held:
        client.close()


def test_a_connection_that_rested_answers_as_before(one):
    server = one()
    with wire.connect(server.http_port) as client:
        infer(client)
        server.rest()
        infer(client)
        # Byte by byte: the first byte wakes the connection.
        server.rest()
        for byte in wire.head("GET", "/v2/health/live"):
            client.sendall(bytes([byte]))
        assert client.recv(1 << 12).startswith(b"HTTP/1.1 200")
        server.rest()
        # The client says that it sends no more.
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
