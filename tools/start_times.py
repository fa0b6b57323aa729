#!/usr/bin/env python3
"""Measures how a server starts: time and processor time to ready and to the first answer, memory and processes.

    tools/start_times.py target/ci/downbeat examples/models
    tools/start_times.py target/ci/downbeat examples/models --against OLD_PROGRAM --starts 11

Each row is the median of several starts. With --against, starts of both programs take turns, so that the ratios hold on a busy machine too. A cold start has
no page of the program and of the models in the page cache, and is the first start after an installation: no profile is stored. `first` has an empty folder
of profiles, `later` has the profiles of an earlier start.
"""
import argparse
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
READY_WITHIN_S = 300
BYTES = {"BOOL": 1, "INT8": 1, "UINT8": 1, "INT16": 2, "UINT16": 2, "FP16": 2, "BF16": 2, "INT32": 4, "UINT32": 4, "FP32": 4, "INT64": 8, "UINT64": 8, "FP64": 8}
# Dimensions of requests that vary, behind the batch dimension.
VARYING = 16


def free_ports(count):
    """Ports of the loopback interface without a listener."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def forget_pages(*paths):
    """Takes files out of the page cache, unless another process has them mapped."""
    for path in paths:
        for file in [path] if path.is_file() else filter(pathlib.Path.is_file, path.rglob("*")):
            with open(file, "rb") as opened:
                os.fdatasync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def field(text, name):
    """A number of /proc/PID/status or smaps_rollup, in MiB where the file has kB."""
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    words = line.split()
    return int(words[1]) / 1024 if words[-1] == "kB" else int(words[1])


class Start:
    """One server, from its start on."""

    def __init__(self, program, models, profiles, flags):
        self.port, grpc, metrics = free_ports(3)
        command = [str(program), "serve", str(models), "--host", "127.0.0.1", "--http-port", str(self.port), "--grpc-port", str(grpc), "--metrics-port",
                   str(metrics), "--profile-cache", str(profiles), *flags]
        self.log = tempfile.TemporaryFile()
        self.begin = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self.log, stdin=subprocess.DEVNULL)
        self.proc = pathlib.Path(f"/proc/{self.process.pid}")

    def said(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def cpu_s(self):
        """Processor time of the server and of its processes that have ended."""
        return sum(int(ticks) for ticks in (self.proc / "stat").read_text().rsplit(")", 1)[1].split()[11:15]) * TICK_S

    def call(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def wait_ready(self):
        """Seconds from the start until the server says that it is ready."""
        while time.monotonic() - self.begin < READY_WITHIN_S:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}:\n{self.said()}")
            try:
                if self.call("GET", "/v2/health/ready")[0] == 200:
                    return time.monotonic() - self.begin
            except OSError:
                pass
            time.sleep(0.002)
        raise SystemExit(f"the server was not ready after {READY_WITHIN_S} s:\n{self.said()}")

    def request(self, model):
        """A request of zeros for a model, as binary tensors."""
        metadata = json.loads(self.call("GET", f"/v2/models/{model}")[1])
        inputs, data = [], b""
        for tensor in metadata["inputs"]:
            shape = [size if size > 0 else VARYING if at else 1 for at, size in enumerate(tensor["shape"])]
            count = 1
            for size in shape:
                count *= size
            size = count * BYTES[tensor["datatype"]]
            inputs.append({"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape, "parameters": {"binary_data_size": size}})
            data += bytes(size)
        head = json.dumps({"inputs": inputs}).encode()
        return f"/v2/models/{model}/infer", head + data, {"Inference-Header-Content-Length": str(len(head))}

    def memory(self):
        status = (self.proc / "status").read_text()
        return {"RSS": field(status, "VmRSS"), "own": field(status, "RssAnon"), "file": field(status, "RssFile"), "peak": field(status, "VmHWM"),
                "threads": field(status, "Threads")}

    def processes(self):
        """The server's process and its children."""
        children = (self.proc / "task").glob("*/children")
        return 1 + sum(len(file.read_text().split()) for file in children)

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def measure(program, models, profiles, flags, requests):
    """Starts a server once, has it answer, and ends it. Returns {figure: number}."""
    start = Start(program, models, profiles, flags)
    try:
        found = {"ready s": start.wait_ready(), "CPU s": start.cpu_s()}
        names = json.loads(start.call("POST", "/v2/repository/index", "{}")[1])
        calls = [start.request(model["name"]) for model in names]
        status, answer = start.call("POST", *calls[0])
        if status != 200:
            raise SystemExit(f"{calls[0][0]}: {status} {answer[:400]}")
        found["answer s"] = time.monotonic() - start.begin
        found |= {name if name == "threads" else f"{name} MiB": value for name, value in start.memory().items()}
        found["processes"] = start.processes()
        for _ in range(requests):
            for call in calls:
                start.call("POST", *call)
        found[f"RSS MiB after {requests}"] = start.memory()["RSS"]
        return found
    finally:
        start.stop()


def rows(arguments, folder):
    """The figures of all starts: {(situation, program): [figures]}."""
    programs = []
    for number, program in enumerate([arguments.program, *arguments.against]):
        # Pages of a program that runs elsewhere too stay in the page cache.
        programs.append(pathlib.Path(shutil.copy(program, folder / f"downbeat-{number}")))
    found = {}
    for _ in range(arguments.starts):
        for program, name in zip(programs, [arguments.program, *arguments.against]):
            profiles = folder / f"profiles-{program.name}"
            for situation in ["first, cold", "first, warm", "later, cold", "later, warm"]:
                if situation.startswith("first"):
                    shutil.rmtree(profiles, ignore_errors=True)
                if situation == "later, cold":
                    fill(program, arguments, profiles)
                if situation.endswith("cold"):
                    forget_pages(program, arguments.models)
                figures = measure(program, arguments.models, profiles, arguments.flag, arguments.requests)
                found.setdefault((situation, str(name)), []).append(figures)
    return found


def fill(program, arguments, profiles):
    """Runs a server until its profiles are stored."""
    start = Start(program, arguments.models, profiles, arguments.flag)
    try:
        start.wait_ready()
        time.sleep(arguments.fill_s)
    finally:
        start.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("models", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path, action="append", default=[], help="another program, for ratios")
    parser.add_argument("--starts", type=int, default=7, help="starts of each kind")
    parser.add_argument("--requests", type=int, default=100, help="requests to each model before memory is read again")
    parser.add_argument("--fill-s", type=float, default=0.0, help="seconds that a server may measure behind the service before `later` starts")
    parser.add_argument("--flag", action="append", default=["--engine=rten"], help="a flag of downbeat serve")
    parser.add_argument("--json", type=pathlib.Path, help="writes all figures of all starts here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = rows(arguments, pathlib.Path(folder))
    if arguments.json:
        arguments.json.write_text(json.dumps([[*key, figures] for key, figures in found.items()]))
    names = list(next(iter(found.values()))[0])
    print("| start | program | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 2) + "|")
    for (situation, program), figures in sorted(found.items()):
        medians = [statistics.median(each[name] for each in figures) for name in names]
        shown = [f"{value:.2f}" if name.endswith(" s") else f"{value:.0f}" for name, value in zip(names, medians)]
        print(f"| {situation} | {program} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
