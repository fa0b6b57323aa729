"""`downbeat log why` and `log show`: a server's owner asks what became of a request."""
import json
import subprocess
import time

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import models

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
# Each request of `slow` takes tens of milliseconds.
LATE = ("--slo-ms", "1", "--drop", "none", "--profiling-budget", "0")


def ask(client, kind, **options):
    tensor = kind.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    return client.infer("slow", [tensor], **options)


def log(binary, *arguments):
    return subprocess.run([binary, "log", *map(str, arguments)], capture_output=True, text=True, timeout=120)


def why(binary, *arguments):
    """What `log why` says. The log is at most a second behind, so that a first try may be too early."""
    deadline = time.monotonic() + 60
    while (done := log(binary, "why", *arguments)).returncode != 0 or "The log ends before" in done.stdout:
        assert time.monotonic() < deadline, done.stderr + done.stdout
        time.sleep(0.2)
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "decisions"


def test_a_late_request_is_explained_while_the_server_runs(start, repository, folder, binary):
    models.slow(repository)
    server = start(repository, "--decision-log", str(folder), *LATE)
    with httpclient.InferenceServerClient(server.http) as client:
        ask(client, httpclient, request_id="over http", headers={"traceparent": PARENT})
        ask(client, httpclient)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        ask(client, grpcclient, request_id="over gRPC", headers={"traceparent": PARENT.replace("4bf9", "5bf9")})
    for name, trace in (("over http", TRACE), ("over gRPC", TRACE.replace("4bf9", "5bf9"))):
        told = why(binary, name, folder)
        assert f'(id "{name}", trace {trace}) for slow came at 20' in told, told
        assert "with 1 item and had " in told and " late." in told and "a deadline " in told, told
        assert why(binary, trace, folder) == told
        assert why(binary, f"00-{trace}-00f067aa0ba902b7-01", folder, "--model", "slow") == told
    story = json.loads(why(binary, "over http", folder, "--json"))
    assert story["outcome"] == "late" and story["model"] == "slow" and story["late_ms"] > 0 and story["budget_ms"] > 0 and story["batch"]["requests"] == 1
    # A time finds the first request that failed from then on, also one without an id.
    assert why(binary, story["request"], folder).startswith(f"Request {story['request']} (id")
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(story["came_unix_ns"] // 10**9))
    assert why(binary, at, folder).startswith("In the second from that time on came ")


def test_a_name_that_is_unknown_is_an_error_with_the_span_of_the_log(start, repository, folder, binary):
    models.slow(repository)
    server = start(repository, "--decision-log", str(folder), *LATE)
    with httpclient.InferenceServerClient(server.http) as client:
        for _ in range(2):
            ask(client, httpclient, request_id="again")
    assert why(binary, "again", folder).rstrip().endswith("One earlier request has this id too.")
    server.stop()
    done = log(binary, "why", "nobody", folder)
    assert done.returncode == 1 and 'no request with the id "nobody"; the log goes from 20' in done.stderr, done.stderr
    done = log(binary, "why", "again", folder, "--model", "other")
    assert done.returncode == 1 and "of model 'other'" in done.stderr, done.stderr
    done = log(binary, "why", "again", folder / "missing")
    assert done.returncode == 1 and "there is no decision log" in done.stderr, done.stderr


def test_a_request_that_was_refused_is_found_with_its_error(start, repository, folder, binary):
    models.slow(repository)
    server = start(repository, "--decision-log", str(folder), "--slo-ms", "1")
    with httpclient.InferenceServerClient(server.http) as client:
        refused = 0
        for number in range(20):
            # The server tries some of the requests that its profile refuses.
            try:
                ask(client, httpclient, request_id=f"id {number}")
            except InferenceServerException:
                refused = number
    told = why(binary, f"id {refused}", folder)
    assert "It was refused (deadline_impossible)" in told and "What would have saved it: a deadline at least" in told, told
    server.stop()
    shown = log(binary, "show", folder, "--reason", "deadline_impossible", "--json", "--last", "1")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["id"] == f"id {refused}"
    shown = log(binary, "show", folder, "--reason", "bad", "--model", "slow", "--since", "1h")
    assert f'id "id {refused}"' in shown.stdout and " for slow" not in shown.stderr, shown.stdout
    # Entries name the model, in each file.
    shown = log(binary, "show", folder, "--model", "slow")
    assert shown.returncode == 0 and "request r" in shown.stdout and " of slow" in shown.stdout and " of m0" not in shown.stdout, shown.stdout
    done = log(binary, "show", folder, "--reason", "tired")
    assert done.returncode == 1 and "'tired' is no outcome; there are in_time, late" in done.stderr
    done = log(binary, "show", folder, "--model", "other")
    assert done.returncode == 1 and "the log names slow" in done.stderr


def test_a_log_of_several_files_is_one_log(start, repository, folder, binary):
    models.identity(repository, "FP32", "quick")
    # The least size of a file is 64 KiB. The bound of all files leaves room for those of a slow second.
    server = start(repository, "--decision-log", str(folder), "--decision-log-bytes", "4M")
    x = httpclient.InferInput("INPUT0", [1, 1], "FP32")
    x.set_data_from_numpy(np.ones((1, 1), np.float32))
    with httpclient.InferenceServerClient(server.http, concurrency=4) as client:
        client.infer("quick", [x], request_id="first")
        deadline, number = time.monotonic() + 120, 0
        while len(list(folder.glob("*.000*.log"))) < 2:
            assert time.monotonic() < deadline, sorted(folder.iterdir())
            number += 1
            client.infer("quick", [x], request_id=f"id {number}")
        client.infer("quick", [x], request_id="last")
        for name in ("first", "last"):
            # Requests of each shape have a queue.
            assert f'(id "{name}") for quick [1] came at' in why(binary, name, folder)
    server.stop()
    for earlier in folder.glob("*.000001.log"):
        newest = earlier.with_name(earlier.name.replace(".000001", ""))
        shown = log(binary, "show", newest)
        assert shown.returncode == 0 and "quick" in shown.stdout, "each file begins with the names"
    for file in folder.glob("shard-*.log"):
        if file.name.count(".") == 1 and file.stat().st_size:
            replayed = log(binary, "replay", file)
            assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    done = subprocess.run([binary, "what-if", folder, "--devices", "2"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Without its begin a log still tells its stories, and cannot be replayed.
    for earlier in folder.glob("*.000*.log"):
        earlier.unlink()
    assert '(id "last") for quick [1] came at' in why(binary, "last", folder)
    replays = [log(binary, "replay", file) for file in folder.glob("*.log") if file.stat().st_size]
    assert any("the begin of the log is gone" in replay.stderr for replay in replays)


def test_changes_at_an_instant_are_told_by_model(start, repository, folder, binary):
    models.add(repository, "first", 1)
    models.add(repository, "second", 2)
    server = start(repository, "--decision-log", str(folder))

    def ask_for_a_while(*names):
        """Asks each of these models in turn for longer than the least part of a log that is compared."""
        end = time.monotonic() + 2.5
        with httpclient.InferenceServerClient(server.http) as client:
            while time.monotonic() < end:
                for name in names:
                    tensor = httpclient.InferInput("x", [1, 4], "FP32")
                    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
                    client.infer(name, [tensor])

    ask_for_a_while("first")
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() // 1_000_000 % 1000:03}Z"
    ask_for_a_while("first", "second")
    server.stop()
    done = log(binary, "changes", at, folder)
    assert done.returncode == 0, done.stderr
    assert "Requests for second began to come: " in done.stdout and "| first " in done.stdout, done.stdout
    told = json.loads(log(binary, "changes", at, folder, "--span", "2s", "--json").stdout)
    of = {change["model"]: change for change in told["models"]}
    assert of["second"]["before"]["offered_per_s"] == 0 and of["second"]["before"]["in_time"] is None
    assert of["second"]["after"]["in_time"] == 1 and of["first"]["before"]["in_time"] == 1
    assert of["first"]["before"]["batch"] == 1 and of["first"]["before"]["devices"] > 0
    assert told["before_s"] <= 2 and told["after_s"] <= 2
    wrong = log(binary, "changes", "0s", folder)
    assert wrong.returncode != 0 and "at least a second after its begin" in wrong.stderr, wrong.stderr
