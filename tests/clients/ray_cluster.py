"""What the tests on Ray share."""
import importlib.util
import os
import time

import pytest
from serving import ROOT

PACKAGE = ROOT / "packaging/wheel/python"
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY and os.environ.get("DOWNBEAT_REQUIRE_RAY") != "1", reason="needs Ray: see tests/clients/requirements-ray.txt")
PATIENCE_S = 180
# The machine is shared: small object stores, no dashboard.
NODE = {"num_cpus": 6, "object_store_memory": 80 << 20}
# Ray looks at each node each second, and gives it ten.
SYSTEM = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 10}
# Any free ports, and an engine that needs no library. A short grace: no load balancer has to learn that a server ends.
COMMON = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "ready_timeout_s": PATIENCE_S, "env": {"DOWNBEAT_SHUTDOWN_GRACE": "1"}}
RTEN = ["--engine", "rten", "--max-queue-wait", "120"]


def until(condition, what):
    """Waits for a condition; its value."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def package():
    """The module `downbeat.ray`, and what processes of Ray inherit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PACKAGE)
        patch.setenv("PYTHONPATH", str(PACKAGE))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # On a busy machine a node takes its time.
        patch.setenv("RAY_raylet_start_wait_time_s", str(PATIENCE_S))
        import downbeat.ray

        yield downbeat.ray


def members(app, role=None):
    return [member for member in app.status()["members"] if role in (None, member["role"])]


def whole(app):
    """Whether all processes run and know each other."""
    return app.status()["state"] == "ready"
