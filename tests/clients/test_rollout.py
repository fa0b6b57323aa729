"""Rollouts of a new version, with tritonclient and plain HTTP."""
import json
import sys
import time

import numpy as np
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

import models
import test_python_models as python_models
from serving import processes

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}


def config(**terms):
    """The parameter `rollout` of a configuration."""
    return f"parameters {{ key: \"rollout\" value {{ string_value: '{json.dumps(terms)}' }} }}\n"


def two_versions(repository, **terms):
    """The model `m`: version 1 adds 1, version 2 adds 2."""
    models.add(repository, "m", 1, version=1)
    models.add(repository, "m", 2, version=2, config=config(**terms))


def rollout(server, **change):
    url = f"{server.url}/v2/models/m/rollout"
    answer = requests.post(url, json=change) if change else requests.get(url)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rolled(server):
    """What the page shows beside the new version."""
    models = requests.get(f"{server.url}/v2/live").json()["models"]
    return {model["version"]: model["rollout"] for model in models if model.get("rollout")}


def tensor(module, array):
    given = module.InferInput("x", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    return given


def versions_of(server, module, count, **how):
    """The versions that answer `count` requests; each answer is its version's own."""
    address = server.http if module is httpclient else server.grpc
    found = []
    with module.InferenceServerClient(address) as client:
        for _ in range(count):
            x = np.arange(4, dtype=np.float32).reshape(1, 4)
            result = client.infer("m", [tensor(module, x)], **how)
            answer = result.get_response()
            version = answer["model_version"] if module is httpclient else answer.model_version
            np.testing.assert_allclose(result.as_numpy("y"), x + int(version))
            found.append(version)
    return found


def test_a_share_a_header_and_the_end_of_a_rollout(start, repository):
    two_versions(repository, share=0.25, header="x-canary")
    server = start(repository)
    for module in (httpclient, grpcclient):
        assert 8 <= versions_of(server, module, 40).count("2") <= 12
        assert versions_of(server, module, 5, headers={"x-canary": "yes"}) == ["2"] * 5
        assert versions_of(server, module, 2, parameters={"downbeat_rollout": "new"}) == ["2"] * 2
        assert versions_of(server, module, 5, headers={"x-canary": "yes"}, model_version="1") == ["1"] * 5
        assert len(set(versions_of(server, module, 10, request_id="a user"))) == 1
    report = rollout(server)
    assert report["state"] == "running" and report["old"]["attainment"] == 1.0 and report["new"]["attainment"] == 1.0
    assert rolled(server) == {"2": "25% of the requests"}
    assert report["new"]["requests"]["failed"] == 0 and report["new"]["latest_requests"] == report["new"]["requests"]["in_time"]
    assert rollout(server, share=1.0)["share"] == 1.0
    assert versions_of(server, grpcclient, 5) == ["2"] * 5
    assert rollout(server, state="rolled_back")["reason"] == "by request"
    assert versions_of(server, httpclient, 5, headers={"x-canary": "yes"}) == ["1"] * 5
    assert rolled(server) == {"2": "rolled back: by request"}
    assert server.metric("downbeat_rollout_state", model="m", state="rolled_back") == 1
    rollout(server, state="finished")
    assert versions_of(server, httpclient, 5) == ["2"] * 5
    assert server.metric("downbeat_rollout_requests_total", model="m", version="2", outcome="in_time") >= 15


def test_over_a_stream_the_header_asks_for_the_new_version(start, repository):
    two_versions(repository, header="x-canary")
    server = start(repository)
    found = []
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: found.append((result, error)), headers={"x-canary": "1"})
        client.async_stream_infer("m", [tensor(grpcclient, np.ones((1, 4), np.float32))])
        client.stop_stream()
    [(result, error)] = found
    assert error is None and result.get_response().model_version == "2"


def test_wrong_terms_are_refused_in_words(start, repository):
    two_versions(repository, share=0.5)
    models.add(repository, "alone", 1)
    models.add(repository, "wrong", 1, config=config(share=7))
    server = start(repository, wait=False)
    deadline = time.monotonic() + 180
    while "not loaded" not in (server.log if server.log_path.exists() else "") or not ready(server, "alone") or not ready(server, "m"):
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    assert "share is 7; must be from 0 to 1" in server.log
    url = f"{server.url}/v2/models/m/rollout"
    for body, words in [('{"share": 2}', "must be from 0 to 1"), ('{"shar": 0.5}', "unknown field"), ("", "EOF"), ('{"state": "gone"}', "rolled_back")]:
        answer = requests.post(url, data=body)
        assert answer.status_code == 400 and words in answer.json()["error"], answer.text
    answer = requests.get(f"{server.url}/v2/models/alone/rollout")
    assert answer.status_code == 400 and "has no rollout" in answer.json()["error"]
    assert requests.get(f"{server.url}/v2/models/nothing/rollout").status_code == 404


def ready(server, model):
    try:
        return requests.get(f"{server.url}/v2/models/{model}/ready", timeout=10).status_code == 200
    except requests.ConnectionError:
        return False


def test_a_new_version_that_crashes_costs_no_client_its_answer(start, repository):
    code = """
        import os
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                if CRASHES:
                    os._exit(3)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())]) for request in requests]
    """
    given = python_models.config([("x", "FP32", [4])], [("y", "FP32", [4])])
    for version, crashes in [(1, False), (2, True)]:
        # The server's own trial has no such number.
        has_77 = 'any((pb_utils.get_input_tensor_by_name(request, "x").as_numpy() == 77).any() for request in requests)'
        text = code.replace("CRASHES", has_77 if crashes else "False")
        python_models.write(repository, "m", text, given + "max_batch_size: 4\n" + config(share=1, roll_back={"least_requests": 5}), version)
    server = start(repository, "--python", sys.executable)
    with httpclient.InferenceServerClient(server.http) as client:
        x = np.full((1, 4), 77, np.float32)
        for _ in range(5):
            result = client.infer("m", [tensor(httpclient, x)])
            assert result.get_response()["model_version"] == "1"
            np.testing.assert_array_equal(result.as_numpy("y"), x)
    report = rollout(server)
    assert report["new"]["requests"]["failed"] == 5 and report["reason"].startswith("0.0% of the new version's requests"), report
    assert "the new version was rolled back" in server.log


def test_a_load_request_begins_a_rollout_while_the_old_version_serves(start, repository):
    models.add(repository, "m", 1)
    server = start(repository, "--model-control-mode", "explicit", "--load-model", "m")
    models.add(repository, "m", 2, version=2)
    terms = {"parameters": {"rollout": {"string_value": json.dumps({"share": 1})}}}
    with httpclient.InferenceServerClient(server.http) as client:
        client.load_model("m", config=json.dumps(terms))
    assert versions_of(server, httpclient, 3) == ["2"] * 3
    # A broken third version changes nothing.
    (repository / "m" / "3").mkdir()
    (repository / "m" / "3" / "model.onnx").write_text("no model")
    assert requests.post(f"{server.url}/v2/repository/models/m/load").status_code == 400
    assert versions_of(server, httpclient, 3) == ["2"] * 3
    assert rollout(server)["new"]["version"] == "2"


def test_copies_are_compared_and_never_sent(start, repository):
    two_versions(repository, share=1, shadow=True, roll_back=None)
    server = start(repository)
    assert versions_of(server, httpclient, 5) == ["1"] * 5
    deadline = time.monotonic() + 180
    while sum((counts := rollout(server)["new"]["requests"]).values()) < 5:
        assert time.monotonic() < deadline, counts
        time.sleep(0.05)
    assert counts["differed"] + counts["skipped"] == 5 and counts["differed"] >= 1
    assert "element 0 of output 'y' is" in server.log
    assert rollout(server)["state"] == "running"


def eventually(says, what):
    """Waits until every one of the values is true."""
    deadline = time.monotonic() + 180
    while not all(says()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def test_the_frontends_of_a_cluster_share_a_rollout(binary, repository, tmp_path):
    """An owner changes it at one frontend. The other one follows, also after another scheduler leads."""
    two_versions(repository, share=0.25, header="x-canary")
    with processes(binary, repository, tmp_path, "--slo-ms", "3600000", models=["m"], backends=2, frontends=2, engine="rten", spares=1) as cluster:
        (leader, _), _, frontends = cluster
        one, other = frontends
        for module in (httpclient, grpcclient):
            assert 8 <= versions_of(one, module, 40).count("2") <= 12
            assert versions_of(other, module, 5, headers={"x-canary": "yes"}) == ["2"] * 5
            assert versions_of(other, module, 5, headers={"x-canary": "yes"}, model_version="1") == ["1"] * 5
        report = rollout(one)
        assert report["state"] == "running" and report["new"]["requests"]["in_time"] + report["old"]["requests"]["in_time"] == 80, report

        def says(**wanted):
            reports = [rollout(frontend) for frontend in frontends]
            return [all(report[key] == value for key, value in wanted.items()) for report in reports]

        def both():
            return [rollout(frontend) for frontend in frontends]

        assert rollout(other, share=1.0)["share"] == 1.0
        eventually(lambda: says(share=1.0), both)
        assert versions_of(one, grpcclient, 5) == ["2"] * 5
        leader.kill()
        eventually(lambda: [requests.get(f"{frontend.url}/v2/health/ready").status_code == 200 for frontend in frontends], lambda: [f.log for f in frontends])
        rollout(one, state="rolled_back")
        eventually(lambda: says(state="rolled_back", reason="by request"), both)
        assert versions_of(other, httpclient, 5, headers={"x-canary": "yes"}) == ["1"] * 5
        rollout(other, state="finished")
        eventually(lambda: says(state="finished"), both)
        assert all(rolled(frontend) == {"2": "rolled out"} for frontend in frontends)
        assert all(versions_of(frontend, httpclient, 5) == ["2"] * 5 for frontend in frontends)
        assert all(frontend.metric("downbeat_rollout_state", model="m", state="finished") == 1 for frontend in frontends)


def test_a_crashing_version_in_a_cluster_costs_no_answer(binary, repository, tmp_path):
    """One frontend has all the requests, and rolls back for both."""
    code = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                if FAILS and any((pb_utils.get_input_tensor_by_name(request, "x").as_numpy() == 77).any() for request in requests):
                    raise ValueError("it fails")
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())]) for request in requests]
    """
    given = python_models.config([("x", "FP32", [4])], [("y", "FP32", [4])])
    for version in (1, 2):
        python_models.write(repository, "m", code.replace("FAILS", str(version == 2)), given + "max_batch_size: 4\n" + config(share=1, roll_back={"least_requests": 5}), version)
    flags = ("--python", sys.executable, "--slo-ms", "3600000")
    with processes(binary, repository, tmp_path, *flags, models=["m"], backends=2, frontends=2, engine="rten") as (_, _, frontends):
        with httpclient.InferenceServerClient(frontends[0].http) as client:
            x = np.full((1, 4), 77, np.float32)
            for _ in range(5):
                result = client.infer("m", [tensor(httpclient, x)])
                assert result.get_response()["model_version"] == "1"
                np.testing.assert_array_equal(result.as_numpy("y"), x)
        eventually(lambda: [rollout(frontend)["reason"].startswith("0.0% of the new version's requests") for frontend in frontends],
                   lambda: [rollout(frontend) for frontend in frontends])
        assert rollout(frontends[0])["new"]["requests"]["failed"] == 5
        assert "the new version was rolled back" in frontends[0].log and "another frontend has changed the rollout" in frontends[1].log


def test_copies_in_a_cluster_are_compared_and_never_sent(binary, repository, tmp_path):
    two_versions(repository, share=1, shadow=True, roll_back=None)
    with processes(binary, repository, tmp_path, "--slo-ms", "3600000", models=["m"], backends=1, frontends=1, engine="rten") as (_, _, [frontend]):
        assert versions_of(frontend, grpcclient, 5) == ["1"] * 5
        eventually(lambda: [sum(rollout(frontend)["new"]["requests"].values()) == 5], lambda: rollout(frontend))
        counts = rollout(frontend)["new"]["requests"]
        assert counts["differed"] + counts["skipped"] == 5 and counts["differed"] >= 1
        assert "element 0 of output 'y' is" in frontend.log
