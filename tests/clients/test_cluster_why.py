"""`downbeat log why` by the decision log of a cluster's frontend: which batch of which backend had a request, and where its time went."""
import contextlib
import json
import subprocess

import pytest
import requests

from serving import EXAMPLES, Server, free_ports
from test_cluster_view import until
from test_ui import DIGIT, infer, missed, zeros

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def cluster(binary, tmp_path):
    """A scheduler, a backend, and a frontend with a decision log."""
    apart = ("--schedulers", f"127.0.0.1:{free_ports(1)[0]}")
    with contextlib.ExitStack() as stack:
        def start(*flags, **options):
            return stack.enter_context(Server(binary, EXAMPLES / "models", tmp_path, *apart, *flags, wait=False, **options))

        scheduler = start(role="scheduler")
        backend = start("--node-name", "east", "--slo-ms", "digits=3600000", "--slo-ms", "mlp=0.0001", engine="rten", role="backend")
        frontend = start("--listen", "127.0.0.1:0", "--decision-log", str(tmp_path / "decisions"), role="frontend")
        for process in (scheduler, backend, frontend):
            process.wait_ready()
        for model in ("digits", "mlp"):
            until(lambda model=model: requests.get(f"{frontend.url}/v2/models/{model}/ready", timeout=10).status_code, lambda status: status == 200)
        yield frontend, tmp_path / "decisions"


def why(binary, *words, folder):
    return subprocess.run([binary, "log", "why", *words, folder], capture_output=True, text=True, timeout=60)


def test_a_frontends_log_tells_where_a_requests_time_went(cluster, binary):
    frontend, folder = cluster
    assert infer(frontend, body={**DIGIT, "id": "scan-9"}, headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}).status_code == 200
    assert infer(frontend, "mlp", zeros(frontend, "mlp", id="hopeless")).status_code == 504
    story = json.loads(until(lambda: why(binary, "scan-9", "--json", folder=folder), lambda told: told.returncode == 0 and '"took_ms":null' not in told.stdout).stdout)
    assert (story["id"], story["trace"], story["model"], story["items"], story["error"]) == ("scan-9", TRACE, "digits", 1, None)
    batch = story["batch"]
    assert (batch["backend"], batch["device"], batch["items"], batch["epoch"], batch["scheduler"]) == ("east", 0, 1, 1, 0)
    assert batch["batch"].startswith("1.0.") and (story["returned"], story["lost"]) == (0, 0)
    phases = [story[phase] for phase in ("queue_ms", "fetch_ms", "device_ms", "answer_ms")]
    assert all(phase >= 0 for phase in phases) and story["device_ms"] > 0 and abs(sum(phases) - story["took_ms"]) < 0.01, story
    assert story["budget_ms"] == 3_600_000 and story["late_ms"] is None
    for name in (["scan-9"], [TRACE], ["scan-9", "--model", "digits"], [story["request"]]):
        told = why(binary, *name, folder=folder)
        assert told.returncode == 0 and 'of backend "east" claimed it' in told.stdout and "on device 0" in told.stdout and "in time" in told.stdout, told
    # The scheduler refuses a request that no batch could answer in time.
    refused = until(lambda: why(binary, "hopeless", folder=folder), lambda told: "it got an error" in told.stdout)
    assert "No batch has claimed it." in refused.stdout and "mlp" in refused.stdout, refused
    [row] = missed(frontend, "mlp")["requests"]
    assert row["command"].startswith("downbeat log why hopeless"), row
    nobody = why(binary, "nobody", folder=folder)
    assert nobody.returncode != 0 and "no request with the id" in nobody.stderr, nobody
    shown = subprocess.run([binary, "log", "show", folder], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and 'of "east" ran' in shown.stdout and 'id "scan-9"' in shown.stdout, shown


def test_the_log_has_the_last_requests_of_a_frontend_that_stops(cluster, binary):
    frontend, folder = cluster
    assert infer(frontend, body={**DIGIT, "id": "last"}).status_code == 200
    frontend.terminate()
    assert frontend.wait_end() == 0
    # It ended early, as it was told.
    frontend.was_killed = True
    told = why(binary, "last", folder=folder)
    assert told.returncode == 0 and "in time" in told.stdout, told
