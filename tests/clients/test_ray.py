"""Downbeat on Ray: three nodes of a Ray cluster on this machine, and what dies on them."""
import contextlib
import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys

import models
import pytest
import requests
from ray_cluster import COMMON, NODE, PACKAGE, PATIENCE_S, RTEN, SYSTEM, members, needs_ray, package, until, whole  # noqa: F401
from ray_load import Load
from serving import EXAMPLES, environment

@pytest.fixture(scope="module")
def cluster(package, binary, tmp_path_factory):
    """A Ray cluster of three nodes. All are on this machine, and have its address."""
    import ray
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment(folder, "rten"), "DOWNBEAT_BIN": str(binary)}.items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": SYSTEM})
        try:
            for _ in range(2):
                cluster.add_node(**NODE)
            ray.init(cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    models.identity(folder, "INT32")
    return folder


@pytest.fixture(scope="module")
def deployed(package, cluster, repository):
    """Two of each role, which the tests share."""
    app = package.deploy(repository, name="counted", frontends=2, schedulers=2, backends=2, backend_args=RTEN, **COMMON)
    yield app
    app.shutdown()


@pytest.fixture
def app(cluster, deployed):
    """The shared app, whole again after what another test has killed."""
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(**NODE)
    deployed.scale(backends=2, timeout_s=PATIENCE_S)
    return deployed


def more(load, count=50):
    """Waits for more answers, so that a fault meets requests before and after it."""
    before = load.count()
    until(lambda: load.count() >= before + count, lambda: f"{load.count() - before} answers; {load.refused}, {load.tried_again} tried again")


def leader(app):
    """The scheduler that a frontend follows."""
    rank = requests.get(f"http://{app.address}/v2/cluster", timeout=30).json()["leader"]
    return next(member for member in members(app, "scheduler") if member["name"] == f"scheduler-{rank}")


def restarted(app, member):
    """Whether the process of a member was replaced by another, and all is well again."""
    return whole(app) and next(its for its in members(app) if its["name"] == member["name"])["pid"] != member["pid"]


@needs_ray
def test_the_cluster_answers_and_its_roles_are_on_several_nodes(package, cluster):
    app = package.deploy(EXAMPLES / "models", frontends=2, schedulers=2, backends=2, backend_args=RTEN, **COMMON)
    try:
        for address in app.addresses:
            answer = requests.post(f"http://{address}/v2/models/digits/infer", data=(EXAMPLES / "digit.json").read_bytes(), timeout=60)
            assert answer.json()["outputs"][0]["data"][0].endswith(":7:seven"), answer.text
        for role in ("scheduler", "frontend", "backend"):
            nodes = {member["node"] for member in members(app, role)}
            assert len(nodes) == 2, f"both processes of the role {role} are on the node {nodes}"
        with pytest.raises(package.DeployError, match="runs already"):
            package.deploy(EXAMPLES / "models", **COMMON)
        for member in members(app):
            check_secret(command_line(member["pid"]))
        shown = subprocess.run([sys.executable, "-m", "downbeat.ray", "status"], env={**os.environ, "RAY_ADDRESS": cluster.address}, capture_output=True, text=True, timeout=PATIENCE_S)
        assert "  backends: 2 of 2 ready\n    backend-0: ready at" in shown.stdout, shown
    finally:
        app.shutdown()
    assert "downbeat" not in package.running()


def command_line(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def check_secret(arguments):
    """A process gets its secret by a file that other users cannot read."""
    file = pathlib.Path(arguments[arguments.index("--cluster-secret") + 1])
    assert stat.filemode(file.stat().st_mode) == "-rw-------"
    assert file.read_text().strip() not in arguments


@needs_ray
def test_a_killed_scheduler_or_backend_costs_no_request_and_a_frontend_only_its_connections(app):
    with Load(app.addresses) as load:
        more(load)
        for victim in (leader(app), members(app, "backend")[0]):
            os.kill(victim["pid"], signal.SIGKILL)
            more(load)
            until(lambda: restarted(app, victim), lambda: app.status())
        # A backend's actor: its process finishes its work, and another starts.
        victim = members(app, "backend")[1]
        os.kill(victim["actor_pid"], signal.SIGKILL)
        until(lambda: restarted(app, victim), lambda: app.status())
        more(load)
        assert load.tried_again == 0
        victim = members(app, "frontend")[0]
        os.kill(victim["pid"], signal.SIGKILL)
        until(lambda: restarted(app, victim), lambda: app.status())
        assert victim["http"] in app.addresses, "the frontend is at its address again"
        more(load)
    load.check()


def kill_node(cluster, app, node):
    """Ends a node as if it lost power: processes of Downbeat do not finish their work, Ray does not say goodbye."""
    for member in members(app):
        if member["node"] == node.node_id:
            os.kill(member["pid"], signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


@needs_ray
def test_a_killed_node_costs_no_request_and_its_roles_move(app, cluster):
    old = [member["http"] for member in members(app, "scheduler")]
    victim = next(node for node in cluster.worker_nodes if any(its["node"] == node.node_id for its in members(app, "scheduler")))
    with Load(app.addresses) as load:
        more(load)
        kill_node(cluster, app, victim)
        more(load)
        until(lambda: whole(app) and victim.node_id not in {its["node"] for its in members(app)}, lambda: app.status())
        load.addresses = app.addresses
        more(load)
        # The scheduler that stayed goes. If the others did not know the one that moved, they had none.
        stayed = next(member for member in members(app, "scheduler") if member["node"] != victim.node_id and member["http"] in old)
        os.kill(stayed["pid"], signal.SIGKILL)
        more(load)
        until(lambda: restarted(app, stayed), lambda: app.status())
    load.check()


@needs_ray
def test_backends_come_and_go_by_scale_and_no_request_is_lost(app):
    with Load(app.addresses) as load:
        more(load)
        app.scale(backends=3)
        assert len(members(app, "backend")) == 3
        more(load)
        app.scale(backends=1)
        assert [member["name"] for member in members(app, "backend")] == ["backend-0"]
        more(load)
    load.check()
    assert load.tried_again == 0


@needs_ray
def test_a_killed_controller_finds_its_members_again(app):
    import ray

    def is_another():
        # Ray refuses calls while it starts the actor.
        with contextlib.suppress(ray.exceptions.RayError):
            return app.status()["controller_pid"] != before["controller_pid"] and whole(app)

    before = app.status()
    os.kill(before["controller_pid"], signal.SIGKILL)
    until(is_another, "the controller is there again")
    names = lambda members: {member["name"]: member["pid"] for member in members}
    assert names(members(app)) == names(before["members"])


@needs_ray
@pytest.mark.parametrize("arguments, error", [
    ({"repository": "/no/such/folder"}, "there is no /no/such/folder: a local model repository has to be on each node"),
    ({"program": "/no/downbeat"}, r"there is no program at /no/downbeat, which deploy\(program=...\) names"),
    ({"gpus_per_backend": 2}, "a backend needs 1 CPU and 2 GPU, and the 3 nodes of the Ray cluster have at most 6 CPU, at most 0 GPU each"),
    ({"scheduler_args": ["--no-such-flag"]}, r"scheduler-\d: the process ended with status 2\n.*unexpected argument '--no-such-flag'"),
    ({"backend_args": ["--host", "::"]}, "backend_args has --host, which deploy gives itself"),
    ({"backends": 0}, "backends is 0; it has to be a whole number, at least 1"),
    ({"repository": ""}, "the model repository is an empty text"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_an_app_that_cannot_run_says_why_and_leaves_nothing(package, cluster, repository, arguments, error):
    with pytest.raises((package.DeployError, ValueError), match=f"(?s){error}"):
        package.deploy(**{"repository": repository, "schedulers": 1, **COMMON, **arguments})
    assert "downbeat" not in package.running()


@needs_ray
def test_a_port_in_use_is_named(package, cluster, repository):
    import ray

    with socket.socket() as other:
        other.bind((ray.util.get_node_ip_address(), 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(package.DeployError, match=f"(?s)frontend-0: port {port} of .* is in use by another program.*http_port=0"):
            package.deploy(repository, schedulers=1, **{**COMMON, "http_port": port})


def test_without_ray_the_error_says_what_to_install():
    program = "import sys; sys.modules['ray'] = None; import downbeat.ray"
    ended = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(PACKAGE)}, capture_output=True, text=True)
    assert "downbeat.ray needs Ray, which is not installed" in ended.stderr and "pip install 'downbeat-server[ray]'" in ended.stderr


def test_an_old_ray_is_refused_by_its_version():
    program = "import sys, types; sys.modules['ray'] = types.SimpleNamespace(__version__='2.9.3'); import downbeat.ray"
    ended = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(PACKAGE)}, capture_output=True, text=True)
    assert "2.9.3 is installed. Upgrade it" in ended.stderr, ended.stderr
