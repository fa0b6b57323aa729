"""A controller with the algorithm of Kubernetes' autoscaler starts and stops backends of a real cluster, by the scheduler's advice."""
import contextlib
import math
import subprocess
import time

import emulated
from downbeat.autoscaler import Hpa, published
from serving import Server, free_ports

# The time of ResNet-50 in Symphony's table 2, ten times as slow: with the SLO of a second a device does 85 requests a second.
LATENCY = "alpha_ms = 10.53\nbeta_ms = 50.72\nmax_batch = 80\n"
# Shorter windows than the defaults, so that the test takes seconds.
OPTIONS = """
[autoscale]
grow_window_s = 3
shrink_window_s = 5
max_devices = 4
"""
PATIENCE_S = 120


class Loop:
    """The autoscaler, which looks each second, and its backends, which end with this."""

    def __init__(self, start, scheduler):
        self.start, self.scheduler = start, scheduler
        self.hpa, self.backends, self.begin = Hpa(most=4, down_window_s=3), [start()], time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for backend in self.backends:
            backend.stop()

    def look(self):
        devices, wanted = (self.scheduler.metric(f"downbeat_{name}") for name in ("devices", "autoscale_devices"))
        pods = self.hpa.sync(time.monotonic() - self.begin, len(self.backends), published(devices, wanted))
        while len(self.backends) < pods:
            self.backends.append(self.start())
        while len(self.backends) > pods:
            # As Kubernetes: the youngest first, by SIGTERM. It finishes what it has.
            self.backends.pop().stop()

    def until(self, condition, what):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {len(self.backends)} backends; {self.scheduler.log[-2000:]}"
            time.sleep(1)
            self.look()


@contextlib.contextmanager
def load(binary, frontend, rate):
    """So many requests a second, until the end of the block."""
    command = [str(binary), "bench", "-m", "resnet", "-u", frontend.http, "--rate", str(rate), "-d", "600", "-w", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def test_backends_follow_the_load_up_and_down(binary, tmp_path):
    models = tmp_path / "models"
    emulated.write(models, "resnet", LATENCY)
    (tmp_path / "options.toml").write_text(OPTIONS)
    (port,) = free_ports(1)
    apart = ("--schedulers", f"127.0.0.1:{port}")
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(Server(binary, models, tmp_path, *apart, "--config", str(tmp_path / "options.toml"), role="scheduler", wait=False))

        def start():
            flags = ("--slo-ms", "resnet=1000", "--scheduler", "deferred")
            return Server(binary, models, tmp_path, *apart, *flags, engine="emulated", role="backend", wait=False)

        loop = stack.enter_context(Loop(start, scheduler))
        frontend = stack.enter_context(Server(binary, models, tmp_path, *apart, "--listen", "127.0.0.1:0", role="frontend"))
        outcomes = lambda: [frontend.metric("downbeat_slo_requests_total", outcome=outcome) for outcome in ("in_time", "missed")]

        def good_lately():
            """Of at least 200 requests since the last call, 99% were in time."""
            nonlocal before
            good, bad = (now - then for now, then in zip(outcomes(), before))
            if good + bad < 200:
                return False
            before = outcomes()
            return good >= 0.99 * (good + bad)

        with load(binary, frontend, 60):
            loop.until(lambda: math.isfinite(scheduler.metric("downbeat_autoscale_devices")), "the advice")
        with load(binary, frontend, 120):
            loop.until(lambda: scheduler.metric("downbeat_devices") >= 2, "more devices")
            before = outcomes()
            loop.until(good_lately, "requests in time")
        most = len(loop.backends)
        with load(binary, frontend, 20):
            loop.until(lambda: len(loop.backends) < most, "fewer devices")
            loop.until(lambda: scheduler.metric("downbeat_devices") == len(loop.backends), "the scheduler sees it")
