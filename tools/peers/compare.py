#!/usr/bin/env python3
"""Measures Downbeat beside other servers: the same models, the same client, in turns on one machine.

    tools/peers/compare.py tune  OPTIONS --tuning tuning.jsonl                      searches settings for Triton
    tools/peers/compare.py run   OPTIONS --tuning tuning.jsonl --out runs.jsonl     measures every server in turns
    tools/peers/compare.py table runs.jsonl                                         prints medians and spreads

`run` starts all servers. Each turn takes way after way, such as `mlp http 32`, and loads one server after
another; the other servers are idle meanwhile. Both commands append to their file, so several calls can
make one measurement (`--turns`, `--ways`, `--part`). docs/results/peers.md says where the servers come
from. A server whose option is not given is left out.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODELS = ROOT / "examples/models"
# Sentence lengths of RTE; token ids below the vocabulary's size; nothing masked.
ENCODER = "--shape-lognormal *:4.11,0.52,128 --range input_ids:0,999 --range attention_mask:1,1".split()
INPUTS = {"mlp": [], "encoder": ENCODER, "digits": ["--range", "image:0,255"]}
WAYS = [(m, protocol, n) for m in INPUTS for protocol in ("http", "grpc") for n in (32, 1)]
ECHO, DOWNBEAT, TRITON, TUNED = "echo", "Downbeat", "Triton", "Triton tuned"
FURNACE, MLSERVER = "furnace-server", "MLServer"
SERVERS = [ECHO, DOWNBEAT, TRITON, TUNED, FURNACE, MLSERVER]
# Triton's batcher: off, or its preferred batch sizes and the microseconds it waits for them.
BATCHING = [None, ([], 0), ([], 100), ([8], 100), ([16], 100), ([16], 500), ([32], 500)]
LARGEST_BATCH = {"mlp": 128, "encoder": 32, "digits": 64}


def free_ports(count):
    """Free ports below those that the system gives to outgoing connections."""
    sockets = []
    while len(sockets) < count:
        with contextlib.suppress(OSError):
            sockets.append(socket.create_server(("127.0.0.1", random.randrange(20_000, 32_000))))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Server:
    """A server in a process group of its own."""

    def __init__(self, name, http, grpc, command, ready="/v2/health/ready", folder=ROOT, **environment):
        self.name, self.http, self.grpc, self.ready = name, http, grpc, ready
        self.log = tempfile.TemporaryFile()
        environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1", **environment}
        self.child = subprocess.Popen(
            [str(word) for word in command], stdout=self.log, stderr=self.log, cwd=folder, env=environment,
            start_new_session=True)

    def wait(self):
        for _ in range(600):
            if self.child.poll() is not None:
                break
            with contextlib.suppress(OSError):
                self.get(self.ready)
                return
            time.sleep(0.05)
        self.log.seek(0)
        raise SystemExit(f"{self.name}: not ready\n{self.log.read()[-4000:].decode(errors='replace')}")

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=2) as answer:
            return answer.read()

    def version(self):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return json.loads(self.get("/v2"))["version"]
        return ""

    def processes(self):
        """The fields of /proc/PID/stat behind the name, of each process of the group."""
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[2]) == self.child.pid:
                    yield fields

    def cpu_seconds(self):
        return sum(int(fields[11]) + int(fields[12]) for fields in self.processes()) / os.sysconf("SC_CLK_TCK")

    def resident_mb(self):
        return sum(int(fields[21]) for fields in self.processes()) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


def start_echo(args, _):
    http, grpc = free_ports(2)
    command = [args.echo, "--port", http, "--grpc-port", grpc]
    return Server(ECHO, http, grpc, command, ready="/v2/models/mlp")


def start_downbeat(args, _):
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    command = [args.downbeat, "serve", "--host", "127.0.0.1", *ports, MODELS]
    return Server(DOWNBEAT, http, grpc, command, ORT_DYLIB_PATH=args.onnxruntime)


def start_triton(args, _, repository=MODELS, name=TRITON, flags=()):
    ports = free_ports(3)
    listen = []
    for protocol, port in zip(("http", "grpc", "metrics"), ports):
        listen += [f"--{protocol}-address=127.0.0.1", f"--{protocol}-port={port}"]
    places = [f"--model-repository={repository}", f"--backend-directory={args.triton_backends}"]
    wheel = pathlib.Path(args.triton)
    command = [wheel / "pytriton/tritonserver/bin/tritonserver", *places, *listen, *flags]
    libraries = f"{wheel}/nvidia_pytriton.libs"
    return Server(name, ports[0], ports[1], command, LD_LIBRARY_PATH=libraries)


def start_tuned(args, scratch):
    best = {model: ranked(args.tuning, model)[0] for model in INPUTS}
    repository = triton_repository(scratch / "tuned", best)
    return start_triton(args, scratch, repository, TUNED, args.triton_flags)


def start_furnace(args, _):
    http, grpc = free_ports(2)
    command = [args.furnace, http, grpc, *(f"{m}={MODELS}/{m}/1/model.onnx" for m in INPUTS)]
    return Server(FURNACE, http, grpc, command, ORT_DYLIB_PATH=args.onnxruntime)


def start_mlserver(args, scratch):
    http, grpc = free_ports(2)
    folder = scratch / "mlserver"
    folder.mkdir()
    python = pathlib.Path(args.mlserver)
    models = [f"{m}={MODELS}/{m}/1/model.onnx" for m in INPUTS]
    subprocess.run([python, HERE / "mlserver_onnx.py", folder, str(http), str(grpc), *models], check=True)
    return Server(MLSERVER, http, grpc, [python.parent / "mlserver", "start", "."], folder=folder, PYTHONPATH=str(HERE))


def given_servers(args):
    """The starters of the servers whose options are given, in the order of SERVERS."""
    triton = args.triton and args.triton_backends
    starters = [
        (args.echo, start_echo), (args.downbeat, start_downbeat), (triton, start_triton),
        (triton and args.tuning, start_tuned), (args.furnace, start_furnace), (args.mlserver, start_mlserver)]
    return [starter for given, starter in starters if given]


# -- Triton's settings


def grid():
    """All settings that are tried: instances, batching, and threads inside an operator (0: as many as cores)."""
    return [
        {"instances": instances, "batching": batching, "threads": threads}
        for instances in (1, 2, 3) for batching in BATCHING for threads in (1, 0)
        if threads or batching in (None, ([], 0))]


def triton_repository(folder, settings):
    for model, chosen in settings.items():
        (folder / model).mkdir(parents=True)
        (folder / model / "1").symlink_to(MODELS / model / "1")
        lines = [
            'backend: "onnxruntime"', f"max_batch_size: {LARGEST_BATCH[model]}",
            f"instance_group [ {{ kind: KIND_CPU count: {chosen['instances']} }} ]",
            f'parameters {{ key: "intra_op_thread_count" value: {{ string_value: "{chosen["threads"]}" }} }}']
        if chosen["batching"] is None:
            # Without `dynamic_batching` Triton turns its batcher on where max_batch_size is above 1.
            lines[1] = "max_batch_size: 1"
        else:
            sizes, delay = chosen["batching"]
            preferred = f"preferred_batch_size: {sizes}" if sizes else ""
            lines.append(f"dynamic_batching {{ {preferred} max_queue_delay_microseconds: {delay} }}")
        (folder / model / "config.pbtxt").write_text("\n".join(lines) + "\n")
    return folder


def ranked(tuning, model):
    """The settings of a model in the file, those with the highest median rate first."""
    rates = {}
    for row in read_rows(tuning):
        if row["model"] == model:
            rates.setdefault(json.dumps(row["settings"]), []).append(row["rate"])
    if not rates:
        raise SystemExit(f"{tuning}: has no settings for {model}; `compare.py tune` writes them")
    return [json.loads(text) for text in sorted(rates, key=lambda text: -statistics.median(rates[text]))]


def tune(args):
    """Tries settings for all models at once: the grid, or the best so far again (`--again`)."""
    if args.again:
        best = {model: ranked(args.tuning, model) for model in INPUTS}
        tries = [{model: best[model][rank] for model in INPUTS} for rank in range(args.again)]
    else:
        tries = [dict.fromkeys(INPUTS, settings) for settings in grid()]
    part, parts = map(int, args.part.split("/"))
    for settings in tries[part - 1::parts]:
        with tempfile.TemporaryDirectory() as folder:
            repository = triton_repository(pathlib.Path(folder) / "models", settings)
            server = start_triton(args, None, repository, flags=args.triton_flags)
            try:
                server.wait()
                for model in INPUTS:
                    row = measure(args, server, (model, "http", 32))
                    append(args.tuning, {"model": model, "settings": settings[model], **row})
            finally:
                server.stop()


# -- turns


def measure(args, server, way):
    """Loads a server in one way, in a closed loop. Returns the rate, latencies and CPU time."""
    model, protocol, connections = way
    port = server.grpc if protocol == "grpc" else server.http
    # MLServer answers 500 to the binary tensors of the protocol's extension.
    body = ["--body", "json"] if server.name == MLSERVER and protocol == "http" else []
    command = [
        args.client or args.downbeat, "bench", "-m", model, "-u", f"{protocol}://127.0.0.1:{port}", "--closed",
        "-c", connections, "-d", args.seconds, "-w", args.warmup, "--json", "-q", *INPUTS[model], *body]
    before = server.cpu_seconds()
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{server.name}, {way}: {done.stderr.strip() or done.stdout[-2000:]}")
    found = json.loads(done.stdout)
    total, requests = found["total"], found["generator"]["requests"]
    return {
        "rate": total["goodput_per_second"], "bad_percent": total["bad_percent"],
        "p50_ms": total["latency_ms"]["p50"], "p99_ms": total["latency_ms"]["p99"],
        "cpu_us": (server.cpu_seconds() - before) * 1e6 / requests,
        "client_cpu_us": found["generator"]["cpu_us_per_request"]}


def serves(server, way):
    """Tells whether a server can serve a way."""
    # The echo server has one input of one type, as mlp has.
    # furnace-server calls the one input of such a model `input`, whatever its name: digits has `image`.
    return way[0] in {ECHO: ["mlp"], FURNACE: ["mlp", "encoder"]}.get(server.name, INPUTS)


def turn(args, servers, ways, number):
    named = f"{time.strftime('%H:%M:%S')} {os.getpid()} {number}"
    for place, way in enumerate(ways):
        first = (number + place) % len(servers)
        for server in servers[first:] + servers[:first]:
            if not serves(server, way):
                continue
            row = {"turn": named, "way": " ".join(map(str, way)), "server": server.name}
            found = measure(args, server, way)
            append(args.out, {**row, **found, "version": server.version(), "resident_mb": server.resident_mb()})


def run(args):
    chosen = [way for way in WAYS if not args.ways or any(" ".join(map(str, way)).startswith(w) for w in args.ways)]
    servers = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for start in given_servers(args):
                servers.append(start(args, pathlib.Path(folder)))
                # One after another: a server may measure its models when it starts.
                servers[-1].wait()
            time.sleep(1)
            for number in range(args.turns):
                turn(args, servers, chosen, args.first + number)
        finally:
            for server in servers:
                server.stop()


# -- tables


def append(path, row):
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def print_table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def spread(values, digits):
    """Median, and least and most in brackets."""
    if not values:
        return ""
    shown = [f"{v:,.{digits}f}" for v in (statistics.median(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def table(args):
    rows = read_rows(args.runs)
    ways = [way for way in (" ".join(map(str, w)) for w in WAYS) if any(row["way"] == way for row in rows)]
    names = [name for name in SERVERS if any(row["server"] == name for row in rows)]

    def of(way, name, field):
        return {row["turn"]: row[field] for row in rows if row["way"] == way and row["server"] == name}

    def ratios(way, name):
        ours, theirs = of(way, DOWNBEAT, "rate"), of(way, name, "rate")
        return [ours[t] / theirs[t] for t in ours if theirs.get(t)]

    for title, field, digits in (
            ("requests/s", "rate", 0), ("p50, ms", "p50_ms", 3), ("p99, ms", "p99_ms", 2),
            ("server's CPU, us a request", "cpu_us", 1)):
        print_table([title, *names], [
            [way, *(spread(list(of(way, name, field).values()), digits) for name in names)] for way in ways])
    others = [name for name in names if name != DOWNBEAT]
    print_table(["Downbeat's rate, times", *others], [
        [way, *(spread(ratios(way, name), 2) for name in others)] for way in ways])
    for name in names:
        its = [row for row in rows if row["server"] == name]
        resident = statistics.median(row["resident_mb"] for row in its)
        bad = max(row["bad_percent"] for row in its)
        print(f"- {name} {its[-1]['version']}: {resident:.0f} MB resident, at most {bad:.2f}% bad")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--downbeat", required=True, type=os.path.abspath, help="binary of Downbeat, and the client")
    common.add_argument("--client", type=os.path.abspath, help="binary whose `bench` is the client, if another")
    common.add_argument("--onnxruntime", type=os.path.abspath, help="library of ONNX Runtime, for Downbeat and furnace-server")
    common.add_argument("--triton", type=os.path.abspath, help="folder into which the wheel nvidia-pytriton was unpacked")
    common.add_argument("--triton-backends", type=os.path.abspath, help="folder with onnxruntime/libtriton_onnxruntime.so")
    common.add_argument("--triton-flags", type=shlex.split, default=[], help="more flags of tuned Triton")
    common.add_argument("--tuning", help="file of settings for Triton and their rates")
    common.add_argument("--seconds", type=float, default=1.5, help="measured seconds of each load")
    common.add_argument("--warmup", type=float, default=0.3, help="seconds of each load before them")
    tuner = commands.add_parser("tune", parents=[common])
    tuner.add_argument("--part", default="1/1", help="which part of the settings, such as 2/3")
    tuner.add_argument("--again", type=int, help="measure again only so many of the best")
    tuner.set_defaults(act=tune)
    runner = commands.add_parser("run", parents=[common])
    runner.add_argument("--echo", type=os.path.abspath, help="the example echo of downbeat-bench")
    runner.add_argument("--furnace", type=os.path.abspath, help="binary of tools/peers/furnace")
    runner.add_argument("--mlserver", type=os.path.abspath, help="python of an environment with mlserver and onnxruntime")
    runner.add_argument("--turns", type=int, default=5)
    runner.add_argument("--first", type=int, default=0, help="number of the first turn, which says what server begins")
    runner.add_argument("--ways", nargs="*", help="only ways that begin so, such as 'mlp http'")
    runner.add_argument("--out", required=True, help="file of measurements, appended to")
    runner.set_defaults(act=run)
    tabler = commands.add_parser("table")
    tabler.add_argument("runs")
    tabler.set_defaults(act=table)
    args = parser.parse_args()
    args.act(args)


if __name__ == "__main__":
    sys.exit(main())
