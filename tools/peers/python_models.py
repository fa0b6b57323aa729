#!/usr/bin/env python3
"""Measures Python models and an ensemble of Downbeat beside Triton's Python backend, in turns on one machine.

    python3.11 -m venv triton && triton/bin/pip install nvidia-pytriton==0.7.0 'tritonclient[http]'
    triton/bin/python tools/peers/python_models.py --downbeat target/dist/downbeat --turns 5

The venv's Python must be one of the system, and runs the models of both servers. Every way loads both servers in each turn, and the order alternates.
`--client` names another program whose `bench` is the client. The table has medians over the turns, and Downbeat's rate divided by Triton's.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytriton
import tritonclient.http as httpclient

from compare import DOWNBEAT, TRITON, Server, free_ports

ADD_SUB = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            outputs = [pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
# Elements of each of the two inputs and outputs: small ones, and 1 MB.
SIZES = {"add_sub": 4, "add_sub_1mb": 262_144}
STEPS = 3


def config(size):
    sides = (("input", "INPUT"), ("output", "OUTPUT"))
    tensors = [f'{side} [ {{ name: "{name}{i}" data_type: TYPE_FP32 dims: [ {size} ] }} ]' for side, name in sides for i in range(2)]
    return "\n".join(['backend: "python"', *tensors, "instance_group [ { kind: KIND_CPU } ]"])


def repository(folder):
    for name, size in [*SIZES.items(), *((f"step{i}", 4) for i in range(STEPS))]:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(ADD_SUB)
        (folder / name / "config.pbtxt").write_text(config(size))
    (folder / "whole" / "1").mkdir(parents=True)
    lines, steps = config(4).splitlines()[1:-1], []
    for i in range(STEPS):
        given = [f"t{i - 1}_{j}" if i else f"INPUT{j}" for j in range(2)]
        made = [f"t{i}_{j}" if i < STEPS - 1 else f"OUTPUT{j}" for j in range(2)]
        maps = [f'input_map {{ key: "INPUT{j}" value: "{given[j]}" }} output_map {{ key: "OUTPUT{j}" value: "{made[j]}" }}' for j in range(2)]
        steps.append(f'{{ model_name: "step{i}" model_version: -1 {" ".join(maps)} }}')
    lines.append(f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}")
    (folder / "whole" / "config.pbtxt").write_text("\n".join(['platform: "ensemble"', *lines]))


def start_downbeat(args, models):
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    return Server(DOWNBEAT, http, grpc, [args.downbeat, "serve", "--host", "127.0.0.1", *ports, models, "--python", sys.executable])


def start_triton(models, scratch):
    site = pathlib.Path(pytriton.__path__[0]).parent
    wheel, backends = site / "pytriton/tritonserver", scratch / "backends"
    shutil.copytree(wheel / "backends", backends)
    shutil.copy(wheel / "python_backend_stubs/{}.{}/triton_python_backend_stub".format(*sys.version_info[:2]), backends / "python")
    # Its interpreter knows the packages of no venv.
    utils, packages = backends / "python/triton_python_backend_utils.py", [entry for entry in sys.path if entry.endswith("-packages")]
    utils.write_text(f"import sys\nsys.path[:0] = {packages}\n{utils.read_text()}")
    ports = free_ports(3)
    listen = [f"--{protocol}-{key}" for protocol, port in zip(("http", "grpc", "metrics"), ports) for key in ("address=127.0.0.1", f"port={port}")]
    command = [wheel / "bin/tritonserver", f"--model-repository={models}", f"--backend-directory={backends}", *listen]
    return Server(TRITON, ports[0], ports[1], command, LD_LIBRARY_PATH=str(site / "nvidia_pytriton.libs"))


def interpreters_cpu(server):
    """The CPU seconds of the server's descendants: the processes that run the models."""
    parents, ticks = {}, {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        # A process may end meanwhile.
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)], ticks[int(stat.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    found, last = set(), {server.child.pid}
    while last:
        last = {pid for pid, parent in parents.items() if parent in last} - found
        found |= last
    return sum(ticks[pid] for pid in found) / os.sysconf("SC_CLK_TCK")


def bench(args, server, model, protocol, connections):
    port = server.grpc if protocol == "grpc" else server.http
    command = [args.client or args.downbeat, "bench", "-m", model, "-u", f"{protocol}://127.0.0.1:{port}", "--closed", "-c", connections,
               "-d", args.seconds, "-w", 0.5, "--json", "-q"]
    before = interpreters_cpu(server)
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{server.name}, {model}: {done.stderr.strip() or done.stdout[-2000:]}")
    reply = json.loads(done.stdout)
    cpu_us = 1e6 * (interpreters_cpu(server) - before) / reply["generator"]["requests"]
    return reply["total"]["goodput_per_second"], reply["total"]["latency_ms"]["p50"], cpu_us


def walk(args, server, whole):
    """One client that asks the ensemble, or its three models one after another."""
    first = [np.arange(4, dtype=np.float32), np.ones(4, dtype=np.float32)]
    took, until, before = [], time.monotonic() + args.seconds, interpreters_cpu(server)
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        while time.monotonic() < until:
            begin, values = time.monotonic(), first
            for model in ["whole"] if whole else [f"step{i}" for i in range(STEPS)]:
                inputs = [httpclient.InferInput(f"INPUT{i}", [4], "FP32").set_data_from_numpy(value) for i, value in enumerate(values)]
                answer = client.infer(model, inputs)
                values = [answer.as_numpy(f"OUTPUT{i}") for i in range(2)]
            took.append(time.monotonic() - begin)
            # Three times sum and difference.
            assert np.array_equal(values[0], 2 * (first[0] + first[1])) and np.array_equal(values[1], 2 * (first[0] - first[1]))
    return len(took) / sum(took), 1000 * statistics.median(took), 1e6 * (interpreters_cpu(server) - before) / len(took)


def ways(args):
    for model in SIZES:
        for protocol in ("http", "grpc"):
            for connections in (1, 16):
                yield (f"{model}, {protocol}, {connections}", lambda server, m=model, p=protocol, n=connections: bench(args, server, m, p, n))
    yield "ensemble of three steps, 1 client", lambda server: walk(args, server, True)
    yield "three calls of the client, 1 client", lambda server: walk(args, server, False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--downbeat", required=True, type=os.path.abspath)
    parser.add_argument("--client", type=os.path.abspath)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        repository(scratch / "models")
        servers = [start_downbeat(args, scratch / "models"), start_triton(scratch / "models", scratch)]
        try:
            [server.wait() for server in servers]
            for turn in range(args.turns):
                for way, measure in ways(args):
                    for server in servers if turn % 2 else servers[::-1]:
                        found.setdefault(way, {}).setdefault(server.name, []).append(measure(server))
        finally:
            [server.stop() for server in servers]
    head = "requests/s, p50 ms, us of the interpreters' CPU"
    print(f"| way | {DOWNBEAT}: {head} | {TRITON}: the same | rate, times (least to most) |\n|---|---|---|---|")
    for way, of in found.items():
        cells = [", ".join(f"{statistics.median(values):.3g}" for values in zip(*of[name])) for name in (DOWNBEAT, TRITON)]
        ratios = sorted(ours[0] / theirs[0] for ours, theirs in zip(of[DOWNBEAT], of[TRITON]))
        print(f"| {way} | {cells[0]} | {cells[1]} | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")


if __name__ == "__main__":
    main()
