"""Probes that tell the truth: the answers at the health port of each role, by the chart's own paths, while models are
loaded, while parts of a cluster are away, while the process hangs, and while it drains."""
import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import time

import pytest
import requests

import models
from chart import container, objects, role_of, workloads
from serving import START_TIMEOUT_S, environment, free_ports

# A kubelet waits so long for an answer unless a probe says otherwise.
PROBE_TIMEOUT_S = 1
LIVE, READY = "/v2/health/live", "/v2/health/ready"


def of_chart(role):
    """The probes of a role in the chart."""
    its, = [container(workload) for workload in workloads(objects({"mode": "single" if role == "serve" else "cluster"})) if role_of(workload) == role]
    return {kind: its[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}


class Probed:
    """A role with a health port."""

    def __init__(self, binary, folder, role, *flags, repository=None, grace=0):
        self.probes = of_chart(role)
        self.http, self.health = free_ports(2)
        command = [binary, role, "--host=127.0.0.1", f"--http-port={self.http}", f"--health-port={self.health}", "--grpc-port=off", "--metrics-port=off",
                   f"--shutdown-grace={grace}", *flags, *(["--engine=rten", str(repository)] if repository else [])]
        self.log = folder / f"{role}-{self.http}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment(folder, "rten"), cwd=folder)

    def asks(self, kind, timeout=60):
        """The status by which a kubelet judges this probe; None if the port does not answer."""
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"http://127.0.0.1:{self.health}{self.probes[kind]['httpGet']['path']}", timeout=timeout).status_code

    def wait(self, kind, status):
        until = time.monotonic() + START_TIMEOUT_S
        while self.asks(kind) != status:
            assert self.process.poll() is None and time.monotonic() < until, f"{kind} is {self.asks(kind)}, not {status}:\n{self.log.read_text()}"
            time.sleep(0.02)

    def end(self):
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log.read_text()


@pytest.fixture
def probed(binary, tmp_path):
    running = []

    def start(role, *flags, **options):
        running.append(Probed(binary, tmp_path, role, *flags, **options))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_the_probes_of_all_roles_ask_what_they_are_for():
    for role in ("serve", "frontend", "scheduler", "backend"):
        probes = of_chart(role)
        assert {kind: probe["httpGet"] for kind, probe in probes.items()} == {
            "startup": {"path": LIVE, "port": "health"}, "liveness": {"path": LIVE, "port": "health"}, "readiness": {"path": READY, "port": "health"}}
        assert all(probe.get("timeoutSeconds", PROBE_TIMEOUT_S) == PROBE_TIMEOUT_S for probe in probes.values())


@pytest.mark.parametrize("role", ["serve", "backend"])
def test_while_models_are_loaded_a_process_is_live_and_unready(probed, repository, role):
    """The load of `endless` tries the model, which takes half an hour."""
    models.add(repository, "one", 1)
    models.loop(repository, "endless", trips=2_000_000_000)
    apart = [f"--schedulers=127.0.0.1:{free_ports(1)[0]}"] if role == "backend" else []
    one = probed(role, *apart, "--load-run-timeout=3600", repository=repository)
    one.wait("startup", 200)
    for _ in range(20):
        assert one.asks("readiness") == 503 and one.asks("liveness") == 200
        time.sleep(0.1)


def test_a_broken_model_and_an_empty_folder_stay_unready(probed, repository):
    one = probed("serve", repository=repository)
    one.wait("startup", 200)
    models.unsupported(repository)
    other = probed("serve", repository=repository)
    other.wait("startup", 200)
    for _ in range(20):
        assert [server.asks("readiness") for server in (one, other)] == [503, 503]
        assert [server.asks("liveness") for server in (one, other)] == [200, 200]
        time.sleep(0.1)


def test_each_role_of_a_cluster_is_ready_when_it_can_do_its_part(probed, repository):
    models.add(repository, "one", 1)
    (port,) = free_ports(1)
    apart = f"--schedulers=127.0.0.1:{port}"
    frontend = probed("frontend", apart, "--listen=127.0.0.1:0", grace=3)
    frontend.wait("startup", 200)
    assert frontend.asks("readiness") == 503 and frontend.asks("liveness") == 200
    backend = probed("backend", apart, repository=repository, grace=3)
    backend.wait("startup", 200)
    scheduler = probed("scheduler", apart, f"--listen=127.0.0.1:{port}", grace=3)
    scheduler.wait("readiness", 200)
    backend.wait("readiness", 200)
    frontend.wait("readiness", 200)
    assert requests.post(f"http://127.0.0.1:{frontend.http}/v2/models/one/infer", timeout=60,
                         json={"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).status_code == 200
    # Without a scheduler a frontend takes no request, and nothing that restarts it would help.
    scheduler.process.kill()
    frontend.wait("readiness", 503)
    assert frontend.asks("liveness") == 200 and backend.asks("liveness") == 200


@pytest.mark.parametrize("role", ["serve", "frontend", "scheduler", "backend"])
def test_a_role_that_drains_is_live_and_unready(probed, repository, role):
    models.add(repository, "one", 1)
    (port,) = free_ports(1)
    apart = f"--schedulers=127.0.0.1:{port}"
    if role == "serve":
        one = probed("serve", repository=repository, grace=5)
    else:
        all_of = {"scheduler": probed("scheduler", apart, f"--listen=127.0.0.1:{port}", grace=5), "backend": probed("backend", apart, repository=repository, grace=5),
                  "frontend": probed("frontend", apart, "--listen=127.0.0.1:0", grace=5)}
        one = all_of[role]
    one.wait("readiness", 200)
    one.process.terminate()
    # Ready for no moment longer than the signal takes; never "not live", which would cut the drain short.
    seen = []
    while one.process.poll() is None:
        seen.append((one.asks("readiness"), one.asks("liveness")))
    assert one.process.returncode == 0, one.log.read_text()
    assert all(live in (200, None) for _, live in seen), seen
    ready = [ready for ready, _ in seen]
    assert 200 not in ready[next((at for at, status in enumerate(ready) if status != 200), len(ready)):], seen
    if role in ("serve", "frontend"):
        assert 503 in ready, seen


def is_stopped(pid):
    """Whether all threads of a process have stopped, which they do one after another."""
    with contextlib.suppress(FileNotFoundError):
        return all(stat.read_text().rpartition(") ")[2][0] == "T" for stat in pathlib.Path(f"/proc/{pid}/task").glob("*/stat"))
    # A thread has ended meanwhile.
    return False


def test_a_stopped_process_answers_no_probe(probed, repository):
    models.add(repository, "one", 1)
    one = probed("serve", repository=repository)
    one.wait("readiness", 200)
    one.process.send_signal(signal.SIGSTOP)
    while not is_stopped(one.process.pid):
        time.sleep(0.01)
    try:
        assert one.asks("liveness", PROBE_TIMEOUT_S) is None and one.asks("readiness", PROBE_TIMEOUT_S) is None
    finally:
        one.process.send_signal(signal.SIGCONT)
    one.wait("liveness", 200)
    one.wait("readiness", 200)


SEIZE, INTERRUPT, DETACH, ALL_THREADS = 0x4206, 0x4207, 17, 0x40000000


def name_of(task):
    """The name of a thread; none of a thread that has ended meanwhile."""
    with contextlib.suppress(OSError):
        return (task / "comm").read_text().strip()


@contextlib.contextmanager
def stopped(process, name):
    """Stops the threads of a process that have this name, by ptrace, and lets them go on afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long

    def ptrace(request, task):
        assert libc.ptrace(request, task, None, None) == 0, os.strerror(ctypes.get_errno())

    held = []
    try:
        for task in pathlib.Path(f"/proc/{process.pid}/task").iterdir():
            if name_of(task) == name:
                ptrace(SEIZE, int(task.name))
                held.append(int(task.name))
                ptrace(INTERRUPT, int(task.name))
                os.waitpid(int(task.name), ALL_THREADS)
        assert held, f"no thread is called {name}"
        yield
    finally:
        for task in held:
            ptrace(DETACH, task)


@pytest.mark.parametrize(("role", "name"), [("serve", "frontend"), ("serve", "server"), ("scheduler", "server")])
def test_a_process_whose_event_loops_hang_is_not_live(probed, repository, role, name):
    """The health port has a thread of its own, which still answers then."""
    models.add(repository, "one", 1)
    (port,) = free_ports(1)
    one = probed("serve", repository=repository) if role == "serve" else probed("scheduler", f"--schedulers=127.0.0.1:{port}", f"--listen=127.0.0.1:{port}")
    one.wait("readiness", 200)
    with stopped(one.process, name):
        one.wait("liveness", 503)
        assert one.asks("readiness") == 503
    one.wait("liveness", 200)
    one.wait("readiness", 200)
    assert "an event loop hangs" in one.log.read_text()
    one.end()


def test_roles_whose_state_machine_hangs_are_not_live(probed, repository):
    """The thread `node` decides. Other threads answer clients and probes, and go on."""
    models.add(repository, "one", 1)
    (port,) = free_ports(1)
    apart = f"--schedulers=127.0.0.1:{port}"
    roles = [probed("scheduler", apart, f"--listen=127.0.0.1:{port}"), probed("frontend", apart, "--listen=127.0.0.1:0"), probed("backend", apart, repository=repository)]
    for one in roles:
        one.wait("readiness", 200)
    with contextlib.ExitStack() as hung:
        for one in roles:
            hung.enter_context(stopped(one.process, "node"))
        # The first probe asks the threads for a sign of life. All have the same time for it.
        assert [one.asks("liveness") for one in roles] == [200] * 3
        for one in roles:
            one.wait("liveness", 503)
        assert [one.asks("readiness") for one in roles] == [503] * 3
    for one in roles:
        one.wait("liveness", 200)
        assert "the role's own thread hangs" in one.log.read_text()
    for one in roles:
        one.wait("readiness", 200)
    for one in reversed(roles):
        one.end()
