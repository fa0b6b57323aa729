"""Decoupled Python models: any number of answers to a request, by gRPC streams and by server-sent events."""
import json
import queue
import sys
import textwrap
import time

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from serving import Server, processes

CONFIG = """
backend: "python"
max_batch_size: 0
{policy}
input [ {{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"

# Answers in execute: one for each element. Parameters: `delay_s` before each answer, `fail_at`, `die_at`, and `with_last`.
REPEAT = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.seen = open(os.path.join(args["model_repository"], "cancelled"), "a")
        assert pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def execute(self, requests):
        for request in requests:
            self.answer(request, request.get_response_sender())

    def answer(self, request, sender):
        given = json.loads(request.parameters())
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        for i, value in enumerate(values):
            time.sleep(given.get("delay_s", 0))
            if sender.is_cancelled():
                print("cancelled", request.request_id(), file=self.seen, flush=True)
                break
            if given.get("die_at") == i:
                os._exit(7)
            if given.get("raise_at") == i:
                raise ValueError("asked to raise")
            if given.get("fail_at") == i:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("asked to fail", pb_utils.TritonError.INVALID_ARG)))
                continue
            parameters = {"number": i} if given.get("number") else None
            response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))], parameters=parameters)
            last = given.get("with_last", False) and i + 1 == len(values)
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)
            if last:
                return
        if not given.get("forget", False):
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

# Answers from threads, after execute has returned: `n` answers to the value n, as python_backend's square.
SQUARE = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0]
            threading.Thread(target=self.answer, args=(request.get_response_sender(), value), daemon=True).start()
        return None

    def answer(self, sender, value):
        for _ in range(value):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

# One answer by a sender, in a model that is not decoupled.
ONE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[:1]
            response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write(repository, name, code, policy=DECOUPLED, config=CONFIG):
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(textwrap.dedent(code))
    (repository / name / "config.pbtxt").write_text(config.format(policy=policy))


@pytest.fixture(scope="module", params=["serve", "cluster"])
def server(request, binary, tmp_path_factory):
    """A server of three models, or the frontend of a cluster with two backends."""
    folder = tmp_path_factory.mktemp("decoupled")
    repository = folder / "models"
    write(repository, "repeat", REPEAT)
    write(repository, "square", SQUARE)
    write(repository, "one", ONE, policy="")
    flags = ("--python", sys.executable)
    if request.param == "serve":
        with Server(binary, repository, folder, *flags) as server:
            yield server
    else:
        with processes(binary, repository, folder, *flags, models=["repeat", "square", "one"], backends=2, lost_after_ms=10_000) as (_, _, [frontend]):
            yield frontend


class Stream:
    """tritonclient's stream, with its answers in a queue."""

    def __init__(self, server):
        self.client, self.answers = grpcclient.InferenceServerClient(server.grpc), queue.Queue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def ask(self, model, values, id="", empty_final=True, **parameters):
        tensor = grpcclient.InferInput("IN", [len(values)], "INT32")
        tensor.set_data_from_numpy(np.array(values, np.int32))
        self.client.async_stream_infer(model, [tensor], request_id=id, enable_empty_final_response=empty_final, parameters=parameters or None)

    def next(self):
        """The next answer: its id, the value or the error, and whether it is the last."""
        result, error = self.answers.get(timeout=60)
        if error is not None:
            return None, str(error), None
        response = result.get_response()
        out = result.as_numpy("OUT")
        return response.id, None if out is None else int(out[0]), response.parameters["triton_final_response"].bool_param

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def test_answers_of_execute(server):
    with Stream(server) as stream:
        stream.ask("repeat", [4, 2, 0], "a")
        assert [stream.next() for _ in range(4)] == [("a", 4, False), ("a", 2, False), ("a", 0, False), ("a", None, True)]
        stream.ask("repeat", [4, 2], "b", with_last=True)
        assert [stream.next() for _ in range(2)] == [("b", 4, False), ("b", 2, True)]
        stream.ask("repeat", [], "c", empty_final=False)
        stream.ask("repeat", [1], "d", empty_final=False, forget=True)
        assert stream.next() == ("d", 1, False)
        stream.ask("repeat", [], "e")
        assert stream.next() == ("e", None, True)


def test_answers_of_threads(server):
    """python_backend's example: 4, 2, 0 and 1 answers, side by side."""
    with Stream(server) as stream:
        for i, value in enumerate([4, 2, 0, 1]):
            stream.ask("square", [value], str(i))
        seen = {}
        while sum(answers[-1:] == [None] for answers in seen.values()) < 4:
            id, value, _ = stream.next()
            seen.setdefault(id, []).append(value)
    assert seen == {"0": [4] * 4 + [None], "1": [2, 2, None], "2": [None], "3": [1, None]}


def test_answers_are_progress_and_the_first_is_timed(binary, tmp_path):
    """A run may go on for longer than its limit, as long as it answers."""
    repository = tmp_path / "models"
    write(repository, "repeat", REPEAT)
    with Server(binary, repository, tmp_path, "--python", sys.executable, "--run-timeout", "4", "--run-timeout-factor", "1") as server:
        with Stream(server) as stream:
            stream.ask("repeat", list(range(1, 17)), "slow", delay_s=0.5)
            begin, values = time.monotonic(), [stream.next()[1] for _ in range(17)]
            assert values == [*range(1, 17), None] and time.monotonic() - begin > 7
            assert server.metric("nv_inference_first_response_histogram_ms_count", model="repeat") == 1
            assert server.metric("nv_inference_first_response_histogram_ms_sum", model="repeat") < 1000 * (time.monotonic() - begin)
            stream.ask("repeat", [1], "stands", delay_s=600)
            assert "ended" in stream.next()[1]


def test_answers_have_their_parameters(server):
    with Stream(server) as stream:
        stream.ask("repeat", [4, 2], "a", number=True)
        numbers = []
        for _ in range(2):
            result, error = stream.answers.get(timeout=60)
            assert error is None
            numbers.append(result.get_response().parameters["number"].int64_param)
        assert numbers == [0, 1]


def test_coroutines_of_requests_go_on_side_by_side(binary, tmp_path):
    """A coroutine that waits lets the next request begin, as in Triton; its error ends its own request."""
    code = """
        import asyncio, json
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            async def execute(self, requests):
                for request in requests:
                    value = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
                    sender = request.get_response_sender()
                    if value < 0 and request.request_id():
                        raise ValueError("a negative value")
                    # The requests of a load have no id, and nobody ends their wait.
                    if value == 0 and request.request_id():
                        self.go.set()
                    elif request.request_id():
                        self.go = asyncio.Event()
                        await asyncio.wait_for(self.go.wait(), 60)
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    write(tmp_path / "models", "waits", code)
    with Server(binary, tmp_path / "models", tmp_path, "--python", sys.executable) as server, Stream(server) as stream:
        stream.ask("waits", [5], "first")
        stream.ask("waits", [-1], "wrong")
        assert "ValueError: a negative value" in stream.next()[1]
        stream.ask("waits", [0], "second")
        answers = [stream.next() for _ in range(4)]
        assert [answer for answer in answers if answer[0] == "second"] == [("second", 0, False), ("second", None, True)]
        assert [answer for answer in answers if answer[0] == "first"] == [("first", 5, False), ("first", None, True)]


def test_many_requests(server):
    with Stream(server) as stream:
        for i in range(200):
            stream.ask("square", [i % 5], str(i))
        ends = counts = 0
        while ends < 200:
            _, value, last = stream.next()
            ends, counts = ends + last, counts + (value is not None)
    assert counts == sum(i % 5 for i in range(200))


def test_errors(server):
    with Stream(server) as stream:
        stream.ask("repeat", [4, 2, 0], "a", fail_at=1)
        answers = [stream.next()[1] for _ in range(4)]
        assert (answers[0], answers[2:]) == (4, [0, None]) and "asked to fail" in answers[1]
        stream.ask("repeat", [1, 2], "b", raise_at=1)
        assert stream.next() == ("b", 1, False)
        assert "asked to raise" in stream.next()[1]


def test_generate(server):
    def post(path, body):
        return requests.post(f"{server.url}/v2/models/{path}", json=body, timeout=60)

    def events(response):
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return [json.loads(event[len("data: "):]) for event in response.text.split("\n\n")[:-1]]

    response = post("repeat/generate_stream", {"IN": [4, 2], "id": "7"})
    assert [event["OUT"] for event in events(response)] == [4, 2] and events(response)[0]["id"] == "7"
    response = post("repeat/generate_stream", {"IN": [4, 2], "fail_at": 0})
    assert response.status_code == 400 and events(response)[0] == {"error": "asked to fail"}
    assert post("repeat/generate", {"IN": [4]}).json()["OUT"] == 4
    assert post("square/generate", {"IN": [1]}).json()["OUT"] == 1
    for path in ("repeat/generate", "square/generate"):
        response = post(path, {"IN": [2, 2]})
        assert response.status_code == 400 and "exactly 1 response" in response.json()["error"]
    response = post("repeat/generate", {"IN": [4], "fail_at": 0})
    assert (response.status_code, response.json()) == (400, {"error": "asked to fail"})
    response = post("repeat/generate_stream", {"IN": ["x"]})
    assert response.status_code == 400 and response.headers["Content-Type"] == "application/json"
    assert post("one/generate", {"IN": [5, 6]}).json()["OUT"] == 5


def test_calls_for_one_answer_are_refused(server):
    tensor = httpclient.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.ones(1, np.int32))
    with httpclient.InferenceServerClient(server.http) as client, pytest.raises(InferenceServerException) as refused:
        client.infer("repeat", [tensor])
    assert "HTTP end point doesn't support models with decoupled transaction policy" in str(refused.value)
    tensor = grpcclient.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.ones(1, np.int32))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException) as refused:
            client.infer("repeat", [tensor])
        assert "ModelInfer RPC doesn't support models with decoupled transaction policy" in str(refused.value)
        assert client.get_model_config("repeat").config.model_transaction_policy.decoupled
        assert client.infer("one", [tensor]).as_numpy("OUT") == [1]


def test_a_client_that_leaves_is_seen_by_the_model(server):
    seen = server.repository / "repeat" / "cancelled"
    before = seen.read_text()
    with Stream(server) as stream:
        stream.ask("repeat", [1] * 10_000, "leaves", delay_s=0.01)
        assert stream.next()[1] == 1
    deadline = time.monotonic() + 60
    while seen.read_text() == before:
        assert time.monotonic() < deadline, "the model goes on for a client that has left"
        time.sleep(0.05)
    with Stream(server) as stream:
        stream.ask("repeat", [3], "next")
        assert stream.next() == ("next", 3, False)


def test_a_process_that_dies_ends_its_requests(server):
    with Stream(server) as stream:
        stream.ask("repeat", [1, 2, 3], "dies", die_at=1)
        assert stream.next() == ("dies", 1, False)
        assert "process" in stream.next()[1]
    deadline = time.monotonic() + 60
    while True:
        with Stream(server) as stream:
            stream.ask("repeat", [5], "again")
            if stream.next()[1] == 5:
                return
        assert time.monotonic() < deadline, "the model does not come back"
        time.sleep(0.1)
