#!/usr/bin/env python3
"""All checks and measurements on a GPU, on a machine that is reached only by copying files; `tools/gpu_pack.sh` makes what travels.

    python3 tools/gpu_run.py unpack PACK WORK              unpacks a part of the pack; begins to write the models in the background
    python3 tools/gpu_run.py measure WORK OUT [STEP ...]   runs the steps, in order of importance; --list names them

Each step has a time limit of its own, and all together one (--minutes). A step that fails or runs out of time is a row, and the others go on. Rows are written as
they come: OUT/gpu.jsonl, OUT/gpu.md (a table, also printed at the end) and OUT/logs.txt. Needs nothing but Python 3; the steps say what else they miss.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = ["resnet50", "bert", "vgg19", "resnet152", "bertlarge"]
SMALL = {"resnet50": "widemlp", "bert": "exits", "vgg19": "widemlp", "resnet152": "exits", "bertlarge": "widemlp"}
TORCH = ["--beside", f"python3 {ROOT}/tools/gpu_torch.py", "--beside", f"python3 {ROOT}/tools/gpu_torch.py --half"]
# A limit of seconds, after which a step is ended.
LIMITS = {"machine": 30, "first": 60, "tests": 110, "resnet50": 75, "bert": 75, "isolation": 35, "switch": 25, "shares": 30,
          "calibration": 40, "elastic": 90, "staged": 90, "resnet152": 50, "vgg19": 50, "bertlarge": 60, "sharing": 60}


def zoo_of(work):
    return work / "zoo"


def unpack(arguments):
    arguments.work.mkdir(parents=True, exist_ok=True)
    for archive in sorted(arguments.pack.glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extractall(arguments.work, filter="data")
        print(f"{archive.name}: unpacked", flush=True)
    zoo = zoo_of(arguments.work)
    names = sorted(set(SMALL.values())) if arguments.small else MODELS
    if not zoo.exists():
        zoo.mkdir()
        for name in names:
            # In a session of its own, so that it outlives this command; a file that is there is whole.
            log = open(zoo / f"{name}.log", "w")
            subprocess.Popen([sys.executable, __file__, "model", name, str(zoo)], stdout=log, stderr=log,
                             stdin=subprocess.DEVNULL, start_new_session=True)
        print(f"writing {', '.join(names)} to {zoo} in the background", flush=True)


def model(arguments):
    """Writes one model, and its FP16 form if onnxruntime's tools are there."""
    part = arguments.zoo / f".{arguments.name}"
    subprocess.run([sys.executable, ROOT / "tools/zoo.py", part, arguments.name], check=True)
    (part / arguments.name).rename(arguments.zoo / arguments.name)
    if arguments.name in ("resnet50", "bert"):
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16

        half = convert_float_to_float16(onnx.load(arguments.zoo / arguments.name / "1/model.onnx"), keep_io_types=True)
        folder = arguments.zoo / f".{arguments.name}-fp16"
        (folder / "1").mkdir(parents=True)
        onnx.save(half, folder / "1/model.onnx")
        folder.rename(arguments.zoo / f"{arguments.name}-fp16")


class Run:
    def __init__(self, arguments):
        self.arguments, self.work, self.out = arguments, arguments.work, arguments.out
        self.zoo = zoo_of(self.work)
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows = []
        self.end = time.monotonic() + 60 * arguments.minutes
        self.log = open(self.out / "logs.txt", "w")
        self.file = open(self.out / "gpu.jsonl", "w")
        self.environment = dict(os.environ, RUST_BACKTRACE="0", CARGO_MANIFEST_DIR=str(ROOT / "crates/engine"), PYTHONUNBUFFERED="1")
        # The programs ask the python3 of the path for NVIDIA's libraries.
        self.environment["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        library = self.work / "libonnxruntime.so.1.31.1"
        if library.exists():
            self.environment["ORT_DYLIB_PATH"] = str(library)

    def row(self, **row):
        self.rows.append(row)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        (self.out / "gpu.md").write_text(table(self.rows))

    def run(self, step, command, limit, line):
        """Runs a command; `line` is called with each line of its output. Its failure is a row."""
        limit = min(limit, self.end - time.monotonic())
        if limit < 3:
            self.row(step=step, what="not run", note="no time was left")
            return
        self.log.write(f"\n$ {' '.join(map(str, command))}\n")
        begin = time.monotonic()
        try:
            child = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                                     env=self.environment, start_new_session=True, cwd=self.work)
        except OSError as error:
            self.row(step=step, what="does not start", note=str(error))
            return
        errors = []

        def read(stream, each):
            for text in stream:
                self.log.write(text)
                each(text.rstrip("\n"))

        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in [(child.stdout, line), (child.stderr, errors.append)]]
        for reader in readers:
            reader.start()
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        try:
            # What it started, too.
            os.killpg(child.pid, 9)
        except ProcessLookupError:
            pass
        child.wait()
        for reader in readers:
            reader.join(5)
        self.log.flush()
        said = next((text for text in reversed(errors) if text.strip() and not text.startswith("note:")), "")
        if status is None:
            self.row(step=step, what="stopped", note=f"its {limit:.0f} s were over")
        elif status:
            self.row(step=step, what=f"failed ({status})", note=said[:400])
        print(f"{step}: {time.monotonic() - begin:.0f} s, status {status}", flush=True)

    def wait_for(self, step, *names):
        """Waits for models, as long as half of what is left."""
        end = time.monotonic() + (self.end - time.monotonic()) / 2
        missing = [name for name in names if not (self.zoo / name).is_dir()]
        while missing and time.monotonic() < end:
            time.sleep(0.5)
            missing = [name for name in names if not (self.zoo / name).is_dir()]
        for name in missing:
            log = self.zoo / f"{name}.log"
            self.row(step=step, what="no model", note=f"{name}: {(log.read_text().strip() or 'not written yet').splitlines()[-1] if log.exists() else 'not asked for'}")
        return not missing

    def names(self, *names):
        return [SMALL[name] if self.arguments.small else name for name in names]

    def batches(self, text):
        return "1,8" if self.arguments.small else text

    def segments(self, count):
        return str(min(count, 3)) if self.arguments.small else str(count)

    # -- steps

    def machine(self):
        told = lambda text: self.row(step="machine", what="", note=text.strip()) if text.strip() else None
        self.run("machine", ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"], 15, told)
        self.run("machine", [self.work / "downbeat", "engine", "list"], 30, told)

    def measure(self, step, limit, *words):
        self.run(step, [self.work / "gpu_measure", *words, "--zoo", self.zoo], limit, lambda text: self.row(**parsed(step, text)))

    def first(self):
        names = self.names("resnet50", "bert")
        if self.wait_for("first", *names):
            self.measure("first", LIMITS["first"], "first", *names, "--batches", self.batches("32"), "--segments", self.segments(8))

    def tests(self):
        told = []

        def line(text):
            told.append(text)
            found = re.match(r"test (\S+::\S+).* \.\.\. (\w*)", text)
            if found:
                # Nothing after the dots: the process ended in the test.
                self.row(step="tests", what=found[1].split("::")[-1], note=found[2] or "not finished")

        # Without --nocapture, a test's own words come at the end, under its name.
        self.run("tests", [self.work / "engine_tests", "--ignored", "--test-threads", "1", "--show-output", "gpu_device"], LIMITS["tests"], line)
        test, words = None, {}
        for text in told:
            found = re.match(r"---- (\S+) stdout ----", text)
            test = found[1].split("::")[-1] if found else None if text in ("failures:", "successes:") else test
            if test and not found and text.strip() and "DOWNBEAT_TEST_SEED" not in text and not text.startswith(("note:", "thread ")):
                words.setdefault(test, []).append(text.strip())
        # What many say is one row: the reason why none runs, mostly.
        sayings = {}
        for test, texts in words.items():
            sayings.setdefault("; ".join(texts)[:600], []).append(test)
        for text, tests in sayings.items():
            self.row(step="tests", what=f"{tests[0]}{f' and {len(tests) - 1} more' if tests[1:] else ''}, said", note=text)

    def throughput(self, name, batches, segments):
        [small] = self.names(name)
        if self.wait_for(name, small):
            limit = LIMITS[name]
            self.measure(name, limit, "throughput", small, "--batches", self.batches(batches), "--segments", self.segments(segments), "--seconds", str(limit * 0.5),
                         *TORCH, "--beside", f"{self.work}/gpu_measure plain --zoo {self.zoo}")

    def pair(self, step, names, batches, more=()):
        names = self.names(*names)
        if self.wait_for(step, *names):
            self.measure(step, LIMITS[step], step, *names, "--batches", self.batches(batches), "--seconds", str(LIMITS[step] * 0.5), *more)

    def policies(self, step, name, rates, policies, more=()):
        [small] = self.names(name)
        if not self.wait_for(step, small):
            return
        flags = [word for policy in policies for word in ("--policy", policy)]

        def line(text):
            found = re.match(r"round \d+: ([^:]+): (.*)", text)
            if found:
                for key, value in re.findall(r"(mean ms at [^ ,]+|capacity/s) ([0-9.e+]+)", found[2]):
                    number = {"per_s": float(value)} if key == "capacity/s" else {"ms": float(value)}
                    self.row(step=step, model=small, what=f"{found[1]}, {key}", **number)

        command = [sys.executable, ROOT / "tools/compare_policies.py", "--binary", self.work / "downbeat", "--repository", self.zoo, "--model", small,
                   "--rounds", "1", "--duration", "2", "--server=--engine cuda", *flags, *more]
        self.run(step, [*command, *rates], LIMITS[step], line)

    def calibration(self):
        """What the simulator needs to speak of this GPU: `gpu.toml`, for `downbeat simulate device --calibration`."""
        step, (one, other) = "calibration", self.names("resnet50", "bert")
        if not self.wait_for(step, one, other):
            return
        profile = [self.work / "downbeat", "profile", "--engine", "cuda", "--repository", self.zoo, "--save", self.out / "gpu.toml"]
        told = lambda text: self.row(step=step, what="", note=text.strip()) if text.strip() else None
        limit = LIMITS[step] / 3
        for model, length in ((one, "32"), (other, "128")):
            self.run(step, [*profile, model, "--length", length, "--batch", self.batches("1,8,32"), "--shares", "4", "--segments", self.segments(4),
                            "--budget", limit * 0.5], limit, told)
        self.run(step, [*profile, one, "--beside", other, "--length", "128", "--batch", self.batches("1,8"), "--budget", limit * 0.5], limit, told)

    def steps(self):
        elastic = ['NO_Wait: policy="windowed"', 'OPT_Wait: policy="windowed", window_ms=5', 'N-Ebird: policy="elastic", mixes="naive"']
        staged = ['ZeroBatch: policy="windowed"', 'DelayBatch: policy="windowed", window_ms=5', 'DVABatch: policy="staged", stages=4']
        low, high = ["--rate", "50,500", "--slo-ms", "50"], ["--start", "500", "--slo-ms", "50"]
        return {
            "machine": self.machine,
            "first": self.first,
            "tests": self.tests,
            "resnet50": lambda: self.throughput("resnet50", "1,4,16,64", 8),
            "bert": lambda: self.throughput("bert", "1,4,16,64", 12),
            "isolation": lambda: self.pair("isolation", ["resnet50", "vgg19"], "16"),
            "switch": lambda: self.pair("switch", ["resnet50", "bert"], "1"),
            "shares": lambda: self.pair("shares", ["resnet50"], "1,8,32"),
            "calibration": self.calibration,
            "elastic": lambda: self.policies("elastic", "resnet50", low, elastic),
            "staged": lambda: self.policies("staged", "resnet50", low, staged),
            "bertlarge": lambda: self.throughput("bertlarge", "1,16,64", 1),
            "resnet152": lambda: self.throughput("resnet152", "1,16,64", 1),
            "vgg19": lambda: self.throughput("vgg19", "1,16,64", 1),
            "sharing": lambda: self.policies("sharing", "resnet50", high, elastic[:1] + elastic[2:]),
        }


def parsed(step, text):
    try:
        row = json.loads(text)
        return row if isinstance(row, dict) else {"step": step, "what": "said", "note": text}
    except ValueError:
        return {"step": step, "what": "said", "note": text}


def table(rows):
    """The rows as a Markdown table."""
    number = lambda value, form: "" if value is None else format(value, form)
    lines = ["| step | model | what | batch | median ms | p99 ms | items/s | |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row.get("step", ""), row.get("model", ""), row.get("what", ""), number(row.get("batch"), "d"), number(row.get("ms"), ".3f"),
                 number(row.get("p99_ms"), ".3f"), number(row.get("per_s"), ".0f"), row.get("note", "")]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def measure(arguments):
    run = Run(arguments)
    steps = run.steps()
    if arguments.list:
        print("\n".join(f"{name}: at most {LIMITS[name]} s" for name in steps))
        return
    unknown = set(arguments.steps) - set(steps)
    if unknown:
        sys.exit(f"gpu_run: there is no step {', '.join(sorted(unknown))}; there are {', '.join(steps)}")
    for name, step in steps.items():
        if arguments.steps and name not in arguments.steps:
            continue
        try:
            step()
        except Exception as error:  # a defect in a step must not cost the others
            run.row(step=name, what="failed here", note=f"{type(error).__name__}: {error}")
    print(table(run.rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    small = argparse.ArgumentParser(add_help=False)
    small.add_argument("--small", action="store_true", help="small models, for a rehearsal without a GPU")
    command = commands.add_parser("unpack", parents=[small])
    command.add_argument("pack", type=pathlib.Path)
    command.add_argument("work", type=lambda text: pathlib.Path(text).resolve())
    command = commands.add_parser("measure", parents=[small])
    command.add_argument("--list", action="store_true", help="name the steps and end")
    command.add_argument("--minutes", type=float, default=9.3, help="time for all steps")
    command.add_argument("work", type=lambda text: pathlib.Path(text).resolve())
    command.add_argument("out", type=lambda text: pathlib.Path(text).resolve())
    command.add_argument("steps", nargs="*")
    command = commands.add_parser("model", help=argparse.SUPPRESS)
    command.add_argument("name")
    command.add_argument("zoo", type=pathlib.Path)
    arguments = parser.parse_args()
    {"unpack": unpack, "measure": measure, "model": model}[arguments.command](arguments)


if __name__ == "__main__":
    main()
