#!/usr/bin/env python3
"""Pairs of models on one device, by who says what runs: Abacus' groups with a trained predictor, and what they are compared with (lab/docs/abacus.md).

    pip install -r tests/clients/requirements.txt && python tests/clients/side_by_side.py target/release/downbeat [PAIR ...]

For each pair: writes the models (tools/zoo.py, pictures of 64 x 64), samples groups of their operators and trains predictors (`downbeat profile --co-run`), with one
thread in a run and with one a core; takes as the SLO twice what a model's largest request takes alone on one thread, 10 ms at least, and as the capacity what one request at
a time on all cores comes to; then offers seeded Poisson arrivals to each policy in turns, the same to all in a round. Prints tables in Markdown: medians over the rounds.
What was sampled is kept in target/side-by-side and gone on with. Takes about an hour; it is no test, and nothing calls it.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

import requests

from figures import Bench, running
from serving import EXAMPLES, ROOT, environment

PIXELS = 64
FOLDER = ROOT / "target" / "side-by-side"
# The models, and the items of a request, each as often.
PAIRS = {
    "ResNet-50, BERT": (["resnet50", "bert"], [1, 2, 4]),
    "mlp, widemlp": (["mlp", "widemlp"], [4, 16, 32]),
    "U-Net, VGG19": (["unet", "vgg19"], [1, 2, 4]),
}
LENGTHS = [4, 8, 16]
INPUTS = {
    "resnet50": ("input", [3, PIXELS, PIXELS]), "vgg19": ("input", [3, PIXELS, PIXELS]), "unet": ("input", [3, PIXELS, PIXELS]),
    "mlp": ("input", [784]), "widemlp": ("input", [1024]),
}
LEAST_SLO_MS = 10.0
LARGEST = "largest"


def cores():
    return len(os.sched_getaffinity(0))


def named(names, policy, more=""):
    """A group for each model by its name: one that cannot have the policy then does not load, where it would go on without otherwise."""
    pad = "pad = true\npad_check_every = 0\n"
    return "".join(f'[[device.groups]]\nmodels = ["{name}"]\npolicy = "{policy}"\n{more}{pad if name == "bert" else ""}' for name in names)


def overlap(order, threads, predicted=False):
    """Settings of the policy overlap; `predicted`: with the predictor for so many threads."""
    def config(folder, names):
        predictor = f'predictor = "{folder}/predictor-{threads}.json"\n' if predicted else ""
        return f'threads = {threads}\n[device]\npolicy = "overlap"\norder = "{order}"\n{predictor}{named(names, "overlap")}'
    return config


def free(_folder, names):
    """Each model by itself, its requests as they came, independent of the other model."""
    return f'threads = 1\n{named(names, "windowed", "window_ms = 0" + chr(10))}'


def policies():
    all_cores = cores()
    return {
        "FCFS": overlap("fcfs", all_cores), "SJF": overlap("sjf", all_cores), "EDF": overlap("edf", all_cores),
        "FCFS, 1 thread": overlap("fcfs", 1), "free": free, "one": overlap("headroom", all_cores),
        "Abacus, 1 thread": overlap("headroom", 1, True), "Abacus": overlap("headroom", all_cores, True),
    }


BASELINES = ["FCFS", "SJF", "EDF", "free"]
OURS = ["Abacus", "Abacus, 1 thread"]


def write_models(names, sizes, folder):
    """A repository of the pair, and files of requests: of all sizes, and of the largest."""
    repository = folder / "models"
    for name in names:
        if (repository / name).exists():
            continue
        if name == "mlp":
            shutil.copytree(EXAMPLES / "models" / name, repository / name)
        else:
            subprocess.run([sys.executable, ROOT / "tools" / "zoo.py", "--pixels", str(PIXELS), repository, name], check=True)
        (repository / name / "config.pbtxt").write_text(f"max_batch_size: {max(sizes)}\n")
        all_of = [request(name, rows, length) for rows in sizes for length in (LENGTHS if name == "bert" else [0])]
        (folder / f"{name}.json").write_text(json.dumps(all_of))
        (folder / f"{name}-{LARGEST}.json").write_text(json.dumps([request(name, max(sizes), LENGTHS[-1])]))
    return repository


def request(name, rows, length):
    def tensor(tensor, datatype, shape, value):
        count = 1
        for size in shape:
            count *= size
        return {"name": tensor, "datatype": datatype, "shape": shape, "data": [value(index) for index in range(count)]}

    if name == "bert":
        shape = [rows, length]
        return {"inputs": [tensor("input_ids", "INT64", shape, lambda index: 1 + index % 999), tensor("attention_mask", "INT64", shape, lambda _: 1)]}
    what, shape = INPUTS[name]
    return {"inputs": [tensor(what, "FP32", [rows, *shape], lambda index: index % 17 / 17)]}


def train(binary, names, sizes, folder, threads, budget):
    """Samples for so many seconds, and trains the predictor; what it says of itself."""
    predictor = folder / f"predictor-{threads}.json"
    if budget > 0 or not predictor.exists():
        subprocess.run(
            [binary, "profile", names[0], "--co-run", names[1], "--repository", folder / "models", "--engine", "onnxruntime", "--threads", str(threads),
             "--batch", ",".join(map(str, sizes)), "--length", str(LENGTHS[-1]), "--budget", str(max(budget, 1)), "--samples", folder / f"samples-{threads}.jsonl",
             "--predictor", predictor, "--json", folder / f"training-{threads}.json"],
            check=True, env=environment(folder), stdout=subprocess.DEVNULL)
    return json.loads((folder / f"training-{threads}.json").read_text())


def serve(binary, folder, config, slos):
    """A server of the pair by these settings."""
    models = "".join(f"[models.{name}]\nslo_ms = {slo}\n" for name, slo in slos.items())
    (folder / "config.toml").write_text('drop = "head"\ndevices = 1\n' + config(folder, list(slos)) + models)
    flags = ["--config", folder / "config.toml", "--profile-cache", folder / "profiles"]
    return running(binary, folder / "models", *map(str, flags))


def alone(bench, server, folder, name, which=""):
    """The time of a model's requests one after the other, milliseconds: the median of the largest,
    the mean of all."""
    report = bench.run(server, "-m", name, "--closed", "-c", "1", "-d", "3", "--input", str(folder / f"{name}{which}.json"))
    latency = report["total"]["latency_ms"]
    return latency["p50"] if which else latency["mean"]


def calibrate(binary, bench, names, folder):
    """The SLOs, and how many requests a second one at a time on all cores come to."""
    slos, means = dict.fromkeys(names, 60_000), []
    with serve(binary, folder, overlap("fcfs", 1), slos) as server:
        ensure_served(server, slos, overlap("fcfs", 1))
        found = {name: max(LEAST_SLO_MS, 2 * alone(bench, server, folder, name, f"-{LARGEST}")) for name in names}
    with serve(binary, folder, overlap("fcfs", cores()), slos) as server:
        means = [alone(bench, server, folder, name) for name in names]
    return {name: round(slo, 1) for name, slo in found.items()}, 1e3 / statistics.mean(means)


def offer(binary, server, folder, slos, rate, seconds, seed):
    """Offers Poisson arrivals to both models, at equal rates. Returns the results."""
    clients = []
    with tempfile.TemporaryDirectory() as reports:
        for number, (name, slo) in enumerate(slos.items()):
            report = pathlib.Path(reports) / name
            command = [binary, "bench", "-u", server.http, "-p", "http", "-m", name, "--rate", str(rate / len(slos)), "-d", str(seconds), "--slo-ms", str(slo),
                       "--seed", str(2 * seed + number), "--input", folder / f"{name}.json", "--json", report]
            clients.append((report, subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)))
        reports = []
        for report, client in clients:
            client.wait(seconds + 60)
            reports.append(json.loads(report.read_text())["total"])
    scheduled, bad = (sum(report[key] for report in reports) for key in ("scheduled", "bad"))
    return {"violations": 100 * bad / max(scheduled, 1), "in_time": sum(report["goodput_per_second"] for report in reports), "requests": scheduled}


def ensure_served(server, slos, config):
    """Ends the measurement if a model runs under another policy than requested, or alone because it
    has no predictor. Then the figures would compare nothing."""
    device = requests.get(f"{server.url}/v2/devices", timeout=10).json()["devices"][0]
    wanted = "windowed" if config is free else "overlap"
    found = {model["model"]: model["policy"] for model in device["models"]}
    assert found == dict.fromkeys(slos, wanted), f"{found}, wanted {wanted}:\n{server.log}"
    if "predictor" in config(FOLDER, list(slos)):
        alone = {model["model"]: model["alone"] for model in device["groups"]["models"]}
        assert not any(alone.values()), alone


def turn(binary, folder, config, slos, offered, seconds, seed):
    """All loads on one server; the groups that it made."""
    with serve(binary, folder, config, slos) as server:
        ensure_served(server, slos, config)
        found = [offer(binary, server, folder, slos, rate, seconds, seed) for rate in offered]
        groups = requests.get(f"{server.url}/v2/devices", timeout=10).json()["devices"][0]["groups"]
    return {"loads": found, "groups": groups}


def show(pair, loads, results):
    """The medians so far."""
    rounds = len(next(iter(results.values())))
    print(f"\n{pair}: violations %, in time/s, median of {rounds} (all violations)\n")
    print("| | " + " | ".join(f"{load:.1f} of what fits" for load in loads) + " | groups of two |\n" + "|---" * (len(loads) + 2) + "|")
    middle = {}
    for name, turns in results.items():
        cells = []
        for index in range(len(loads)):
            violations = [turn["loads"][index]["violations"] for turn in turns]
            in_time = statistics.median(turn["loads"][index]["in_time"] for turn in turns)
            middle[name, index] = (statistics.median(violations), in_time)
            cells.append(f"{statistics.median(violations):.1f}, {in_time:.1f} ({', '.join(f'{one:.1f}' for one in violations)})")
        groups = [turn["groups"] for turn in turns if turn["groups"] and turn["groups"]["groups"]]
        together = f"{100 * statistics.median(group['together'] / group['groups'] for group in groups):.0f}%" if groups else ""
        print(f"| {name} | {' | '.join(cells)} | {together} |")
    for ours in OURS:
        for index, load in enumerate(loads):
            best = min(BASELINES, key=lambda name: middle[name, index][0])
            peak = max(middle[name, index][1] for name in BASELINES)
            (violations, in_time), (least, _) = middle[ours, index], middle[best, index]
            change = f"{100 * (violations / least - 1):+.0f}%" if least else "none to beat"
            print(f"\n{ours} at {load:.1f}: violations {change} to the best ({best}), in time {100 * (in_time / max(peak, 1e-9) - 1):+.1f}% to the best")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=", ".join(f'"{pair}"' for pair in PAIRS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8, help="of each load")
    parser.add_argument("--budget", type=float, default=300, help="seconds of sampling for each predictor; 0: what is there already")
    parser.add_argument("--loads", type=lambda text: [float(load) for load in text.split(",")], default=[0.6, 0.9, 1.5], help="of what fits one at a time")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    unknown = set(arguments.pairs) - set(PAIRS)
    if unknown:
        parser.error(f"unknown pair {', '.join(sorted(unknown))}; there are {', '.join(PAIRS)}")
    binary, bench, ready = arguments.binary, Bench(arguments.binary), {}
    for pair in arguments.pairs or PAIRS:
        names, sizes = PAIRS[pair]
        folder = FOLDER / "-".join(names)
        folder.mkdir(parents=True, exist_ok=True)
        write_models(names, sizes, folder)
        for threads in sorted({1, cores()}):
            said = train(binary, names, sizes, folder, threads, arguments.budget)
            repeated = f", the same group again {100 * said['repeated']:.1f}%" if said["repeated"] else ""
            print(f"{pair}, {threads} threads: {said['samples']} samples, {said['tested']} tested, off by {100 * said['mean_error']:.1f}%, 95% below {100 * said['error']:.1f}%{repeated}")
        slos, fits = calibrate(binary, bench, names, folder)
        print(f"{pair}: SLOs {slos} ms, {fits:.1f}/s fit one at a time", flush=True)
        ready[pair] = (folder, slos, fits, {name: [] for name in policies()})
    for round_ in range(arguments.rounds):
        for pair, (folder, slos, fits, results) in ready.items():
            order = list(policies().items())
            # No policy is always the first.
            order = order[round_ % len(order):] + order[:round_ % len(order)]
            for name, config in order:
                offered = [load * fits for load in arguments.loads]
                results[name].append(turn(binary, folder, config, slos, offered, arguments.seconds, arguments.seed + round_))
            show(pair, arguments.loads, results)
            (folder / "results.json").write_text(json.dumps({"slos": slos, "fits": fits, "loads": arguments.loads, "results": results}))


if __name__ == "__main__":
    main()
