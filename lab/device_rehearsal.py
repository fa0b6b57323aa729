#!/usr/bin/env python3
"""Goodput of the device policy `auto` with and without its rehearsal, in the server, on workloads that nobody chose.

    lab/device_rehearsal.py target/ci/downbeat --seed 1 --workloads 10

Draws emulated models from the seed. Starts `downbeat serve --device-policy auto` on them, once without a rehearsal and
once with it, in turns. Offers the same load to both, and prints the requests a second that each answered in time. Four
of ten workloads are drawn so that the choice at load is wrong: it knows neither SLOs nor arrivals, nor other models.
"""

import argparse
import json
import pathlib
import random
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

TENSORS = """
[[inputs]]
name = "x"
datatype = "FP32"
dims = [-1, 1]
[[outputs]]
name = "y"
datatype = "FP32"
dims = [-1, 1]
"""


def draw(seed, number):
    """A workload: models with their rates, SLOs and arrivals, and the number of devices."""
    rng = random.Random(f"{seed}/{number}")
    wrong = number % 10 in (2, 5, 7, 9)
    devices, count = rng.choice([1, 1, 2]), 2 if wrong and number % 2 else rng.choice([1, 1, 2])
    models = []
    for index in range(count):
        alone = rng.uniform(15, 25) if wrong else rng.uniform(2, 20)
        fixed = rng.uniform(0.1, 0.9)
        alpha, beta = alone * (1 - fixed), alone * fixed
        most = rng.choice([8, 16])
        slo = alone * (rng.uniform(2.5, 3.5) if wrong else rng.uniform(2, 12))
        # The largest batch that an SLO allows twice over is what a device does at best.
        batch = max([size for size in range(1, most + 1) if 2 * (alpha * size + beta) <= slo], default=1)
        peak = 1000 * batch / (alpha * batch + beta) * devices / count
        load = rng.uniform(0.85, 1.1) if wrong else rng.uniform(0.3, 1.1)
        knee = None if rng.random() < 0.4 else round(rng.uniform(0.4, 1.0), 2)
        arrivals = rng.choice(["poisson", "poisson", "gamma:0.5", "gamma:0.2"])
        models.append(dict(name=f"m{index}", alpha=alpha, beta=beta, most=most, slo=slo, rate=peak * load, knee=knee, arrivals=arrivals))
    return dict(number=number, wrong=wrong, devices=devices, models=models)


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


def run(binary, workload, rehearsal, seconds, warm_up):
    """Requests a second that were answered in time, of all models, and the policies at the end."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        flags = []
        for model in workload["models"]:
            path = folder / "models" / model["name"] / "1"
            path.mkdir(parents=True)
            knee = f"knee = {model['knee']}\n" if model["knee"] else ""
            text = f"alpha_ms = {model['alpha']}\nbeta_ms = {model['beta']}\nmax_batch = {model['most']}\n{knee}{TENSORS}"
            (path / "model.emulated.toml").write_text(text)
            flags += ["--slo-ms", f"{model['name']}={model['slo']}"]
        http, grpc, metrics = port(), port(), port()
        command = [binary, "serve", folder / "models", "--engine", "emulated", "--device-policy", "auto", "--scheduler", "deferred", "--devices",
                   str(workload["devices"]), "--rehearsal-cpu", str(rehearsal), "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics),
                   "--profile-cache", folder / "profiles", *flags]
        log = open(folder / "log", "w")
        server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{http}"
            for _ in range(600):
                try:
                    urllib.request.urlopen(url + "/v2/health/ready", timeout=1)
                    break
                except OSError:
                    if server.poll() is not None:
                        raise SystemExit((folder / "log").read_text())
                    time.sleep(0.1)
            loads = []
            for model in workload["models"]:
                report = folder / f"{model['name']}.json"
                load = [binary, "bench", "-m", model["name"], "-u", f"127.0.0.1:{http}", "--rate", str(model["rate"]), "--arrivals", model["arrivals"],
                        "--slo-ms", str(model["slo"]), "--duration", str(seconds), "--warmup", str(warm_up), "--seed", str(workload["number"]), "--json", report]
                loads.append((subprocess.Popen(list(map(str, load)), stdout=subprocess.DEVNULL, stderr=log), report))
            good = 0.0
            for process, report in loads:
                process.wait()
                good += json.loads(report.read_text())["total"]["goodput_per_second"]
            policies = [get(f"{url}/v2/models/{model['name']}/policy")["policy"] for model in workload["models"]]
            return good, policies
        finally:
            server.terminate()
            server.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workloads", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--warm-up", type=float, default=15)
    args = parser.parse_args()
    ratios = []
    print("| workload | models | devices | drawn wrong | at load r/s | rehearsed r/s | ratio | policies at load | rehearsed |")
    print("|---:|---:|---:|---|---:|---:|---:|---|---|")
    for number in range(1, args.workloads + 1):
        workload = draw(args.seed, number)
        results = {}
        # The order changes from one workload to the next.
        for rehearsal in ([0, 0.3], [0.3, 0])[number % 2]:
            results[rehearsal] = run(args.binary, workload, rehearsal, args.seconds, args.warm_up)
        (plain, at_load), (rehearsed, later) = results[0], results[0.3]
        ratios.append(rehearsed / plain if plain else float("inf") if rehearsed else 1.0)
        print(f"| {number} | {len(workload['models'])} | {workload['devices']} | {'yes' if workload['wrong'] else ''} | {plain:.1f} | {rehearsed:.1f} | "
              f"{ratios[-1]:.3f} | {', '.join(at_load)} | {', '.join(later)} |", flush=True)
    print(f"\nratios: median {statistics.median(ratios):.3f}, mean {statistics.mean(ratios):.3f}, least {min(ratios):.3f}, largest {max(ratios):.3f}")


if __name__ == "__main__":
    main()
