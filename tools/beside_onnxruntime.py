#!/usr/bin/env python3
"""Times models on Downbeat's engines beside plain `onnxruntime` in Python at its best settings.

    pip install -r tools/requirements.txt && python tools/zoo.py target/zoo resnet50 mobilenetv2 bert trees
    python tools/beside_onnxruntime.py [--settings] target/release/downbeat [target/zoo] [MODEL ...]

ORT_DYLIB_PATH names the library for Downbeat. The default is the library of the Python package, so that both run the same code.

First, each of the settings of plain `onnxruntime` runs once at batch 1 and at larger ones: 1 or all threads, with and without an arena, spinning, and
IO binding. The fastest setting goes on, and so does the batch with the most items a second. Downbeat goes on with the better of 1 and all threads.
Then all of them run in turns. The table has medians over the turns, and the median of the turns' ratios. `--settings` prints what each setting gives.
"""
import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np
import onnxruntime

LENGTH = 128
CORES = len(os.sched_getaffinity(0))
THREADS = sorted({1, CORES})
SEED = 0


class Plain:
    """A session of plain onnxruntime, with its settings."""

    def __init__(self, path, threads=1, arena=True, spinning=True, binding=False, entries=(), optimized=True):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        level = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = arena
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
        for key, value in entries:
            options.add_session_config_entry(key, value)
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.binding = binding

    def feed(self, batch):
        """Random inputs; the dimension after the batch that varies has LENGTH."""
        random, feed = np.random.default_rng(SEED), {}
        for entry in self.session.get_inputs():
            shape = [batch, *(size if isinstance(size, int) else LENGTH for size in entry.shape[1:])]
            if entry.type == "tensor(float)":
                feed[entry.name] = random.standard_normal(shape, dtype=np.float32)
            else:
                feed[entry.name] = random.integers(1, 2 if "mask" in entry.name else 1000, shape)
        return feed

    def median_s(self, batch, seconds, least=5):
        """Median time of a batch, of at least so many runs."""
        feed, times = self.feed(batch), []
        bound = self.session.io_binding()
        for name, value in feed.items():
            bound.bind_cpu_input(name, value)
        for output in self.session.get_outputs():
            bound.bind_output(output.name)
        end = None
        while end is None or len(times) < least or time.perf_counter() < end:
            begin = time.perf_counter()
            if self.binding:
                self.session.run_with_iobinding(bound)
                bound.copy_outputs_to_cpu()
            else:
                self.session.run(None, feed)
            times.append(time.perf_counter() - begin)
            # The first two plan and allocate.
            if len(times) == 2 and end is None:
                times, end = [], time.perf_counter() + seconds
        return statistics.median(times)


def downbeat_s(binary, folder, model, engine, threads, batches, seconds):
    """Median times of batches on one of Downbeat's engines; `None`: the engine cannot run the model."""
    command = [binary, "profile", model, "--repository", str(folder), "--engine", engine, "--threads", str(threads),
               "--batch", ",".join(map(str, batches)), "--length", str(LENGTH), "--budget", str(seconds * len(batches)), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{model} on {engine}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return {found["batch"]: found["median_ns"] / 1e9 for found in json.loads(done.stdout)["measurements"]}


def largest(folder, model):
    """The largest batch by the configuration that zoo.py wrote."""
    line = next(line for line in (folder / model / "config.pbtxt").read_text().splitlines() if "max_batch_size" in line)
    return int(line.split(":")[1])


def settings():
    """The settings of plain onnxruntime to try."""
    for threads, arena, spinning, binding in itertools.product(THREADS, [True, False], [True, False], [False, True]):
        if threads > 1 or spinning:
            yield {"threads": threads, "arena": arena, "spinning": spinning, "binding": binding}


# Settings that differ from the default in one thing, to measure its gain.
EFFECTS = {
    "no arena": {"arena": False},
    "IO binding": {"binding": True},
    "no spinning": {"spinning": False},
    "spinning stops with the run": {"entries": [("session.force_spinning_stop", "1")]},
    "denormals are zero": {"entries": [("session.set_denormal_as_zero", "1")]},
    "no pre-packed weights": {"entries": [("session.disable_prepacking", "1")]},
    "no optimisation of the graph": {"optimized": False},
}


def effects(path, threads, batches, seconds, turns):
    """The gain of each setting: the ratio of times, the default's to its own, by batch; medians
    over the turns."""
    ratios = {}
    sessions = {name: Plain(path, threads=threads, **changes) for name, changes in EFFECTS.items()}
    usual = Plain(path, threads=threads)
    for _, batch in itertools.product(range(turns), batches):
        for name, session in sessions.items():
            ratios.setdefault((name, batch), []).append(usual.median_s(batch, seconds) / session.median_s(batch, seconds))
    return {key: statistics.median(found) for key, found in ratios.items()}


def best_setting(path, batch, seconds):
    """The fastest setting at this batch."""
    return min(settings(), key=lambda setting: Plain(path, **setting).median_s(batch, seconds, least=2))


def row(binary, folder, model, turns, seconds):
    """The lines of the table for a model, at batch 1 and at the best batch."""
    path = str(folder / model / "1" / "model.onnx")
    most = largest(folder, model)
    sizes = sorted({1, *(2 ** power for power in range(1, 12) if 2 ** power <= most), most})
    widest = Plain(path, threads=CORES)
    per_item = {batch: widest.median_s(batch, seconds / 4, least=2) / batch for batch in sizes}
    best = min(sizes, key=per_item.get)
    batches = sorted({1, best})
    chosen = {batch: best_setting(path, batch, seconds / 4) for batch in batches}
    plain = {batch: Plain(path, **chosen[batch]) for batch in batches}
    engines = {}
    for engine in ["onnxruntime", "rten"]:
        tried = {threads: downbeat_s(binary, folder, model, engine, threads, batches, seconds / 2) for threads in THREADS}
        if all(tried.values()):
            engines[engine] = {batch: min(THREADS, key=lambda threads: tried[threads][batch]) for batch in batches}
    times = {}
    for turn, batch in itertools.product(range(turns), batches):
        measures = {"plain": lambda: plain[batch].median_s(batch, seconds)}
        for engine, threads in engines.items():
            measures[engine] = lambda engine=engine, threads=threads: downbeat_s(
                binary, folder, model, engine, threads[batch], [batch], seconds)[batch]
        order = list(measures.items())
        for name, measure in order if turn % 2 == 0 else reversed(order):
            times.setdefault((name, batch), []).append(measure())
    for batch in batches:
        cells = [f"{model}, batch {batch}", f"{1e3 * statistics.median(times['plain', batch]):.4g} ({described(chosen[batch])})"]
        ratios = []
        for engine in ["onnxruntime", "rten"]:
            found = times.get((engine, batch))
            cells.append(f"{1e3 * statistics.median(found):.4g} ({engines[engine][batch]} threads)" if found else "cannot run it")
            each = sorted(a / b for a, b in zip(times["plain", batch], found or []))
            ratios.append(f"{statistics.median(each):.3f} ({each[0]:.3f} to {each[-1]:.3f})" if each else "")
        print(f"| {' | '.join([*cells, *ratios])} |", flush=True)
    return batches


def described(setting):
    """A setting in words."""
    words = [f"{setting['threads']} threads"]
    words += [] if setting["arena"] else ["no arena"]
    words += [] if setting["spinning"] else ["no spinning"]
    words += ["IO binding"] if setting["binding"] else []
    return ", ".join(words)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", action="store_true", help="print what each setting of onnxruntime gives, instead")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measure")
    parser.add_argument("binary")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent / "target/zoo")
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["resnet50", "mobilenetv2", "bert", "trees"])
    arguments = parser.parse_args()
    library = next((pathlib.Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"), None)
    if library:
        os.environ.setdefault("ORT_DYLIB_PATH", str(library))
    if arguments.settings:
        print("| model, batch | threads | setting | times as fast as without |\n|---|---|---|---|")
        for model, threads in itertools.product(arguments.models, THREADS):
            path = str(arguments.folder / model / "1" / "model.onnx")
            found = effects(path, threads, [1, min(8, largest(arguments.folder, model))], arguments.seconds, arguments.turns)
            for (name, batch), ratio in found.items():
                print(f"| {model}, {batch} | {threads} | {name} | {ratio:.3f} |", flush=True)
        return
    print("Milliseconds a batch; a ratio above 1: faster than plain onnxruntime.\n")
    print("| model | plain onnxruntime, best | Downbeat, onnxruntime | Downbeat, rten | ratio, onnxruntime | ratio, rten |\n|---|---|---|---|---|---|")
    for model in arguments.models:
        row(arguments.binary, arguments.folder, model, arguments.turns, arguments.seconds)


if __name__ == "__main__":
    main()
