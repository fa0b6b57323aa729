"""Inputs that requests may leave out (`optional: true`, with an initialiser in the file), and inputs without a shape in the file."""
import concurrent.futures
import pathlib

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def tensor(name, dims):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


def save(repository, name, graph, config):
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = pathlib.Path(repository) / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(model.SerializeToString())
    (path.parent.parent / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module", params=["onnxruntime", "rten"])
def server(request, binary, tmp_path_factory):
    from serving import Server

    folder = tmp_path_factory.mktemp("optional")
    repository = folder / "models"
    bias = numpy_helper.from_array(np.array([10, 20, 30, 40], np.float32), "b")
    graph = helper.make_graph([helper.make_node("Add", ["x", "b"], ["y"])], "bias",
                              [tensor("x", ["N", 4]), tensor("b", [4])], [tensor("y", ["N", 4])], [bias])
    save(repository, "bias", graph, """
        max_batch_size: 0
        input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }, { name: "b" data_type: TYPE_FP32 dims: [ 4 ] optional: true } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]""")
    # Elements in float_data, as some exporters write them.
    scale = helper.make_tensor("s", TensorProto.FLOAT, [1, 1], [3.0])
    graph = helper.make_graph([helper.make_node("Mul", ["x", "s"], ["y"])], "scale",
                              [tensor("x", ["N", 4]), tensor("s", ["N", 1])], [tensor("y", ["N", 4])], [scale])
    save(repository, "scale", graph, """
        max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "s" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
        dynamic_batching { max_queue_delay_microseconds: 1000 }
        model_warmup [ { inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: false } } } ]""")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "shapeless", [tensor("x", None)], [tensor("y", ["N", 4])])
    save(repository, "shapeless", graph, """
        max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]""")
    with Server(binary, repository, folder, engine=request.param) as server:
        yield server


def ask(client, model, module=httpclient, **values):
    inputs = []
    for name, value in values.items():
        inputs.append(module.InferInput(name, list(value.shape), "FP32"))
        inputs[-1].set_data_from_numpy(value)
    return client.infer(model, inputs).as_numpy("y")


@pytest.mark.parametrize("module", [pytest.param(httpclient, id="http"), pytest.param(grpcclient, id="grpc")])
def test_an_optional_input_is_that_of_the_file_where_it_is_left_out(server, module):
    with module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client:
        mine = np.array([1, 2, 3, 4], np.float32)
        np.testing.assert_array_equal(ask(client, "bias", module, x=X), X + np.array([10, 20, 30, 40], np.float32))
        np.testing.assert_array_equal(ask(client, "bias", module, x=X, b=mine), X + mine)
        np.testing.assert_array_equal(ask(client, "scale", module, x=X), X * 3)
        own = np.array([[5], [7]], np.float32)
        np.testing.assert_array_equal(ask(client, "scale", module, s=own, x=X), X * own)
        with pytest.raises(InferenceServerException) as error:
            ask(client, "bias", module, b=mine)
        assert "missing required input(s) ['x']" in error.value.message()
        assert error.value.message().startswith("expected number of inputs between 1 and 2 but got 1 inputs for model 'bias'")
        with pytest.raises(InferenceServerException) as error:
            ask(client, "bias", module, x=X, c=mine)
        assert error.value.message().startswith("unexpected inference input 'c' for model 'bias'")


def test_requests_with_and_without_the_input_share_batches(server):
    with grpcclient.InferenceServerClient(server.grpc) as client:
        def one(i):
            x = np.full((1 + i % 3, 4), i, np.float32)
            if i % 2:
                own = np.full((len(x), 1), i, np.float32)
                return np.array_equal(ask(client, "scale", grpcclient, x=x, s=own), x * own)
            return np.array_equal(ask(client, "scale", grpcclient, x=x), x * 3)

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert all(pool.map(one, range(200)))


def test_the_configuration_gives_an_input_its_missing_shape(server):
    with httpclient.InferenceServerClient(server.http) as client:
        np.testing.assert_array_equal(ask(client, "shapeless", x=X), -X)
        assert client.get_model_metadata("shapeless")["inputs"][0]["shape"] == [-1, 4]
        with pytest.raises(InferenceServerException) as error:
            ask(client, "shapeless", x=X[:, :3])
        assert error.value.message().startswith("unexpected shape for input 'x' for model 'shapeless'. Expected [-1,4], got [2,3].")
        optional = {i["name"]: i["optional"] for i in client.get_model_config("scale")["input"]}
        assert optional == {"x": False, "s": True}
