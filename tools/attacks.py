"""What sixteen clients that attack a server do to two others and to health.

    target/clients-venv/bin/python tools/attacks.py BEFORE AFTER [--seconds 8] [--only json,gzip]
    target/clients-venv/bin/python tools/attacks.py --cluster BINARY [--only silent,replay]

For each binary and each attack: the answers per second of a client with 300 kB of JSON, the latencies of a client with a
request of 500 bytes, and those of health at each port that has it. Each is measured in a process of its own.

With --cluster: the rows of docs/results/trust.md. Strangers and liars at the ports of a cluster (tests/clients/attempts.py).
"""
import argparse
import contextlib
import gzip
import io
import json
import multiprocessing
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "clients"))

import attempts
import wire
from PIL import Image
from serving import Server, free_ports

ATTACKERS = 16
INDEXED = 3_000
PROBE = wire.head("GET", "/v2/health/live")


def numbers(count):
    """A request to `digits` whose tensor has so many numbers; all but 64 are a mistake that only reading finds."""
    text = json.dumps({"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 8, 8] if count == 64 else [1, count], "data": []}]})
    return wire.post("/v2/models/digits/infer", text.replace("[]", "[" + "0.123," * (count - 1) + "1]").encode())


def picture():
    file = io.BytesIO()
    Image.new("L", (8000, 8000)).save(file, "PNG")
    return wire.post("/v2/models/photo/infer", file.getvalue(), "Content-Type: image/png")


def long_text():
    return wire.post("/v2/models/sentence/infer", {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a" * 8_000]}]})


ATTACKS = {
    "nothing": None,
    "json": ("48 MB of JSON", lambda: numbers(8 << 20)),
    "gzip": ("1,000,000 empty gzip members", lambda: wire.post("/v2/models/digits/infer", gzip.compress(b"") * 1_000_000, "Content-Encoding: gzip")),
    "picture": ("a PNG of 8000 by 8000 pixels", picture),
    "text": ("a text of 8 kB", long_text),
    "index": (f"the index of {INDEXED:,} models", lambda: wire.post("/v2/repository/index", {})),
    "ping": ("HTTP/2 PING acknowledgements that nobody asked for", None),
}


def ask(port, request, until, pause=0.0):
    """Asks again and again: the seconds of each answer."""
    took = []
    while time.monotonic() < until:
        with contextlib.suppress(OSError), wire.connect(port) as client, client.makefile("rb") as stream:
            while time.monotonic() < until:
                begin = time.monotonic()
                client.sendall(request)
                if wire.read_response(stream) is None:
                    break
                took.append(time.monotonic() - begin)
                time.sleep(pause)
    return took


def acknowledge(port, until):
    """Sends PING acknowledgements as fast as the server takes them."""
    frames = wire.Http2.frame(wire.Http2.PING, 1, 0, bytes(8)) * 1_000
    while time.monotonic() < until:
        with contextlib.suppress(OSError), wire.connect(port) as client:
            client.sendall(wire.PREFACE + wire.ACKNOWLEDGED)
            while time.monotonic() < until:
                client.sendall(frames)


def attack(name, http_port, grpc_port, until):
    if name == "ping":
        clients = [threading.Thread(target=acknowledge, args=(grpc_port, until)) for _ in range(ATTACKERS)]
    else:
        request = ATTACKS[name][1]()
        clients = [threading.Thread(target=ask, args=(http_port, request, until)) for _ in range(ATTACKERS)]
    for client in clients:
        client.start()


def p99(took):
    if len(took) < 2:
        return f"{len(took)} answers"
    return f"p50 {statistics.median(took) * 1e3:.2f}, p99 {statistics.quantiles(took, n=100)[98] * 1e3:.2f}, max {max(took) * 1e3:.1f} ms of {len(took)}"


def measure(server, health_port, name, seconds):
    if ATTACKS[name]:
        attackers = multiprocessing.Process(target=attack, args=(name, server.http_port, server.grpc_port, time.monotonic() + seconds + 3))
        attackers.start()
        time.sleep(2)
    until = time.monotonic() + seconds
    asked = {
        "300 kB": (server.http_port, numbers(50_000), until, 0.0),
        "500 bytes": (server.http_port, numbers(64), until, 0.002),
        "health": (server.http_port, PROBE, until, 0.005),
    }
    if health_port:
        asked["health, its own port"] = (health_port, PROBE, until, 0.005)
    with multiprocessing.Pool(len(asked)) as pool:
        answers = {what: pool.apply_async(ask, each) for what, each in asked.items()}
        answers = {what: found.get() for what, found in answers.items()}
    print(f"  {ATTACKS[name][0] if ATTACKS[name] else 'nothing'}")
    for what, took in answers.items():
        rate = f"{len(took) / seconds:.1f}/s, " if what == "300 kB" else ""
        print(f"    {what}: {rate}{p99(took)}", flush=True)
    if ATTACKS[name]:
        attackers.join()


def repository(folder):
    """Three models to serve, and many that are only in the index."""
    models, preprocess = folder / "models", ROOT / "examples" / "preprocess"
    shutil.copytree(preprocess / "models", models)
    shutil.copytree(ROOT / "examples" / "models" / "digits", models / "digits")
    (folder / "downbeat.toml").write_text((preprocess / "downbeat.toml").read_text())
    for number in range(INDEXED):
        version = models / f"m{number}" / "1"
        version.mkdir(parents=True)
        shutil.copy(ROOT / "fuzz/seeds/onnx/add", version / "model.onnx")
    return models


def run(binary, seconds, names, help_text):
    print(f"{binary}:")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        models = repository(folder)
        flags = ["--config", str(folder / "downbeat.toml"), "--no-profiling", "--model-control-mode", "explicit"]
        flags += [flag for name in ("digits", "photo", "sentence") for flag in ("--load-model", name)]
        health_port = None
        if "--health-port" in help_text:
            [health_port] = free_ports(1)
            flags += ["--health-port", str(health_port)]
        for name in names:
            server = Server(binary, models, folder, *flags, engine="rten")
            try:
                measure(server, health_port, name, seconds)
                size = server.log_path.stat().st_size
                print(f"    resident {server.memory_mib('VmHWM'):.0f} MiB at most; the log has {size:,} bytes", flush=True)
            finally:
                server.process.kill()
                server.process.wait()


def run_attempts(binary, names):
    def nothing(cluster):
        """nothing"""
        time.sleep(2)
        return "nothing"

    with tempfile.TemporaryDirectory() as folder, attempts.Cluster(binary, folder, models=attempts.ALL) as cluster:
        for title, some in (("nothing", [nothing]), ("without the secret", attempts.OUTSIDERS), ("with the secret", attempts.LIARS)):
            print(f"{title}:")
            for attempt in some:
                if names is None or attempt.__name__ in names:
                    print(attempts.run(cluster, attempt).row(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binaries", nargs="+", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--only", type=lambda names: names.split(","))
    parser.add_argument("--cluster", action="store_true")
    options = parser.parse_args()
    if options.cluster:
        run_attempts(options.binaries[0], options.only)
        sys.exit()
    for each in options.binaries:
        run(each, options.seconds, options.only or list(ATTACKS), subprocess.run([each, "serve", "--help"], capture_output=True, text=True).stdout)
