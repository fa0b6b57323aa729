"""Backends on Ray follow the scheduler's advice, and Ray's autoscaler adds nodes for them and takes the nodes away."""
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import types

import emulated
import psutil
import pytest
from ray_cluster import COMMON, PATIENCE_S, members, needs_ray, package, until, whole  # noqa: F401
from serving import environment
from test_autoscale import LATENCY, OPTIONS, load

# The provider of nodes that Ray has for tests expects the head at this port.
PORT = 6379
STORE = 80 << 20
SETUP = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")


def node_type(resources, most):
    return {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": most}


def configuration():
    """A head without room for backends, and nodes with room for one. `ray.cluster_utils.AutoscalingCluster` reads a file that Ray's wheel lacks,
    and ends all other clusters of the machine."""
    return {
        "cluster_name": "test", "max_workers": 3, "upscaling_speed": 1.0, "idle_timeout_minutes": 0.2, "head_node_type": "ray.head.default", "auth": {}, "docker": {},
        "provider": {"type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True, "disable_launch_config_check": True},
        "available_node_types": {"ray.head.default": node_type({"CPU": 2}, 0), "backend": node_type({"CPU": 1, "object_store_memory": STORE}, 3)},
        "file_mounts": {}, "file_mounts_sync_continuously": False, "cluster_synced_files": [], "rsync_exclude": [], "rsync_filter": [],
        **{f"{name}_commands": [] for name in SETUP},
    }


def end(process):
    """Ends the head, and the nodes that it has started."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    for its in [process, *family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            its.kill()
    process.wait()


@pytest.fixture
def autoscaling(package, binary, tmp_path):  # noqa: F811
    """A Ray cluster of one node whose autoscaler adds nodes, as many as three."""
    import ray

    with socket.socket() as s:
        assert s.connect_ex((ray.util.get_node_ip_address(), PORT)) != 0, f"a Ray cluster or another program has port {PORT}: end it for this test"
    (tmp_path / "cluster.json").write_text(json.dumps(configuration()))
    command = [str(pathlib.Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={PORT}", "--num-cpus=2",
               f"--object-store-memory={STORE}", "--include-dashboard=false", f"--autoscaling-config={tmp_path / 'cluster.json'}"]
    own = {**environment(tmp_path, "rten"), "DOWNBEAT_BIN": str(binary), "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    with open(tmp_path / "ray.log", "wb") as log:
        head = subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        until(lambda: is_up(head, tmp_path / "ray.log"), "Ray's head is up")
        yield ray
    finally:
        ray.shutdown()
        end(head)


def is_up(head, log):
    import ray

    assert head.poll() is None, log.read_text()
    # `ray start --block` says so once all processes of the head are there.
    if "This command will now block" not in log.read_text():
        return False
    with contextlib.suppress(ConnectionError, ray.exceptions.RayError):
        ray.init(f"{ray.util.get_node_ip_address()}:{PORT}", log_to_driver=False)
        return True


def alive(ray):
    return sum(node["Alive"] for node in ray.nodes())


@needs_ray
def test_backends_and_nodes_follow_the_load_up_and_down(autoscaling, package, binary, tmp_path):  # noqa: F811
    emulated.write(tmp_path / "models", "resnet", LATENCY)
    (tmp_path / "options.toml").write_text(OPTIONS)
    with pytest.raises(package.DeployError, match="free in the Ray cluster: nothing|a backend needs 8 CPU"):
        package.deploy(tmp_path / "models", cpus_per_backend=8, **COMMON)
    app = package.deploy(
        tmp_path / "models", schedulers=1, backends=1, max_backends=3, scale_every_s=1, scale_down_after_s=3, wait_for_nodes=True,
        scheduler_args=["--config", tmp_path / "options.toml"], **COMMON,
        backend_args=["--engine", "emulated", "--slo-ms", "resnet=1000", "--scheduler", "deferred"],
    )
    try:
        frontend = types.SimpleNamespace(http=app.address)
        assert alive(autoscaling) == 2
        with load(binary, frontend, 120):
            until(lambda: len(members(app, "backend")) >= 2 and whole(app), lambda: app.status())
            most = alive(autoscaling)
            assert most >= 3
        with load(binary, frontend, 20):
            until(lambda: alive(autoscaling) < most, lambda: app.status())
    finally:
        app.shutdown()
