#!/usr/bin/env python3
"""Compares what `downbeat advise` predicts with what a server then does, on requests that the advice has not seen.

    cargo build --profile ci
    python tools/held_out.py --binary target/ci/downbeat --seed 7

Each of the runs draws models, devices, SLOs, a rate and a target from the seed, and then
1. records: a server of emulated models under the drawn settings, with a decision log, under load;
2. predicts: `downbeat advise` on the log, with the drawn wish (`--by`) and target;
3. checks: `downbeat config check` takes the recommended configuration;
4. reruns: a server with this configuration, under load of the same kind with another seed;
5. compares: the share of requests in time that was predicted with the share in the log of the rerun.
The command fails if a share differs by more than --within points.
"""
import argparse
import json
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests/clients"))

import emulated  # noqa: E402

READY_WITHIN_S = 120


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/downbeat", type=pathlib.Path)
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20, help="of load in each record and rerun")
    parser.add_argument("--load", type=lambda text: tuple(map(float, text.split(","))), default=(0.3, 1.1), metavar="LOW,HIGH",
                        help="of what all devices do with batches of half the largest size; default: 0.3,1.1")
    parser.add_argument("--within", type=float, default=2, help="points")
    parser.add_argument("--policy", help="policies that the advice tries; default: all that it tries by itself")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the logs and reports; default: none is kept")
    return parser.parse_args()


def drawn(random, load):
    """The models, devices and load of a run."""
    devices = random.randint(2, 5)
    models, work = [], 0
    for number in range(random.randint(1, 3)):
        alpha, beta = round(random.uniform(1, 6), 2), round(random.uniform(4, 30), 2)
        max_batch = random.choice([4, 8, 16])
        slo = round(random.uniform(2.5, 6) * (alpha * max_batch / 2 + beta), 1)
        share = random.uniform(0.3, 1)
        models.append({"name": f"m{number}", "alpha": alpha, "beta": beta, "max_batch": max_batch, "slo_ms": slo, "share": round(share, 2)})
    total = sum(model["share"] for model in models)
    for model in models:
        half = model["max_batch"] / 2
        work += model["share"] / total * (model["alpha"] + model["beta"] / half) / 1e3
    rate = random.uniform(*load) * devices / work
    return {"models": models, "devices": devices, "rate": round(min(rate, 800), 1), "target": random.choice([0.9, 0.95, 0.99]),
            "by": random.choice(["devices", "latency", "headroom", "price"]),
            "arrivals": random.choice(["poisson", "gamma:0.3"]), "scheduler": random.choice(["adaptive", "eager", "deferred"])}


def write(folder, run):
    for model in run["models"]:
        emulated.write(folder / "models", model["name"], "alpha_ms = {alpha}\nbeta_ms = {beta}\nmax_batch = {max_batch}\n".format(**model))


def base(run):
    """The configuration of the recorded server."""
    sections = "".join(f'\n[models.{model["name"]}]\nslo_ms = {model["slo_ms"]}\n' for model in run["models"])
    return f'devices = {run["devices"]}\nscheduler = "{run["scheduler"]}"\n{sections}'


def merged(run, advised):
    """The recorded server's configuration with the advised lines in place of its own. Each section stands once in a file."""
    top, _, sections = advised.partition("[models.")
    lines = dict(line.split(" = ", 1) for line in f'devices = {run["devices"]}\nscheduler = "{run["scheduler"]}"\n{top}'.splitlines() if " = " in line)
    of_models = {model["name"]: [f'slo_ms = {model["slo_ms"]}'] for model in run["models"]}
    for section in filter(None, ("[models." + sections).split("[models.")):
        name, body = section.split("]\n", 1)
        of_models[name] += [line for line in body.splitlines() if line]
    return "".join(f"{key} = {value}\n" for key, value in lines.items()) + "".join(
        f"\n[models.{name}]\n" + "\n".join(lines) + "\n" for name, lines in of_models.items())


def command(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def serve(args, folder, config, name, run, seed):
    """Serves with this configuration under the run's load. Returns the folder of the decision log."""
    file, log = folder / f"{name}.toml", folder / name
    file.write_text(config)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    said = open(folder / f"{name}.log", "w+")
    server = subprocess.Popen([args.binary, "serve", folder / "models", "--engine", "emulated", "--config", file, "--decision-log", log,
                               "--http-port", str(port), "--grpc-port", "off", "--metrics-port", "off"], stdout=said, stderr=said)
    try:
        end = time.monotonic() + READY_WITHIN_S
        while True:
            try:
                with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                if time.monotonic() > end or server.poll() is not None:
                    said.seek(0)
                    sys.exit(f"the server did not become ready:\n{said.read()}")
                time.sleep(0.1)
        models = [word for model in run["models"] for word in ("-m", f'{model["name"]}:{model["share"]}')]
        ran = subprocess.run([args.binary, "bench", *models, "-u", url, "--quiet", "--rate", str(run["rate"]), "--arrivals", run["arrivals"],
                              "--duration", str(args.seconds), "--warmup", "0", "--seed", str(seed)], capture_output=True, text=True, timeout=1800)
        # Requests without an answer in time are expected.
        if ran.returncode not in (0, 1):
            sys.exit(ran.stdout + ran.stderr)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    return log


def attainment(args, log):
    """The share of requests in time in a log: of the model that fares worst, and the number of all requests."""
    report = json.loads(command(args.binary, "what-if", log, "--no-rehearsal", "--quiet", "--json", "-"))
    happened = report["rows"][0]
    return min(model["attainment"] for model in happened["models"]), happened["all"]["requests"]


def compare(args, folder, run, draw):
    write(folder, run)
    recorded = serve(args, folder, base(run), "recorded", run, draw.randrange(1 << 30))
    before, _ = attainment(args, recorded)
    report = folder / "advice.json"
    command(args.binary, "advise", recorded, "--target", run["target"], "--by", run["by"], "--price", "1", "--quiet", "--json", report,
            *(["--policy", args.policy] if args.policy else []))
    advice = json.loads(report.read_text())
    best = advice["candidates"][0]
    if advice["config"] is None:
        return {"before": before, "none": True}
    config = merged(run, advice["config"])
    (folder / "rerun.toml").write_text(config)
    command(args.binary, "config", "check", folder / "models", "--engine", "emulated", "--config", folder / "rerun.toml")
    rerun = serve(args, folder, config, "rerun", run, draw.randrange(1 << 30))
    after, requests = attainment(args, rerun)
    return {"before": before, "replayed": advice["faithful"][1], "predicted": best["attainment"], "interval": best["interval"],
            "after": after, "requests": requests, "devices": best["devices"], "policy": " ".join(best[key] for key in ("scheduler", "drop"))}


def main():
    args = arguments()
    args.binary = args.binary.resolve()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}, {args.runs} runs, {args.seconds} s each\n")
    print("| run | models | devices | rate | arrivals | scheduler | in time | replayed | target | by | advised | predicted | 95% sure | rerun | off |")
    print("|---:|---:|---:|---:|---|---|---:|---:|---:|---|---|---:|---:|---:|---:|")
    worst, inside, compared = 0.0, 0, 0
    for number in range(1, args.runs + 1):
        draw = random.Random(f"{seed} {number}")
        run = drawn(draw, args.load)
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.keep / str(number) if args.keep else pathlib.Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            found = compare(args, folder, run, draw)
        row = [number, len(run["models"]), run["devices"], run["rate"], run["arrivals"], run["scheduler"], f'{100 * found["before"]:.2f}%']
        if "none" in found:
            row += ["", run["target"], run["by"], "no setting holds", "", "", "", ""]
        else:
            off = 100 * (found["after"] - found["predicted"])
            low, high = found["interval"]["low"], found["interval"]["high"]
            worst, compared = max(worst, abs(off)), compared + 1
            inside += low <= found["after"] <= high
            row += [f'{100 * found["replayed"]:.2f}%', run["target"], run["by"], f'{found["devices"]}: {found["policy"]}',
                    f'{100 * found["predicted"]:.2f}%', f"{100 * low:.2f}–{100 * high:.2f}%", f'{100 * found["after"]:.2f}%', f"{off:+.2f}"]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    print(f"\n{compared} compared; the largest difference is {worst:.2f} points; {inside} reruns were inside the interval")
    if worst > args.within:
        sys.exit(f"more than {args.within} points")


if __name__ == "__main__":
    main()
