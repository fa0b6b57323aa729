#!/usr/bin/env python3
"""Figures of a server at work, under attack and beside others, of two builds in turns: `figures.py BEFORE AFTER [FIGURE ...]`.

    pip install -r tests/clients/requirements.txt && python tests/clients/figures.py before/downbeat target/release/downbeat

Both serve the same models with the same flags, one after the other in each round, and the later build's `bench` is the client of both.
Prints a table in Markdown: medians over the rounds, all values, and the median of the rounds' ratios. `widemlp`, `resnet50` and isolation want `tools/zoo.py`'s models in target/zoo.
Takes about an hour; it is no test, and nothing calls it.
"""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import requests

import models
import wire
from serving import EXAMPLES, Server

ROUNDS = 3
JSON_BYTES = 45 << 20
MIB = 1 << 20
CONNECTIONS = 10_000
# As many as this process may have open, up to 100,000.
STEPS = [count for count in (1_000, 10_000, 19_000, 30_000, 100_000) if count + 200 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1]]


class Bench:
    """`downbeat bench` as a client."""

    def __init__(self, binary):
        self.binary = binary

    def run(self, server, *arguments, protocol="http"):
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            url = server.http if protocol == "http" else server.grpc
            subprocess.run([self.binary, "bench", "-u", url, "-p", protocol, "--json", report.name, *arguments],
                           check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return json.load(open(report.name))


@contextlib.contextmanager
def running(binary, repository, *flags, engine="onnxruntime"):
    """A server that is killed at the end, however it is by then."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(binary, repository, pathlib.Path(folder), *flags, engine=engine)
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()


def cpu_s(server):
    """User and system time of the process so far."""
    fields = pathlib.Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(model, *arguments, seconds=4, protocol="http", repository=EXAMPLES / "models", config="", shown=("requests/s", "p50 us", "CPU us a request")):
    """The report of `bench` for one model under a load, and the server's CPU time."""
    def figure(binary, bench, folder):
        (folder / "figure.toml").write_text(config)
        flags = ["--config", str(folder / "figure.toml"), "--model-control-mode", "explicit", "--load-model", model]
        with running(binary, repository, *flags) as server:
            begin = cpu_s(server)
            report = bench.run(server, "-m", model, "-d", str(seconds), *arguments, protocol=protocol)
            took = cpu_s(server) - begin
            answered = requests.get(f"{server.url}/v2/models/{model}/stats", timeout=10).json()["model_stats"][0]["inference_count"]
            every = {
                "requests/s": rate(report), "p50 us": 1e3 * p50_ms(report), "p99 ms": p99_ms(report), "bad %": report["total"]["bad_percent"],
                "CPU us a request": 1e6 * took / max(answered, 1),
            }
            return {name: every[name] for name in shown}
    return figure


def isolation(binary, bench, folder):
    """`mlp` at 2,000/s alone, beside `resnet50` at full load, and with a core each."""
    mixed = folder / "mixed"
    if not mixed.exists():
        shutil.copytree(EXAMPLES / "models" / "mlp", mixed / "mlp")
        shutil.copytree(ZOO / "resnet50", mixed / "resnet50")
    found = {}
    parts = '[device]\npartitions = ["0", "1"]\n[models.mlp]\npartition = 0\n[models.resnet50]\npartition = 1\n'
    for name, beside, config in [("alone", False, ""), ("beside", True, ""), ("a core each", True, parts)]:
        (folder / "isolation.toml").write_text(config)
        with running(binary, mixed, "--config", str(folder / "isolation.toml")) as server:
            with tempfile.NamedTemporaryFile(suffix=".json") as report:
                full = ["-m", "resnet50", "--closed", "-c", "16", "-d", "12"]
                command = [bench.binary, "bench", "-u", server.http, "-p", "http", "--json", report.name, *full]
                other = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) if beside else None
                time.sleep(3 if beside else 0)
                alone = bench.run(server, "-m", "mlp", "--rate", "2000", "-d", "6")
                found[f"{name}: p50 us"], found[f"{name}: p99 ms"] = 1e3 * p50_ms(alone), p99_ms(alone)
                if other:
                    other.wait(120)
                    found[f"{name}: resnet50/s"] = rate(json.load(open(report.name)))
    return found


def turns(wide):
    """`mlp` at 200/s (SLO 250 ms) beside `widemlp` at `wide`/s (SLO 50 ms) on one device."""
    def figure(binary, bench, folder):
        both = folder / "both"
        if not both.exists():
            shutil.copytree(EXAMPLES / "models" / "mlp", both / "mlp")
            shutil.copytree(ZOO / "widemlp", both / "widemlp")
        (folder / "both.toml").write_text("[models.mlp]\nslo_ms = 250\n[models.widemlp]\nslo_ms = 50\n")
        with running(binary, both, "--config", str(folder / "both.toml")) as server:
            offered = ["-m", "mlp:200", "-m", f"widemlp:{wide}", "--rate", str(wide + 200), "--slo-ms", "50"]
            small, large = bench.run(server, *offered, "-w", "3", "-d", "8", protocol="grpc")["models"]
            return {
                "mlp p50 ms": small["latency_ms"]["p50"], "mlp p99 ms": small["latency_ms"]["p99"],
                "mlp not answered": sum(failure["count"] for failure in small["failures"].values()),
                "widemlp p99 ms": large["latency_ms"]["p99"], "widemlp bad %": large["bad_percent"],
            }
    return figure


def rate(report):
    return report["total"]["answered_per_second"]


def p99_ms(report):
    return report["total"]["latency_ms"]["p99"]


def p50_ms(report):
    return report["total"]["latency_ms"]["p50"]


def idle(binary, _bench, _folder):
    """A server with the examples on the built-in engine, and without requests."""
    with running(binary, EXAMPLES / "models", engine="rten") as server:
        # Long enough for threads that wait a while before they rest. Too short for the new
        # measurements of an idle machine (30 s).
        time.sleep(12)
        begin, before = cpu_s(server), server.threads()
        time.sleep(10)
        after = server.threads()
        switches = sum(count for _, count in after.values()) - sum(count for _, count in before.values())
        rollup = pathlib.Path(f"/proc/{server.process.pid}/smaps_rollup").read_text()
        anonymous = int(re.search(r"Anonymous:\s+(\d+)", rollup).group(1))
        return {
            "resident MiB": server.memory_bytes() / MIB, "of it anonymous MiB": anonymous / 1024, "threads": len(after),
            "context switches in 10 s": switches, "CPU ms in 10 s": 1e3 * (cpu_s(server) - begin),
        }


def idle_connections(protocol, steps, used=0.1):
    """Idle connections, more and more of them; a share of them has had an answer before."""
    def figure(binary, _bench, _folder):
        with running(binary, EXAMPLES / "models", "--max-connections", str(steps[-1] + 100), engine="rten") as server:
            time.sleep(2)
            before, held, found = server.memory_bytes(), [], {}
            for count in steps:
                while len(held) < count:
                    held.append(wire.idle_client(server, protocol, is_used=len(held) % round(1 / used) == 0, number=len(held)))
                # The used connections rest after a second or two.
                time.sleep(5)
                grown = server.memory_bytes() - before
                found[f"KiB a connection, of {count:,}"] = grown / 1024 / count
                found[f"resident MiB with {count:,}"] = server.memory_bytes() / MIB
            for client in held:
                client.close()
            return found

    return figure


def connections(binary, bench, _folder):
    """10,000 idle connections that have each had an answer, and a client beside them."""
    with running(binary, EXAMPLES / "models") as server:
        before = server.memory_bytes()
        held = []
        for number in range(CONNECTIONS):
            try:
                held.append(wire.idle_client(server, "http", is_used=True, number=number))
            except OSError:
                break
        report = bench.run(server, "-m", "mlp", "--rate", "1000", "-d", "3", "--max-connections", "16")
        grown = server.memory_bytes() - before
        for client in held:
            client.close()
        return {"answered": len(held), "KiB a connection": grown / 1024 / max(len(held), 1), "p99 ms of a client beside them": p99_ms(report)}


def pipelined(binary, _bench, _folder):
    """172,000 requests for the largest answer on one connection; nothing is read."""
    with running(binary, EXAMPLES / "models") as server:
        client = wire.connect(server.http_port)
        client.settimeout(5)
        burst = b"GET /v2/openapi.yaml HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
        with contextlib.suppress(OSError):
            for _ in range(172):
                client.sendall(burst)
        time.sleep(10)
        return attacked(server)


def attacked(server):
    alive = False
    with contextlib.suppress(requests.RequestException):
        alive = requests.get(f"{server.url}/v2/health/live", timeout=5).status_code == 200
    ended = server.process.poll()
    return {"peak RSS MiB": server.memory_mib("VmHWM") if ended is None else float("nan"), "answers after": float(alive)}


def half_bodies(binary, _bench, _folder):
    """40 bodies of 60 MiB, all but the last byte, for a model that does not exist."""
    with running(binary, EXAMPLES / "models") as server:
        size = 60 << 20
        head = f"POST /v2/models/none/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()
        body = bytes(size - 1)
        held = []

        def send(_):
            client = wire.connect(server.http_port)
            held.append(client)
            with contextlib.suppress(OSError):
                client.sendall(head)
                client.sendall(body)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(send, range(40)))
        return attacked(server)


def half_messages(binary, _bench, _folder):
    """50 gRPC messages of 55 MiB on one connection, each without its last byte. A build with a
    budget gets one of 512 MiB."""
    budget = "--max-in-flight-bytes"
    known = budget in subprocess.run([binary, "serve", "--help"], capture_output=True, text=True).stdout
    with running(binary, EXAMPLES / "models", *([budget, "512M"] if known else [])) as server:
        size = 55 << 20
        message = b"\0" + size.to_bytes(4, "big") + bytes(size - 1)
        with wire.Http2(server.grpc_port) as client:
            for _ in range(50):
                client.send(client.open("/inference.GRPCInferenceService/ModelInfer"), message)
            return attacked(server)


def beside_json(binary, bench, folder):
    """A small model beside two clients that send 45 MiB of JSON each, again and again."""
    repository = folder / "json"
    if not repository.exists():
        models.identity(repository, "FP32", "large")
        shutil.copytree(EXAMPLES / "models" / "mlp", repository / "mlp")
    with running(binary, repository) as server:
        alone = bench.run(server, "-m", "mlp", "--rate", "200", "-d", "5")
        numbers = ",".join(["0.12345678"] * (JSON_BYTES // 11))
        body = ('{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,%d],"data":[%s]}],"outputs":[{"name":"OUTPUT0","parameters":{"binary_data":true}}]}'
                % (JSON_BYTES // 11, numbers)).encode()
        stop, answers = threading.Event(), []

        def send():
            while not stop.is_set():
                answers.append(requests.post(f"{server.url}/v2/models/large/infer", data=body, timeout=60).status_code)

        clients = [threading.Thread(target=send) for _ in range(2)]
        for client in clients:
            client.start()
        time.sleep(1)
        beside = bench.run(server, "-m", "mlp", "--rate", "200", "-d", "8")
        stop.set()
        for client in clients:
            client.join()
        return {"p99 ms alone": p99_ms(alone), "p99 ms beside": p99_ms(beside), "p50 ms beside": p50_ms(beside),
                "large answered": sum(status == 200 for status in answers)}


def beside_slow(binary, bench, folder):
    """A fast model beside one whose runs take most of a second, with one client of that."""
    repository = folder / "slow"
    if not repository.exists():
        models.slow(repository, "slow", products=240)
        models.add_sub(repository, "fast")
    with running(binary, repository) as server:
        stop, took = threading.Event(), []

        def send():
            while not stop.is_set():
                begin = time.monotonic()
                requests.post(f"{server.url}/v2/models/slow/infer", timeout=60,
                              json={"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]})
                took.append(time.monotonic() - begin)

        client = threading.Thread(target=send)
        client.start()
        time.sleep(1)
        report = bench.run(server, "-m", "fast", "--rate", "100", "-d", "8")
        stop.set()
        client.join()
        return {"p99 ms": p99_ms(report), "p50 ms": p50_ms(report), "slow ms": statistics.median(took) * 1e3}


def terminations(binary, _bench, _folder):
    """SIGTERM under 16 busy keep-alive connections, ten times: requests that were sent whole and got no answer."""
    lost = refused = 0
    slowest = 0.0
    for _ in range(10):
        with running(binary, EXAMPLES / "models") as server:
            ended = threading.Event()

            def send():
                counts = [0, 0]
                body = (EXAMPLES / "digit.json").read_bytes()
                head = f"POST /v2/models/digits/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                client = None
                while not ended.is_set():
                    if client is None:
                        try:
                            client = wire.connect(server.http_port)
                        except OSError:
                            counts[1] += 1
                            break
                    try:
                        client.sendall(head + body)
                        answer = b""
                        while b"\r\n\r\n" not in answer:
                            part = client.recv(65536)
                            if not part:
                                raise ConnectionResetError
                            answer += part
                        text, _, rest = answer.partition(b"\r\n\r\n")
                        length = next(int(line.split(b":")[1]) for line in text.lower().split(b"\r\n") if line.startswith(b"content-length"))
                        while len(rest) < length:
                            part = client.recv(65536)
                            if not part:
                                raise ConnectionResetError
                            rest += part
                        if b"connection: close" in text.lower():
                            client.close()
                            client = None
                    except OSError:
                        counts[0] += 1
                        break
                return counts

            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                clients = [pool.submit(send) for _ in range(16)]
                time.sleep(0.5 + random.random() / 4)
                begin = time.monotonic()
                server.terminate()
                server.process.wait(120)
                slowest = max(slowest, time.monotonic() - begin)
                ended.set()
                for client in clients:
                    counts = client.result()
                    lost += counts[0]
                    refused += counts[1]
    return {"requests lost": lost, "clients refused a connection at the end": refused, "slowest end s": slowest}


def policy(name, more=""):
    return f'[[device.groups]]\nmodels = ["*"]\npolicy = "{name}"\n{more}'


ZOO = EXAMPLES.parent / "target" / "zoo"
MANY, LONE, DIGITS = ("--closed", "-c", "32"), ("--closed", "-c", "1"), ("--closed", "-c", "64")
# Lengths as RTE has them.
RTE = ("--closed", "-c", "32", "--shape-lognormal", "*:4.11,0.52,256", "--range", "input_ids:0,999", "--range", "attention_mask:1,1")
TAILS = ("requests/s", "p50 us", "p99 ms")
SLO = ("requests/s", "p99 ms", "bad %")
WIDE_SLO = "[models.widemlp]\nslo_ms = 50\n"

FIGURES = {
    "mlp, 32 connections, HTTP": (load("mlp", *MANY), 5),
    "mlp, 32 connections, gRPC": (load("mlp", *MANY, protocol="grpc"), 5),
    "mlp, 32 connections, SLO 50 ms": (load("mlp", *MANY, config="[models.mlp]\nslo_ms = 50\n"), 7),
    "mlp, one connection, HTTP": (load("mlp", *LONE), 5),
    "mlp, one connection, gRPC": (load("mlp", *LONE, protocol="grpc"), 5),
    "digits, 64 connections, exclusive": (load("digits", *DIGITS), 5),
    "digits, 64 connections, staged": (load("digits", *DIGITS, config=policy("staged", "stages = 2\n")), 5),
    "digits, 64 connections, elastic": (load("digits", *DIGITS, config=policy("elastic")), 5),
    "encoder, 32 connections, exclusive": (load("encoder", *RTE, shown=TAILS), 5),
    "encoder, 32 connections, staged": (load("encoder", *RTE, config=policy("staged", "stages = 2\npad = true\n"), shown=TAILS), 5),
    "widemlp, 32 connections, gRPC": (load("widemlp", *MANY, protocol="grpc", repository=ZOO, shown=TAILS), 5),
    "widemlp, 32 connections, SLO 50 ms": (load("widemlp", *MANY, "-w", "3", protocol="grpc", repository=ZOO, config=WIDE_SLO, shown=TAILS), 5),
    "widemlp, 32 connections, SLO 50 ms, deferred": (
        load("widemlp", *MANY, "-w", "3", protocol="grpc", repository=ZOO, config='scheduler = "deferred"\n' + WIDE_SLO, shown=TAILS), 5),
    "widemlp, Poisson 3,400/s, SLO 50 ms": (
        load("widemlp", "--rate", "3400", "--slo-ms", "50", protocol="grpc", repository=ZOO, config=WIDE_SLO, shown=SLO), 5),
    "widemlp, Poisson 3,800/s, SLO 50 ms": (
        load("widemlp", "--rate", "3800", "--slo-ms", "50", protocol="grpc", repository=ZOO, config=WIDE_SLO, shown=SLO), 5),
    "mlp beside widemlp at 1,000/s": (turns(1000), 5),
    "mlp beside widemlp at 1,800/s": (turns(1800), 5),
    "resnet50, Poisson 34/s, SLO 500 ms": (
        load("resnet50", "--rate", "34", "--slo-ms", "500", seconds=15, repository=ZOO, config="[models.resnet50]\nslo_ms = 500\n", shown=SLO), 3),
    "isolation": (isolation, 3),
    "idle server": (idle, 3),
    "10,000 connections": (connections, 1),
    "idle HTTP connections, a tenth used": (idle_connections("http", STEPS), 1),
    "idle HTTP connections, all used": (idle_connections("http", STEPS, used=1), 1),
    "idle gRPC connections, all used": (idle_connections("grpc", STEPS, used=1), 1),
    "pipelined, unread": (pipelined, 1),
    "HTTP half bodies": (half_bodies, 1),
    "gRPC half messages": (half_messages, 1),
    "beside 45 MiB of JSON": (beside_json, ROUNDS),
    "beside a slow model": (beside_slow, ROUNDS),
    "10 SIGTERMs": (terminations, 1),
}


def main():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before, after = (str(pathlib.Path(binary).resolve()) for binary in sys.argv[1:3])
    wanted = sys.argv[3:] or list(FIGURES)
    bench = Bench(after)
    print("| figure | | before | after | ratio |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            measure, rounds = FIGURES[name]
            values = {before: [], after: []}
            for round_ in range(rounds):
                for binary in (before, after) if round_ % 2 == 0 else (after, before):
                    values[binary].append(measure(binary, bench, pathlib.Path(folder)))
            for key in values[after][0]:
                cells = []
                for binary in (before, after):
                    found = [run[key] for run in values[binary]]
                    all_of = f" ({', '.join(f'{value:,.4g}' for value in found)})" if len(found) > 1 else ""
                    cells.append(f"{statistics.median(found):,.5g}{all_of}")
                ratios = [y[key] / x[key] for x, y in zip(values[before], values[after]) if x[key]]
                ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
                print(f"| {name} | {key} | {cells[0]} | {cells[1]} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
