"""Other people's programs against the server: kserve's clients, perf_analyzer, MLPerf LoadGen, schemathesis."""
import csv
import glob
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

import models
from serving import ROOT

HERE = pathlib.Path(__file__).parent
SCRIPTS = pathlib.Path(sysconfig.get_path("scripts"))


def run(command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def test_kserve(made):
    run([sys.executable, HERE / "kserve_session.py", made.url, made.grpc])


# -- perf_analyzer


def perf_analyzer(*arguments):
    # Linked against the CUDA runtime, which the wheel does not say.
    libraries = glob.glob(f"{sysconfig.get_path('platlib')}/nvidia/cuda_runtime/lib")
    return run([SCRIPTS / "perf_analyzer", *arguments], env=dict(os.environ, LD_LIBRARY_PATH=":".join(libraries)))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheel's binary is for x86-64")
@pytest.mark.parametrize("model, more", [
    ("mlp", []), ("mlp", ["-b", "4"]), ("mlp", ["--shared-memory", "system"]), ("encoder", ["--shape", "input_ids:16", "--shape", "attention_mask:16", "--input-data", "zero"]), ("mlp", ["--collect-metrics"]),
    ("digits", ["--request-rate-range", "50"]),
])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer(examples, tmp_path, protocol, model, more):
    if "--request-rate-range" not in more:
        more = [*more, "--concurrency-range", "4"]
    if "--collect-metrics" in more:
        more = [*more, "--metrics-url", f"127.0.0.1:{examples.metrics_port}/metrics"]
    address = examples.http if protocol == "http" else examples.grpc
    # The latency's stability depends on the machine, so windows of 50 requests count as they are.
    # But if the machine stops for 20 ms in a window of 2 ms, the window is ten times as slow as its
    # neighbours. The tool wants three windows in a row without such a stop.
    output = perf_analyzer("-m", model, "-u", address, "-i", protocol, "--measurement-mode", "count_windows", "--measurement-request-count", "50",
                           "--stability-percentage", "999", "--max-trials", "20", "-f", tmp_path / "report.csv", *more)
    assert "Failed" not in output, output
    row = next(csv.DictReader(open(tmp_path / "report.csv")))
    assert float(row["Inferences/Second"]) > 0 and int(row["p99 latency"]) > 0
    # The server's own report came over the statistics endpoint.
    assert int(row["Server Compute Infer"]) > 0


# -- MLPerf LoadGen


def loadgen(server, mode, folder):
    run([sys.executable, HERE / "loadgen_session.py", server.grpc, mode, folder])
    return dict(re.findall(r"^ *(.+?)\s*: *(.+)$", (folder / "mlperf_log_summary.txt").read_text(), re.MULTILINE))


def test_loadgen_accuracy(examples, tmp_path):
    """LoadGen's own log of the answers is judged: every held-out picture once, as often right as when it was trained."""
    import onnx

    sys.path.insert(0, str(ROOT / "tools"))
    from make_examples import digits_split

    loadgen(examples, "accuracy", tmp_path)
    _, _, images, classes = digits_split()
    answers = {entry["qsl_idx"]: int(entry["data"], 16) for entry in json.loads((tmp_path / "mlperf_log_accuracy.json").read_text())}
    assert sorted(answers) == list(range(len(images)))
    accuracy = np.mean([answers[i] == classes[i] for i in range(len(images))])
    model = onnx.load(ROOT / "examples/models/digits/1/model.onnx")
    assert accuracy >= float({p.key: p.value for p in model.metadata_props}["test_accuracy"]) - 1e-4


def test_loadgen_performance(examples, tmp_path):
    summary = loadgen(examples, "performance", tmp_path)
    assert summary["Scenario"] == "Server" and summary["Mode"] == "PerformanceOnly"
    assert summary["Min queries satisfied"] == "Yes" and summary["Min duration satisfied"] == "Yes"
    # The result of all rules of LoadGen: the 99th percentile under its limit, and enough queries to
    # be sure.
    assert summary["Result is"] == "VALID", summary


# -- schemathesis


@pytest.mark.parametrize("names", [
    pytest.param("", id="random names"),
    # Clients may load and unload `extra` meanwhile; requests to `simple` reach the model.
    pytest.param('[parameters]\n"path.model" = "simple"\n"path.version" = "1"\n"path.entry" = "extra"\n', id="names that are there"),
])
def test_schemathesis(start, repository, tmp_path, names):
    """Requests made from the protocol's OpenAPI text, right and wrong: each is answered as the text says, never with a 5xx."""
    models.add_sub(repository)
    models.add_sub(repository, "extra")
    server = start(repository, "--model-control-mode", "explicit", "--load-model", "*", "--shared-memory")
    (tmp_path / "schemathesis.toml").write_text(names)
    run([SCRIPTS / "schemathesis", "--config-file", tmp_path / "schemathesis.toml", "run", ROOT / "crates/frontend/openapi.yaml", "--url", server.url,
         "--max-examples", "30", "--seed", "1", "--workers", "1", "--phases", "examples,coverage,fuzzing", "--request-timeout", "30",
         "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"], cwd=tmp_path)
