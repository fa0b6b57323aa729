"""The decision log of pipelines: `downbeat log`, `what-if`, `advise` and `timeline` after real requests."""
import json
import subprocess
import sys

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import ensembles
import models
from ensembles import FOUR, step
from test_decoupled import write

ONE = ("TYPE_FP32", [1])
REQUESTS = 20
CALLER = """
backend: "python"
max_batch_size: 0
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 1, 4 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 1, 4 ] }} ]
"""
CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for asked in requests:
            x = pb_utils.get_input_tensor_by_name(asked, "x")
            called = pb_utils.InferenceRequest(model_name="plus1", requested_output_names=["y"], inputs=[x]).exec()
            y = pb_utils.get_output_tensor_by_name(called, "y").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return answers
"""


def tensor(name, array):
    made = httpclient.InferInput(name, list(array.shape), "FP32")
    made.set_data_from_numpy(array)
    return made


@pytest.fixture
def recorded(start, repository, tmp_path, binary):
    """A folder with the log of a server, and what `downbeat timeline` said."""
    folder = tmp_path / "decisions"
    ensembles.chain(repository)
    ensembles.fork(repository)
    ensembles.write(repository, "nested", [
        step("chain", {"in": "in"}, {"out": "t"}), step("plus1", {"x": "t"}, {"y": "out"})], {"in": FOUR}, {"out": FOUR})
    models.slow(repository, "slow")
    ensembles.write(repository, "race", [step("slow", {"x": "in"}, {"y": "t"}), step("slow", {"x": "t"}, {"y": "out"})], {"in": ONE}, {"out": ONE},
                    max_batch_size=1, more='parameters { key: "slo_ms" value { string_value: "1" } }')
    write(repository, "caller", CODE, "", CALLER)
    server = start(repository, "--decision-log", str(folder), "--profiling-budget", "0", "--python", sys.executable)
    x = np.ones((1, 4), np.float32)
    with httpclient.InferenceServerClient(server.http) as client:
        for _ in range(REQUESTS):
            client.infer("chain", [tensor("in", x)])
            client.infer("plus1", [tensor("x", x)])
        client.infer("fork", [tensor("in", x)])
        client.infer("nested", [tensor("in", x)])
        np.testing.assert_array_equal(client.infer("caller", [tensor("x", x)]).as_numpy("y"), x + 1)
        for _ in range(3):
            # The first one may be a probe.
            try:
                client.infer("race", [tensor("in", np.ones((1, 1), np.float32))])
            except InferenceServerException:
                pass
    page = tmp_path / "timeline.html"
    timeline = run(binary, "timeline", server.url, "--seconds", "60", "-o", page)
    server.stop()
    return folder, timeline, page.read_text()


def run(binary, *arguments):
    done = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_recorded_log_tells_where_the_time_went(recorded, binary):
    folder, timeline, page = recorded
    views = json.loads(run(binary, "log", "pipelines", folder, "--json", "-"))["pipelines"]
    of = {view["pipeline"]: view for view in views}
    assert set(of) == {"chain", "fork", "nested", "race", "calls of caller"}
    # One of `nested` too.
    assert of["chain"]["requests"] == of["chain"]["in_time"] == REQUESTS + 1
    assert [(its["model"], its["requests"]) for its in of["chain"]["steps"]] == [(name, REQUESTS + 1) for name in ("plus1", "plus10", "plus100")]
    assert [its["requests"] for its in of["fork"]["steps"]] == [1, 1, 1, 1]
    # The model was tried at load, too.
    (call,) = of["calls of caller"]["steps"]
    assert call["model"] == "plus1" and call["requests"] >= 1
    assert sum(of["race"]["lost"].values()) + of["race"]["late"] == 3
    said = run(binary, "log", "pipelines", folder, "--pipeline", "chain")
    assert said.startswith(f"chain: {REQUESTS + 1} requests, {REQUESTS + 1} in time (100.0%)") and " short of " in said, said
    for file in sorted(folder.glob("*.log")):
        assert "differs" not in run(binary, "log", "replay", file)
    shown = "".join(run(binary, "log", "show", file) for file in folder.glob("shard-*.log"))
    assert "; step 0 ('plus1') of chain #" in shown and "; step 0 ('plus1') of caller #" in shown
    # The timeline follows requests through their steps.
    assert "chain: " in timeline and "A dot is waiting" in timeline and "steps 0 plus1, 1 plus10, 2 plus100" in timeline, timeline
    assert "nested: 1 requests; steps 0.0 plus1, 0.1 plus10, 0.2 plus100, 1 plus1" in timeline, timeline
    assert "chain #" in page and "&#39;plus100&#39;" in page


def test_a_recorded_log_is_replayed_as_pipelines(recorded, binary):
    folder, *_ = recorded
    report = json.loads(run(binary, "what-if", folder, "--rate", "1.2", "--more", "plus10=1", "--json", "-"))
    logged, base, _, more = report["rows"]
    requests = {flow["pipeline"]: flow["requests"] for flow in logged["flows"]}
    # `chain` within `nested` is a part of that. Calls of `caller` are requests of plus1 itself.
    assert [requests[name] for name in ("chain", "fork", "nested")] == [REQUESTS, 1, 1]
    assert requests["plus1"] >= REQUESTS + 1
    # Unless a probe was tried, all requests of `race` were given up before its first step.
    assert "race" in requests or any(note.startswith("Left out: step 0 ('slow') of 'race'") for note in report["notes"])
    assert [flow["requests"] for flow in base["flows"]] == [flow["requests"] for flow in logged["flows"]]
    assert more["pools"][0]["devices"] == base["pools"][0]["devices"] + 1
    assert any(note.startswith("Assumed: ") for note in report["notes"])
    advice = json.loads(run(binary, "advise", folder, "--max-devices", "2", "--target", "0.5", "--json", "-"))
    assert {"holds", "short", "before", "added"} <= set(advice)
