"""Raw binary requests, nesting and sizes over HTTP, as Triton's own http_test.py tries them, with its words."""
import json

import numpy as np
import pytest
import requests
from onnx import TensorProto, helper

import models
from graph import Graph

RAW = {"Inference-Header-Content-Length": "0"}


def identity(repository, name, elem_type, dims, inputs=1, max_batch=0):
    graph = Graph(name)
    for i in range(inputs):
        value = graph.input(f"INPUT{i}", elem_type, dims)
        graph.nodes.append(helper.make_node("Identity", [value], [f"OUTPUT{i}"], name=f"identity{i}"))
        graph.outputs.append(helper.make_tensor_value_info(f"OUTPUT{i}", elem_type, dims))
    models.write(repository, name, graph, f"max_batch_size: {max_batch}\n")


@pytest.fixture(scope="module")
def zero(binary, tmp_path_factory):
    from serving import Server

    folder = tmp_path_factory.mktemp("raw")
    repository = folder / "models"
    identity(repository, "zero_1_float32", TensorProto.FLOAT, ["A"])
    identity(repository, "zero_1_float16", TensorProto.FLOAT16, ["A", "B"])
    identity(repository, "zero_3_float32", TensorProto.FLOAT, ["A"], inputs=3)
    identity(repository, "zero_1_object", TensorProto.STRING, ["A"])
    identity(repository, "zero_1_object_1_element", TensorProto.STRING, [1])
    identity(repository, "simple_identity", TensorProto.STRING, ["N", 1], max_batch=8)
    identity(repository, "simple_identity_int64", TensorProto.INT64, ["N", 1], max_batch=8)
    with Server(binary, repository, folder, "--no-profiling") as server:
        yield server


def post(server, model, **arguments):
    return requests.post(f"{server.url}/v2/models/{model}/infer", **arguments)


def output(reply):
    assert reply.status_code == 200, reply.text
    return reply.content[int(reply.headers["Inference-Header-Content-Length"]):]


@pytest.mark.parametrize("count", [8, 32])
def test_raw_binary(zero, count):
    data = np.arange(count, dtype=np.float32).tobytes()
    assert output(post(zero, "zero_1_float32", data=data, headers=RAW)) == data
    assert output(post(zero, "zero_1_float32", data=iter([data]), headers=RAW)) == data, "chunked"


@pytest.mark.parametrize("model", ["zero_1_object_1_element", "simple_identity"])
def test_one_element_of_bytes(zero, model):
    assert output(post(zero, model, data="427", headers=RAW)) == b"\3\0\0\0" + b"427"


@pytest.mark.parametrize("model, words", [
    ("zero_1_object", "For BYTES datatype raw input 'INPUT0', the model must have input shape [1]"),
    ("zero_1_float16", "The shape of the raw input 'INPUT0' can not be deduced because there are more than one variable-sized dimension"),
    ("zero_3_float32", "Raw request must only have 1 input (found 1) to be deduced but got 3 inputs in"),
])
def test_what_cannot_be_deduced(zero, model, words):
    reply = post(zero, model, data=b"12345678", headers=RAW)
    assert reply.status_code == 400 and words in reply.json()["error"], reply.text


@pytest.mark.parametrize("model, datatype, value", [("simple_identity", "BYTES", '"hello"'), ("simple_identity_int64", "INT64", "123")])
def test_nesting(zero, model, datatype, value):
    for depth, passes in [(50, True), (120, False)]:
        tensor = {"name": "INPUT0", "datatype": datatype, "shape": [1, 1], "data": json.loads("[" * depth + value + "]" * depth)}
        reply = post(zero, model, json={"inputs": [tensor]})
        assert (reply.status_code == 200) == passes, reply.text
        if not passes:
            assert "JSON nesting depth exceeds maximum allowed limit (100)" in reply.json()["error"]


@pytest.mark.parametrize("shape, words", [
    ([2**4, 2**60 + 2], "causes total element count to exceed maximum size of"),
    ([2**2, 2**60 + 2], "byte size overflow for input"),
])
def test_sizes_that_overflow(zero, shape, words):
    tensor = {"name": "INPUT0", "shape": shape, "datatype": "FP32", "data": [1.0]}
    reply = post(zero, "zero_1_float32", json={"inputs": [tensor]})
    assert reply.status_code == 400 and words in reply.json()["error"], reply.text


def test_duplicate_outputs(zero):
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [8], "data": [1.0] * 8}
    reply = post(zero, "zero_1_float32", json={"inputs": [tensor], "outputs": [{"name": "OUTPUT0"}] * 2})
    assert reply.status_code == 400, reply.text
    assert "Duplicate output name 'OUTPUT0' is not allowed in a request" in reply.json()["error"]


def test_a_body_over_the_limit(zero):
    """Triton answers 400. Downbeat answers 413, which proxies and clients know, with the same
    words."""
    reply = post(zero, "zero_1_float32", data=b"\0" * ((64 << 20) + 4), headers=RAW)
    assert reply.status_code == 413 and "exceeds the maximum allowed value" in reply.json()["error"], reply.text
