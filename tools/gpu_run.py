#!/usr/bin/env python3
"""All checks and measurements on a GPU, on a machine that is reached only by copying files; `tools/gpu_pack.sh` makes what travels.

    python3 tools/gpu_run.py unpack PACK WORK                   unpacks a part of the pack; gets models and libraries ready in the background
    python3 tools/gpu_run.py measure WORK OUT [CALL|STEP ...]   runs a call's steps (`first` unless said otherwise), in order of importance; --list names all

Each step has a time limit of its own, and those of a call sum to no more than its time (--minutes). A step that fails or runs out of time is a row, and the others go
on. Rows are written as they come: OUT/gpu.jsonl, OUT/gpu.md (a table, also printed at the end, and when this is stopped) and OUT/logs.txt. Needs nothing but
Python 3; the steps say what else they miss.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCH = ROOT / "tools/gpu_torch.py"
MODELS = ["resnet50", "bert", "vgg19", "resnet152", "bertlarge"]
SMALL = {"resnet50": "widemlp", "bert": "exits", "vgg19": "widemlp", "resnet152": "exits", "bertlarge": "widemlp"}
# Models and batches for torch.compile before the measurement, the most telling first.
COMPILED = ["bert:16", "resnet50:16", "bert:1", "resnet50:1"]
# The steps of each call, in order of importance, and the seconds after which a step is ended;
# waiting for its models counts.
CALLS = {
    "first": {"machine": 25, "graphs": 50, "sessions": 35, "grids": 25, "census": 10, "cuts": 30, "tests": 90, "resnet50": 85, "bert": 85, "launches": 20,
              "switch": 20, "isolation": 30, "shares": 30},
    "more": {"calibration": 50, "elastic": 100, "staged": 100, "bertlarge": 75, "resnet152": 65, "vgg19": 65, "sharing": 80},
    "abacus": {"abacus": 540},
}
LIMITS = {step: limit for call in CALLS.values() for step, limit in call.items()}


def zoo_of(work):
    return work / "zoo"


def environment(work):
    # The programs ask the python3 of the path for NVIDIA's libraries.
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    library = work / "libonnxruntime.so.1.31.1"
    found = {"ORT_DYLIB_PATH": str(library)} if library.exists() else {}
    return dict(os.environ, RUST_BACKTRACE="0", CARGO_MANIFEST_DIR=str(ROOT / "crates/engine-ort"), PYTHONUNBUFFERED="1", PATH=path, **found)


# -- before it


def unpack(arguments):
    arguments.work.mkdir(parents=True, exist_ok=True)
    for archive in sorted(arguments.pack.glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extractall(arguments.work, filter="data")
        print(f"{archive.name}: unpacked", flush=True)
    names = sorted(set(SMALL.values())) if arguments.small else MODELS
    begin(arguments.work, "compile", TORCH, "--compiled", arguments.work / "compiled", "--ahead", *COMPILED)
    for name in names:
        begin(arguments.work, name, __file__, "model", name, zoo_of(arguments.work))
    if all((arguments.work / name).exists() for name in ("gpu_measure", "libonnxruntime_providers_cuda.so")):
        begin(arguments.work, "warm", __file__, "warm", arguments.work, *names)


def begin(work, task, *command):
    """Begins a task in the background, once: in a session of its own, so that it outlives this command."""
    folder = work / "background"
    folder.mkdir(exist_ok=True)
    if (folder / f"{task}.log").exists():
        return
    with open(folder / f"{task}.log", "w") as log:
        child = subprocess.Popen([sys.executable, *map(str, command)], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                                 env=environment(work))
    (folder / f"{task}.pid").write_text(str(child.pid))
    print(f"{task}: begun in the background", flush=True)


def model(arguments):
    """Writes one model, and if onnxruntime's tools are there its FP16 form and that with attention fused. A folder that is there is whole."""
    arguments.zoo.mkdir(exist_ok=True)
    part = arguments.zoo / f".{arguments.name}"
    subprocess.run([sys.executable, ROOT / "tools/zoo.py", part, arguments.name], check=True)
    (part / arguments.name).rename(arguments.zoo / arguments.name)
    if arguments.name in ("resnet50", "bert"):
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16

        def save(form, proto):
            folder = arguments.zoo / f".{arguments.name}{form}"
            (folder / "1").mkdir(parents=True)
            onnx.save(proto, folder / "1/model.onnx")
            folder.rename(arguments.zoo / f"{arguments.name}{form}")

        path = arguments.zoo / arguments.name / "1/model.onnx"
        save("-fp16", convert_float_to_float16(onnx.load(path), keep_io_types=True))
        if arguments.name == "bert":
            from onnxruntime.transformers.optimizer import optimize_model

            fused = optimize_model(str(path), model_type="bert", num_heads=12, hidden_size=768, opt_level=0, use_gpu=True)
            count = fused.get_fused_operator_statistics()["Attention"]
            assert count == 12, f"{count} of 12 attentions were fused"
            save("-fused", fused.model)
            fused.convert_float_to_float16(keep_io_types=True)
            save("-fused-fp16", fused.model)


def warm(arguments):
    """Runs each model once as soon as it is unpacked. The first session of a machine reads
    gigabytes of libraries, and no step should wait for this."""
    last = time.monotonic()
    zoo = zoo_of(arguments.work)
    child = subprocess.Popen([arguments.work / "gpu_measure", "plain", "--zoo", zoo], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for name in (None, *arguments.names):
        while name and not (zoo / name).is_dir() and time.monotonic() < last + 60:
            time.sleep(0.2)
        if name:
            last = time.monotonic()
            child.stdin.write(f"{name} 1 2\n")
            child.stdin.flush()
        answer = child.stdout.readline()
        print(f"{name or 'libraries'}: {time.monotonic() - last:.1f} s{', ' + answer.strip() if 'error' in answer or not answer else ''}", flush=True)
        if not answer:
            break


# -- the steps


class Clocks:
    """The GPU's clocks, power and temperature, asked for all the time."""

    ASKED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")

    def __init__(self):
        self.samples, self.child = [], None
        command = ["nvidia-smi", f"--query-gpu={','.join(self.ASKED)}", "--format=csv,noheader,nounits", "--id=0", "--loop-ms=250"]
        try:
            self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.child.stdout:
            self.samples.append(line)

    def told(self):
        """The samples since the last call."""
        count = len(self.samples)
        samples = [line.strip().split(", ") for line in self.samples[:count]]
        del self.samples[:count]
        samples = [sample for sample in samples if len(sample) == len(self.ASKED)]
        words = []
        for index, unit in enumerate(("MHz", "MHz memory", "W", "°C")):
            values = sorted(float(sample[index]) for sample in samples if re.fullmatch(r"[\d.]+", sample[index]))
            if values:
                words.append(f"{statistics.median(values):.0f} {unit} ({values[0]:.0f} to {values[-1]:.0f})")
        # 1: nothing runs.
        limits = sorted({sample[-1] for sample in samples if re.fullmatch(r"0x[0-9a-f]+", sample[-1]) and int(sample[-1], 16) & ~1})
        return ", ".join(words) + (f"; held back by {', '.join(limits)} (nvmlClocksEventReasons)" if limits else "")

    def end(self):
        if self.child:
            self.child.kill()
            self.child.wait()


class Run:
    def __init__(self, arguments):
        self.arguments, self.work, self.out = arguments, arguments.work, arguments.out
        self.zoo = zoo_of(self.work)
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows = []
        self.end = self.until = time.monotonic() + 60 * arguments.minutes
        self.log = open(self.out / "logs.txt", "w")
        self.file = open(self.out / "gpu.jsonl", "w")

    def row(self, **row):
        self.rows.append(row)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        (self.out / "gpu.md").write_text(table(self.rows))

    def left(self):
        """Seconds that the step has."""
        return self.until - time.monotonic()

    def run(self, step, command, line, limit=1e9):
        """Runs a command, and calls `line` with each line of the output. A failure becomes a row."""
        limit = min(limit, self.left())
        if limit < 3:
            self.row(step=step, what="not run", note="no time was left")
            return
        self.log.write(f"\n$ {' '.join(map(str, command))}\n")
        begin = time.monotonic()
        try:
            child = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                                     env=environment(self.work), start_new_session=True, cwd=self.work)
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
        status = None
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Ends the command's children, too, also when the script is stopped.
            kill(child.pid)
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
        """Waits for models, as long as half of the step's time."""
        end = time.monotonic() + self.left() / 2
        missing = [name for name in names if not (self.zoo / name).is_dir()]
        while missing and time.monotonic() < end:
            time.sleep(0.2)
            missing = [name for name in names if not (self.zoo / name).is_dir()]
        for name in missing:
            self.row(step=step, what="no model", note=f"{name}: {self.said(name)[-1]}")
        return not missing

    def said(self, task):
        """The output of a task in the background."""
        log = self.work / "background" / f"{task}.log"
        return (log.read_text().strip().splitlines() or ["nothing yet"]) if log.exists() else ["it was not begun"]

    def is_at_it(self, task):
        try:
            pid = (self.work / "background" / f"{task}.pid").read_text()
            # Z: the process has ended, and its parent has not waited for it.
            return pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def names(self, *names):
        return [SMALL[name] if self.arguments.small else name for name in names]

    def batches(self, text):
        return "1,8" if self.arguments.small else text

    def segments(self, count):
        return str(min(count, 3)) if self.arguments.small else str(count)

    def machine(self):
        told = lambda text: self.row(step="machine", what="", note=text.strip()) if text.strip() else None
        self.run("machine", ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv,noheader"], told, 8)
        self.run("machine", [self.work / "downbeat", "engine", "list"], told, self.left() / 2)
        while self.is_at_it("warm") and self.left() > 1:
            time.sleep(0.2)
        self.row(step="machine", what="first sessions", note="; ".join(self.said("warm")))

    def measure(self, step, *words):
        self.run(step, [self.work / "gpu_measure", *words, "--zoo", self.zoo], lambda text: self.row(**parsed(step, text)))

    def models(self, step, names, batches, *more):
        """A step of `gpu_measure` on these models. It should end after three quarters of its time."""
        names = self.names(*names)
        if self.wait_for(step, *names):
            self.measure(step, step, *names, "--batches", self.batches(batches), "--seconds", f"{self.left() * 0.75:.0f}", *more)

    def tests(self):
        told = []

        def line(text):
            told.append(text)
            found = re.match(r"test (\S+::\S+).* \.\.\. (\w*)", text)
            if found:
                # Nothing after the dots: the process ended in the test.
                self.row(step="tests", what=found[1].split("::")[-1], note=found[2] or "not finished")

        # Without --nocapture, a test's own words come at the end, under its name.
        self.run("tests", [self.work / "engine_tests", "--ignored", "--test-threads", "1", "--show-output", "gpu_device"], line)
        test, words = None, {}
        for text in told:
            found = re.match(r"---- (\S+) stdout ----", text)
            test = found[1].split("::")[-1] if found else None if text in ("failures:", "successes:") else test
            if test and not found and text.strip() and "DOWNBEAT_TEST_SEED" not in text and not text.startswith(("note:", "thread ")):
                words.setdefault(test, []).append(text.strip())
        # A text that many tests print becomes one row: mostly the reason why no test runs.
        sayings = {}
        for test, texts in words.items():
            sayings.setdefault("; ".join(texts)[:600], []).append(test)
        for text, tests in sayings.items():
            self.row(step="tests", what=f"{tests[0]}{f' and {len(tests) - 1} more' if tests[1:] else ''}, said", note=text)

    def throughput(self, name, batches, segments):
        [small] = self.names(name)
        if not self.wait_for(name, small):
            return
        if self.is_at_it("compile"):
            kill(int((self.work / "background/compile.pid").read_text()))
        self.row(step=name, what="torch.compile beforehand", note="; ".join(self.said("compile")))
        torch = ["", "--half", f"--compiled {self.work}/compiled", f"--half --compiled {self.work}/compiled", *(["--eager", "--half --eager"] if name == "bert" else [])]
        beside = [f"python3 {TORCH} {words}" for words in torch] + [f"{self.work}/gpu_measure plain --zoo {self.zoo}"]
        self.measure(name, "throughput", small, "--batches", self.batches(batches), "--segments", self.segments(segments), "--seconds", f"{self.left() * 0.5:.0f}",
                     *(word for command in beside for word in ("--beside", command)))

    def policies(self, step, name, rates, policies):
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
                   "--rounds", "1", "--duration", "2", "--server=--engine cuda", *flags]
        self.run(step, [*command, *rates], line)

    def calibration(self):
        """Reports of this GPU for `downbeat-lab calibrate`: `calibration-*.json`."""
        step, (one, other) = "calibration", self.names("resnet50", "bert")
        if not self.wait_for(step, one, other):
            return
        profile = [self.work / "downbeat", "profile", "--engine", "cuda", "--repository", self.zoo]
        told = lambda text: self.row(step=step, what="", note=text.strip()) if text.strip() else None
        report = lambda name: ["--json", self.out / f"calibration-{name}.json"]
        limit = self.left() / 3
        for model, length, batches in ((one, "32", "1,4,16"), (other, "128", "1,4,8")):
            self.run(step, [*profile, model, "--length", length, "--batch", self.batches(batches), "--shares", "4", "--segments", self.segments(4),
                            "--budget", limit * 0.5, *report(model)], told, limit)
        pairs = [self.work / "downbeat-lab", "pairs", "--engine", "cuda", "--repository", self.zoo, one, other]
        self.run(step, [*pairs, "--length", "128", "--batch", self.batches("1,8"), "--budget", limit * 0.5, *report("pair")], told, limit)

    def abacus(self):
        samples, names = self.out / "abacus.jsonl", self.names(*MODELS[:4])
        if self.arguments.samples:
            shutil.copy(self.arguments.samples, samples)
        if self.wait_for("abacus", *names):
            # Each sample is written when it is done, so that it may come close to its limit.
            self.measure("abacus", "abacus", *names, "--batches", self.batches("4,8,16,32"), "--segments", self.segments(16), "--samples", samples,
                         "--seconds", f"{max(self.left() - 20, 1):.0f}")

    def steps(self):
        elastic = ['NO_Wait: policy="windowed"', 'OPT_Wait: policy="windowed", window_ms=5', 'N-Ebird: policy="elastic", mixes="naive"']
        staged = ['ZeroBatch: policy="windowed"', 'DelayBatch: policy="windowed", window_ms=5', 'DVABatch: policy="staged", stages=4']
        low, high = ["--rate", "50,500", "--slo-ms", "50"], ["--start", "500", "--slo-ms", "50"]
        both = ["bert", "resnet50"]
        return {
            "machine": self.machine,
            "graphs": lambda: self.models("graphs", both, "1,8", "--segments", self.segments(4)),
            "sessions": lambda: self.models("sessions", both, "1,8", "--segments", self.segments(4)),
            "grids": lambda: self.models("grids", both, "1,32"),
            "census": lambda: self.models("census", [], "1"),
            "cuts": lambda: self.models("cuts", both, "1,8", "--segments", self.segments(8)),
            "tests": self.tests,
            "resnet50": lambda: self.throughput("resnet50", "1,4,16,64", 8),
            "bert": lambda: self.throughput("bert", "1,4,16,64", 12),
            "launches": lambda: self.models("launches", both, "1"),
            "switch": lambda: self.models("switch", both, "1"),
            "isolation": lambda: self.models("isolation", ["resnet50", "vgg19"], "16"),
            "shares": lambda: self.models("shares", ["resnet50"], "1,8,32"),
            "calibration": self.calibration,
            "elastic": lambda: self.policies("elastic", "resnet50", low, elastic),
            "staged": lambda: self.policies("staged", "resnet50", low, staged),
            "bertlarge": lambda: self.throughput("bertlarge", "1,16,64", 1),
            "resnet152": lambda: self.throughput("resnet152", "1,16,64", 1),
            "vgg19": lambda: self.throughput("vgg19", "1,16,64", 1),
            "sharing": lambda: self.policies("sharing", "resnet50", high, elastic[:1] + elastic[2:]),
            "abacus": self.abacus,
        }


def kill(group):
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


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
    if arguments.list:
        for call, limits in CALLS.items():
            print(f"{call}: {sum(limits.values())} s at most, in order of importance: {', '.join(f'{step} {limit}' for step, limit in limits.items())}")
        return
    chosen = [step for word in arguments.steps or ["first"] for step in CALLS.get(word, [word])]
    unknown = set(chosen) - set(LIMITS)
    if unknown:
        sys.exit(f"gpu_run: there is no call or step {', '.join(sorted(unknown))}; there are {', '.join([*CALLS, *LIMITS])}")
    # Ends in order, so that the table is printed and no process is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run, clocks = Run(arguments), Clocks()
    steps = run.steps()
    try:
        for name in chosen:
            run.until = min(time.monotonic() + LIMITS[name], run.end)
            try:
                steps[name]()
            except Exception as error:  # a defect in a step must not cost the others
                run.row(step=name, what="failed here", note=f"{type(error).__name__}: {error}")
            seen = clocks.told()
            if seen:
                run.row(step=name, what="clocks", note=seen + ("; torch.compile in the background" if run.is_at_it("compile") else ""))
    finally:
        clocks.end()
        print(table(run.rows), flush=True)


def main():
    path = lambda text: pathlib.Path(text).resolve()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    small = argparse.ArgumentParser(add_help=False)
    small.add_argument("--small", action="store_true", help="small models, for a rehearsal without a GPU")
    command = commands.add_parser("unpack", parents=[small])
    command.add_argument("pack", type=pathlib.Path)
    command.add_argument("work", type=path)
    command = commands.add_parser("measure", parents=[small])
    command.add_argument("--list", action="store_true", help="name the calls, their steps and limits, and end")
    command.add_argument("--minutes", type=float, default=9.3, help="time for all steps")
    command.add_argument("--samples", type=path, help="abacus.jsonl of an earlier call, to go on from")
    command.add_argument("work", type=path)
    command.add_argument("out", type=path)
    command.add_argument("steps", nargs="*")
    command = commands.add_parser("model", help=argparse.SUPPRESS)
    command.add_argument("name")
    command.add_argument("zoo", type=path)
    command = commands.add_parser("warm", help=argparse.SUPPRESS)
    command.add_argument("work", type=path)
    command.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    {"unpack": unpack, "measure": measure, "model": model, "warm": warm}[arguments.command](arguments)


if __name__ == "__main__":
    main()
