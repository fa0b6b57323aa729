"""Device policies, Python models and pipelines behind two frontends and two backends: the answers are right, also when a backend, a
scheduler or a whole node is killed."""
import concurrent.futures
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import onnxruntime
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

import ensembles
import models
import test_decoupled
from models import random_inputs
from serving import EXAMPLES, processes
from test_device_policies import GROUPS
from test_examples import NP_TO_NAME, inputs_of

MODELS = EXAMPLES / "models"
NAMES = ["digits", "mlp", "encoder"]
# However busy the machine is, no request is late.
PATIENT = ("--slo-ms", "digits=3600000", "--slo-ms", "mlp=3600000", "--slo-ms", "encoder=3600000")
PATIENCE_S = 300


@pytest.fixture(scope="module", params=[*GROUPS, "auto"])
def cluster(request, binary, tmp_path_factory):
    """Two schedulers, two backends that have the examples by one device policy, and two frontends. Beside the examples there are
    the Python model `held` and the ensemble `chain`."""
    policy = request.param
    folder = tmp_path_factory.mktemp(policy)
    repository = folder / "models"
    shutil.copytree(MODELS, repository)
    models.held(repository)
    ensembles.chain(repository)
    groups = GROUPS.get(policy, {"*": 'policy = "auto"'})
    named = {"*": '"digits", "mlp"', "encoder": '"encoder"'} if "encoder" in groups else {"*": '"digits", "mlp", "encoder"'}
    options = "".join(f"[[device.groups]]\nmodels = [{named[names]}]\n{settings}\n" for names, settings in groups.items())
    (folder / "policies.toml").write_text(options)
    flags = ("--config", str(folder / "policies.toml"), "--python", sys.executable, "--slo-ms", "3600000", *PATIENT)
    with processes(binary, repository, folder, *flags, models=[*NAMES, "held", "chain"], backends=2, frontends=2, spares=1) as (schedulers, backends, frontends):
        yield policy, schedulers, backends, frontends


def ask(frontend, part, rounds, names=tuple(NAMES)):
    """So many requests of a client, each compared with ONNX Runtime."""
    sessions = {name: onnxruntime.InferenceSession(MODELS / name / "1/model.onnx") for name in names}
    module, address = (httpclient, frontend.http) if part % 2 else (grpcclient, frontend.grpc)
    rng = np.random.default_rng(part)
    options = {"network_timeout": PATIENCE_S} if part % 2 else {}
    with module.InferenceServerClient(address, **options) as client:
        for number in rounds:
            name = names[(part + number) % len(names)]
            feed = random_inputs(sessions[name], int(rng.integers(1, 5)), int(rng.integers(1, 41)), seed=100 * part + number)
            result = client.infer(name, inputs_of(module, feed))
            for entry, expected in zip(sessions[name].get_outputs(), sessions[name].run(None, feed)):
                got = result.as_numpy(entry.name)
                np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3, err_msg=f"{name} {entry.name} {part} {number}")


def launches(backends):
    return [backend.metric("downbeat_launches_total") for backend in backends]


def test_many_clients_get_the_answers_of_onnxruntime(cluster):
    policy, _, backends, frontends = cluster
    before = launches(backends)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda part: ask(frontends[part // 2 % 2], part, range(12)), range(8)))
    if policy != "auto":
        assert requests.get(f"{backends[0].url}/v2/models/digits/policy", timeout=30).json()["policy"] == policy
    assert all(after > before for before, after in zip(before, launches(backends))), "both backends ran batches"


def test_a_request_that_fails_costs_no_other_its_answer(cluster):
    _, _, _, frontends = cluster
    wrong = {"input_ids": [[1_000_000] * 9], "attention_mask": [[1] * 9]}
    session = onnxruntime.InferenceSession(MODELS / "encoder/1/model.onnx")
    names = [entry.name for entry in session.get_inputs()]
    body = {"inputs": [{"name": name, "datatype": "INT64", "shape": [1, 9], "data": wrong.get(name, [[0] * 9])[0]} for name in names]}

    def send(part):
        if part % 4:
            return ask(frontends[part % 2], part, range(3))
        reply = requests.post(f"{frontends[part % 2].url}/v2/models/encoder/infer", json=body, timeout=PATIENCE_S)
        assert reply.status_code != 200 and "failed on this request" in reply.text, reply.text

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(16)))


def question(name, number):
    """The body of a request, and the outputs that it must have."""
    if name in ("held", "chain"):
        x = np.full((1, 1) if name == "held" else (2, 4), number, np.float32)
        given, wanted = ({"x": x}, {"y": x}) if name == "held" else ({"in": x}, {"out": x + 111})
    else:
        session = onnxruntime.InferenceSession(MODELS / name / "1/model.onnx")
        given = random_inputs(session, 1 + number % 4, 8, seed=number)
        wanted = {entry.name: value for entry, value in zip(session.get_outputs(), session.run(None, given))}
    inputs = [{"name": name, "datatype": NP_TO_NAME[value.dtype], "shape": value.shape, "data": value.ravel().tolist()} for name, value in given.items()]
    return inputs, wanted


def test_killed_processes_and_a_killed_node_cost_no_request(cluster):
    """The leading scheduler is killed, and then a node with a backend and a frontend. The clients of that frontend ask the other
    one again. Each id gets one right answer."""
    _, (leader, _), backends, frontends = cluster
    names = [*NAMES, "held", "chain"]
    asked = {name: [question(name, number) for number in range(4)] for name in names}
    answered, ids = threading.Semaphore(0), []

    def send(part):
        session, frontend = requests.Session(), frontends[part % 2]
        for number in range(50):
            inputs, wanted = asked[name := names[(part + number) % len(names)]][number % 4]
            body = {"id": f"{part}-{number}", "inputs": inputs}
            try:
                reply = session.post(f"{frontend.url}/v2/models/{name}/infer", json=body, timeout=PATIENCE_S)
            except requests.RequestException:
                assert frontend is frontends[1], "the other frontend lives"
                frontend = frontends[0]
                reply = session.post(f"{frontend.url}/v2/models/{name}/infer", json=body, timeout=PATIENCE_S)
            assert reply.status_code == 200, (name, reply.text)
            outputs = {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in reply.json()["outputs"]}
            for output, expected in wanted.items():
                np.testing.assert_allclose(outputs[output], expected, rtol=1e-3, atol=1e-3, err_msg=f"{name} {output} {body['id']}")
            ids.append(reply.json()["id"])
            answered.release()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        parts = [pool.submit(send, part) for part in range(8)]
        for killed in ([leader], [backends[1], frontends[1]]):
            for _ in range(80):
                answered.acquire()
            for process in killed:
                process.kill()
        for part in parts:
            part.result()
    assert sorted(ids) == sorted(f"{part}-{number}" for part in range(8) for number in range(50))


def test_python_models_answer_behind_frontends(binary, repository, tmp_path):
    models.held(repository, "held")
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}]}
    flags = ("--python", sys.executable)
    with processes(binary, repository, tmp_path, *flags, models=["held"], backends=2, frontends=2) as (_, backends, frontends):
        def post(number):
            return requests.post(f"{frontends[number % 2].url}/v2/models/held/infer", json=body, timeout=PATIENCE_S)

        hold = repository / "held" / "hold"
        hold.touch()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            replies = [pool.submit(post, number) for number in range(8)]
            while not (repository / "held" / "runs").exists():
                assert not any(reply.done() for reply in replies), [reply.result().text for reply in replies if reply.done()]
                time.sleep(0.02)
            backends[0].kill()
            hold.unlink()
            for reply in replies:
                assert reply.result().status_code == 200 and reply.result().json()["outputs"][0]["data"] == [3.0], reply.result().text


def test_answers_that_come_one_by_one_end_with_their_backend(binary, repository, tmp_path):
    """A backend that is killed ends its streams with an error. A backend that is told to end first sends its last answers."""
    test_decoupled.write(repository, "repeat", test_decoupled.REPEAT)
    with processes(binary, repository, tmp_path, "--python", sys.executable, models=["repeat"], backends=2) as (_, backends, [frontend]):
        with test_decoupled.Stream(frontend) as stream:
            for client in "ab":
                stream.ask("repeat", [7] * 40, client, delay_s=0.25)
            assert {stream.next()[0] for _ in range(20)} == {"a", "b"}, "each backend answers one of them"
            backends[0].terminate()
            ends = []
            while len(ends) < 2:
                client, value, is_last = stream.next()
                assert client is not None, value
                ends += [client] if is_last else []
            assert backends[0].wait_end() == 0
            backends[0].was_killed = True
            stream.ask("repeat", [7] * 1000, "c", delay_s=0.25)
            assert stream.next()[:2] == ("c", 7)
            backends[1].kill()
            client = "c"
            while client is not None:
                client, value, _ = stream.next()
            assert "lost" in value


def test_operators_run_side_by_side_behind_frontends(binary, tmp_path):
    """The policy `overlap` with a predictor that says that all groups take 6 ms: groups of both models run, and every answer is right."""
    predictor, options = tmp_path / "predictor.json", tmp_path / "overlap.toml"
    train = [binary, "profile", "mlp", "--co-run", "digits", "--repository", MODELS, "--engine", "rten", "--threads", "1", "--budget", "1", "--predictor", predictor]
    subprocess.run(train, check=True, capture_output=True, timeout=PATIENCE_S)
    trained = json.loads(predictor.read_text())
    last = trained["predictor"]["mlp"]["layers"][-1]
    last["weights"], last["biases"] = [0.0] * len(last["weights"]), [math.log(6)]
    predictor.write_text(json.dumps(trained))
    options.write_text('threads = 1\n[device]\npolicy = "overlap"\npredictor = "predictor.json"\n')
    names = ["digits", "mlp"]
    with processes(binary, MODELS, tmp_path, "--config", options, *PATIENT, models=names, backends=2, frontends=2, engine="rten") as (_, backends, frontends):
        for backend, name in itertools.product(backends, names):
            assert requests.get(f"{backend.url}/v2/models/{name}/policy", timeout=PATIENCE_S).json()["policy"] == "overlap"
        while not all(backend.metric("downbeat_operator_groups_total", requests="several") for backend in backends):
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda part: ask(frontends[part // 2 % 2], part, range(4), names), range(8)))


def test_a_model_whose_process_was_killed_answers_again_behind_frontends(binary, tmp_path):
    """Requests are answered meanwhile, or are told which signal has ended the process."""
    flags = ("--isolation", "process", *PATIENT)
    with processes(binary, MODELS, tmp_path, *flags, models=["digits"], backends=2, frontends=2, engine="rten") as (_, backends, frontends):
        def executor(backend):
            [device] = requests.get(f"{backend.url}/v2/devices", timeout=PATIENCE_S).json()["devices"]
            return next(model["executor"] for model in device["models"] if model["model"] == "digits")

        inputs, wanted = question("digits", 1)
        [expected] = wanted.values()

        def post(number):
            reply = requests.post(f"{frontends[number % 2].url}/v2/models/digits/infer", json={"inputs": inputs}, timeout=PATIENCE_S)
            if reply.status_code == 200:
                [output] = reply.json()["outputs"]
                np.testing.assert_allclose(np.array(output["data"]).reshape(output["shape"]), expected, rtol=1e-3, atol=1e-3)
            else:
                assert reply.status_code == 503 and "SIGKILL" in reply.text, reply.text
            return reply.status_code

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            os.kill(executor(backends[0])["pid"], signal.SIGKILL)
            while executor(backends[0])["restarts"] == 0 or not requests.get(f"{backends[0].url}/v2/models/digits/ready", timeout=PATIENCE_S).ok:
                list(pool.map(post, range(8)))
            before = launches(backends)
            while not all(after > before for before, after in zip(before, launches(backends))):
                assert set(pool.map(post, range(8))) == {200}
        assert [executor(backend)["restarts"] for backend in backends] == [1, 0]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared")
def test_a_backend_divides_its_cores_behind_frontends(binary, repository, tmp_path):
    """Two models begin on all cores. Each has a core of its own once their shares are settled, and no answer is lost."""
    for name, number in (("one", 1), ("two", 2)):
        models.add(repository, name, number)
    (tmp_path / "shares.toml").write_text('[device]\npolicy = "windowed"\nshares = "auto"\nshare_hold_down_s = 1\nshare_period_s = 0.2\n')
    flags = ("--config", str(tmp_path / "shares.toml"), "--slo-ms", "3600000", "--threads", "1")
    with processes(binary, repository, tmp_path, *flags, models=["one", "two"], backends=1, frontends=2, engine="rten") as (_, [backend], frontends):
        over = threading.Event()

        def send(part):
            name, number = (("one", 1), ("two", 2))[part % 2]
            body, sent = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 1, 2, 3]}]}, 0
            while not over.is_set():
                reply = requests.post(f"{frontends[part // 2].url}/v2/models/{name}/infer", json=body, timeout=PATIENCE_S)
                assert reply.status_code == 200 and reply.json()["outputs"][0]["data"] == [number + i for i in range(4)], reply.text
                sent += 1
            return sent

        def placed():
            devices = requests.get(f"{backend.url}/v2/devices", timeout=PATIENCE_S).json()["devices"]
            return {model["model"]: model["partition"] for device in devices for model in device["models"]}

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            sending = [pool.submit(send, part) for part in range(4)]
            deadline = time.monotonic() + PATIENCE_S
            try:
                while len(set((found := placed()).values())) < 2:
                    assert time.monotonic() < deadline, found
                    time.sleep(0.1)
            finally:
                over.set()
            assert all(part.result() > 0 for part in sending)
        assert backend.metric("downbeat_share_changes_total") >= 2


CHAIN = {"id": "7", "inputs": [{"name": "in", "datatype": "FP32", "shape": [2, 4], "data": list(range(8))}]}


@pytest.fixture(scope="module")
def pipelines(binary, tmp_path_factory):
    """Two backends with the ensembles `chain` (adds 111) and `outer`, whose steps are `chain` and `plus1`, and two frontends.
    One model of a step has the device policy `windowed`."""
    folder = tmp_path_factory.mktemp("pipelines")
    repository = folder / "models"
    ensembles.chain(repository)
    ensembles.write(repository, "outer", [ensembles.step("chain", {"in": "in"}, {"out": "t"}), ensembles.step("plus1", {"x": "t"}, {"y": "out"})],
                    {"in": ensembles.FOUR}, {"out": ensembles.FOUR})
    (folder / "options.toml").write_text('[[device.groups]]\nmodels = ["plus10"]\npolicy = "windowed"\n')
    with processes(binary, repository, folder, "--config", str(folder / "options.toml"), "--slo-ms", "3600000", models=["chain", "outer", "plus1"],
                   backends=2, frontends=2, spares=1, engine="rten") as cluster:
        yield cluster


def test_a_pipeline_answers_behind_frontends(pipelines):
    _, _, frontends = pipelines
    for frontend, (name, more) in itertools.product(frontends, {"chain": 111.0, "outer": 112.0}.items()):
        reply = requests.post(f"{frontend.url}/v2/models/{name}/infer", json=CHAIN, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        [output] = reply.json()["outputs"]
        assert reply.json()["id"] == "7" and output["name"] == "out" and output["data"] == [number + more for number in range(8)]
        with grpcclient.InferenceServerClient(frontend.grpc) as client:
            assert client.is_model_ready(name)
            result = client.infer(name, inputs_of(grpcclient, {"in": np.ones((3, 4), np.float32)}))
            np.testing.assert_array_equal(result.as_numpy("out"), np.full((3, 4), 1 + more, np.float32))
        [statistics] = requests.get(f"{frontend.url}/v2/models/{name}/stats", timeout=PATIENCE_S).json()["model_stats"]
        assert statistics["inference_stats"]["success"]["count"] >= 2 and statistics["inference_count"] >= 5


def test_a_failing_step_is_named_behind_frontends(pipelines):
    _, _, frontends = pipelines
    for wrong, reason in (({"shape": [1, 5]}, "shape"), ({"datatype": "INT64"}, "INT64")):
        [tensor] = CHAIN["inputs"]
        body = {"inputs": [{**tensor, "data": [1] * (5 if "shape" in wrong else 8), **wrong}]}
        reply = requests.post(f"{frontends[0].url}/v2/models/chain/infer", json=body, timeout=PATIENCE_S)
        assert reply.status_code == 400 and reason in reply.json()["error"], reply.text


def test_killed_processes_cost_no_request_of_a_pipeline(pipelines):
    """The leading scheduler is killed, and then a backend."""
    (leader, _), backends, frontends = pipelines
    answered = threading.Semaphore(0)

    def send(part):
        session = requests.Session()
        for _ in range(60):
            reply = session.post(f"{frontends[part % 2].url}/v2/models/outer/infer", json=CHAIN, timeout=PATIENCE_S)
            assert reply.status_code == 200 and reply.json()["outputs"][0]["data"][0] == 112.0, reply.text
            answered.release()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        parts = [pool.submit(send, part) for part in range(8)]
        for process in (leader, backends[0]):
            for _ in range(60):
                answered.acquire()
            process.kill()
        for part in parts:
            part.result()


def test_clients_load_and_unload_models_at_any_frontend(binary, tmp_path):
    repository = tmp_path / "models"
    ensembles.chain(repository)
    models.add(repository, "broken", 1)
    (repository / "broken/1/model.onnx").write_bytes(b"no model")
    flags = ("--model-control-mode", "explicit", "--load-model", "plus1")
    with processes(binary, repository, tmp_path, *flags, models=["plus1"], backends=2, frontends=2, engine="rten") as (_, backends, frontends):
        def post(frontend, path, body=None):
            return requests.post(f"{frontend.url}/v2/repository/{path}", json=body, timeout=PATIENCE_S)

        def ready(process, model):
            return requests.get(f"{process.url}/v2/models/{model}/ready", timeout=PATIENCE_S).status_code == 200

        one, other = frontends
        assert post(one, "models/plus10/load").status_code == 200
        assert all(ready(process, "plus10") for process in [one, *backends])
        # An ensemble loads the models of its steps.
        with grpcclient.InferenceServerClient(other.grpc) as client:
            client.load_model("chain")
            result = client.infer("chain", inputs_of(grpcclient, {"in": np.ones((1, 4), np.float32)}))
            np.testing.assert_array_equal(result.as_numpy("out"), np.full((1, 4), 112, np.float32))
            client.unload_model("chain")
            assert not client.is_model_ready("chain")
        for name, reason in (("broken", "backend "), ("nobody", "nobody")):
            reply = post(one, f"models/{name}/load")
            assert reply.status_code == 400 and reason in reply.json()["error"], reply.text
        reply = post(one, "models/plus10/load", {"parameters": {"config": "{}"}})
        assert reply.status_code == 501 and "ask the backend" in reply.json()["error"], reply.text
        assert post(other, "models/plus10/unload").status_code == 200
        assert not any(ready(process, "plus10") for process in [other, *backends])
        reply = post(other, "models/plus10/unload")
        assert reply.status_code == 400 and "none has it" in reply.json()["error"], reply.text
        assert ready(one, "plus1") and not ready(one, "nobody")
