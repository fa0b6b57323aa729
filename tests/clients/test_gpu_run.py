"""The script that measures on GPUs (tools/gpu_run.py), rehearsed without a GPU. Programs that fail,
hang and end stand in for the programs that it starts."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import time

import pytest

import serving
from serving import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import gpu_run

SCRIPT = ROOT / "tools/gpu_run.py"
# However busy the machine is.
PATIENCE_S = 120
# The measuring program: it says a row, and then behaves as this script sets for its first argument,
# the step.
PROGRAM = """#!{python}
import json, os, subprocess, sys, time
step = sys.argv[1]
if step == "plain":
    print("{{}}", flush=True)
    for line in sys.stdin:
        print(json.dumps({{"ms": [1.0, 1.0]}} if "exits" in line else {{"error": "it cannot"}}), flush=True)
    sys.exit()
print(json.dumps({{"step": step, "model": "", "what": "begun", "ms": 1.5, "note": " ".join(sys.argv[2:])}}), flush=True)
if step == "graphs":
    # A child of its own, which is to end with it.
    child = subprocess.Popen(["sleep", "600"])
    print(json.dumps({{"step": step, "what": "child", "note": str(child.pid)}}), flush=True)
    time.sleep(600)
if step == "grids":
    sys.exit("gpu_measure: the device is gone")
if step == "census":
    print("no row")
"""
SMI = "#!{python}\nimport time\nwhile True:\n    print('1980, 3201, 412.50, 45, 0x0000000000000004', flush=True)\n    time.sleep(0.1)\n"


@pytest.fixture
def work(tmp_path):
    """A folder as `unpack` leaves it, with models."""
    for name, text in (("gpu_measure", PROGRAM), ("bin/nvidia-smi", SMI)):
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(python=sys.executable))
        path.chmod(0o755)
    for model in ("exits", "widemlp"):
        (tmp_path / "work/zoo" / model).mkdir(parents=True)
    return tmp_path / "work"


def begin(work, *steps, options=()):
    environment = dict(os.environ, PATH=f"{work / 'bin'}:{os.environ['PATH']}")
    command = [sys.executable, SCRIPT, "measure", "--small", *options, work, work / "out", *steps]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def rows(work):
    path = work / "out/gpu.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid):
    """Whether a process ends. After SIGKILL it still needs a moment of a core."""
    until = time.monotonic() + PATIENCE_S
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_alive(pid)


def test_limits_of_a_call_fit_into_it(capsys):
    arguments = gpu_run.argparse.Namespace(list=True)
    gpu_run.measure(arguments)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == len(gpu_run.CALLS)
    for (call, limits), line in zip(gpu_run.CALLS.items(), told):
        assert sum(limits.values()) <= 60 * 9.3, call
        assert line.startswith(f"{call}: {sum(limits.values())} s at most"), line
    steps = [step for limits in gpu_run.CALLS.values() for step in limits]
    assert len(set(steps)) == len(steps) and not set(steps) & set(gpu_run.CALLS) - {"abacus"}
    # The figures that the design waits for have 150 s, and come first.
    first = list(gpu_run.CALLS["first"].items())
    assert [step for step, _ in first[:6]] == ["machine", "graphs", "sessions", "grids", "census", "cuts"]
    assert sum(limit for _, limit in first[1:6]) == 150


def test_every_step_is_there(tmp_path):
    run = gpu_run.Run(gpu_run.argparse.Namespace(work=tmp_path, out=tmp_path / "out", minutes=1, small=True, samples=None))
    assert set(run.steps()) == set(gpu_run.LIMITS)


def test_steps_that_fail_or_hang_cost_no_other(work):
    """`grids` fails, `graphs` is stopped when the time is over, and after it nothing is begun; what they said before is kept."""
    child = begin(work, "grids", "census", "graphs", "cuts", options=["--minutes", "0.12"])
    printed, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, printed
    told = [(row["step"], row["what"]) for row in rows(work) if row["what"] != "clocks"]
    assert told == [("grids", "begun"), ("grids", "failed (1)"), ("census", "begun"), ("census", "said"), ("graphs", "begun"),
                    ("graphs", "child"), ("graphs", "stopped"), ("cuts", "not run")]
    assert any(row.get("note") == "gpu_measure: the device is gone" for row in rows(work))
    assert ends(next(row["note"] for row in rows(work) if row["what"] == "child"))
    table = (work / "out/gpu.md").read_text()
    assert printed.endswith(table + "\n") and "| graphs |  | begun |  | 1.500 |" in table
    [clocks] = [row["note"] for row in rows(work) if row["step"] == "graphs" and row["what"] == "clocks"]
    assert clocks == "1980 MHz (1980 to 1980), 3201 MHz memory (3201 to 3201), 412 W (412 to 412), 45 °C (45 to 45); held back by 0x0000000000000004 (nvmlClocksEventReasons)"


def test_stopped_it_prints_its_table_and_leaves_nothing_running(work):
    child = begin(work, "census", "graphs", "cuts")
    until = time.monotonic() + PATIENCE_S
    while not any(row["what"] == "child" for row in rows(work)) and time.monotonic() < until:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    printed, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 128 + signal.SIGTERM, printed
    assert "| census |  | begun |" in printed and "| graphs |  | begun |" in printed, printed
    assert ends(next(row["note"] for row in rows(work) if row["what"] == "child"))


def test_a_model_that_is_missing_is_said(work):
    (work / "zoo/exits").rmdir()
    (work / "background").mkdir()
    (work / "background/exits.log").write_text("Traceback\nModuleNotFoundError: No module named 'onnx'\n")
    # `sessions` wants both models, and waits for half of its time. `isolation` wants another model.
    child = begin(work, "sessions", "isolation", options=["--minutes", "0.15"])
    printed, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, printed
    told = [(row["step"], row["what"], row["note"]) for row in rows(work) if row["what"] in ("no model", "begun")]
    assert told[0] == ("sessions", "no model", "exits: ModuleNotFoundError: No module named 'onnx'")
    assert [step for step, what, _ in told if what == "begun"] == ["isolation"]


def test_steps_are_named(work):
    child = begin(work, "everything")
    printed, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 1 and "there is no call or step everything; there are first, more, abacus, machine, graphs" in printed


def test_samples_go_on_from_an_earlier_call(work, tmp_path):
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text('{"sample": 0}\n')
    child = begin(work, "abacus", options=["--samples", earlier])
    printed, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, printed
    assert (work / "out/abacus.jsonl").read_text() == '{"sample": 0}\n'
    [row] = [row for row in rows(work) if row["what"] == "begun"]
    # The program ends by itself before the script would stop it.
    assert f"--samples {work}/out/abacus.jsonl" in row["note"] and "--seconds 520" in row["note"], row


def test_unpacked_models_and_libraries_get_ready_in_the_background(tmp_path):
    (tmp_path / "pack").mkdir()
    with tarfile.open(tmp_path / "pack/programs.tar.xz", "w:xz") as tar:
        for name in ("gpu_measure", "libonnxruntime_providers_cuda.so"):
            (tmp_path / name).write_text(PROGRAM.format(python=sys.executable))
            (tmp_path / name).chmod(0o755)
            tar.add(tmp_path / name, name)
    work = tmp_path / "work"
    for _ in range(2):
        command = [sys.executable, SCRIPT, "unpack", "--small", tmp_path / "pack", work]
        done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
        begun = done.stdout.count("begun")
    assert begun == 0, "a task is begun once"
    until = time.monotonic() + PATIENCE_S
    logs = {task: work / "background" / f"{task}.log" for task in ("warm", "compile", "exits", "widemlp")}
    while time.monotonic() < until and not ("widemlp:" in logs["warm"].read_text() and logs["compile"].read_text()):
        time.sleep(0.2)
    assert (work / "zoo/exits/1/model.onnx").exists() and (work / "zoo/widemlp/1/model.onnx").exists()
    libraries, exits, widemlp = logs["warm"].read_text().splitlines()
    assert re.fullmatch(r"libraries: [0-9.]+ s", libraries) and re.fullmatch(r"exits: [0-9.]+ s", exits)
    assert re.fullmatch(r'widemlp: [0-9.]+ s, {"error": "it cannot"}', widemlp)
    assert "no PyTorch with a GPU" in logs["compile"].read_text()


# -- the program that measures, on the stand-in of the driver

BUILT = ROOT / "target/debug"
# `cargo test` puts it into the one folder, `cargo build` into both.
STAND_IN = max(BUILT.glob("**/libcuda_stand_in.so"), key=lambda path: path.stat().st_mtime, default=None)


@pytest.fixture
def on_stand_in(tmp_path):
    """A folder as `unpack` leaves it, with the programs as they were built last, and the environment to run them."""
    if not STAND_IN or not (BUILT / "examples/gpu_measure").exists():
        pytest.skip("cargo test --workspace builds what this runs")
    work = tmp_path / "work"
    (work / "lib").mkdir(parents=True)
    (work / "lib/libcuda.so.1").symlink_to(STAND_IN)
    (work / "gpu_measure").symlink_to(BUILT / "examples/gpu_measure")
    subprocess.run([sys.executable, ROOT / "tools/zoo.py", work / "zoo", "exits"], check=True)
    (work / "zoo/widemlp").symlink_to("exits")
    return work, dict(os.environ, LD_LIBRARY_PATH=str(work / "lib"), ORT_DYLIB_PATH=str(serving.onnxruntime_library()), ORT_DISABLE_TELEMETRY="1")


def test_the_first_steps_on_a_stand_in(on_stand_in):
    work, environment = on_stand_in
    command = [sys.executable, SCRIPT, "measure", "--small", work, work / "out", "graphs", "sessions", "grids", "census", "cuts", "launches"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {(row["step"], row["what"]): row.get("note", "") for row in rows(work)}
    assert not [key for key in told if key[1].startswith(("failed", "does not"))], done.stdout
    assert {step for step, _ in told} == {"graphs", "sessions", "grids", "census", "cuts", "launches"}
    # Why it is a graph or none, for each size.
    assert {row["batch"] for row in rows(work) if row["what"] == "whole, segment 1 of 1" and "graph" in row["note"]} == {1, 8}
    # The stand-in runs no kernels, and the rows report this.
    assert "no kernel of our own" in told["census", "not run"]


def test_samples_of_two_models_side_by_side(on_stand_in):
    work, environment = on_stand_in
    path = work / "abacus.jsonl"
    command = [work / "gpu_measure", "abacus", "exits", "widemlp", "--zoo", work / "zoo", "--batches", "1,4", "--segments", "3", "--seconds", "0", "--samples", path]
    for _ in range(2):
        subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environment, timeout=200)
        # A call that is stopped may leave half of a sample.
        path.write_text(path.read_text() + '{"sample": 77, "seed": 1')
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    samples = [json.loads(line) for line in lines]
    assert [sample["sample"] for sample in samples] == [0, 1], "the second call went on"
    for sample in samples:
        assert sample["models"] == ["exits", "widemlp"] and set(sample["batches"]) <= {1, 4}
        ends = [(begin, end, count) for (begin, end), count in zip(sample["ranges"], sample["segments"])]
        assert all(0 <= begin < end <= count == 3 for begin, end, count in ends) and any(end == count for _, end, count in ends), sample
        times = [*sample["solo_ms"], *sample["beside_ms"], sample["together_ms"]]
        assert len({len(runs) for runs in times}) == 1 and all(ms > 0 for runs in times for ms in runs), sample
