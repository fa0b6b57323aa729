"""Names and texts that Triton's clients and examples compare: programs written against Triton find
the same in Downbeat."""
import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import models

CLIENTS = [pytest.param(httpclient, id="http"), pytest.param(grpcclient, id="grpc")]


@pytest.fixture(params=CLIENTS)
def module(request):
    return request.param


@pytest.fixture
def client(made, module):
    with module.InferenceServerClient(made.http if module is httpclient else made.grpc) as client:
        yield client


def simple_inputs(module, shape=(1, 16), dtype=np.int32, names=("INPUT0", "INPUT1"), second=None):
    inputs = []
    for name, rows in zip(names, (shape, second or shape)):
        inputs.append(module.InferInput(name, list(rows), "INT32" if dtype is np.int32 else "FP32"))
        inputs[-1].set_data_from_numpy(np.zeros(rows, dtype))
    return inputs


def refused(call, *arguments, **keywords):
    with pytest.raises(InferenceServerException) as error:
        call(*arguments, **keywords)
    return error.value.message()


def test_an_unknown_model(client, module):
    for call in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
        assert refused(call, "wrong_model_name").startswith("Request for unknown model: 'wrong_model_name' is not found")
    assert refused(client.infer, "wrong_model_name", simple_inputs(module)).startswith(
        "Request for unknown model: 'wrong_model_name' is not found")
    assert refused(client.get_model_metadata, "simple", "7").startswith(
        "Request for unknown model: 'simple' version 7 is not found")


def test_inputs_and_outputs_that_do_not_fit(client, module):
    def told(inputs, **keywords):
        return refused(client.infer, "simple", inputs, **keywords)

    one = simple_inputs(module)[:1]
    assert told(one) == ("expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], but missing required "
                         "input(s) ['INPUT1']. Please provide all required input(s).")
    assert told(simple_inputs(module, names=("INPUT0", "DUMMY"))).startswith("unexpected inference input 'DUMMY' for model 'simple'")
    assert told(simple_inputs(module), outputs=[module.InferRequestedOutput("DUMMY")]).startswith(
        "unexpected inference output 'DUMMY' for model 'simple'")
    assert told(simple_inputs(module, dtype=np.float32)) == (
        "inference input 'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'")
    assert told(simple_inputs(module, shape=(1, 8))).startswith(
        "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,8]. ")
    assert told(simple_inputs(module, second=(2, 16))).startswith(
        "input 'INPUT1' batch size does not match other inputs for 'simple'")
    most = client.get_model_config("simple")
    most = most["max_batch_size"] if module is httpclient else most.config.max_batch_size
    assert told(simple_inputs(module, shape=(most + 1, 16))).startswith(
        f"inference request batch-size must be <= {most} for 'simple'")


def test_a_full_queue(made):
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
    with httpclient.InferenceServerClient(made.http, concurrency=24) as client:
        tensor = httpclient.InferInput("x", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
        waiting = [client.async_infer("bounded", [tensor]) for _ in range(24)]
        messages = []
        for request in waiting:
            try:
                request.get_result()
            except InferenceServerException as error:
                messages.append(error.message())
    assert messages and all(m.startswith("Exceeds maximum queue size") for m in messages), messages
    assert requests.post(f"{made.url}/v2/models/bounded/infer", json=body).status_code == 200


def test_the_name_that_the_server_was_given(start, repository, module):
    models.add(repository, "one", 1)
    server = start(repository, "--server-name", "triton", "--model-control-mode", "explicit", "--load-model", "one")
    with module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client:
        metadata = client.get_server_metadata() if module is httpclient else client.get_server_metadata(as_json=True)
        assert metadata["name"] == "triton"
        assert refused(client.load_model, "wrong_model_name").startswith(
            "failed to load 'wrong_model_name', failed to poll from model repository")
        client.unload_model("one")
        assert refused(client.get_model_metadata, "one").startswith("Request for unknown model: 'one' has no available versions")
        (repository / "one" / "1" / "model.onnx").write_bytes(b"nothing")
        assert refused(client.load_model, "one").startswith("load failed for model 'one': ")


def test_the_name_without_one_given(client, module):
    metadata = client.get_server_metadata() if module is httpclient else client.get_server_metadata(as_json=True)
    assert metadata["name"] == "downbeat"
