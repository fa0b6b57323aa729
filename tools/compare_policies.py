#!/usr/bin/env python3
"""Capacities of one model under several device policies, measured in turns on one machine, with the ratios to the first policy.

    cargo build --release
    python tools/compare_policies.py --model encoder --lognormal 4.11,0.52,256 --slo-ms 100 \\
        --policy 'windowed: policy="windowed", pad=true' --policy 'staged: policy="staged", stages=2, pad=true' --policy 'exclusive:'

A policy is a name, a colon, and the settings of its `[[device.groups]]` (none: the exclusive default). Each round measures every policy
once, by `downbeat bench --capacity`: the highest rate at which at most 1% of the requests fail or are late, and 99% are answered
within the SLO. Medians of the rounds are compared: neighbours on the machine come and go.

With --rate the mean latency at fixed rates is measured instead: `--rate 200,800`.
"""
import argparse
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
READY_WITHIN_S = 120


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=ROOT / "target/release/downbeat", type=pathlib.Path)
    parser.add_argument("--repository", default=ROOT / "examples/models", type=pathlib.Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", action="append", required=True, metavar="NAME: SETTINGS")
    parser.add_argument("--slo-ms", type=float, default=100)
    parser.add_argument("--lognormal", help="MU,SIGMA,MAX of the lengths of inputs that vary")
    parser.add_argument("--rate", help="rates to measure latencies at, instead of capacities")
    parser.add_argument("--start", type=float, default=200, help="where the capacity search begins, requests a second")
    parser.add_argument("--duration", type=float, default=4, help="seconds of each trial")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", default="", help="more flags of downbeat serve")
    parser.add_argument("--port", type=int, default=18200)
    parser.add_argument("--range", action="append", default=["input_ids:0,999", "attention_mask:1,1"])
    return parser.parse_args()


def configuration(args, settings):
    """A downbeat.toml for one policy."""
    lines = [f'repository = "{args.repository}"', f"slo_ms = {args.slo_ms}",
             f"[model_control]\nmode = \"explicit\"\nload = [\"{args.model}\"]"]
    if settings:
        lines += ["[[device.groups]]", f'models = ["{args.model}"]', *settings]
    return "\n".join(lines) + "\n"


def parts(settings):
    """`a=1, b={c=2, d=3}` at its outer commas."""
    found, depth, quoted = [""], 0, False
    for character in settings:
        quoted ^= character == '"'
        depth += (character in "{[") - (character in "}]") if not quoted else 0
        if character == "," and depth == 0 and not quoted:
            found.append("")
        else:
            found[-1] += character
    return [part.strip() for part in found if part.strip()]


class Server:
    def __init__(self, args, settings):
        self.folder = tempfile.TemporaryDirectory()
        config = pathlib.Path(self.folder.name) / "downbeat.toml"
        config.write_text(configuration(args, settings))
        self.url = f"http://127.0.0.1:{args.port}"
        command = [args.binary, "serve", "--config", config, "--http-port", str(args.port), "--grpc-port", "off",
                   "--metrics-port", "off", *args.server.split()]
        self.log = open(pathlib.Path(self.folder.name) / "log", "w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def __enter__(self):
        end = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.log.seek(0)
        sys.exit(f"the server did not become ready:\n{self.log.read()}")

    def __exit__(self, *_):
        # No load balancer has to learn that it ends.
        self.process.send_signal(signal.SIGINT)
        self.process.wait()
        self.folder.cleanup()


def bench(args, url, more):
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [args.binary, "bench", "-m", args.model, "-u", url, "--quiet", "--json", report.name, "--slo-ms", str(args.slo_ms),
                   "--duration", str(args.duration), *more]
        if args.lognormal:
            command += ["--shape-lognormal", f"*:{args.lognormal}"]
            for values in args.range:
                command += ["--range", values]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode not in (0, 1) or not pathlib.Path(report.name).stat().st_size:
            sys.exit(f"{' '.join(map(str, command))}\n{ran.stdout}{ran.stderr}")
        return json.load(open(report.name))


def measure(args, url):
    """The compared figures: one number for each name."""
    if args.rate:
        found = {}
        for rate in args.rate.split(","):
            total = bench(args, url, ["--rate", rate])["total"]
            found[f"mean ms at {rate}/s"] = total["latency_ms"]["mean"]
        return found
    report = bench(args, url, ["--capacity", "--rate", str(args.start), "--target-p99-ms", str(args.slo_ms)])
    return {"capacity/s": report["capacity"]["rate"] or 0.0}


def main():
    args = arguments()
    policies = {}
    for text in args.policy:
        name, _, settings = text.partition(":")
        policies[name.strip()] = parts(settings)
    rounds = {name: [] for name in policies}
    for number in range(args.rounds):
        for name, settings in policies.items():
            with Server(args, settings) as server:
                found = measure(args, server.url)
            rounds[name].append(found)
            print(f"round {number + 1}: {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
    keys = list(rounds[next(iter(policies))][0])
    first = next(iter(policies))
    print("\n| policy | " + " | ".join(f"{key}, median | ratio to {first}" for key in keys) + " |")
    print("|---" * (1 + 2 * len(keys)) + "|")
    for name in policies:
        cells = []
        for key in keys:
            values = [found[key] for found in rounds[name]]
            # Ratios within a round: the machine is the same in it, or nearly.
            ratios = [mine[key] / base[key] if base[key] else float("nan") for mine, base in zip(rounds[name], rounds[first])]
            cells += [f"{statistics.median(values):.4g} ({', '.join(f'{v:.4g}' for v in values)})", f"{statistics.median(ratios):.2f}"]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
