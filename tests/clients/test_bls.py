"""Requests of Python models to other models: exec, async_exec, answers of decoupled models, deadlines and circles."""
import sys
import time

import numpy as np
import pytest
import requests

import models
from serving import Server
from test_decoupled import SQUARE, write

CALLER = """
backend: "python"
max_batch_size: 0
input [ {{ name: "MODEL" data_type: TYPE_STRING dims: [ 1 ] }}, {{ name: "X" data_type: TYPE_INT32 dims: [ -1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_INT32 dims: [ -1 ] }} ]
{policy}
"""
HEAD = """
import asyncio, json, time
import numpy as np
import triton_python_backend_utils as pb_utils

def request(request, to=None, **others):
    name = to or pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy()[0]
    x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
    if name in (b"square", "square"):
        return pb_utils.InferenceRequest(model_name=name, requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", x)], **others)
    ones = np.ones((1, 16), np.int32)
    inputs = [pb_utils.Tensor("INPUT0", x.reshape(1, -1)), pb_utils.Tensor("INPUT1", ones)]
    return pb_utils.InferenceRequest(model_name=name, requested_output_names=["OUTPUT0"], inputs=inputs, **others)

def answer(response, name="OUTPUT0"):
    if response.has_error():
        return pb_utils.InferenceResponse(error=response.error())
    y = pb_utils.get_output_tensor_by_name(response, name).as_numpy()
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y.reshape(-1))])

class TritonPythonModel:
"""
SYNC = HEAD + """
    def execute(self, requests):
        responses = []
        for asked in requests:
            given = json.loads(asked.parameters())
            time.sleep(given.get("before_s", 0))
            responses.append(answer(request(asked, timeout=given.get("own_us", 0)).exec()))
        return responses
"""
ASYNC = HEAD + """
    async def execute(self, requests):
        responses = []
        for asked in requests:
            both = await asyncio.gather(*(request(asked, "simple").async_exec() for _ in range(4)))
            total = sum(pb_utils.get_output_tensor_by_name(one, "OUTPUT0").as_numpy() for one in both)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", total.reshape(-1))]))
        return responses
"""
SUM = HEAD + """
    def execute(self, requests):
        responses = []
        for asked in requests:
            total = 0
            for response in request(asked).exec(decoupled=True):
                if response.has_error():
                    return [pb_utils.InferenceResponse(error=response.error())]
                total += pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([total]).reshape(-1).astype(np.int32))]))
        return responses
"""
# Cancels after three answers, and gives their number and whether it hears of the end.
CANCEL = HEAD + """
    def execute(self, requests):
        return [self.one(asked) for asked in requests]

    def one(self, asked):
        answers, count, cancelled = request(asked, "square").exec(decoupled=True), 0, False
        for response in answers:
            if response.has_error():
                cancelled = response.error().code() == pb_utils.TritonError.CANCELLED
                continue
            count += 1
            if count == 3:
                answers.cancel()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([count, cancelled], np.int32))])
"""
# Calls a model with its own signature.
CIRCLE = HEAD + """
    def execute(self, requests):
        responses = []
        for asked in requests:
            x = pb_utils.get_input_tensor_by_name(asked, "X").as_numpy()
            if x[0] <= 0:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
                continue
            name = pb_utils.get_input_tensor_by_name(asked, "MODEL")
            inner = pb_utils.InferenceRequest(
                model_name=name.as_numpy()[0], requested_output_names=["Y"], inputs=[name, pb_utils.Tensor("X", x - 1)])
            responses.append(answer(inner.exec(), "Y"))
        return responses
"""


@pytest.fixture(scope="module")
def server(binary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bls")
    repository = folder / "models"
    models.add_sub(repository)
    models.slow(repository)
    write(repository, "square", SQUARE)
    for name, code in (("sync", SYNC), ("async", ASYNC), ("sum", SUM), ("cancel", CANCEL), ("circle", CIRCLE)):
        write(repository, name, code, policy="", config=CALLER)
    write(repository, "circle_of_three", CIRCLE, policy="instance_group [ { count: 3 kind: KIND_CPU } ]", config=CALLER)
    with Server(binary, repository, folder, "--python", sys.executable) as server:
        yield server


def ask(server, model, to, x=tuple(range(16)), **parameters):
    body = {"MODEL": to, "X": list(x), **parameters}
    return requests.post(f"{server.url}/v2/models/{model}/generate", json=body, timeout=60)


def test_a_model_asks_another(server):
    assert ask(server, "sync", "simple").json()["Y"] == list(range(1, 17))
    assert ask(server, "async", "simple").json()["Y"] == [4 * i for i in range(1, 17)]


def test_the_answers_of_a_decoupled_model(server):
    assert ask(server, "sum", "square", [5]).json()["Y"] == 25
    assert ask(server, "sum", "square", [0]).json()["Y"] == 0
    assert ask(server, "sum", "simple").status_code != 200
    refused = ask(server, "sync", "square", [5]).json()["error"]
    assert "exec(decoupled=True)" in refused


def test_a_call_that_is_cancelled_ends_with_an_error(server):
    assert ask(server, "cancel", "square", [100_000]).json()["Y"] == [3, 1]
    assert ask(server, "cancel", "square", [2]).json()["Y"] == [2, 0]


def test_errors_come_back(server):
    refused = ask(server, "sync", "nowhere")
    assert refused.status_code == 404 and "unknown model: 'nowhere'" in refused.json()["error"]
    # The called model refuses the shape.
    assert ask(server, "sync", "simple", range(3)).status_code in (400, 500)


def test_a_call_has_the_rest_of_the_callers_time(server):
    begin = time.monotonic()
    late = ask(server, "sync", "simple", timeout=2_000_000, before_s=4)
    assert late.status_code in (503, 504), late.text
    assert time.monotonic() - begin < 30
    own = ask(server, "sync", "simple", own_us=1)
    assert own.status_code in (503, 504), own.text
    assert ask(server, "sync", "simple", timeout=60_000_000).status_code == 200


def test_a_circle_is_refused(server):
    assert ask(server, "circle", "circle", [0]).json()["Y"] == 0
    refused = ask(server, "circle", "circle", [1])
    assert refused.status_code == 400 and "model 'circle' would wait for itself" in refused.json()["error"], refused.text
    # With three instances two calls deep is possible, and three is not.
    assert ask(server, "circle_of_three", "circle_of_three", [2]).json()["Y"] == 0
    refused = ask(server, "circle_of_three", "circle_of_three", [3])
    assert "would wait for itself" in refused.json()["error"]
    assert ask(server, "circle", "circle", [0]).json()["Y"] == 0


def test_many_calls_side_by_side(server):
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: ask(server, "sync", "simple", [i] * 16).json()["Y"][0], range(100)))
    assert answers == [i + 1 for i in range(100)]
