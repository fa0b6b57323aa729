"""Which engine runs a model, and that its answers are those of the standard. The tests use a sample
of the `onnx` package's node cases, and models that an engine cannot run."""
import functools
import json
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
import requests
from onnx import TensorProto, helper, numpy_helper

from serving import ROOT, Server, onnxruntime_library

INSTALL = "`downbeat engine install`"


def write(repository, name, node, shape, answer, weights=()):
    """A model of one operator from `x` to `y`."""
    path = repository / name / "1/model.onnx"
    path.parent.mkdir(parents=True)
    value = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    made = [numpy_helper.from_array(array, weight) for weight, array in weights]
    graph = helper.make_graph([node], name, [value("x", shape=shape)], [value("y", shape=answer)], made)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def cubic(repository, name="cubic"):
    """`y = Resize(x)` with cubic interpolation, which rten computes linearly."""
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="cubic")
    weights = [("scales", np.array([1, 1, 2, 2], np.float32))]
    write(repository, name, node, [1, 1, 2, 2], [1, 1, 4, 4], weights)


def sign(repository, name="sign"):
    """`y = Sign(x)`, which rten computes wrong at 0, and by other operators right."""
    node = helper.make_node("Sign", ["x"], ["y"])
    write(repository, name, node, ["n", 3], ["n", 3])


def celu(repository, name="celu"):
    """`y = Celu(x)`, which rten does not have."""
    node = helper.make_node("Celu", ["x"], ["y"])
    write(repository, name, node, ["n", 3], ["n", 3])


def infer(server, model, shape, data):
    body = {"inputs": [{"name": "x", "shape": shape, "datatype": "FP32", "data": data}]}
    answer = requests.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["outputs"][0]["data"]


def load(server, model):
    return requests.post(f"{server.url}/v2/repository/models/{model}/load", timeout=120)


@pytest.fixture
def server(binary, repository, tmp_path):
    """`server(options, ...)`: rten for all models, with or without ONNX Runtime's library, and with this downbeat.toml."""
    started = []

    def start(options="", library=True):
        (tmp_path / "downbeat.toml").write_text('engine = "rten"\n[model_control]\nmode = "explicit"\n' + options)
        flags = ["--config", str(tmp_path / "downbeat.toml"), "--no-profiling", "--allow-empty"]
        started.append(Server(binary, repository, tmp_path, *flags, engine="rten", library=library))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def test_a_model_that_rten_cannot_run_goes_to_onnxruntime(server, repository):
    cubic(repository)
    celu(repository)
    sign(repository)
    running = server()
    for model in ("cubic", "celu", "sign"):
        assert load(running, model).status_code == 200, running.log
    assert infer(running, "celu", [1, 3], [-1, 0, 2]) == pytest.approx([np.expm1(-1), 0, 2])
    ends = np.array(infer(running, "cubic", [1, 1, 2, 2], [1, 2, 3, 4])).reshape(4, 4)[0, 0]
    assert ends == pytest.approx(0.68359375), "linear interpolation gives 1"
    said = [line for line in running.log.splitlines() if "rten cannot run the model, so the model runs on onnxruntime" in line]
    assert len(said) == 2 and "Resize" in said[0] and "Celu" in said[1], running.log
    assert infer(running, "sign", [1, 3], [-2, 0, 5]) == [-1, 0, 1]
    rewritten = [line for line in running.log.splitlines() if "some operators are replaced" in line]
    assert len(rewritten) == 1 and "1 Sign" in rewritten[0], running.log


def test_without_onnxruntime_it_is_refused_and_the_engine_named(server, repository):
    cubic(repository)
    running = server(library=False)
    answer = load(running, "cubic")
    assert answer.status_code != 200
    assert "it computes Resize wrong" in answer.text and INSTALL in answer.text and "--engine onnxruntime" in answer.text, answer.text


def test_a_model_stays_on_the_engine_that_its_options_name(server, repository):
    cubic(repository)
    celu(repository)
    sign(repository)
    running = server('[models.cubic]\nengine = "rten"\n[models.sign]\nengine = "onnxruntime"\n')
    answer = load(running, "cubic")
    assert answer.status_code != 200 and "it computes Resize wrong" in answer.text, answer.text
    assert load(running, "sign").status_code == 200, running.log
    assert infer(running, "sign", [1, 3], [-2, 0, 5]) == [-1, 0, 1]
    assert "some operators are replaced" not in running.log, "onnxruntime computes it right"


def test_a_model_goes_to_onnxruntime_in_a_process_of_its_own(server, repository):
    celu(repository)
    running = server('[models.celu]\nisolation = "process"\n')
    assert load(running, "celu").status_code == 200, running.log
    assert infer(running, "celu", [1, 3], [-1, 0, 2]) == pytest.approx([np.expm1(-1), 0, 2])


@pytest.mark.parametrize("engine", ["rten", "onnxruntime"])
def test_an_engine_answers_node_cases_right(engine, tmp_path):
    """A case that the engine refuses is not wrong: how many there are is in docs/conformance.md."""
    # The workspace's features, with which `cargo test --workspace` has built it: the package's own would build the engine again.
    command = ["cargo", "build", "--quiet", "--workspace", "--example", "conformance", "--message-format", "json"]
    built = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    programs = [json.loads(line).get("executable") for line in built.splitlines()]
    program = next(path for path in programs if path)
    save = tmp_path / "cases.json"
    script = [sys.executable, str(ROOT / "tools/conformance.py"), engine, "--sample", "--program", program, "--save", str(save)]
    ran = subprocess.run(script, env=dict(os.environ, ORT_DYLIB_PATH=str(onnxruntime_library())), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    outcomes = [case["outcome"] for case in json.loads(save.read_text())[engine].values()]
    passed = outcomes.count("passed")
    assert passed >= (57 if engine == "rten" else 75), outcomes
