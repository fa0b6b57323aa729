#!/usr/bin/env python3
"""Measures clusters of real processes on this machine beside one `downbeat serve`, or beside each other.

    tools/cluster_bench.py lone         a lone request's latency
    tools/cluster_bench.py loop         requests a second in a closed loop of 32 clients, and CPU and bytes of tensors a request
    tools/cluster_bench.py kill         the scheduler that leads is killed (SIGKILL) under 2,000 requests/s, 20 times
    tools/cluster_bench.py pause        the same, stopped for a second (SIGSTOP)
    tools/cluster_bench.py backend      one of two backends is killed: what is lost, and how many requests are handed in again
    tools/cluster_bench.py stops        each role in turn is stopped for 0.4 s under 450 requests/s with an SLO of 250 ms: what is not answered
    tools/cluster_bench.py busy         beside 60 busy processes, with an SLO of 250 ms: what is not answered, and how often the lead changes
    tools/cluster_bench.py tensors      inputs of 600 KB, by each transport
    tools/cluster_bench.py pictures     JPEGs of `--width` 3000: a lone request, and `--rate` (8) and twice as many a second
    tools/cluster_bench.py incast       8 inputs of 150 KB into one backend, by each transport, and one copy of them
    tools/cluster_bench.py feed         a scheduler alone, of one core, fed over sockets by processes that are played
    tools/cluster_bench.py end-to-end   64 emulated devices: what the cluster holds to what its scheduler alone would
    tools/cluster_bench.py scale        a controller starts and stops backends as Kubernetes' autoscaler would, while the load doubles and halves

Everything is started anew, on free ports. Prints a line for each round, and medians. `incast` and `feed` need the examples of the server:

    cargo build --release -p downbeat && cargo build --release -p downbeat-server --examples
"""

import argparse
import csv
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "tests/clients"), os.path.join(ROOT, "packaging/wheel/python")]

import emulated  # noqa: E402
from downbeat.autoscaler import Hpa, published  # noqa: E402

# The options that make a frontend and its backends exchange tensors in this way, which `GET
# /v2/cluster` then reports. Processes of two users cannot read each other's memory.
TRANSPORTS = {"shared_memory": {}, "tcp": {"user": "nobody"}}
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def free_ports(count):
    """Below those that the system gives to connections, which could take one of them before it is listened on."""
    sockets = []
    while len(sockets) < count:
        try:
            sockets.append(socket.create_server(("127.0.0.1", random.randrange(20_000, 32_000))))
        except OSError:
            pass
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
        return answer.read()


def ready(process):
    for _ in range(600):
        try:
            if json.loads(get(process.http, "/v2/health/ready"))["ready"]:
                return
        except OSError:
            pass
        if process.child.poll() is not None:
            raise SystemExit(f"{process.role}: has ended (--verbose has why)")
        time.sleep(0.1)
    raise SystemExit(f"{process.role}: never ready")


class Process:
    """A process of ours: its ports for people and for metrics."""

    def __init__(self, args, role, *flags, cores=None, **how):
        self.role, (self.http, self.metrics) = role, free_ports(2)
        ports = ["--http-port", str(self.http), "--metrics-port", str(self.metrics), "--grpc-port", "off"]
        command = [args.binary, role, "--host", "127.0.0.1", *ports, *flags]
        if cores is not None:
            command = ["taskset", "-c", cores, *command]
        stderr = None if args.verbose else subprocess.DEVNULL
        self.child = subprocess.Popen(command, stderr=stderr, cwd=ROOT, **how)

    def status(self):
        return json.loads(get(self.http, "/v2/cluster"))

    def metric(self, name):
        """The sum over all labels, or those that are written behind the name."""
        lines = get(self.metrics, "/metrics").decode().splitlines()
        its = (line for line in lines if line.startswith(name) and line[len(name)] in "{, ")
        return sum(float(line.rsplit(" ", 1)[1]) for line in its)

    def cpu(self):
        """Seconds of CPU: the process's own, and the kernel's on its behalf."""
        with open(f"/proc/{self.child.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return [int(fields[place]) / os.sysconf("SC_CLK_TCK") for place in (11, 12)]


    def wakes(self):
        """How often its threads have gone to sleep, and so were woken."""
        sum = 0
        for thread in os.listdir(f"/proc/{self.child.pid}/task"):
            try:
                with open(f"/proc/{self.child.pid}/task/{thread}/status") as file:
                    sum += int(next(line for line in file if line.startswith("voluntary")).split()[1])
            except OSError:
                # The thread has ended.
                pass
        return sum


class Processes:
    """Processes that end with this."""

    def __init__(self, args):
        self.args, self.all = args, []

    def start(self, *what, **how):
        self.all.append(Process(self.args, *what, **how))
        return self.all[-1]

    def cluster(self, models, flags=(), schedulers=2, backends=1, frontends=1, how=None):
        """Starts so many of each, backends with these flags and frontends as `how` says, and gives them once they are ready. `schedulers` may be an address where one is already."""
        addresses = schedulers if isinstance(schedulers, list) else [f"127.0.0.1:{port}" for port in free_ports(schedulers)]
        listed = ["--schedulers", ",".join(addresses), *self.args.roles]
        of = {"schedulers": [], "backends": [], "frontends": []}
        for rank, address in enumerate(addresses if addresses is not schedulers else []):
            of["schedulers"].append(self.start("scheduler", *listed, "--rank", str(rank), "--listen", address))
        for _ in range(backends):
            of["backends"].append(self.start("backend", *listed, *flags, models))
        for _ in range(frontends):
            of["frontends"].append(self.start("frontend", *listed, "--listen", "127.0.0.1:0", **(how or {})))
        for process in self.all:
            ready(process)
        return of

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.child.kill()
            process.child.wait()


class Load:
    """The load generator, while it runs; `end` gives what it measured."""

    def __init__(self, args, process, *flags, model="mlp"):
        self.folder = tempfile.TemporaryDirectory()
        self.out = os.path.join(self.folder.name, "bench.json")
        models = [model] if isinstance(model, str) else model
        named = [word for model in models for word in ("-m", model)]
        command = [args.binary, "bench", *named, "-u", f"127.0.0.1:{process.http}", "--json", self.out, *flags]
        self.child = subprocess.Popen(command, **QUIET)

    def end(self):
        # 3: no request was answered well, which the reader of the row judges.
        if self.child.wait() not in (0, 3):
            raise SystemExit("the load generator failed")
        with self.folder, open(self.out) as file:
            return json.load(file)

    def stop(self):
        self.child.kill()
        self.child.wait()
        self.folder.cleanup()


def bench(args, process, *flags, **what):
    return Load(args, process, *flags, **what).end()


def medians(title, rows):
    columns = [statistics.median(column) for column in zip(*rows)]
    print(title, *[f"{figure:.4g}" for figure in columns], flush=True)
    return columns


def goes_by(transport, frontend):
    """Checks the transport, once a backend has had a batch of the frontend's requests and so is
    connected."""
    backends = [peer for peer in frontend.status()["peers"] if peer["role"] == "backend"]
    if not backends or any(peer["transport"] != transport for peer in backends):
        raise SystemExit(f"tensors do not go by {transport}: {backends} (tcp takes to be root here)")


def lone(args):
    rows = []
    with Processes(args) as processes:
        cluster = processes.cluster(args.models, args.engine)
        (apart,), (backend,) = cluster["frontends"], cluster["backends"]
        whole = processes.start("serve", *args.engine, args.models)
        ready(whole)
        leader = next(process for process in cluster["schedulers"] if process.status()["leads"])
        of = [apart, leader, backend, whole]
        for _ in range(args.rounds):
            before = [process.wakes() for process in of]
            measured = [bench(args, process, "--closed", "-c", "1", "-d", "3", "-w", "0")["total"] for process in (apart, whole)]
            (a, b), (there, here) = ([its["latency_ms"] for its in measured], [its["ok"] for its in measured])
            wakes = [(process.wakes() - was) / count for process, was, count in zip(of, before, [there] * 3 + [here])]
            rows.append([1e3 * figure for figure in (a["p50"], b["p50"], a["p50"] - b["p50"], a["p99"], b["p99"])] + wakes)
            print("cluster p50 %.0f us, serve p50 %.0f us (%.0f apart); p99 %.0f and %.0f us; wake-ups a request: frontend %.2f, "
                  "scheduler %.2f, backend %.2f, serve %.2f" % tuple(rows[-1]), flush=True)
    medians("medians:", rows)


def loop(args):
    rows, costs = [], []
    with Processes(args) as processes:
        cluster = processes.cluster(args.models, args.engine)
        whole = processes.start("serve", *args.engine, args.models)
        ready(whole)
        (apart,), (backend,) = cluster["frontends"], cluster["backends"]
        leader = next(process for process in cluster["schedulers"] if process.status()["leads"])
        of = [apart, leader, backend]
        sent = lambda: [process.metric(f'downbeat_cluster_tensor_bytes_total{{transport="{transport}"}}')
                        for process in (apart, backend) for transport in TRANSPORTS]
        for _ in range(args.rounds):
            before, bytes_before = [process.cpu() for process in (*of, whole)], sent()
            wakes = [process.wakes() for process in (*of, whole)]
            (a, b) = (bench(args, process, "--closed", "-c", "32", "-d", "4", "-w", "0") for process in (apart, whole))
            counts = [measured["total"]["ok"] for measured in (a, b)]
            rows.append([measured["total"]["answered_per_second"] for measured in (a, b)])
            rows[-1].append(rows[-1][0] / rows[-1][1])
            print("cluster %.0f requests/s, serve %.0f: %.2f" % tuple(rows[-1]), flush=True)
            cost = []
            for process, was, count in zip((*of, whole), before, [counts[0]] * 3 + [counts[1]]):
                own, kernel = (1e6 * (now - then) / count for now, then in zip(process.cpu(), was))
                cost += [own + kernel, kernel]
            cost += [(process.wakes() - was) / count for process, was, count in zip((*of, whole), wakes, [counts[0]] * 3 + [counts[1]])]
            costs.append(cost + [(now - then) / counts[0] for now, then in zip(sent(), bytes_before)])
    medians("medians: cluster, serve, ratio:", rows)
    medians("CPU a request, us, in all and in the kernel: frontend, scheduler, backend, serve; wake-ups a request of the same; bytes of tensors sent a request: "
            "frontend, backend, each by " + ", ".join(TRANSPORTS) + ":", costs)


def failover(args):
    """A process dies, or stands still, in the middle of open-loop load: `kill`, `pause`, `backend`."""
    rows, of_backend = [], args.what == "backend"
    for _ in range(args.rounds):
        with Processes(args) as processes:
            flags = [*args.engine, "--default-slo-ms", "100"]
            cluster = processes.cluster(args.models, flags, backends=2 if of_backend else 1)
            (frontend,) = cluster["frontends"]
            calm = bench(args, frontend, "--rate", args.rate or "2000", "-d", "2")
            if of_backend:
                hit = cluster["backends"][0]
            else:
                hit = next(process for process in cluster["schedulers"] if process.status()["leads"])
            again = frontend.metric("downbeat_cluster_run_again_total")
            load = Load(args, frontend, "--rate", args.rate or "2000", "-d", "3")
            time.sleep(2)
            if args.what == "pause":
                hit.child.send_signal(signal.SIGSTOP)
                time.sleep(1)
                hit.child.send_signal(signal.SIGCONT)
            else:
                hit.child.kill()
            with_it = load.end()
            # The server counts once a second.
            time.sleep(1.2)
            row = summary(calm) + summary(with_it) + [frontend.metric("downbeat_cluster_run_again_total") - again]
            rows.append(row)
            print("before: longest %.1f ms, %d of %d failed; with it: longest %.1f ms, %d of %d failed, %d handed in again "
                  "as their backend was lost" % tuple(row), {why: its["count"] for why, its in with_it["total"]["failures"].items()}, flush=True)
    longest, columns = sorted(row[3] for row in rows), list(zip(*rows))
    print("longest: median %.1f ms, worst %.1f ms; failed %d of %d; handed in again: median %d, most %d" % (
        statistics.median(longest), longest[-1], sum(columns[4]), sum(columns[5]), statistics.median(columns[6]), max(columns[6])))
    print("before:  median %.1f ms, worst %.1f ms" % (statistics.median(columns[0]), max(columns[0])))


def stops(args):
    """A role stands still for 0.4 s, with a spare scheduler and without."""
    rate = args.rate or "450"
    for hit, schedulers in [("backends", 1), ("schedulers", 1), ("frontends", 1), ("schedulers", 2)]:
        rows = []
        for _ in range(args.rounds):
            with Processes(args) as processes:
                cluster = processes.cluster(args.models, [*args.engine, "--default-slo-ms", "250"], schedulers)
                (frontend,) = cluster["frontends"]
                _, calm, _ = summary(bench(args, frontend, "--rate", rate, "-d", "5"))
                stopped = next((process for process in cluster[hit] if process.status().get("leads", True)), cluster[hit][0])
                load = Load(args, frontend, "--rate", rate, "-d", "5", "-w", "0")
                time.sleep(2)
                stopped.child.send_signal(signal.SIGSTOP)
                time.sleep(0.4)
                stopped.child.send_signal(signal.SIGCONT)
                measured = load.end()
                _, bad, scheduled = summary(measured)
                rows.append([calm, bad, scheduled, 1e3 * bad / float(rate)])
                print(f"one of the {hit}, {schedulers} schedulers: not answered before %d, with the pause %d, of %d; the load of %.0f ms" % tuple(rows[-1]),
                      {why: its["count"] for why, its in measured["total"]["failures"].items()}, flush=True)
        medians(f"medians of {hit} with {schedulers} schedulers:", rows)


def busy(args):
    """A cluster and `serve` in turns, beside so many processes that compute."""
    rows = []
    computes = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(args.beside)]
    try:
        with Processes(args) as processes:
            flags = [*args.engine, "--default-slo-ms", "250"]
            cluster = processes.cluster(args.models, flags, schedulers=3)
            (frontend,), whole = cluster["frontends"], processes.start("serve", *flags, args.models)
            ready(whole)
            for _ in range(args.rounds):
                bad = []
                for process in (frontend, whole):
                    _, failed, scheduled = summary(bench(args, process, "--rate", args.rate or "100", "-d", "20"))
                    bad.append(100 * failed / scheduled)
                rows.append([*bad, frontend.status()["epoch"]])
                print("cluster %.2f%% not answered, serve %.2f%%; epoch %d" % tuple(rows[-1]), flush=True)
    finally:
        for process in computes:
            process.kill()
    medians(f"medians beside {args.beside} processes:", rows)
    print("load average", *os.getloadavg())


def summary(measured):
    total = measured["total"]
    return [total["latency_ms"]["max"], total["scheduled"] - total["ok"], total["scheduled"]]


def tensors(args):
    rows = []
    with tempfile.TemporaryDirectory() as models, Processes(args) as processes:
        emulated.write(models, "large", "alpha_ms = 0.05\nbeta_ms = 0.05\nmax_batch = 8\n", 150_000)
        engine, ways = ["--engine", "emulated"], {}
        for transport in args.transports:
            (ways[transport],) = processes.cluster(models, engine, schedulers=1, how=TRANSPORTS[transport])["frontends"]
            bench(args, ways[transport], "--requests", "20", "-w", "0", model="large")
            goes_by(transport, ways[transport])
        for _ in range(args.rounds):
            row = []
            for frontend in ways.values():
                one = bench(args, frontend, "--closed", "-c", "1", "-d", "3", "--variants", "4", model="large")
                all = bench(args, frontend, "--closed", "-c", "8", "-d", "3", "--variants", "4", model="large")
                row += [1e3 * one["total"]["latency_ms"]["p50"], all["total"]["answered_per_second"]]
            row += [figure / row[n % 2] for n, figure in enumerate(row[2:])]
            rows.append(row)
            print(*[f"{figure:.4g}" for figure in row], flush=True)
    names = [f"{transport} {what}" for transport in args.transports for what in ("lone p50 us", "8 clients requests/s")]
    medians("medians: " + ", ".join(names) + f"; the others' to those of {args.transports[0]}:", rows)


PHOTO = """alpha_ms = 1
beta_ms = 5
max_batch = 8
[[inputs]]
name = "x"
datatype = "FP32"
dims = [-1, 3, 32, 32]
[[outputs]]
name = "y"
datatype = "FP32"
dims = [-1, 1]
"""
STEPS = """[models.photo]
preprocess = [{ step = "decode" }, { step = "resize", size = 40 }, { step = "crop", size = 32 },
  { step = "normalize", mean = [0, 0, 0], std = [1, 1, 1] }, { step = "layout", order = "chw" }]
"""


def pictures(args):
    import io
    import threading

    from PIL import Image

    noise = Image.frombytes("RGB", (300, 200), random.Random(7).randbytes(300 * 200 * 3)).resize((args.width, args.width * 2 // 3))
    noise.save(jpeg := io.BytesIO(), "JPEG", quality=90)
    item = len(jpeg.getvalue()).to_bytes(4, "little") + jpeg.getvalue()
    rows = []

    def ask(port, name):
        described = {"name": name, "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(item)}}
        head = json.dumps({"inputs": [described]}).encode()
        begin = time.monotonic()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/models/photo/infer", head + item,
                                         {"Inference-Header-Content-Length": str(len(head))})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                answer.read()
        except OSError:
            return None
        return 1e3 * (time.monotonic() - begin)

    with tempfile.TemporaryDirectory() as folder, Processes(args) as processes:
        models, config = os.path.join(folder, "models"), os.path.join(folder, "steps.toml")
        os.makedirs(os.path.join(models, "photo/1"))
        for path, what in [(os.path.join(models, "photo/1/model.emulated.toml"), PHOTO), (config, STEPS)]:
            with open(path, "w") as file:
                file.write(what)
        flags = ["--engine", "emulated", "--config", config]
        (frontend,) = processes.cluster(models, flags, schedulers=1)["frontends"]
        described = json.loads(get(frontend.http, "/v2/models/photo/config"))
        name = described["parameters"]["preprocess_input"]["string_value"]
        for _ in range(args.rounds):
            lone = [ask(frontend.http, name) for _ in range(60)][10:]
            row = [statistics.median(lone), sorted(lone)[-5]]
            for rate in (float(args.rate or 8), 2 * float(args.rate or 8)):
                took, threads = [], []
                for n in range(100):
                    threads.append(threading.Thread(target=lambda: took.append(ask(frontend.http, name))))
                    threads[-1].start()
                    time.sleep(random.Random(n).expovariate(rate))
                for thread in threads:
                    thread.join()
                row += [sum(one is not None and one <= 250 for one in took) / len(took)]
                row += [statistics.median(one for one in took if one is not None)]
            rows.append(row)
            print("lone p50 %.2f ms, p90 %.2f ms; at the rate: %.2f within 250 ms, p50 %.1f ms; at twice the rate: %.2f, p50 %.1f ms" % tuple(row), flush=True)
    medians("medians:", rows)


def incast(args):
    rows = []
    with tempfile.TemporaryDirectory() as models:
        emulated.write(models, "a_small", "alpha_ms = 0.001\nbeta_ms = 0.01\nmax_batch = 8\n", 1)
        emulated.write(models, "b_large", "alpha_ms = 0.001\nbeta_ms = 0.01\nmax_batch = 8\n", 37_500)
        for _ in range(args.rounds):
            for transport in args.transports:
                with Processes(args) as processes:
                    address = f"127.0.0.1:{free_ports(1)[0]}"
                    played = subprocess.Popen([example(args, "incast"), address, "2", "8", "1000"], stdout=subprocess.PIPE, text=True)
                    try:
                        of = processes.cluster(models, ["--engine", "emulated"], [address], frontends=2, how=TRANSPORTS[transport])
                        told = []
                        for model in ("a_small", "b_large"):
                            load = [Load(args, frontend, "--closed", "-c", "4", "-d", "600", "--variants", "8", model=model)
                                    for frontend in of["frontends"]]
                            told.append(json.loads(played.stdout.readline()))
                            for frontend in of["frontends"]:
                                goes_by(transport, frontend)
                            for generator in load:
                                generator.stop()
                    finally:
                        played.kill()
                        played.wait()
                small, large = told
                row = [small["p50_us"], large["p50_us"], large["p99_us"], large["one_copy_us"]]
                rows.append((transport, row + [(row[1] - row[0]) / row[3]]))
                print(transport, "8 small inputs p50 %.0f us; 8 of 150 KB p50 %.0f, p99 %.0f us; one copy of them %.0f us: what they take more is %.1f copies"
                      % tuple(rows[-1][1]), flush=True)
    for transport in args.transports:
        medians(f"medians, {transport}:", [row for its, row in rows if its == transport])


def example(args, name):
    path = os.path.join(os.path.dirname(args.binary), "examples", name)
    if not os.path.exists(path):
        raise SystemExit(f"{path} is not there: cargo build --release -p downbeat-server --examples")
    return path


def feed(args):
    rows = []
    for _ in range(args.rounds):
        for rate in args.rates:
            with Processes(args) as processes:
                address = f"127.0.0.1:{free_ports(1)[0]}"
                # The scheduler's ports for probes belong to other threads, which do nothing
                # meanwhile.
                scheduler = processes.start("scheduler", "--schedulers", address, "--listen", address, cores="0")
                ready(scheduler)
                before = scheduler.cpu()
                command = ["taskset", "-c", "1", example(args, "feed"), address, str(rate), "5"]
                told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
                own, kernel = (now - then for now, then in zip(scheduler.cpu(), before))
            offered, bad = told["handed_in_per_second"], 100 * told["refused"] / told["handed_in"]
            each = 1e9 * (own + kernel) / told["handed_in_in_all"]
            rows.append((rate, [offered, told["planned_per_second"], bad, told["mean_batch"], each, 100 * kernel / (own + kernel), 1e3 / each]))
            print("%.0f requests/s handed in, %.0f planned, %.2f%% refused, mean batch %.1f; %.0f ns of the scheduler's CPU a request, %.0f%% of it "
                  "in the kernel: %.2f million/s would fill its core" % tuple(rows[-1][1]), flush=True)
    for rate in args.rates:
        medians(f"medians at {rate:.0f}/s:", [row for its, row in rows if its == rate])


def end_to_end(args):
    """Symphony's figure 9, "e" to "s": 64 devices on two backends, two frontends, open-loop load; times as the paper's, longer by `--scale`."""
    with open(os.path.join(ROOT, "lab/experiments/profiles/profiles_1080ti.csv")) as file:
        profiles = list(csv.DictReader(file))
    for profile in profiles:
        for column in ("alpha_ms", "beta_ms", "slo_ms"):
            profile[column] = float(profile[column]) * args.scale
    with tempfile.TemporaryDirectory() as folder, Processes(args) as processes:
        named, models = os.path.join(folder, "profiles.csv"), os.path.join(folder, "models")
        with open(named, "w") as file:
            rows = csv.DictWriter(file, profiles[0].keys())
            rows.writeheader()
            rows.writerows(profiles)
        slos = []
        for profile in profiles:
            # As far as the SLO allows, as the simulation takes it.
            most = max(1, int((profile["slo_ms"] - profile["beta_ms"]) / profile["alpha_ms"]))
            emulated.write(models, profile["name"], "alpha_ms = {alpha_ms}\nbeta_ms = {beta_ms}\n".format(**profile) + f"max_batch = {most}\n", 1)
            slos += ["--slo-ms", f"{profile['name']}={profile['slo_ms']}"]
        seconds = args.seconds * args.scale
        simulate = [args.binary, "simulate", "capacity", "--profiles", named, "--devices", "64", "--policy", "deferred+window",
                    "--span", str(seconds), "--warm-up", str(2 * args.scale), "--json"]
        told = json.loads(subprocess.run(simulate, check=True, stdout=subprocess.PIPE, text=True).stdout)
        alone = told["cases"][0]["value"]["median"]
        print("scheduler alone: %.0f requests/s" % alone, flush=True)
        flags = ["--engine", "emulated", "--devices", "32", "--scheduler", "deferred", "--drop", "window", *slos]
        cluster = processes.cluster(models, flags, backends=2, frontends=2)

        low, high, share = 0.0, args.most, 0.95
        while high - low > 0.02:
            worst, all = bad_shares(args, cluster["frontends"], alone * share, seconds, [profile["name"] for profile in profiles])
            print("%.0f requests/s, %.3f of that: %.2f%% of a model's are bad at most, %.2f%% of all" % (alone * share, share, worst, all), flush=True)
            (low, high) = (share, high) if worst <= 1 else (low, share)
            share = (max(low, 0.7 * high) + high) / 2
    print("end to end %.0f requests/s, scheduler alone %.0f: %.3f (times are %g times the paper's)" % (low * alone, alone, low, args.scale))


def bad_shares(args, frontends, rate, seconds, models):
    """The share of requests that are not answered in time, percent: of the model with the most, and
    of all."""
    late_of = lambda: [frontend.metric(f'downbeat_requests_late_total{{model="{model}"') for frontend in frontends for model in models]
    late = late_of()
    load = [Load(args, frontend, "--rate", str(rate / len(frontends)), "-d", str(seconds), "-w", "0", "--seed", str(seed), model=models)
            for seed, frontend in enumerate(frontends)]
    told = [{model["name"]: model for model in generator.end()["models"]} for generator in load]
    late = [now - was for now, was in zip(late_of(), late)]
    scheduled = [sum(by[model]["scheduled"] for by in told) for model in models]
    bad = [sum(by[model]["scheduled"] - by[model]["ok"] for by in told) + sum(late[place::len(models)]) for place, model in enumerate(models)]
    return max(100 * its / of for its, of in zip(bad, scheduled)), 100 * sum(bad) / sum(scheduled)


class Outcomes:
    """Reads, once a second, how many requests of a frontend were in time and how many were not."""

    def __init__(self, frontend):
        self.frontend, self.seconds = frontend, []

    def look(self):
        named = 'downbeat_slo_requests_total{model="resnet",outcome="%s"'
        good, bad = (self.frontend.metric(named % outcome) for outcome in ("in_time", "missed"))
        self.seconds.append((good, bad))

    def attainment(self, seconds):
        """Of the last so many seconds."""
        (good, bad), (then_good, then_bad) = self.seconds[-1], self.seconds[max(0, len(self.seconds) - 1 - seconds)]
        all = good - then_good + bad - then_bad
        return (good - then_good) / all if all else 1.0


def scale(args):
    """Three backends of one emulated device each have three quarters of their capacity. The load doubles, and later halves."""
    # ResNet-50 of Symphony's table 2, ten times as slow; the SLO leaves a batch of 40.
    device = 1000 * 40 / (10.53 * 40 + 50.72)
    with tempfile.TemporaryDirectory() as models, Processes(args) as processes:
        emulated.write(models, "resnet", "alpha_ms = 10.53\nbeta_ms = 50.72\nmax_batch = 80\n", 1)
        flags = ["--engine", "emulated", "--scheduler", "deferred", "--drop", "window", "--slo-ms", "resnet=1000"]
        of = processes.cluster(models, flags, schedulers=1, backends=3)
        (leader,), (frontend,), backends = of["schedulers"], of["frontends"], of["backends"]
        listed = leader.child.args[leader.child.args.index("--schedulers"):][:2]
        hpa, outcomes, begin = Hpa(down_window_s=args.down_window), Outcomes(frontend), time.monotonic()
        metric, pods = None, 3
        for share, seconds in ((0.75, 90), (1.5, 240), (0.75, 330)):
            load = Load(args, frontend, "--rate", str(share * 3 * device), "-d", str(seconds), "-w", "0", model="resnet")
            for second in range(seconds):
                # The load generator keeps its own time; the loop keeps to whole seconds of this clock.
                time.sleep(max(0, begin + len(outcomes.seconds) - time.monotonic()))
                outcomes.look()
                devices, wanted = leader.metric("downbeat_devices"), leader.metric("downbeat_autoscale_devices")
                # Prometheus' scrape, its rule, and Kubernetes' sync: each every 15 s, one after the other.
                if second % 15 == 0:
                    scraped = published(devices, wanted)
                elif second % 15 == 5:
                    metric = scraped
                elif second % 15 == 14:
                    pods = hpa.sync(len(outcomes.seconds), len(backends), metric)
                for _ in range(len(backends), pods):
                    backends.append(processes.start("backend", *listed, *args.roles, *flags, models))
                for _ in range(pods, len(backends)):
                    # As Kubernetes does: the youngest first, by SIGTERM.
                    backends.pop().child.send_signal(signal.SIGTERM)
                if second % 15 == 14 or second + 1 == seconds:
                    print(f"load {share:.2f}, {second + 1:3d} s: {devices:.0f} devices, {wanted:.0f} wanted, {len(backends)} backends, "
                          f"attainment {outcomes.attainment(15):.4f} in 15 s", flush=True)
                if share == 1.5 and second + 1 == seconds:
                    print(f"from 60 s after the load doubled on: attainment {outcomes.attainment(seconds - 60):.4f}", flush=True)
            load.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measurements = {"lone": (lone, 7), "loop": (loop, 7), "kill": (failover, 20), "pause": (failover, 20), "backend": (failover, 20),
                    "stops": (stops, 3), "busy": (busy, 5),
                    "tensors": (tensors, 5), "pictures": (pictures, 5), "incast": (incast, 3), "feed": (feed, 3), "end-to-end": (end_to_end, 1), "scale": (scale, 1)}
    parser.add_argument("what", choices=measurements)
    parser.add_argument("--binary", default=os.path.join(ROOT, "target/release/downbeat"))
    parser.add_argument("--models", default=os.path.join(ROOT, "examples/models"))
    parser.add_argument("--engine", type=str.split, default=["--engine", "rten"])
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--rate", help="of kill, pause and backend (2000), stops (450), busy (100) and pictures (8)")
    parser.add_argument("--beside", type=int, default=60, help="of busy: the processes that compute")
    parser.add_argument("--transports", type=lambda text: text.split(","), default=list(TRANSPORTS), help="of tensors and incast: " + ",".join(TRANSPORTS))
    parser.add_argument("--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[5e5, 1e6, 1.5e6, 2e6], help="of feed")
    parser.add_argument("--scale", type=float, default=4, help="of end-to-end: how many times the paper's times")
    parser.add_argument("--most", type=float, default=1.05, help="of end-to-end: the largest share of the scheduler's own that is tried")
    parser.add_argument("--seconds", type=float, default=10, help="of end-to-end: of the paper's time, for each rate")
    parser.add_argument("--roles", type=str.split, default=[], help="more flags of frontends, schedulers and backends: --roles='--busy-poll-us 200'")
    parser.add_argument("--width", type=int, default=3000, help="of pictures: pixels in a row; two thirds as many rows")
    parser.add_argument("--down-window", type=float, default=120, help="of scale: stabilizationWindowSeconds of the autoscaler")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    measure, rounds = measurements[args.what]
    args.rounds = args.rounds or rounds
    measure(args)


if __name__ == "__main__":
    main()
