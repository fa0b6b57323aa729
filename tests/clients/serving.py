"""A Downbeat server under test, as a process."""
import contextlib
import itertools
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import time

import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# Loading measures a profile of each model; a loaded machine takes its time.
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60


def onnxruntime_library():
    """The shared library inside the onnxruntime wheel that the tests compare with."""
    import onnxruntime

    found = sorted((pathlib.Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    assert found, "the onnxruntime wheel has no libonnxruntime.so"
    return found[0]


LOWEST_PORT = 10_000


def _ports():
    """Ports below the range from which the kernel gives out free ports. The first one differs by
    process."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        count = int(file.read().split()[0]) - LOWEST_PORT
    for number in itertools.count(os.getpid() * 1_009):
        yield LOWEST_PORT + number % count


PORTS = _ports()


def is_free(port):
    """Whether nothing listens on a port of the loopback interface."""
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count):
    """Ports without a listener. No process of another test takes such a port before the test's
    server does."""
    return list(itertools.islice(filter(is_free, PORTS), count))


def environment(folder, engine="onnxruntime"):
    """The environment of a server: a cache of its own, and the onnxruntime wheel's library or none."""
    # No load balancer has to learn that a server of a test ends.
    env = dict(os.environ, XDG_CACHE_HOME=str(folder / "cache"), NO_COLOR="1", DOWNBEAT_SHUTDOWN_GRACE="0")
    env.pop("ORT_DYLIB_PATH", None)
    if engine == "onnxruntime":
        env["ORT_DYLIB_PATH"] = str(onnxruntime_library())
    return env


class Server:
    """`downbeat serve`, or the process of another `role` of a cluster, on free ports of the
    loopback interface. `limits` bound the process: {resource.RLIMIT_...: number}. `library`:
    whether ONNX Runtime's library can be found also where `engine` is another."""

    def __init__(self, binary, repository, folder, *flags, engine="onnxruntime", wait=True, limits=None, role="serve", library=False):
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.repository = pathlib.Path(repository)
        self.was_killed = False
        self.log_path = folder / f"server-{self.http_port}.log"
        models = [str(repository), "--engine", engine] if role in ("serve", "backend") else []
        command = [str(binary), role, *models, "--host", "127.0.0.1", "--http-port", str(self.http_port),
                   "--grpc-port", str(self.grpc_port), "--metrics-port", str(self.metrics_port), *flags]

        def limit():
            for kind, most in (limits or {}).items():
                resource.setrlimit(kind, (most, most))

        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                            env=environment(folder, "onnxruntime" if library else engine), cwd=folder, preexec_fn=limit if limits else None)
        if wait:
            self.wait_ready()

    @property
    def http(self):
        """Host and port, as tritonclient wants them."""
        return f"127.0.0.1:{self.http_port}"

    @property
    def url(self):
        return f"http://{self.http}"

    @property
    def grpc(self):
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def log(self):
        return self.log_path.read_text(errors="replace")

    def wait_ready(self):
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/v2/health/ready", timeout=10).status_code == 200:
                    return
            time.sleep(0.02)
        self.process.kill()
        raise AssertionError(f"the server was not ready after {START_TIMEOUT_S} s:\n{self.log}")

    def metrics(self):
        """The metrics page, as {name: [(labels, value)]}. (prometheus_client's own parser renames Triton's counters.)"""
        text = requests.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10).text
        found = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()
                found.setdefault(name, []).append((dict(re.findall(r'(\w+)="([^"]*)"', labels or "")), float(value)))
        return found

    def metric(self, name, **labels):
        """The sum of the samples of `name` whose labels include `labels`."""
        return sum(value for found, value in self.metrics().get(name, []) if labels.items() <= found.items())

    def leave_during_work(self, request):
        """Sends a request and leaves before its answer, until the server says that it ended the work on it early. A client that leaves too early has no
        work begun, so that each try waits longer."""
        name, pause, deadline = "downbeat_work_abandoned_total", 0.01, time.monotonic() + START_TIMEOUT_S
        before = self.metric(name)
        while self.metric(name) == before:
            assert time.monotonic() < deadline, "the work went on for a client that had left"
            with socket.create_connection(("127.0.0.1", self.http_port), timeout=60) as client:
                client.sendall(request)
                time.sleep(pause)
            pause *= 1.3
            # Nothing of the request is held any more.
            while self.metric("downbeat_in_flight_bytes") > 0:
                assert time.monotonic() < deadline, "the request is held for a client that has left"
                time.sleep(0.02)

    def memory_bytes(self, field="VmRSS"):
        """The process's memory; with `VmHWM` the most that it ever had."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{field}:\s+(\d+) kB", status).group(1)) * 1024

    def memory_mib(self, field="VmRSS"):
        """The same in whole MiB."""
        return self.memory_bytes(field) >> 20

    def threads(self):
        """The threads of the process: {number: (name, times that it was given a core)}."""
        found = {}
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            # A thread may end meanwhile.
            with contextlib.suppress(OSError):
                status = (task / "status").read_text()
                switches = re.findall(r"ctxt_switches:\s+(\d+)", status)
                found[int(task.name)] = (re.search(r"Name:\s+(.*)", status).group(1), sum(map(int, switches)))
        return found

    def children(self):
        """The numbers of the processes that this one has started and that have not ended."""
        found = []
        for file in pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            # A thread may end meanwhile.
            with contextlib.suppress(OSError):
                found += map(int, file.read_text().split())
        return found

    def open_files(self):
        """What the process has open: paths, and names of pipes and sockets."""
        names = []
        for link in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir():
            # A file may be closed meanwhile.
            with contextlib.suppress(FileNotFoundError):
                names.append(os.readlink(link))
        return names

    def rest(self, quiet_s=2, within_s=120):
        """Waits until no thread has had a core for a while; the threads then."""
        deadline, before = time.monotonic() + within_s, None
        while time.monotonic() < deadline:
            threads = self.threads()
            if threads == before:
                return threads
            before = threads
            time.sleep(quiet_s)
        raise AssertionError(f"the server does not rest: {self.threads()} after {before}")

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait_end(self):
        """Waits until the server has ended; its exit status."""
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not end {STOP_TIMEOUT_S} s after SIGTERM:\n{self.log}") from None

    def kill(self):
        """SIGKILL, which is no fault of the server."""
        self.process.kill()
        self.process.wait()
        self.was_killed = True

    def stop(self):
        """SIGTERM; a clean end is expected."""
        if self.was_killed:
            return
        assert self.process.poll() is None, f"the server ended early with {self.process.returncode}:\n{self.log}"
        self.terminate()
        status = self.wait_end()
        assert status == 0, f"exit status {status}:\n{self.log}"
        assert "panicked" not in self.log, self.log

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.stop()
        elif self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            print(self.log)


@contextlib.contextmanager
def cluster(binary, repository, folder, *flags, models):
    """A scheduler, a backend with these flags, and a frontend that serves these models of it, which is given."""
    with processes(binary, repository, folder, *flags, models=models, lost_after_ms=10_000) as (_, _, (frontend,)):
        yield frontend


@contextlib.contextmanager
def processes(binary, repository, folder, *flags, models, backends=1, frontends=1, engine="onnxruntime", spares=0, keys=None, lost_after_ms=1000):
    """A cluster: its scheduler (with `spares`: the list of all), its backends with these flags, and its frontends, which serve these models. Clients of
    frontends may need a key (`keys`: the file of keys, and a key with the scope `read`). A request that may not run twice ends with an error if its
    backend is silent for `lost_after_ms`. Tests that stop no process choose a long time, since a busy machine stops them."""
    apart = ("--schedulers", ",".join(f"127.0.0.1:{port}" for port in free_ports(1 + spares)), "--lost-after-ms", str(lost_after_ms))
    with contextlib.ExitStack() as stack:
        def start(*more, **options):
            return stack.enter_context(Server(binary, repository, folder, *apart, *more, **options))

        schedulers = [start("--rank", str(rank), role="scheduler", wait=False) for rank in range(1 + spares)]
        # They load side by side.
        backends = [start(*flags, engine=engine, role="backend", wait=False) for _ in range(backends)]
        of_frontends, headers = (("--api-keys", keys[0]), {"Authorization": f"Bearer {keys[1]}"}) if keys else ((), {})
        frontends = [start("--listen", "127.0.0.1:0", *of_frontends, role="frontend", wait=False) for _ in range(frontends)]
        for process in [*schedulers, *backends, *frontends]:
            process.wait_ready()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(requests.get(f"{frontend.url}/v2/models/{model}/ready", headers=headers, timeout=10).status_code == 200 for frontend in frontends for model in models):
            assert time.monotonic() < deadline, [frontend.log for frontend in frontends]
            time.sleep(0.02)
        yield schedulers if spares else schedulers[0], backends, frontends
