#!/usr/bin/env python3
"""Measures what the locks of the ports cost: TLS and API keys, beside a server with neither.

    tools/lock_cost.py --binary target/release/downbeat --rounds 7

Three servers of the same models get a closed loop of clients in turns: `plain`, `keys` and `tls`. A round prints the
requests a second and the server's CPU time for a request. The medians of the ratios to `plain` follow, over all rounds.
The client has the same two cores, and encrypts, too. So the rates have the client's cost, and the CPU time has not.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

from cluster_bench import ROOT, Processes, emulated

LOCKS = ["plain", "keys", "tls"]


def locked(args, folder):
    """For each lock: the server's options, the scheme of its address, and the client's variables."""
    certificate, key, keys = (str(folder / name) for name in ("server.pem", "server.key", "keys.toml"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
        + ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
        + ["-out", certificate, "-keyout", key],
        check=True, stderr=subprocess.DEVNULL,
    )
    added = [args.binary, "key", "add", keys, "web"]
    secret = subprocess.run(added, check=True, capture_output=True, text=True).stdout.split()[-1]
    return {
        "plain": ([], "http", {}),
        "keys": (["--api-keys", keys], "http", {"DOWNBEAT_API_KEY": secret}),
        "tls": (["--tls-certificate", certificate, "--tls-key", key], "https", {"DOWNBEAT_CA": certificate}),
    }


def measured(args, server, scheme, model, variables):
    """Requests a second, and microseconds of the server's CPU for a request."""
    before = sum(server.cpu())
    command = [args.binary, "bench", "-u", f"{scheme}://127.0.0.1:{server.http}", "-m", model, "--closed", "--json"]
    command += ["-c", str(args.connections), "-d", str(args.seconds), "-w", "0"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **variables})
    total = json.loads(run.stdout)["total"]
    if total["ok"] < total["scheduled"]:
        raise SystemExit(f"{model}: {total['scheduled'] - total['ok']} requests of {total['scheduled']} failed")
    return total["answered_per_second"], 1e6 * (sum(server.cpu()) - before) / total["ok"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "target/release/downbeat"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    args = parser.parse_args()
    args.verbose, args.roles = False, []
    with tempfile.TemporaryDirectory() as name, Processes(args) as processes:
        folder = pathlib.Path(name)
        models = folder / "models"
        models.mkdir()
        emulated.write(str(models), "small", "alpha_ms = 0.001\nbeta_ms = 0.01\nmax_batch = 32\n", 16)
        emulated.write(str(models), "large", "alpha_ms = 0.001\nbeta_ms = 0.01\nmax_batch = 32\n", 37_500)
        how = locked(args, folder)
        servers = {}
        for lock, (flags, _, _) in how.items():
            servers[lock] = processes.start("serve", "--engine", "emulated", *flags, str(models))
        for lock, (_, scheme, variables) in how.items():
            wait(args, servers[lock], scheme, variables)
        for model in ("small", "large"):
            rounds = []
            for _ in range(args.rounds):
                row = {lock: measured(args, servers[lock], scheme, model, variables) for lock, (_, scheme, variables) in how.items()}
                rounds.append(row)
                print(model, *(f"{lock} {rate:.0f}/s {cpu:.1f} us" for lock, (rate, cpu) in row.items()), sep="  ", flush=True)
            for lock in LOCKS[1:]:
                rates = [row[lock][0] / row["plain"][0] for row in rounds]
                cpus = [row[lock][1] / row["plain"][1] for row in rounds]
                print(f"{model}, {lock}: rate {summary(rates)}, the server's CPU {summary(cpus)} of plain", flush=True)


def summary(ratios):
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def wait(args, server, scheme, variables):
    """Waits until the server answers a request."""
    command = [args.binary, "bench", "-u", f"{scheme}://127.0.0.1:{server.http}", "-m", "small", "--requests", "20", "-w", "0", "--json"]
    for _ in range(100):
        run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
        if run.returncode == 0 and json.loads(run.stdout)["total"]["ok"]:
            return
        time.sleep(0.1)
    raise SystemExit(f"the server does not answer: {run.stderr or run.stdout}")


if __name__ == "__main__":
    main()
