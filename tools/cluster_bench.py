#!/usr/bin/env python3
"""Measures clusters of real processes on this machine, over TCP on loopback, beside one `downbeat serve`.

    tools/cluster_bench.py lone       a lone request's latency
    tools/cluster_bench.py loop       requests a second in a closed loop of 32 clients
    tools/cluster_bench.py kill       the scheduler that leads is killed (SIGKILL) under 2,000 requests/s, 20 times
    tools/cluster_bench.py pause      the same, stopped for a second (SIGSTOP)

Everything is started anew, on free ports. Prints a line for each round, and medians.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Processes:
    """Processes that end with this."""

    def __init__(self, binary, verbose):
        self.binary, self.verbose, self.all = binary, verbose, []

    def start(self, role, *flags, http):
        flags = ["--host", "127.0.0.1", "--grpc-port", "off", "--metrics-port", "off", "--http-port", str(http), *flags]
        stderr = None if self.verbose else subprocess.DEVNULL
        child = subprocess.Popen([self.binary, role, *flags], stderr=stderr, cwd=ROOT)
        self.all.append(child)
        return child

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for child in self.all:
            child.kill()
            child.wait()


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
        return json.load(answer)


def ready(port):
    for _ in range(600):
        try:
            if get(port, "/v2/health/ready")["ready"]:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("never ready")


def cluster(processes, args, flags=()):
    """Two schedulers, a backend and a frontend; gives the frontend's port, and the schedulers with theirs."""
    a, b, *http = free_ports(6)
    addresses = [f"127.0.0.1:{a}", f"127.0.0.1:{b}"]
    listed = ["--schedulers", ",".join(addresses)]
    schedulers = []
    for rank, address in enumerate(addresses):
        own = ["--rank", str(rank), "--listen", address]
        schedulers.append((processes.start("scheduler", *listed, *own, http=http[rank]), http[rank]))
    processes.start("backend", *listed, *flags, *args.engine, args.models, http=http[2])
    processes.start("frontend", *listed, "--listen", "127.0.0.1:0", http=http[3])
    for port in http:
        ready(port)
    return http[3], schedulers


def bench(args, port, *flags):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "bench.json")
        command = [args.binary, "bench", "-m", "mlp", "-u", f"127.0.0.1:{port}", "--json", out, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(out) as file:
            return json.load(file)


def beside(args, *flags):
    """The same load on a cluster and on one server, in turns."""
    with Processes(args.binary, args.verbose) as processes:
        apart, _ = cluster(processes, args)
        (whole,) = free_ports(1)
        processes.start("serve", *args.engine, args.models, http=whole)
        ready(whole)
        for _ in range(args.rounds):
            yield bench(args, apart, *flags), bench(args, whole, *flags)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lone", "loop", "kill", "pause"])
    parser.add_argument("--binary", default=os.path.join(ROOT, "target/release/downbeat"))
    parser.add_argument("--models", default=os.path.join(ROOT, "examples/models"))
    parser.add_argument("--engine", type=str.split, default=["--engine", "rten"])
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--rate", default="2000")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    args.rounds = args.rounds or {"lone": 7, "loop": 7, "kill": 20, "pause": 20}[args.what]
    {"lone": lone, "loop": loop, "kill": failover, "pause": failover}[args.what](args)


def lone(args):
    rows = []
    for apart, whole in beside(args, "--closed", "-c", "1", "-d", "3"):
        (a, b) = (measured["total"]["latency_ms"] for measured in (apart, whole))
        row = [1e3 * figure for figure in (a["p50"], b["p50"], a["p99"], b["p99"])]
        rows.append(row)
        print("cluster p50 %.0f us, serve p50 %.0f us; p99 %.0f and %.0f us" % tuple(row), flush=True)
    print("medians:", [round(statistics.median(column)) for column in zip(*rows)])


def loop(args):
    rows = []
    for apart, whole in beside(args, "--closed", "-c", "32", "-d", "4"):
        row = [measured["total"]["answered_per_second"] for measured in (apart, whole)]
        rows.append(row)
        print("cluster %.0f requests/s, serve %.0f" % tuple(row), flush=True)
    print("medians:", [round(statistics.median(column)) for column in zip(*rows)])


def failover(args):
    rows = []
    for _ in range(args.rounds):
        with Processes(args.binary, args.verbose) as processes:
            port, schedulers = cluster(processes, args, ["--default-slo-ms", "100"])
            calm = bench(args, port, "--rate", args.rate, "-d", "2")
            leader = next(child for child, http in schedulers if get(http, "/v2/cluster")["leads"])
            load = ["--rate", args.rate, "-d", "3"]
            with tempfile.TemporaryDirectory() as folder:
                out = os.path.join(folder, "bench.json")
                command = [args.binary, "bench", "-m", "mlp", "-u", f"127.0.0.1:{port}", "--json", out, *load]
                running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                time.sleep(2)
                if args.what == "kill":
                    leader.kill()
                else:
                    leader.send_signal(signal.SIGSTOP)
                    time.sleep(1)
                    leader.send_signal(signal.SIGCONT)
                running.wait()
                with open(out) as file:
                    hit = json.load(file)
            row = summary(calm) + summary(hit)
            rows.append(row)
            print("before: longest %.1f ms, %d of %d failed; with it: longest %.1f ms, %d of %d failed" % tuple(row), flush=True)
    longest = sorted(row[3] for row in rows)
    print("longest: median %.1f ms, worst %.1f ms; failed %d of %d" % (
        statistics.median(longest), longest[-1], sum(row[4] for row in rows), sum(row[5] for row in rows)))
    print("before:  median %.1f ms, worst %.1f ms" % (
        statistics.median(row[0] for row in rows), max(row[0] for row in rows)))


def summary(measured):
    total = measured["total"]
    return [total["latency_ms"]["max"], total["scheduled"] - total["ok"], total["scheduled"]]


main()
