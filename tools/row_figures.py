"""How soon a server is ready, and what a model loses that is no longer batched.

    python tools/row_figures.py BINARY ready MODELS            # first and second start of each model, seconds
    python tools/row_figures.py BINARY batches MODELS NAME...  # requests/s of a model as decided, and with batching = "always"
    python tools/row_figures.py OLD,NEW turns MODELS mlp       # requests/s and latency of builds in turns
    python tools/row_figures.py BINARY isolated MODELS mlp     # processes, threads and memory of ten models

Every figure is a median of `--turns` turns. The profile cache of each model is its own, and empty at its first start.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

START_WITHIN_S = 300


class Server:
    """A server on a repository, on free ports."""

    def __init__(self, binary, repository, cache, *flags):
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [binary, "serve", "--model-repository", repository, "--host", "127.0.0.1", "--http-port", "0"]
        command += ["--grpc-port", "0", "--metrics-port", "off", "--log-format", "json", "--profile-cache", cache, *flags]
        self.begin = time.monotonic()
        environment = {**os.environ, "DOWNBEAT_SHUTDOWN_GRACE": "0"}
        self.process = subprocess.Popen(command, stderr=self.log, env=environment)
        self.ports = {}
        while {"HTTP", "gRPC"} - set(self.ports):
            self.check()
            for line in Path(self.log.name).read_text().splitlines():
                fields = json.loads(line).get("fields", {}) if line.startswith("{") else {}
                if fields.get("message") in ("HTTP", "gRPC") and "address" in fields:
                    self.ports[fields["message"]] = fields["address"]
            time.sleep(0.002)

    def check(self):
        late = time.monotonic() - self.begin > START_WITHIN_S
        if late or self.process.poll() is not None:
            raise SystemExit(f"the server did not start:\n{Path(self.log.name).read_text()[-2000:]}")

    def get(self, path):
        with urllib.request.urlopen(f"http://{self.ports['HTTP']}{path}") as answer:
            return json.load(answer) if path.endswith("config") else answer.read()

    def ready(self):
        """Seconds from the start to ready; `None` if a model does not load."""
        while True:
            self.check()
            try:
                self.get("/v2/health/ready")
                return time.monotonic() - self.begin
            except urllib.error.HTTPError:
                if '"not loaded"' in Path(self.log.name).read_text():
                    return None
                time.sleep(0.002)

    def stop(self):
        self.process.terminate()
        self.process.wait()


def one_model(models, name, into):
    """A repository of one model."""
    shutil.copytree(Path(models) / name, Path(into) / name)
    return str(into)


def ready(binary, models, turns):
    for name in sorted(os.listdir(models)):
        if not (Path(models) / name).is_dir():
            continue
        starts = [[], []]
        rows = "does not load"
        for _ in range(turns):
            with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
                repository = one_model(models, name, folder)
                for start in starts:
                    server = Server(binary, repository, cache)
                    start.append(server.ready())
                    if start[-1] is not None:
                        parameters = server.get(f"/v2/models/{name}/config").get("parameters", {})
                        rows = parameters.get("downbeat_rows", {}).get("string_value", "not batched by its shapes")
                    server.stop()
        said = [f"{statistics.median(s):.2f}" if None not in s else "-" for s in starts]
        print(f"| {name} | {said[0]} | {said[1]} | {rows} |", flush=True)


def bench(binary, address, model, protocol, clients, seconds):
    """The report of a closed loop."""
    command = [binary, "bench", "-m", model, "--closed", "-c", str(clients), "-d", str(seconds), "-p", protocol]
    said = subprocess.run([*command, "-u", address, "--json"], capture_output=True, text=True, check=True).stdout
    return json.loads(said)


def rate(report):
    return report["total"]["answered_per_second"]


def batches(binary, models, names, turns):
    for name in names:
        rates = {"check": [], "always": []}
        for _ in range(turns):
            for choice, found in rates.items():
                with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
                    config = Path(cache) / "downbeat.toml"
                    config.write_text(f'[models.{name}]\nbatching = "{choice}"\n')
                    server = Server(binary, one_model(models, name, folder), cache, "--config", str(config))
                    if server.ready() is not None:
                        found.append(rate(bench(binary, server.ports["HTTP"], name, "http", 32, 3)))
                    server.stop()
        median = {choice: statistics.median(found) if found else float("nan") for choice, found in rates.items()}
        print(f"| {name} | {median['check']:.0f} | {median['always']:.0f} | {median['always'] / median['check']:.2f} |", flush=True)


def turns_of(binaries, models, name, turns):
    cases = [("http", 32), ("grpc", 32), ("http", 1), ("grpc", 1)]
    found = {(binary, case): [] for binary in binaries for case in cases}
    caches = {binary: tempfile.mkdtemp() for binary in binaries}
    with tempfile.TemporaryDirectory() as folder:
        repository = one_model(models, name, folder)
        for turn in range(turns):
            for binary in binaries if turn % 2 == 0 else binaries[::-1]:
                server = Server(binary, repository, caches[binary])
                server.ready()
                for protocol, clients in cases:
                    address = server.ports["HTTP" if protocol == "http" else "gRPC"]
                    # The same load generator for all builds.
                    found[binary, (protocol, clients)].append(rate(bench(binaries[0], address, name, protocol, clients, 3)))
                server.stop()
    for case in cases:
        medians = [statistics.median(found[binary, case]) for binary in binaries]
        spread = [f"{min(found[binary, case]):.0f} to {max(found[binary, case]):.0f}" for binary in binaries]
        print(f"| {case[0]}, {case[1]} in flight | " + " | ".join(f"{m:.0f} ({s})" for m, s in zip(medians, spread)), end="")
        print(f" | {medians[-1] / medians[0]:.3f} |", flush=True)


def processes(root):
    """The process `root` and all below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [root]
    for process in found:
        found += parents.get(process, [])
    return found


def isolated(binary, models, name, count=10):
    for isolation in ["none", "process"]:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
            for number in range(count):
                shutil.copytree(Path(models) / name, Path(folder) / f"{name}{number}")
            server = Server(binary, folder, cache, "--isolation", isolation, "--no-profiling")
            after = server.ready()
            for number in range(count):
                bench(binary, server.ports["HTTP"], f"{name}{number}", "http", 1, 1)
            every = processes(server.process.pid)
            threads = sum(len(os.listdir(f"/proc/{process}/task")) for process in every)
            rolled = [Path(f"/proc/{process}/smaps_rollup").read_text().split() for process in every]
            # Proportional: a page that processes share counts once.
            memory = sum(int(words[words.index("Pss:") + 1]) for words in rolled) / 1024
            print(f"| {isolation} | {len(every)} | {threads} | {memory:.0f} MiB | ready after {after:.2f} s |", flush=True)
            server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("figure", choices=["ready", "batches", "turns", "isolated"])
    parser.add_argument("models")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    binaries = [str(Path(binary).resolve()) for binary in given.binary.split(",")]
    if given.figure == "ready":
        ready(binaries[0], given.models, given.turns)
    elif given.figure == "batches":
        batches(binaries[0], given.models, given.names, given.turns)
    elif given.figure == "isolated":
        isolated(binaries[0], given.models, given.names[0])
    else:
        turns_of(binaries, given.models, given.names[0], given.turns)


if __name__ == "__main__":
    main()
