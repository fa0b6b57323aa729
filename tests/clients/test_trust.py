"""Strangers and liars at the ports of a cluster: no request of a client fails, and nothing has to be restarted.

Each attempt of `attempts.py` runs beside a client that counts its answers by id. Bounds of time are against hangs, not for
speed.
"""
import concurrent.futures
import http.client
import json
import signal
import time

import pytest
import requests

import attempts
from roles_peer import BACKEND, FRONTEND, MOST, epoch, standing

# An attempt after which the cluster may need a leader anew: requests wait meanwhile, and none fails.
CHANGES_EPOCH = {"step", "other_leader", "a_backend_says_that_another_process_has_led_in_the_leader_s_epoch"}


@pytest.fixture(scope="module")
def cluster(binary, tmp_path_factory):
    with attempts.Cluster(binary, tmp_path_factory.mktemp("trust"), models=attempts.ALL) as cluster:
        yield cluster
        for process in cluster.processes:
            assert process.process.poll() is None and "panicked" not in process.log, process.log


@pytest.mark.parametrize("attempt", attempts.OUTSIDERS + attempts.LIARS, ids=lambda attempt: attempt.__name__)
def test_a_client_notices_nothing_of(cluster, attempt):
    result = attempts.run(cluster, attempt)
    assert not result.bad, result.row()
    deadline = time.monotonic() + attempts.PATIENCE_S
    while not cluster.state()[0]:
        assert time.monotonic() < deadline, "the scheduler leads again"
    assert attempt.__name__ in CHANGES_EPOCH or result.before == result.after, result.row()
    assert "open after" not in result.happened and "stayed" not in result.happened, result.row()
    if attempt in attempts.OUTSIDERS:
        peers = requests.get(f"{cluster.scheduler.url}/v2/cluster", timeout=attempts.PATIENCE_S).json()["peers"]
        assert all(peer["name"] != "stranger" for peer in peers), peers


def test_there_are_thirty_attempts():
    assert len(attempts.OUTSIDERS) >= 30 and len(attempts.LIARS) >= 30


def test_the_leader_of_a_liar_s_epoch_stays_and_probes_tell_the_truth(cluster):
    before = cluster.state()
    probes = [f"{process.url}/v2/health/ready" for process in cluster.processes]
    with attempts.Client(cluster.frontend.http_port, cluster.models) as client:
        for role in (BACKEND, FRONTEND):
            for number in (MOST, (1 << 63) + 1, before[1] + (1 << 33), 1 << 62):
                with cluster.peer(role) as liar:
                    liar.say(standing(epoch(number)))
                    assert liar.closed_within(), f"a liar that reports {number} is given up"
                assert cluster.state() == before
                assert all(requests.get(probe, timeout=60).status_code == 200 for probe in probes)
        client.wait_for(20)
    assert all(is_right for is_right, *_ in client.answers), client.answers
    assert "restart it" in cluster.scheduler.log


def test_the_greatest_plausible_step_leaves_a_way_back(cluster):
    """Example: a backend reports 2^32 above the leader's epoch. The leader takes the next one, and so does any other liar's leader."""
    with attempts.Client(cluster.frontend.http_port, cluster.models) as client:
        for _ in range(3):
            known = cluster.epoch()
            with cluster.peer() as liar:
                liar.say(standing(epoch(known + (1 << 32))))
                deadline = time.monotonic() + attempts.PATIENCE_S
                while cluster.state() != (True, known + (1 << 32) + 1):
                    assert time.monotonic() < deadline, cluster.state()
                    time.sleep(0.02)
            while not cluster.is_ready():
                assert time.monotonic() < deadline
        client.wait_for(20)
    assert all(is_right for is_right, *_ in client.answers), client.answers


def test_a_request_of_a_stopped_backend_ends_while_the_backend_is_stopped(binary, tmp_path):
    """The backend is stopped while it has claimed requests. Each request ends, although nobody continues the backend."""
    with attempts.Cluster(binary, tmp_path, "--slo-ms", "digits=250") as cluster:
        def ask(name):
            connection = http.client.HTTPConnection("127.0.0.1", cluster.frontend.http_port, timeout=attempts.PATIENCE_S)
            connection.request("POST", "/v2/models/digits/infer", json.dumps(dict(attempts.DIGIT, id=name)))
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            # Enough requests that the backend has claimed some at any instant.
            early = [pool.submit(ask, f"e{n}") for n in range(400)]
            while not any(answer.done() for answer in early):
                time.sleep(0.001)
            cluster.backend.process.send_signal(signal.SIGSTOP)
            try:
                answers = [answer.result(attempts.PATIENCE_S) for answer in early]
                # Only then does the backend go on.
            finally:
                cluster.backend.process.send_signal(signal.SIGCONT)
        assert {status for status, _ in answers} <= {200, 503, 504}, answers
        assert any(status == 200 for status, _ in answers) and any(status != 200 for status, _ in answers)
        deadline = time.monotonic() + attempts.PATIENCE_S
        while ask("late")[0] != 200:
            assert time.monotonic() < deadline, "the backend serves again"
