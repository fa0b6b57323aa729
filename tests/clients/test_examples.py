"""The examples answer as ONNX Runtime in Python does, and `digits` is as often right as when it was trained."""
import concurrent.futures
import json
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from models import random_inputs
from serving import EXAMPLES, ROOT

sys.path.insert(0, str(ROOT / "tools"))
from make_examples import digits_split  # noqa: E402

NP_TO_NAME = {np.dtype(np.float32): "FP32", np.dtype(np.int64): "INT64"}
MODELS = EXAMPLES / "models"


def inputs_of(module, feed):
    inputs = []
    for name, value in feed.items():
        tensor = module.InferInput(name, list(value.shape), NP_TO_NAME[value.dtype])
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


@pytest.mark.parametrize("server", ["examples", "examples_rten"])
@pytest.mark.parametrize("model", ["digits", "mlp", "encoder"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_every_example_answers_as_onnxruntime_does(server, model, protocol, request):
    server = request.getfixturevalue(server)
    session = onnxruntime.InferenceSession(MODELS / model / "1" / "model.onnx")
    module, address = (httpclient, server.http) if protocol == "http" else (grpcclient, server.grpc)
    with module.InferenceServerClient(address) as client:
        for batch, length in [(1, 1), (1, 33), (4, 7), (3, 128)]:
            feed = random_inputs(session, batch, length, seed=batch * 1000 + length)
            result = client.infer(model, inputs_of(module, feed))
            for entry, expected in zip(session.get_outputs(), session.run(None, feed)):
                np.testing.assert_allclose(result.as_numpy(entry.name), expected, rtol=1e-4, atol=1e-4, err_msg=entry.name)


@pytest.mark.parametrize("server", ["examples", "examples_rten"])
def test_digits_is_as_accurate_as_trained_and_within_its_slo(server, request):
    server = request.getfixturevalue(server)
    _, _, images, classes = digits_split()
    trained = {p.key: p.value for p in onnx.load(MODELS / "digits/1/model.onnx").metadata_props}
    missed_before = server.metric("downbeat_requests_late_total", model="digits")

    def ask(part):
        right, latencies = 0, []
        with grpcclient.InferenceServerClient(server.grpc) as client:
            for index in part:
                sent = time.perf_counter()
                result = client.infer("digits", inputs_of(grpcclient, {"image": images[index:index + 1]}))
                latencies.append(time.perf_counter() - sent)
                right += int(result.as_numpy("probabilities").argmax() == classes[index])
        return right, latencies

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(ask, np.array_split(np.arange(len(images)), 4)))
    right, latencies = sum(p[0] for p in parts), sum((p[1] for p in parts), [])
    assert right / len(images) >= float(trained["test_accuracy"]) - 1e-4
    # The server drops a request that cannot make its deadline. So full answers say that the server
    # meant to be in time. The median says this from outside, and does not depend on one pause of a
    # shared machine.
    assert np.median(latencies) < 0.250
    assert server.metric("downbeat_requests_late_total", model="digits") - missed_before <= len(images) // 100


def test_classification_gives_the_label_and_its_probability(examples):
    request = json.loads((EXAMPLES / "digit.json").read_text())
    image = np.array(request["inputs"][0]["data"], np.float32).reshape(1, 8, 8)
    for module, address in [(httpclient, examples.http), (grpcclient, examples.grpc)]:
        with module.InferenceServerClient(address) as client:
            outputs = [module.InferRequestedOutput("probabilities", class_count=3)]
            top = client.infer("digits", inputs_of(module, {"image": image}), outputs=outputs).as_numpy("probabilities")
            assert top.shape == (1, 3)
            values = [entry.decode().split(":") for entry in top[0]]
            assert values[0][1:] == ["7", "seven"] and 0.5 < float(values[0][0]) <= 1
            assert float(values[0][0]) > float(values[1][0]) >= float(values[2][0])


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_readmes_curl_line_prints_the_class_with_its_probability(examples):
    answer = subprocess.run(["curl", "-s", f"{examples.http}/v2/models/digits/infer", "-d", "@examples/digit.json"],
                            cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert re.fullmatch(r"0\.97\d*:7:seven", json.loads(answer)["outputs"][0]["data"][0]), answer


def test_the_readmes_infer_command_prints_the_class_with_its_probability(binary, examples):
    run = subprocess.run([binary, "infer", "digits", "examples/digit.png", "--url", examples.url],
                         cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "seven" in run.stdout and re.search(r"0\.97|97\.\d", run.stdout), run.stdout


def test_the_model_without_a_configuration_is_completed_from_its_file(examples):
    with httpclient.InferenceServerClient(examples.http) as client:
        config = client.get_model_config("encoder")
        assert config["max_batch_size"] > 1
        assert {i["name"]: (i["data_type"], [int(d) for d in i["dims"]]) for i in config["input"]} == {
            "input_ids": ("TYPE_INT64", [-1]), "attention_mask": ("TYPE_INT64", [-1])}
        assert {o["name"]: [int(d) for d in o["dims"]] for o in config["output"]} == {"hidden": [-1, 64], "pooled": [64]}
        metadata = client.get_model_metadata("encoder")
        assert {i["name"]: i["shape"] for i in metadata["inputs"]} == {"input_ids": [-1, -1], "attention_mask": [-1, -1]}
        partial = client.get_model_config("mlp")
        assert partial["max_batch_size"] == 128 and [int(d) for d in partial["input"][0]["dims"]] == [784]
