"""Models of one operator from the onnx package's backend tests, served without a configuration: they load and answer as the package says."""
import json
import pathlib
import shutil

import numpy as np
import onnx
import pytest
import requests
import tritonclient.http as httpclient
from onnx import TensorProto, helper, numpy_helper

from serving import Server

DATA = pathlib.Path(onnx.__file__).parent / "backend" / "test" / "data" / "node"

# Inputs that are shapes, axes, bounds or repeats, which no made-up numbers are, and single elements.
CASES = """
test_add test_relu test_matmul_2d test_nonzero_example
test_reshape_extended_dims test_reshape_negative_dim test_reshape_one_dim test_reshape_reduced_dims test_reshape_zero_and_negative_dim
test_slice test_slice_neg test_slice_neg_steps test_slice_negative_axes test_slice_start_out_of_bounds
test_split_variable_parts_1d_opset13 test_split_variable_parts_2d_opset13 test_split_variable_parts_default_axis_opset18
test_unsqueeze_axis_0 test_unsqueeze_three_axes test_unsqueeze_unsorted_axes test_squeeze test_squeeze_negative_axes
test_resize_downsample_sizes_nearest test_resize_upsample_scales_nearest test_resize_upsample_sizes_nearest
test_expand_dim_changed test_tile test_pow_bcast_scalar test_clip_inbounds
test_clip test_cumsum_1d test_where_example
""".split()

DATATYPES = {TensorProto.FLOAT: "FP32", TensorProto.INT64: "INT64", TensorProto.INT32: "INT32", TensorProto.DOUBLE: "FP64", TensorProto.BOOL: "BOOL"}


def read(path):
    tensor = TensorProto()
    tensor.ParseFromString(path.read_bytes())
    return numpy_helper.to_array(tensor)


@pytest.fixture(scope="module")
def server(binary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("node-cases")
    repository = folder / "models"
    for case in CASES:
        (repository / case / "1").mkdir(parents=True)
        shutil.copy(DATA / case / "model.onnx", repository / case / "1")
    with Server(binary, repository, folder, "--no-profiling") as server:
        yield server


@pytest.mark.parametrize("case", CASES)
def test_a_node_case_is_answered_without_a_configuration(server, case):
    graph, data = onnx.load(DATA / case / "model.onnx").graph, DATA / case / "test_data_set_0"
    inputs = []
    for number, value in enumerate(graph.input):
        array = read(data / f"input_{number}.pb")
        inputs.append(httpclient.InferInput(value.name, list(array.shape), DATATYPES[value.type.tensor_type.elem_type]))
        inputs[-1].set_data_from_numpy(array)
    with httpclient.InferenceServerClient(server.http) as client:
        answer = client.infer(case, inputs)
    for number, value in enumerate(graph.output):
        expected = read(data / f"output_{number}.pb")
        # A single element is [1] to clients.
        np.testing.assert_allclose(answer.as_numpy(value.name).reshape(expected.shape), expected, rtol=1e-3, atol=1e-5)
        assert expected.shape in ((), answer.as_numpy(value.name).shape)


def save(repository, name, node, inputs, outputs):
    path = pathlib.Path(repository) / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    of = lambda values: [helper.make_tensor_value_info(*value) for value in values]
    graph = helper.make_graph([node], name, of(inputs), of(outputs))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


def ask(server, name, *tensors):
    inputs = [{"name": n, "shape": shape, "datatype": datatype, "data": data} for n, shape, datatype, data in tensors]
    return requests.post(f"http://{server.http}/v2/models/{name}/infer", json.dumps({"inputs": inputs}), timeout=60)


def test_a_reload_keeps_the_version_that_answers(start, repository):
    """The new file is a Reshape with its shape as an input, which answers no made-up request."""
    number = TensorProto.FLOAT
    save(repository, "m", helper.make_node("Relu", ["x"], ["y"]), [("x", number, ["N", 4])], [("y", number, ["N", 4])])
    server = start(repository, "--model-control-mode", "explicit", "--load-model", "m")
    load = lambda: requests.post(f"http://{server.http}/v2/repository/models/m/load", "{}", timeout=60)
    old = lambda: ask(server, "m", ("x", [1, 4], "FP32", [-1, 2, 3, 4])).json()["outputs"][0]["data"]
    assert load().status_code == 200 and old() == [0, 2, 3, 4]
    save(repository, "m", helper.make_node("Reshape", ["x", "shape"], ["y"]),
         [("x", number, [2, 3, 4]), ("shape", TensorProto.INT64, [2])], [("y", number, None)])
    refused = load()
    assert refused.status_code == 400 and "so that version stays" in refused.json()["error"]
    assert old() == [0, 2, 3, 4]
    assert requests.post(f"http://{server.http}/v2/repository/models/m/unload", "{}", timeout=60).status_code == 200
    assert load().status_code == 200
    answer = ask(server, "m", ("x", [2, 3, 4], "FP32", list(range(24))), ("shape", [2], "INT64", [4, 6])).json()
    assert answer["outputs"][0]["shape"] == [4, 6] and answer["outputs"][0]["data"] == list(range(24))


def test_single_elements_and_no_rows_over_json(start, repository):
    number = TensorProto.FLOAT
    save(repository, "times", helper.make_node("Mul", ["x", "n"], ["y"]), [("x", number, []), ("n", number, [])], [("y", number, [])])
    save(repository, "relu", helper.make_node("Relu", ["x"], ["y"]), [("x", number, ["N", 4])], [("y", number, ["N", 4])])
    server = start(repository)
    for shape in ([], [1]):
        answer = ask(server, "times", ("x", shape, "FP32", [2.5]), ("n", shape, "FP32", [3])).json()
        assert answer["outputs"][0]["data"] == [7.5], answer
    none = ask(server, "relu", ("x", [0, 4], "FP32", [])).json()["outputs"][0]
    assert none["shape"] == [0, 4] and none["data"] == []
