"""Good and bad load on one server, for long: memory, threads, open files and answers are judged at the end.

    just soak                 # ten minutes
    just soak --seconds 60
    DOWNBEAT_BIN=target/debug/downbeat python tests/clients/soak.py --seconds 20
"""
import argparse
import base64
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import statistics
import struct
import sys
import tempfile
import threading
import time

import grpc
import numpy as np
import requests
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

import models
import wire
from serving import ROOT, Server

# The growth allowed after the first third: allocators keep some of their memory, and a peak may
# come late.
MEMORY_SHARE, MEMORY_MIB = 1.15, 64
THREADS, FILES = 4, 8

X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}
SLOW = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}


class Load:
    """Everything that is done to the server; each method is one round of a thread."""

    def __init__(self, server, repository, seed):
        self.server, self.random = server, random.Random(seed)
        self.counts, self.wrong, self.lock = collections.Counter(), [], threading.Lock()
        self.upload = base64.b64encode((repository / "other" / "1" / "model.onnx").read_bytes()).decode()

    def count(self, what, wrong=None):
        with self.lock:
            self.counts[what] += 1
            if wrong is not None:
                self.counts[f"{what}: wrong"] += 1
                self.wrong.append(f"{what}: {wrong}"[:300])

    def url(self, path):
        return f"{self.server.url}/v2/{path}"

    def over_http(self):
        """Good requests, fifty on a connection."""
        with requests.Session() as session:
            for _ in range(50):
                reply = session.post(self.url("models/small/infer"), json=X, timeout=60)
                good = reply.status_code == 200 and reply.json()["outputs"][0]["data"] == [2.0, 3.0, 4.0, 5.0]
                self.count("HTTP", None if good else reply.text)

    def over_grpc(self):
        with grpcclient.InferenceServerClient(self.server.grpc) as client:
            tensor = grpcclient.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32))
            for _ in range(50):
                try:
                    data = client.infer("small", [tensor], client_timeout=60).as_numpy("y").tolist()
                    self.count("gRPC", None if data == [[2, 3, 4, 5]] else data)
                except InferenceServerException as error:
                    self.count("gRPC", error)

    def leaving(self):
        """Clients that do not wait for the answer."""
        with wire.connect(self.server.http_port) as connection:
            connection.sendall(wire.post("/v2/models/slow/infer", SLOW))
            time.sleep(self.random.uniform(0, 0.05))
        with grpcclient.InferenceServerClient(self.server.grpc) as client:
            tensor = grpcclient.InferInput("x", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
            with contextlib.suppress(InferenceServerException):
                client.infer("slow", [tensor], client_timeout=0.02)
        self.count("left")

    def bad(self):
        """Requests that the server must refuse with a status below 500, or cut off."""
        path = "/v2/models/small/infer"
        whole = wire.post(path, X)
        with wire.connect(self.server.http_port) as connection, contextlib.suppress(OSError):
            connection.sendall(whole[:self.random.randrange(1, len(whole))])
        with wire.connect(self.server.http_port) as connection, contextlib.suppress(OSError):
            connection.sendall(self.random.randbytes(200) + b"\r\n\r\n")
            connection.recv(1 << 16)
        bodies = [b"", b"{", b"[" * 5_000, self.random.randbytes(500), json.dumps(X).replace("1.0", "1e999").encode(),
                  json.dumps(X).replace("[1, 4]", "[1, 9007199254740993]").encode(), b" " * (1 << 20)]
        for body in bodies:
            reply = requests.post(self.server.url + path, data=body, timeout=60)
            self.count("bad HTTP", None if 400 <= reply.status_code < 500 and reply.json()["error"] else reply.text)
        for path in ("models/nothing/infer", "nowhere", "models/small/versions/9/ready"):
            reply = requests.post(self.url(path), json=X, timeout=60)
            self.count("bad path", None if 400 <= reply.status_code < 500 else reply.text)
        with grpc.insecure_channel(self.server.grpc) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", lambda data: data, lambda data: data)
            for body in (self.random.randbytes(300), b"\x0a\x05small", struct.pack("<I", 0xFFFFFFFF)):
                try:
                    call(body, timeout=60)
                    self.count("bad gRPC", "answered")
                except grpc.RpcError as error:
                    code = error.code().name
                    self.count("bad gRPC", None if code in ("INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND") else error)

    def models(self):
        """Loads, reloads and unloads a model, from the repository and from the request, rightly and wrongly."""
        path = "repository/models/other"
        for parameters, good in (({}, True), ({"config": "{}", "file:1/model.onnx": self.upload}, True),
                                 ({"config": "{"}, False), ({"config": "{}", "file:1/model.onnx": "AAAA"}, False)):
            reply = requests.post(self.url(f"{path}/load"), json={"parameters": parameters}, timeout=60)
            self.count("load", None if (reply.status_code == 200) == good else reply.text)
            reply = requests.post(self.url("models/other/infer"), json=X, timeout=60)
            self.count("loaded", None if reply.status_code == 200 else reply.text)
        reply = requests.post(self.url(f"{path}/unload"), timeout=60)
        self.count("unload", None if reply.status_code == 200 else reply.text)

    def asking(self):
        """The requests of monitoring."""
        self.server.metrics()
        for path in ("health/live", "models/stats", "models/small", "models/small/config"):
            reply = requests.get(self.url(path), timeout=60)
            self.count("asked", None if reply.status_code == 200 else reply.text)
        time.sleep(0.2)


def sample(server):
    process = pathlib.Path(f"/proc/{server.process.pid}")
    return server.memory_mib(), len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))


def repeat(load, one, until):
    while time.monotonic() < until:
        try:
            one()
        except Exception as error:  # noqa: BLE001 - every exception is a finding and not the end
            load.count(one.__name__, repr(error))


def run(binary, seconds, seed, folder):
    repository = folder / "models"
    for name, constant in (("small", 1), ("other", 2)):
        models.add(repository, name, constant)
    models.slow(repository)
    os.environ["TMPDIR"] = str(folder / "temporary")
    (folder / "temporary").mkdir()
    failures = []
    with Server(binary, repository, folder, "--model-control-mode", "explicit", "--load-model", "small", "--load-model", "slow") as server:
        load = Load(server, repository, seed)
        # One request of each kind, so that the server has made everything that it makes once.
        for one in (load.over_http, load.over_grpc, load.leaving, load.bad, load.models, load.asking):
            one()
        time.sleep(1)
        idle = sample(server)
        work = [load.over_http] * 3 + [load.over_grpc] * 2 + [load.leaving, load.bad, load.models, load.asking]
        until, samples = time.monotonic() + seconds, []
        with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
            for one in work:
                pool.submit(repeat, load, one, until)
            while time.monotonic() < until:
                time.sleep(min(1, seconds / 20))
                samples.append(sample(server))
        # Until the server has noticed closed connections and finished queued requests.
        for _ in range(30):
            time.sleep(1)
            end = sample(server)
            if end[2] <= idle[2] + FILES and end[1] <= idle[1] + THREADS:
                break
        third = len(samples) // 3
        names = ("memory MiB", "threads", "files")
        early, late = ([statistics.median(column) for column in zip(*part)] for part in (samples[third:2 * third], samples[-third:]))
        most = [max(column) for column in zip(*samples)]
        print(f"{'':12} {'idle':>8} {'middle':>8} {'end':>8} {'most':>8} {'after':>8}")
        for name, *row in zip(names, idle, early, late, most, end):
            print(f"{name:12} " + " ".join(f"{value:8.0f}" for value in row))
        if late[0] > early[0] * MEMORY_SHARE + MEMORY_MIB:
            failures.append(f"memory grows: {early[0]:.0f} to {late[0]:.0f} MiB")
        for index, bound in ((1, THREADS), (2, FILES)):
            if end[index] > idle[index] + bound:
                failures.append(f"{names[index]} stay: {idle[index]} before, {end[index]} after")
        failures += [f"{what}: never" for what in ("HTTP", "gRPC", "left", "bad HTTP", "bad gRPC", "load") if not load.counts[what]]
        failures += load.wrong[:20]
        print(", ".join(f"{what} {count}" for what, count in sorted(load.counts.items())))
        reply = requests.get(load.url("health/ready"), timeout=60)
        if reply.status_code != 200:
            failures.append(f"not ready: {reply.text}")
    if left := list((folder / "temporary").glob("downbeat*/*")):
        failures.append(f"left behind: {left}")
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    binary = pathlib.Path(os.environ.get("DOWNBEAT_BIN", ROOT / "target" / "release" / "downbeat")).resolve()
    with tempfile.TemporaryDirectory() as folder:
        failures = run(binary, arguments.seconds, arguments.seed, pathlib.Path(folder))
    for failure in failures:
        print("FAILED", failure)
    print("failed" if failures else "sound")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
