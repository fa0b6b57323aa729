"""Random pipelines on real servers with emulated models: four divisions of the deadline, side by side.

    tools/live_pipelines.py target/release/downbeat --seed 7 --workloads 4 --requests 1500

Each arrival goes to four servers at the same moment, so that the same noise of the machine meets all of them:

- `equal`: an SLO for each step, equal shares. The client calls the models one after another, each with its timeout.
- `none`: Triton's way. The server knows no deadline, and starts batches as soon as a device is free.
- `fixed`: the fixed weights (`--rehearsal-cpu 0`).
- `rehearsed`: weights by the rehearsal.

A request is good if its answer comes within the SLO, by the client's clock. Time is stretched, so that load 1 is `--rate`
requests a second. At load 1 the busiest devices have no idle time, by the same reckoning as in the pipeline lab. A run is
*disturbed* if the client sent a request late by more than a tenth of the shortest SLO. The table leaves these runs out.
"""

import argparse
import asyncio
import csv
import json
import math
import pathlib
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RULES = ["equal", "none", "fixed", "rehearsed"]
MAX_BATCH = 64


def log_between(dice, least, most):
    return math.exp(dice.uniform(math.log(least), math.log(most)))


class Workload:
    """1 to 3 pipelines, their models and devices, drawn as the pipeline lab draws them."""

    def __init__(self, seed, number, rate):
        dice = random.Random(f"{seed}/{number}")
        name = dice.choice(["profiles_1080ti.csv", "profiles_a100.csv"])
        with open(ROOT / "lab/experiments/profiles" / name, encoding="utf-8") as file:
            published = [(float(row["alpha_ms"]), float(row["beta_ms"])) for row in csv.DictReader(file)]
        self.number, self.models, self.pools, self.pipelines = number, [], [], []
        shared_pool = self.pool() if dice.random() < 0.5 else None
        joins = set()
        for _ in range(dice.randint(1, 3)):
            branches = 0 if dice.random() < 0.7 else dice.randint(2, 3)
            after = [[i - 1] if i else [] for i in range(dice.randint(2, 5))]
            if branches:
                after = [[]] + [[0]] * branches + [list(range(1, branches + 1))]
            known, steps = len(self.models), []
            for inputs in after:
                reusable = [model for model in range(known) if model not in joins]
                if reusable and len(inputs) < 2 and dice.random() < 0.25:
                    steps.append(dice.choice(reusable))
                    continue
                if dice.random() < 0.3:
                    profile, pool = (log_between(dice, 0.2, 3.0), log_between(dice, 0.05, 1.0)), self.pool()
                else:
                    profile, pool = dice.choice(published), shared_pool
                    pool = self.pool() if pool is None else pool
                if len(inputs) > 1:
                    joins.add(len(self.models))
                steps.append(len(self.models))
                self.models.append([profile, pool])
            alone = [sum(self.models[model][0]) for model in steps]
            slo = max(path(after, alone)) * log_between(dice, 2.5, 10.0)
            self.pipelines.append({"after": after, "models": steps, "slo": slo, "rate": log_between(dice, 0.3, 1.0)})
        self.kind = dice.choice(["poisson", "bursty", "steps"])
        self.shape = log_between(dice, 0.05, 0.5)
        self.loads = [dice.uniform(0.5, 1.0), dice.uniform(1.0, 3.0)]
        self.paces = [log_between(dice, 0.3, 2.0) for _ in range(8)]
        self.scale(dice, rate)

    def pool(self):
        self.pools.append(1)
        return len(self.pools) - 1

    def demands(self):
        """By pool: devices that are busy, with batches that take half of an equal share of the SLO."""
        rates, budgets = [0.0] * len(self.models), [math.inf] * len(self.models)
        for pipeline in self.pipelines:
            longest = max(path(pipeline["after"], [1.0] * len(pipeline["models"])))
            for model in pipeline["models"]:
                rates[model] += pipeline["rate"]
                budgets[model] = min(budgets[model], pipeline["slo"] / longest)
        demands = [0.0] * len(self.pools)
        for ((alpha, beta), pool), rate, budget in zip(self.models, rates, budgets):
            batch = max(1, min(MAX_BATCH, int((budget / 2 - beta) / alpha)))
            demands[pool] += rate * (alpha * batch + beta) / batch
        return demands

    def scale(self, dice, rate):
        wanted = log_between(dice, 1.0, 12.0)
        self.stretch_rates(wanted / sum(self.demands()))
        self.pools = [max(1, math.ceil(demand * dice.uniform(1.0, 1.6))) for demand in self.demands()]
        self.stretch_rates(1 / max(demand / devices for demand, devices in zip(self.demands(), self.pools)))
        # Rates are in requests a millisecond until here. Time is stretched to the wanted rate.
        stretch = sum(pipeline["rate"] for pipeline in self.pipelines) * 1000 / rate
        self.stretch_rates(1 / stretch)
        for model in self.models:
            model[0] = tuple(part * stretch for part in model[0])
        for pipeline in self.pipelines:
            pipeline["slo"] *= stretch

    def stretch_rates(self, factor):
        for pipeline in self.pipelines:
            pipeline["rate"] *= factor

    def arrivals(self, seed, requests, load):
        """Instants in seconds, each with its pipeline."""
        dice, all_rates = random.Random(f"{seed}/{self.number}/arrivals"), sum(p["rate"] for p in self.pipelines)
        span, arrivals = requests / (all_rates * 1000), []
        for index, pipeline in enumerate(self.pipelines):
            at, rate = 0.0, pipeline["rate"] * 1000
            while at < span:
                pace = self.paces[min(7, int(8 * at / span))] / statistics.mean(self.paces)
                gap = dice.gammavariate(self.shape, 1 / self.shape) if self.kind == "bursty" else dice.expovariate(1.0)
                at += gap / rate / (pace if self.kind == "steps" else 1.0)
                arrivals.append((at / load, index))
        return sorted(arrivals)

    def __str__(self):
        steps, pools = [len(pipeline["models"]) for pipeline in self.pipelines], self.pools
        slos = [round(pipeline["slo"]) for pipeline in self.pipelines]
        below, above = self.loads
        return (f"workload {self.number}: pipelines of {steps} steps, SLOs of {slos} ms, {len(self.models)} models on "
                f"pools of {pools} devices, {self.kind}, loads {below:.2f} and {above:.2f}")


def path(after, weights):
    """By step: the weight of the longest path that ends with it."""
    through = []
    for step, before in enumerate(after):
        through.append(weights[step] + max((through[first] for first in before), default=0.0))
    return through


def write_repository(folder, workload, rule):
    inputs = [1] * len(workload.models)
    for pipeline in workload.pipelines:
        for before, model in zip(pipeline["after"], pipeline["models"]):
            inputs[model] = max(inputs[model], len(before))
    for index, (((alpha, beta), _), count) in enumerate(zip(workload.models, inputs)):
        place = folder / f"m{index}" / "1"
        place.mkdir(parents=True)
        tensor = '[[{}]]\nname = "{}"\ndatatype = "FP32"\ndims = [-1, 1]\n'
        text = f"alpha_ms = {alpha:.6f}\nbeta_ms = {beta:.6f}\nmax_batch = {MAX_BATCH}\n"
        text += "".join(tensor.format("inputs", f"x{place}") for place in range(count)) + tensor.format("outputs", "y")
        (place / "model.emulated.toml").write_text(text)
        (place.parent / "config.pbtxt").write_text(
            f'backend: "downbeat_emulated" max_batch_size: {MAX_BATCH}\n')
    for index, pipeline in enumerate(workload.pipelines):
        place = folder / f"p{index}"
        (place / "1").mkdir(parents=True)
        steps = []
        for step, (before, model) in enumerate(zip(pipeline["after"], pipeline["models"])):
            values = [f"t{first}" for first in before] or ["x"]
            maps = " ".join(f'input_map {{ key: "x{at}" value: "{value}" }}' for at, value in enumerate(values))
            last = step == len(pipeline["models"]) - 1
            maps += f' output_map {{ key: "y" value: "{"y" if last else f"t{step}"}" }}'
            steps.append(f'{{ model_name: "m{model}" model_version: -1 {maps} }}')
        slo = "" if rule in ("none", "equal") else (
            f'parameters {{ key: "slo_ms" value {{ string_value: "{pipeline["slo"]:.3f}" }} }}')
        (place / "config.pbtxt").write_text(
            f'platform: "ensemble" max_batch_size: {MAX_BATCH}\n'
            'input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
            'output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
            f'{slo}\nensemble_scheduling {{ step [ {", ".join(steps)} ] }}\n')


class Server:
    def __init__(self, binary, folder, workload, rule, batches):
        self.rule, self.port = rule, free_port()
        models = folder / "models"
        write_repository(models, workload, rule)
        first, places = 0, []
        for devices in workload.pools:
            places.append(list(range(first, first + devices)))
            first += devices
        dispatch = "eager" if rule == "none" else batches
        config = f'engine = "emulated"\ndevices = {first}\nmax_queue_wait_s = 0\n\n[placement]\n'
        config += "".join(f"m{index} = {places[pool]}\n" for index, (_, pool) in enumerate(workload.models))
        (folder / "downbeat.toml").write_text(config)
        self.log = open(folder / "log", "w+", encoding="utf-8")
        command = [binary, "serve", str(models), "--config", str(folder / "downbeat.toml"), "--http-port", str(self.port),
                   "--grpc-port", "0", "--metrics-port", "0", "--scheduler", dispatch, "--no-profiling",
                   "--rehearsal-cpu", "0.1" if rule == "rehearsed" else "0"]
        command += ["--drop", "none"] if rule == "none" else []
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.idle = []

    async def ready(self):
        for _ in range(600):
            if self.process.poll() is not None:
                break
            try:
                status, _ = await self.ask("GET", "/v2/health/ready")
                if status == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.2)
        self.log.seek(0)
        sys.exit(f"the server for '{self.rule}' does not serve:\n{self.log.read()}")

    async def ask(self, method, target, body=b""):
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = re.search(r"content-length: (\d+)", head)
        answer = await reader.readexactly(int(length[1])) if length else b""
        self.idle.append((reader, writer))
        return int(head.split()[1]), answer

    async def infer(self, model, names, timeout=None):
        tensor = {"shape": [1, 1], "datatype": "FP32", "data": [0]}
        body = {"inputs": [{"name": name, **tensor} for name in names]}
        if timeout is not None:
            body["parameters"] = {"timeout": max(1, int(timeout * 1e6))}
        status, _ = await self.ask("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())
        return status == 200

    def changes(self):
        self.log.seek(0)
        return self.log.read().count("found better weights")

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=30)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def by_steps(server, pipeline):
    """An SLO for each step: each has an equal part of the whole on the longest path through it."""
    after, models = pipeline["after"], pipeline["models"]
    budget = pipeline["slo"] / 1e3 / max(path(after, [1.0] * len(models)))
    done = {}

    async def step(number):
        if not all([await done[first] for first in after[number]]):
            return False
        names = [f"x{place}" for place in range(max(1, len(after[number])))]
        return await server.infer(f"m{models[number]}", names, budget)

    for number in range(len(models)):
        done[number] = asyncio.ensure_future(step(number))
    return all(await asyncio.gather(*done.values()))


async def request(server, workload, index, due, goods):
    pipeline, is_done = workload.pipelines[index], False
    try:
        if server.rule == "equal":
            is_done = await by_steps(server, pipeline)
        else:
            is_done = await server.infer(f"p{index}", ["x"])
    except (OSError, asyncio.IncompleteReadError):
        pass
    goods.append(is_done and time.monotonic() - due <= pipeline["slo"] / 1e3)


async def play(servers, workload, arrivals, warm_up):
    """By rule: the part of the requests after the warm-up that were good, and how late the client was at most."""
    goods = {server.rule: [] for server in servers}
    begin, tasks, lag = time.monotonic() + 0.2, [], 0.0
    for number, (at, index) in enumerate(arrivals):
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        lag = max(lag, time.monotonic() - begin - at)
        for server in servers:
            counted = goods[server.rule] if number >= warm_up else []
            tasks.append(asyncio.ensure_future(request(server, workload, index, begin + at, counted)))
    limit = 4 * max(pipeline["slo"] for pipeline in workload.pipelines) / 1e3
    await asyncio.wait(tasks, timeout=limit)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    counted = len(arrivals) - warm_up
    return {rule: sum(good) / counted for rule, good in goods.items()}, lag


async def run(args, number, batches):
    workload = Workload(args.seed, number, args.rate)
    print(workload, flush=True)
    rows = []
    for load in workload.loads:
        with tempfile.TemporaryDirectory(prefix="live-pipelines-") as folder:
            folders = [pathlib.Path(folder) / rule for rule in RULES]
            servers = [Server(args.binary, made(place), workload, rule, batches) for place, rule in zip(folders, RULES)]
            try:
                await asyncio.gather(*(server.ready() for server in servers))
                arrivals = workload.arrivals(args.seed, args.requests, load)
                good, lag = await play(servers, workload, arrivals, len(arrivals) // 3)
                changes = servers[-1].changes()
            finally:
                for server in servers:
                    server.stop()
                if args.keep:
                    shutil.copytree(folder, pathlib.Path(args.keep) / f"{number}-{load:.2f}", dirs_exist_ok=True)
        disturbed = 10 * 1e3 * lag > min(pipeline["slo"] for pipeline in workload.pipelines)
        rows.append(None if disturbed else good)
        shown = ", ".join(f"{rule} {part:.3f}" for rule, part in good.items())
        print(f"  load {load:.2f}: good {shown}; {changes} changes of weights, client late by {1e3 * lag:.0f} ms at most"
              f"{'; disturbed' if disturbed else ''}", flush=True)
    return rows


def made(folder):
    folder.mkdir(parents=True)
    return folder


def table(batches, all_rows):
    print(f"\n| {batches} | goodput below: median, mean (workloads) | above |\n|---|---|---|")
    for rule in RULES:
        cells = []
        for place in (0, 1):
            counted = [rows[place] for rows in all_rows if rows[place] and rows[place]["equal"] > 0]
            ratios = [row[rule] / row["equal"] for row in counted]
            of = f"{statistics.median(ratios):.2f}, {statistics.mean(ratios):.2f}" if ratios else "-"
            cells.append(f"{of} ({len(ratios)})")
        print(f"| {rule} | {cells[0]} | {cells[1]} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("binary", help="the program downbeat")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--workloads", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1500, help="of each run; the first third does not count")
    parser.add_argument("--rate", type=float, default=25.0, help="requests a second at load 1")
    parser.add_argument("--batches", choices=["deferred", "eager", "adaptive"], default="deferred")
    parser.add_argument("--keep", help="a folder for repositories and logs of the servers")
    args = parser.parse_args()
    all_rows = [asyncio.run(run(args, number, args.batches)) for number in range(1, args.workloads + 1)]
    table(args.batches, all_rows)


if __name__ == "__main__":
    main()
