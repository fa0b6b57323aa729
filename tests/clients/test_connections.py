"""Connections as a black box: many, slow, silent, greedy, and the connections of a server that
stops."""
import http.client
import json
import socket
import threading
import time

import grpc
import numpy as np
import psutil
import pytest
import requests
import tritonclient.grpc as grpcclient

import models
from serving import Server, free_ports
from wire import connect

BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}).encode()
INFER = "/v2/models/one/infer"
# Beyond any wait of a test: a hang.
HANG_S = 60


@pytest.fixture
def one(start, repository):
    """Starts a server on one small model: `one(*flags)`."""
    models.add(repository, "one", 1)
    return lambda *flags: start(repository, *flags, engine="rten")


def get(path):
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def post(body=BODY):
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (INFER.encode(), len(body)) + body


def answer(s):
    """The status and the body of the next answer."""
    response = http.client.HTTPResponse(s)
    response.begin()
    return response.status, response.read()


def ended(s):
    """Waits until the server ends the connection."""
    try:
        while s.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass


# -- greedy


def test_pipelined_requests_whose_answers_nobody_reads_take_no_memory(one):
    server = one()
    before = psutil.Process(server.process.pid).memory_info().rss
    with connect(server.http_port) as s:
        s.settimeout(2)
        requests_ = get("/v2/openapi.yaml") * 1000
        with pytest.raises(TimeoutError):
            # 172 MB of requests: 100 GB of answers.
            for _ in range(4000):
                s.sendall(requests_)
        assert requests.get(f"{server.url}/v2/health/live").status_code == 200
        grown = psutil.Process(server.process.pid).memory_info().rss - before
    assert grown < 100 << 20, f"{grown >> 20} MiB for one connection"


@pytest.mark.parametrize("rest", [b"\r\n", b"G", b"POST /v2/models/one/infer HTTP/1.1\r\n"])
def test_an_answer_comes_at_once_whatever_follows_the_request(one, rest):
    server = one()
    with connect(server.http_port) as s:
        s.sendall(post() + rest)
        assert answer(s)[0] == 200


def test_heads_that_are_wrong_or_too_large_are_answered(one):
    server = one()
    for head, status in [(b"GET / HTTP/7.0\r\n\r\n", 400), (b"\x00\x01\x02\r\n\r\n and more", 400),
                         (b"GET / HTTP/1.1\r\nlong: " + b"x" * 600_000 + b"\r\n\r\n", 431)]:
        with connect(server.http_port) as s:
            s.sendall(head)
            assert answer(s)[0] == status, head[:20]


# -- probes


def test_the_health_port_answers_probes_alone_and_sees_the_drain(start, repository):
    models.add(repository, "one", 1)
    (port,) = free_ports(1)
    server = start(repository, "--health-port", str(port), "--shutdown-grace", "5", engine="rten")
    probe = f"http://127.0.0.1:{port}"
    for path, status in [("/v2/health/live", 200), ("/v2/health/ready", 200), ("/v2/health/ready/", 200), ("/metrics", 404), ("/v2/models/one", 404)]:
        assert requests.get(probe + path, timeout=HANG_S).status_code == status, path
    server.terminate()
    while requests.get(f"{probe}/v2/health/ready", timeout=HANG_S).status_code == 200:
        pass
    assert requests.get(f"{probe}/v2/health/live", timeout=HANG_S).status_code == 200
    assert server.wait_end() == 0


# -- many


def test_idle_sockets_shut_out_nobody_where_few_files_may_be_open(binary, tmp_path, repository):
    models.add(repository, "one", 1)
    few = tmp_path / "downbeat-with-few-files"
    few.write_text(f'#!/bin/sh\nulimit -n 64\nexec "{binary}" "$@"\n')
    few.chmod(0o755)
    with Server(few, repository, tmp_path, engine="rten") as server:
        ports = [server.http_port, server.grpc_port, server.http_port, server.metrics_port]
        idle = [connect(ports[i % 4]) for i in range(200)]
        for _ in range(5):
            # Idle for a moment is enough to make room.
            time.sleep(0.3)
            assert server.metrics()
            assert requests.get(f"http://127.0.0.1:{server.metrics_port}/v2/health/ready", timeout=HANG_S).status_code == 200
            assert requests.post(f"{server.url}{INFER}", data=BODY, timeout=HANG_S).status_code == 200
            with grpcclient.InferenceServerClient(server.grpc) as client:
                assert client.is_server_ready()
        for s in idle:
            s.close()


def test_at_the_cap_clients_are_told_why(one):
    server = one("--max-connections", "2")
    busy = []
    while len(busy) < 2:
        # The client sends half of a request. The server may refuse it at first: connections that
        # waited for the server's start count, too.
        s = connect(server.http_port)
        s.sendall(post()[:-len(BODY)])
        s.settimeout(0.5)
        try:
            assert answer(s)[0] == 503
        except TimeoutError:
            s.settimeout(HANG_S)
            busy.append(s)
    told = None
    for _ in range(200):
        with connect(server.http_port) as s:
            s.sendall(get("/v2/health/live"))
            status, text = answer(s)
            if status == 503:
                told = json.loads(text)["error"]
                break
    assert told and "--max-connections" in told, told
    with grpc.insecure_channel(server.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", lambda data: data, lambda data: data)
        with pytest.raises(grpc.RpcError) as refused:
            check(b"", timeout=HANG_S)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE and "503" in refused.value.details(), refused.value
    assert "connections are refused" in server.log
    for s in busy:
        s.sendall(BODY)
        assert answer(s)[0] == 200
        s.close()


# -- slow


def test_what_trickles_in_ends_and_what_is_idle_too(one):
    server = one("--transfer-timeout", "1", "--idle-timeout", "2")

    def trickle(s, data):
        try:
            for byte in data:
                s.sendall(bytes([byte]))
                time.sleep(0.1)
        except OSError:
            return
        raise AssertionError("every byte was taken")

    def head():
        with connect(server.http_port) as s:
            trickle(s, b"GET /v2/health/live HTTP/1.1\r\nHost: " + b"x" * 300)

    def body():
        with connect(server.http_port) as s:
            s.sendall(post(b" " * 300)[:-300])
            s.settimeout(HANG_S)
            status, text = answer_while(s, lambda: trickle(s, b" " * 300))
            assert status == 408 and b"--min-rate" in text, text

    def idle():
        with connect(server.http_port) as s:
            s.sendall(post())
            assert answer(s)[0] == 200
            ended(s)

    def silent():
        with connect(server.grpc_port) as s:
            ended(s)

    at_once(head, body, idle, silent)
    assert requests.post(f"{server.url}{INFER}", data=BODY).status_code == 200


def answer_while(s, work):
    thread = threading.Thread(target=work)
    thread.start()
    result = answer(s)
    thread.join()
    return result


def at_once(*functions):
    """Runs functions side by side, and raises the exception of any."""
    failures = []

    def run(function):
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=[function]) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# -- stopping


class Client:
    """Sends request after request on one connection. When the server closes it, the client opens a
    new one, until no server listens."""

    def __init__(self, server):
        self.port, self.answered, self.lost, self.refused = server.http_port, 0, [], []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S)
            except OSError:
                return
            with connection:
                while True:
                    try:
                        connection.sendall(post())
                        response = http.client.HTTPResponse(connection)
                        response.begin()
                        response.read()
                    except (OSError, http.client.HTTPException) as error:
                        self.lost.append(error)
                        return
                    self.answered += 1
                    if response.status != 200:
                        self.refused.append(response.status)
                    if response.getheader("Connection") == "close":
                        break


@pytest.mark.parametrize("grace", ["0.5", "0.5", "1"])
def test_sigterm_under_load_loses_no_request(one, grace):
    server = one("--shutdown-grace", grace)
    clients = [Client(server) for _ in range(16)]
    while sum(client.answered for client in clients) < 500:
        time.sleep(0.01)
    server.terminate()
    unready = False
    while not unready:
        try:
            unready = requests.get(f"http://127.0.0.1:{server.metrics_port}/v2/health/ready", timeout=HANG_S).status_code == 503
        except requests.ConnectionError:
            break
    assert server.wait_end() == 0, server.log
    for client in clients:
        client.thread.join()
    assert unready
    assert [error for client in clients for error in client.lost] == []
    assert [status for client in clients for status in client.refused] == []


def test_sigterm_under_load_loses_no_grpc_call(one):
    server = one("--shutdown-grace", "0.5")
    failures, stop = [], threading.Event()

    def calls():
        tensor = grpcclient.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
        with grpcclient.InferenceServerClient(server.grpc) as client:
            while not stop.is_set():
                try:
                    client.infer("one", [tensor])
                except Exception as error:
                    # After the end no server accepts connections. Requests sent on a connection
                    # have been answered.
                    if "failed to connect" not in str(error).lower():
                        failures.append(str(error))
                    return

    threads = [threading.Thread(target=calls) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    server.terminate()
    assert server.wait_end() == 0, server.log
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_silent_connection_does_not_hold_the_drain(one):
    server = one("--transfer-timeout", "1", "--drain-timeout", "300")
    with connect(server.grpc_port), connect(server.http_port) as half:
        half.sendall(b"GET /v2")
        assert requests.get(f"{server.url}/v2/health/ready").status_code == 200
        server.terminate()
        assert server.wait_end() == 0, server.log


def test_the_drain_timeout_is_a_limit(start, repository):
    models.add(repository, "one", 1)
    server = start(repository, "--drain-timeout", "1", engine="rten")
    with connect(server.http_port) as s:
        s.sendall(post()[:-5])
        assert requests.get(f"{server.url}/v2/health/ready").status_code == 200
        server.terminate()
        server.wait_end()
        ended(s)
