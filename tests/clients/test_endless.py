"""Runs and loads that do not end: other models answer meanwhile, the endless model reports it, and
the server ends at the first signal."""
import concurrent.futures
import signal
import time

import pytest
import requests

import models

ENDLESS = 2e9
# These tests look for hangs: nothing in them takes so long.
PATIENCE_S = 60

engines = pytest.mark.parametrize("engine", ["onnxruntime", "rten"])


def infer(server, model, value, **parameters):
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [value, 0, 0, 0]}
    body = {"inputs": [tensor], "parameters": parameters}
    return requests.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=PATIENCE_S)


def control(server, model, what):
    return requests.post(f"{server.url}/v2/repository/models/{model}/{what}", json={}, timeout=PATIENCE_S)


def is_ready(server, model):
    return requests.get(f"{server.url}/v2/models/{model}/ready", timeout=PATIENCE_S).status_code == 200


def index(server):
    return {entry["name"]: entry for entry in requests.post(f"{server.url}/v2/repository/index", json={}, timeout=PATIENCE_S).json()}


def is_live(server):
    return requests.get(f"{server.url}/v2/health/live", timeout=PATIENCE_S).status_code == 200


def explicit(start, repository, *flags, engine="onnxruntime", isolation="none"):
    """A server with the models `one` and `loop`. By default `loop` would run in a process of its own."""
    models.add(repository, "one", 1)
    models.loop(repository)
    control = ["--model-control-mode", "explicit", "--load-model", "*"]
    return start(repository, *control, "--isolation", isolation, "--devices", "1", *flags, engine=engine)


@pytest.mark.parametrize("policy", ["exclusive", "windowed"])
def test_onnxruntime_ends_a_run_that_does_not_end(start, repository, policy):
    server = explicit(start, repository, "--run-timeout", "1", "--device-policy", policy)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        endless = pool.submit(infer, server, "loop", ENDLESS)
        assert [infer(server, "one", 1).status_code for _ in range(20)] == [200] * 20
        reply = endless.result()
    assert reply.status_code == 504 and "its limit" in reply.json()["error"], reply.text
    assert not is_ready(server, "loop") and is_ready(server, "one") and is_live(server)
    said = index(server)["loop"]
    assert said["state"] == "UNAVAILABLE" and "its limit" in said["reason"], said
    assert infer(server, "one", 1).status_code == 200
    # The model still gets requests, and is well again with its first answer.
    reply = infer(server, "loop", 3)
    assert reply.status_code == 200 and reply.json()["outputs"][0]["data"] == [3, 0, 0, 0]
    assert is_ready(server, "loop") and index(server)["loop"]["state"] == "READY"
    assert "a run takes too long" in server.log
    assert server.metric("downbeat_requests_not_answered_total", model="loop", reason="run_ended") == 1


@pytest.mark.parametrize("policy", ["exclusive", "windowed"])
def test_a_run_of_rten_that_does_not_end_is_left_behind(start, repository, policy):
    server = explicit(start, repository, "--run-timeout", "1", "--device-policy", policy, "--threads", "1", engine="rten")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        endless = pool.submit(infer, server, "loop", ENDLESS)
        assert [infer(server, "one", 1).status_code for _ in range(20)] == [200] * 20
        reply = endless.result()
    assert reply.status_code == 504 and "cannot end it" in reply.json()["error"], reply.text
    assert not is_ready(server, "loop") and is_ready(server, "one")
    refused = infer(server, "loop", 1)
    assert refused.status_code == 503 and "load the model again" in refused.json()["error"], refused.text
    assert [infer(server, "one", 1).status_code for _ in range(20)] == [200] * 20
    # Loaded again it is another model, but for the core that the run keeps.
    assert control(server, "loop", "load").status_code == 200
    assert is_ready(server, "loop") and infer(server, "loop", 3).json()["outputs"][0]["data"] == [3, 0, 0, 0]
    server.stop()


def test_a_run_of_rten_that_does_not_end_costs_its_own_process_only(start, repository):
    server = explicit(start, repository, "--run-timeout", "1", engine="rten", isolation="auto")
    reply = infer(server, "loop", ENDLESS)
    assert reply.status_code in (503, 504), reply.text
    assert infer(server, "one", 1).status_code == 200
    until = time.monotonic() + PATIENCE_S
    while infer(server, "loop", 3).status_code != 200:
        assert time.monotonic() < until, server.log
    assert is_ready(server, "loop") and is_live(server)


def test_a_server_with_endless_runs_on_all_cores_is_not_live(start, repository):
    server = explicit(start, repository, "--run-timeout", "0.2", engine="rten")
    import os

    for _ in range(len(os.sched_getaffinity(server.process.pid))):
        assert is_live(server)
        assert infer(server, "loop", ENDLESS).status_code == 504
        assert control(server, "loop", "load").status_code == 200
    assert not is_live(server)
    assert requests.get(f"{server.url}/v2/health/ready", timeout=PATIENCE_S).status_code == 503
    assert "not live any more" in server.log


@pytest.mark.parametrize("policy", ["exclusive", "windowed"])
def test_a_run_ends_when_its_client_has_gone(start, repository, policy):
    server = explicit(start, repository, "--run-timeout", "0", "--device-policy", policy)
    assert infer(server, "loop", ENDLESS, timeout=300_000).status_code == 504
    # The only device is free again, and nothing is held against the model.
    assert infer(server, "one", 1).status_code == 200
    assert infer(server, "loop", 3).status_code == 200
    assert server.metric("downbeat_requests_not_answered_total", model="loop", reason="timeout") == 1
    assert server.metric("downbeat_requests_not_answered_total", model="loop", reason="run_ended") == 0


def test_unload_ends_the_runs_that_nobody_waits_for(start, repository):
    server = explicit(start, repository, "--run-timeout", "0")
    # A short while, in which the run would not be ended by itself.
    assert infer(server, "loop", ENDLESS, timeout=100_000).status_code == 504
    assert control(server, "loop", "unload").status_code == 200
    # The only device is free again.
    assert infer(server, "one", 1).status_code == 200


def test_unload_says_that_a_run_goes_on(start, repository):
    # Without a measurement, which would put another version in the place of the one that runs.
    server = explicit(start, repository, "--run-timeout", "0", "--no-profiling", engine="rten")
    assert infer(server, "loop", ENDLESS, timeout=300_000).status_code == 504
    reply = control(server, "loop", "unload")
    assert reply.status_code == 503 and "still goes on" in reply.json()["error"], reply.text
    said = index(server)["loop"]
    assert said["state"] == "UNAVAILABLE" and "still goes on" in said["reason"], said
    assert infer(server, "one", 1).status_code == 200


@engines
def test_the_drain_timeout_is_a_limit_whatever_runs(start, repository, engine):
    server = explicit(start, repository, "--run-timeout", "0", "--drain-timeout", "1", engine=engine)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        endless = pool.submit(lambda: requests.post(f"{server.url}/v2/models/loop/infer", timeout=PATIENCE_S, json={
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [ENDLESS, 0, 0, 0]}]}))
        time.sleep(0.5)
        begin = time.monotonic()
        server.terminate()
        assert server.wait_end() == 0, server.log
        assert time.monotonic() - begin < 30
        with pytest.raises((requests.ConnectionError, AssertionError)):
            assert endless.result().status_code == 200


@engines
@pytest.mark.parametrize("constant", [False, True], ids=["varying", "constant"])
def test_an_endless_first_run_makes_its_own_model_unavailable(start, repository, engine, constant):
    # An engine may compute constant parts while it reads the model.
    models.loop(repository, "endless", trips=int(ENDLESS), constant=constant)
    models.add(repository, "one", 1)
    server = start(repository, "--load-run-timeout", "10", "--strict-readiness", "false", engine=engine)
    for _ in range(PATIENCE_S * 10):
        said = index(server)
        if said["endless"]["state"] == "UNAVAILABLE" and said["one"]["state"] == "READY":
            break
        time.sleep(0.1)
    assert said["one"]["state"] == "READY", said
    assert said["endless"]["state"] == "UNAVAILABLE" and "a run had not ended after 10 s" in said["endless"]["reason"], said
    assert infer(server, "one", 1).status_code == 200
    assert infer(server, "endless", 1).status_code == 503


@pytest.mark.parametrize("after_s", [0.2, 0.7, 1.5])
def test_sigterm_during_a_slow_load_ends_the_server_cleanly(start, repository, after_s):
    models.slow_to_load(repository)
    server = start(repository, wait=False)
    for _ in range(PATIENCE_S * 10):
        if "metrics" in server.log:
            break
        time.sleep(0.1)
    time.sleep(after_s)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0, server.log
    assert time.monotonic() - begin < 30
