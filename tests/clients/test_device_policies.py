"""Under every device policy, many clients at once get the answers of ONNX Runtime."""
import concurrent.futures
import json
import subprocess

import numpy as np
import onnxruntime
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from models import random_inputs
from serving import EXAMPLES
from test_examples import inputs_of

MODELS = EXAMPLES / "models"
GROUPS = {
    "windowed": {"encoder": 'policy = "windowed"\npad = true', "*": 'policy = "windowed"\nwindow_ms = 1'},
    "elastic": {"encoder": 'policy = "elastic"\npad = true\nmax_length = 40', "*": 'policy = "elastic"\nmixes = { 4 = "4", 16 = "4,4,8" }'},
    "staged": {"encoder": 'policy = "staged"\nstages = 3\npad = true', "*": 'policy = "staged"\nstages = 2'},
}


@pytest.fixture(scope="module", params=[(policy, engine) for policy in GROUPS for engine in ["rten", "onnxruntime"]], ids="-".join)
def server(request, binary, tmp_path_factory):
    """A server on the examples, by one policy."""
    from serving import Server

    policy, engine = request.param
    folder = tmp_path_factory.mktemp(policy)
    groups = "".join(f'[[device.groups]]\nmodels = ["{models}"]\n{settings}\n' for models, settings in GROUPS[policy].items())
    (folder / "policies.toml").write_text(groups)
    with Server(binary, MODELS, folder, "--config", str(folder / "policies.toml"), engine=engine) as server:
        server.policy = policy
        yield server


def answer(client, model, inputs):
    """The answer to a request. On a busy machine one may come after its deadline, and is sent again."""
    while True:
        try:
            return client.infer(model, inputs)
        except InferenceServerException as error:
            if error.status() not in ("504", "StatusCode.DEADLINE_EXCEEDED"):
                raise


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_many_clients_get_the_answers_of_onnxruntime(server, protocol):
    sessions = {name: onnxruntime.InferenceSession(MODELS / name / "1/model.onnx") for name in ["digits", "mlp", "encoder"]}
    module, address = (httpclient, server.http) if protocol == "http" else (grpcclient, server.grpc)

    def ask(part):
        rng = np.random.default_rng(part)
        with module.InferenceServerClient(address) as client:
            for round_ in range(12):
                model = ["digits", "mlp", "encoder"][(part + round_) % 3]
                session = sessions[model]
                feed = random_inputs(session, int(rng.integers(1, 5)), int(rng.integers(1, 41)), seed=100 * part + round_)
                result = answer(client, model, inputs_of(module, feed))
                for entry, expected in zip(session.get_outputs(), session.run(None, feed)):
                    got = result.as_numpy(entry.name)
                    assert got.shape == expected.shape
                    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3, err_msg=f"{model} {entry.name} {part} {round_}")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert server.metric("downbeat_launches_total", model="encoder") > 0
    assert server.metric("downbeat_launch_length_total", model="encoder", kind="computed") >= server.metric(
        "downbeat_launch_length_total", model="encoder", kind="asked")


def test_a_request_that_fails_costs_no_other_its_answer(server):
    session = onnxruntime.InferenceSession(MODELS / "encoder/1/model.onnx")

    def ask(part):
        feed = random_inputs(session, 1, 9, seed=part)
        if part % 4 == 0:
            feed["input_ids"][0, 3] = 1_000_000
        with httpclient.InferenceServerClient(server.http) as client:
            if part % 4 == 0:
                with pytest.raises(InferenceServerException, match="failed on this request"):
                    client.infer("encoder", inputs_of(httpclient, feed))
            else:
                result = client.infer("encoder", inputs_of(httpclient, feed))
                np.testing.assert_allclose(result.as_numpy("pooled"), session.run(["pooled"], feed)[0], rtol=1e-3, atol=1e-3)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(32)))


def test_a_model_says_which_policy_it_has_and_why(server):
    report = requests.get(f"{server.url}/v2/models/digits/policy", timeout=30).json()
    assert report["policy"] == report["asked"] and report["reason"]
    assert requests.get(f"{server.url}/v2/models/digits/versions/1/policy", timeout=30).json() == report
    assert requests.get(f"{server.url}/v2/models/nobody/policy", timeout=30).status_code == 404


def test_the_timeline_shows_what_ran(server, binary, tmp_path):
    with httpclient.InferenceServerClient(server.http) as client:
        feed = random_inputs(onnxruntime.InferenceSession(MODELS / "digits/1/model.onnx"), 2, 1, seed=1)
        answer(client, "digits", inputs_of(httpclient, feed))
    timeline = requests.get(f"{server.url}/v2/timeline?seconds=20", timeout=30).json()
    digits = next(device for device in timeline["devices"] if device["model"] == "digits")
    assert digits["policy"] == server.policy and digits["complete"] and digits["launches"], json.dumps(digits)[:2000]
    ends = {}
    for launch in sorted(digits["launches"], key=lambda launch: launch["begin_ns"]):
        assert ends.get(launch["lane"], 0) <= launch["begin_ns"] <= launch["end_ns"] <= timeline["now_ns"]
        ends[launch["lane"]] = launch["end_ns"]
    page = tmp_path / "out.html"
    run = subprocess.run([binary, "timeline", server.url, "--seconds", "20", "-o", page], check=True, capture_output=True, text=True)
    assert "launches of 3 models on 1 device" in run.stdout
    row = f'<th scope="row">digits</th><td class="text">1</td><td class="text">{server.policy}</td>'
    assert ">Device 0</h2>" in page.read_text() and row in page.read_text() and "<script" not in page.read_text()
